"""Trainer ranks as real processes, each with a default group, told what to do over a pipe; engines live with rank 0.

The weights of content c are a function of c, so that any rank can say what an engine must hold.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import forking
import torch
from msgspec import UNSET
from publishers import publisher_of
from stopping import send_signal

from weightcast.errors import InsufficientMemoryError, PeerDiedError, PeersLostError
from weightcast.format.bucket import Layout, narrow
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Held
from weightcast.sources.module import ModuleSource
from weightcast.trainer.deltas import OriginBase
from weightcast.trainer.group.rank import _can_map
from weightcast.trainer.packer import Packer

DEADLINE_SECONDS = 60.0

_pack = Packer.pack
_context = forking.preloaded(
    "torch", "torch.distributed", "weightcast.trainer.publisher", "weightcast.transports.memory"
)

Tensors = dict[str, torch.Tensor]
Cut = Callable[[torch.Tensor, int, int], list[Held]]


# --- models ---------------------------------------------------------------------------------------


def table(content: int) -> Tensors:
    """All kinds of shapes and dtypes; `large` takes several buckets of 4096 bytes, a row of `wide` more than one."""
    generator = torch.Generator().manual_seed(content)

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        if not dtype.is_floating_point:
            return torch.randint(-100, 100, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "scalar": of(),
        "empty": of(0, 5),
        "flags": of(7, dtype=torch.bool),
        "large": of(37, 129),
        "odd": of(5, 3, dtype=torch.bfloat16),
        "wide": of(3, 2500, dtype=torch.bfloat16),
        "eight": of(9, 11).to(torch.float8_e4m3fn),
        "counts": of(6, 4, dtype=torch.int64),
        "cube": of(4, 6, 5, dtype=torch.float64),
        "one": of(1, 3),
        **{f"tiny.{number}": of(2, 2, dtype=torch.bfloat16) for number in range(20)},
    }


def many(content: int) -> Tensors:
    generator = torch.Generator().manual_seed(content)
    return {f"layer.{n}": torch.randn(16, 16, generator=generator).bfloat16() for n in range(60)}


def large(content: int) -> Tensors:
    """Several blocks of a digest in a bucket, one of them cut; a tensor that takes several buckets."""
    generator = torch.Generator().manual_seed(content)
    shapes = {"a": (700, 1000), "b": (1900, 1024), "c": (5, 7), "d": (333, 1031)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def linears(content: int) -> Tensors:
    generator = torch.Generator().manual_seed(content)
    sizes = {"0": (96, 33), "1": (50, 96), "2": (7, 50)}
    weights = {f"{name}.weight": torch.randn(size, generator=generator) for name, size in sizes.items()}
    return weights | {f"{name}.bias": torch.randn(rows, generator=generator) for name, (rows, _) in sizes.items()}


def stepped(content: int) -> Tensors:
    """`table`, of which each content differs from the one before in a few elements."""
    tensors = table(0)
    for tensor in tensors.values():
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
            for number in range(content if tensor.numel() else 0):
                tensor.view(-1)[number * 31 % tensor.numel()] += 1 + number
    return tensors


MODELS: dict[str, Callable[[int], Tensors]] = {
    model.__name__: model for model in (table, many, large, linears, stepped)
}


# --- shardings ------------------------------------------------------------------------------------


def piece(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Held:
    view = tensor
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        view = view.narrow(dim, offset, size)
    return Region(tuple(offsets), tuple(sizes)), view


def chunk(tensor: torch.Tensor, dim: int, rank: int, size: int) -> list[Held]:
    """As FSDP2 cuts: equal chunks, the last ones smaller or empty."""
    step = -(-tensor.shape[dim] // size)
    start = min(rank * step, tensor.shape[dim])
    end = min(start + step, tensor.shape[dim])
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    offsets[dim], sizes[dim] = start, end - start
    return [piece(tensor, offsets, sizes)]


def whole(tensor: torch.Tensor) -> list[Held]:
    return [piece(tensor, (0,) * tensor.dim(), tensor.shape)]


def rows(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    return chunk(tensor, 0, rank, size) if tensor.dim() else whole(tensor)


def columns(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    return chunk(tensor, tensor.dim() - 1, rank, size) if tensor.dim() else whole(tensor)


def strided(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    """Every size-th row: many regions of one tensor, as interleaved tensor parallelism makes them."""
    if tensor.dim() == 0:
        return whole(tensor)
    return [held for row in range(rank, tensor.shape[0], size) for held in chunk(tensor, 0, row, tensor.shape[0])]


def last_alone(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    return whole(tensor) if rank == size - 1 else []


def hybrid(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    """Two shards, held by the ranks in turn: each is there more than once, as with HSDP."""
    return chunk(tensor, 0, rank % 2, 2) if tensor.dim() else whole(tensor)


def replicated(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    return whole(tensor)


def transposed(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    """Rows that lie scattered in memory."""
    if tensor.dim() < 2:
        return rows(tensor, rank, size)
    return [(region, view.transpose(0, 1).contiguous().transpose(0, 1)) for region, view in rows(tensor, rank, size)]


def alternating(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    """A rank's even columns lie before its odd ones: gate and up of an expert of gpt-oss."""
    if not tensor.dim() or tensor.shape[-1] % 2:
        return rows(tensor, rank, size)
    pairs = tensor.unflatten(-1, (-1, 2))
    ((region, view),) = chunk(pairs, pairs.dim() - 2, rank, size)
    (*offsets, start, _), (*sizes, num, _) = region.offsets, region.sizes
    memory = view.movedim(-1, 0).contiguous().movedim(0, -1)
    return [(Region((*offsets, 2 * start), (*sizes, 2 * num)), memory)]


def gapped(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    return [] if rank == 1 else rows(tensor, rank, size)


def overlapping(tensor: torch.Tensor, rank: int, size: int) -> list[Held]:
    if tensor.dim() == 0 or tensor.shape[0] < 3:
        return whole(tensor)
    last = tensor.shape[0] - 1
    sizes = (last, *tensor.shape[1:])
    return [piece(tensor, (min(rank, 1), *(0 for _ in tensor.shape[1:])), sizes)]


CUTS: dict[str, Cut] = {
    cut.__name__: cut
    for cut in (rows, columns, strided, last_alone, hybrid, replicated, transposed, alternating, gapped, overlapping)
}


# --- what a source may do wrong -------------------------------------------------------------------


def _smaller(region: Region, data: torch.Tensor) -> Held:
    return region, data[:1]


def _of_another_dtype(region: Region, data: torch.Tensor) -> Held:
    return region, data.to(torch.int64)


def _on_meta(region: Region, data: torch.Tensor) -> Held:
    return region, data.to("meta")


def _freed(region: Region, data: torch.Tensor) -> Held:
    copy = data.clone()
    copy.untyped_storage().resize_(0)
    return region, copy


SPOILS: dict[str, Callable[[Region, torch.Tensor], Held]] = {
    spoil.__name__.lstrip("_"): spoil for spoil in (_smaller, _of_another_dtype, _on_meta, _freed)
}


class ShardedSource:
    """A rank's share of a model. `masters`: kept in float32, published in the model's dtypes."""

    def __init__(self, model: str, cut: str, rank: int, size: int, *, masters: bool = False) -> None:
        self.model, self.cut, self.rank, self.size, self.masters = model, cut, rank, size, masters
        self._specs = tuple(
            TensorSpec(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                aliases=("odd.alias",) if name == "odd" else (),
                group="pair" if name in ("one", "cube") else "",
            )
            for name, tensor in MODELS[model](0).items()
        )
        self.fails: Exception | None = None
        self.fill(0)

    def fill(self, content: int) -> None:
        full = MODELS[self.model](content)
        if self.masters:
            full = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in full.items()}
        self._regions = {name: CUTS[self.cut](tensor, self.rank, self.size) for name, tensor in full.items()}

    def rename(self, old: str, new: str) -> None:
        self._specs = tuple(
            TensorSpec(new if s.name == old else s.name, s.dtype, s.shape, aliases=s.aliases, group=s.group)
            for s in self._specs
        )
        self._regions = {new if name == old else name: held for name, held in self._regions.items()}

    def spoil(self, kind: str, name: str) -> None:
        """Give other views than declared, in a new mapping; or, "moved", in the same one."""
        if kind == "moved":
            self._regions[name] = [(region, data.clone()) for region, data in self._regions[name]]
        else:
            spoiled = [SPOILS[kind](region, data) for region, data in self._regions[name]]
            self._regions = {**self._regions, name: spoiled}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> dict[str, list[Held]]:
        if self.fails is not None:
            raise self.fails
        return self._regions


class Fsdp2Source(ModuleSource):
    """`linears` as FSDP2 shards it. Making it is a collective."""

    def __init__(self, size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        module = torch.nn.Sequential(torch.nn.Linear(33, 96), torch.nn.Linear(96, 50), torch.nn.Linear(50, 7))
        self.model = "linears"
        self._sharded = fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
        super().__init__(self._sharded)

    def fill(self, content: int) -> None:
        from torch.distributed.tensor import distribute_tensor

        whole = linears(content)
        for name, parameter in self._sharded.named_parameters():
            shard = distribute_tensor(whole[name], parameter.device_mesh, parameter.placements)
            parameter.data.to_local().copy_(shard.to_local())


# --- in a rank's process --------------------------------------------------------------------------


class Rank:
    """What one process holds; each method is something that a test can ask for."""

    def __init__(self, rank: int, size: int, pipe: Connection) -> None:
        self.rank, self.size, self.pipe = rank, size, pipe
        self.publisher: Any = None
        self.source: Any = None
        self.engines: list[Any] = []
        self.counts: dict[str, int] = {}
        self.phase = ""
        self.make_base = OriginBase.__init__

    def make(
        self,
        model: str,
        cut: str,
        *,
        num_engines: int = 1,
        masters: bool = False,
        group: Sequence[int] | None = None,
        is_apart: bool = False,
        hosts: int = 1,
        late_seconds: float = 0.0,
        is_provable: bool = False,
        has_directory: bool = False,
        num_engine_ranks: int = 1,
        **options: Any,
    ) -> None:
        """`group`: the trainer ranks that publish; the first one does it for all.

        `is_apart`: this rank can't map another's memory, as in another container. `hosts`: the ranks are on so many.
        `late_seconds`: so much later than the others ranks of an even number pack. `is_provable`: what engines hold can
        be read. `has_directory`: the publisher asks for its engines, those of `self.engines`. `num_engine_ranks`: of
        the last engine.
        """
        import torch.distributed as dist
        from core.direct import DirectEngine, ReadableEngine, RecordingEngine
        from core.parallel import ParallelEngine

        from weightcast.trainer.group import rank

        self.unmake()
        rank.host_identity = lambda: f"host {self.rank * hosts // self.size}"
        rank._can_map = _can_not_map if is_apart else _can_map

        leads = self.rank % 2 == 0
        Packer.pack = functools.partialmethod(_late, _pack, late_seconds * leads)  # type: ignore[assignment]
        members = tuple(range(self.size)) if group is None else tuple(group)
        if group is not None:
            options["trainer_group"] = dist.new_group(list(group), backend="gloo")
        place = members.index(self.rank) if self.rank in members else 0
        if cut == "fsdp2":
            self.source = Fsdp2Source(self.size)
        else:
            self.source = ShardedSource(model, cut, place, len(members), masters=masters)
        if self.rank == members[0]:
            kind = ReadableEngine if is_provable else RecordingEngine
            self.engines = [DirectEngine(f"engine-{n}", kind()) for n in range(num_engines)]
            if num_engine_ranks > 1:
                self.engines[-1] = ParallelEngine("parallel", [kind() for _ in range(num_engine_ranks)])
        options = {"transport": "ipc://", "bucket_size_bytes": 4096, "deadline_seconds": 20.0, **options}
        engines = SimpleNamespace(engines=lambda: self.engines) if has_directory else self.engines
        self.publisher = publisher_of(self.source, engines=engines, **options)

    def unmake(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        for engine in self.engines:
            engine.close()
        self.publisher, self.engines = None, []

    def fill(self, content: int) -> None:
        self.source.fill(content)

    def rename(self, old: str, new: str) -> None:
        self.source.rename(old, new)

    def spoil(self, kind: str, name: str) -> None:
        self.source.spoil(kind, name)

    def fail_source(self, error: Exception | None) -> None:
        self.source.fails = error

    def fail_engine(self, after: int | None) -> None:
        if self.rank == 0:
            _workers(self.engines[0])[0].fail_after = after

    def spoil_engine(self, name: str) -> None:
        """What the first engine says that it holds of this tensor is wrong by one element from now on."""
        self.engines[0].engine.spoilt = name

    def be_absent(self, seconds: float) -> None:
        """The first engine of this rank is not there for so long, from when it is asked first."""
        first_asked: list[float] = []
        connect = self.engines[0].connect

        def connect_later() -> Any:
            first_asked.append(time.monotonic())
            if time.monotonic() < first_asked[0] + seconds:
                raise PeerDiedError("nothing listens there yet", peer="engine-0")
            return connect()

        self.engines[0].connect = connect_later

    def publish(self, version: int | None = None, *, in_step: bool = False, **arguments: Any) -> dict[str, Any]:
        from weightcast.engines.gate import Gate

        with Gate().step() if in_step else contextlib.nullcontext():
            return self._outcome(lambda: self.publisher.publish(version, **arguments))

    def change_fleet(self, engine: str, *, is_known: bool = True) -> dict[str, Any]:
        """Add an engine, if it is known, and remove it again."""
        from core.direct import DirectEngine, RecordingEngine

        def change() -> None:
            if is_known:
                client = DirectEngine(engine, RecordingEngine())
                self.engines.append(client)
                self.publisher.add_engine(client)
            self.publisher.remove_engine(engine)

        try:
            change()
        except ValueError as exc:
            return {"error": (type(exc).__name__, str(exc))}
        return {"error": None}

    def sync(self, engine: str, *, is_new: bool = False) -> dict[str, Any]:
        """Bring one engine to the last version; `is_new`: one that is added for it."""
        from core.direct import DirectEngine, RecordingEngine

        if is_new:
            client = DirectEngine(engine, RecordingEngine())
            self.engines += [client] * (self.rank == 0)
            self.publisher.add_engine(client)
        return self._outcome(lambda: self.publisher.sync(engine))

    def add(self, engine: str) -> None:
        """Add an engine, which the next publish goes to."""
        from core.direct import DirectEngine, RecordingEngine

        client = DirectEngine(engine, RecordingEngine())
        self.engines += [client] * (self.rank == 0)
        self.publisher.add_engine(client)

    def lose_base(self) -> None:
        """Drop the base of the first engine's first worker, or that of the origin that this rank leads."""
        if self.rank == 0:
            engine = self.engines[0]
            worker = engine.worker if hasattr(engine, "worker") else engine.workers[0]
            if worker._session is not None:
                worker._session.base = None
        else:
            self.publisher._group._base = None

    def drop(self, engine: str) -> None:
        """Remove an engine."""
        self.publisher.remove_engine(engine)
        for client in [client for client in self.engines if client.name == engine]:
            self.engines.remove(client)
            client.close()

    def leads(self) -> bool:
        """Whether this rank leads an origin."""
        return self.publisher._group._sender is not None

    def refuse_bases(self, is_refused: bool) -> None:
        """Have this rank find no memory for a base, or find it again."""
        OriginBase.__init__ = _no_base if is_refused else self.make_base  # type: ignore[method-assign]

    def fail_nowhere(self) -> None:
        """Forget `fail_at`."""
        Packer.pack = functools.partialmethod(_late, _pack, 0.0)

    def change_directory(self, *, joins: str = "", leaves: str = "") -> None:
        """On the first rank, which has the engines."""
        from core.direct import DirectEngine, RecordingEngine

        if joins and self.rank == 0:
            self.engines.append(DirectEngine(joins, RecordingEngine()))
        for engine in [engine for engine in self.engines if engine.name == leaves]:
            self.engines.remove(engine)
            engine.close()

    def sync_all(self) -> dict[str, Any]:
        return self._outcome(lambda: self.publisher.sync())

    def _outcome(self, call: Callable[[], Any]) -> dict[str, Any]:
        self.counts.clear()
        try:
            report = call()
            outcome = {"report": report.to_json(), "error": None}
        except BaseException as exc:
            outcome = {"report": None, "error": (type(exc).__name__, str(exc))}
            if hasattr(exc, "failures"):
                outcome["failures"] = {name: type(error).__name__ for name, error in exc.failures.items()}
                outcome["report"] = exc.report.to_json()
        return {**outcome, "version": self.publisher.version, "run": self.publisher.run, "counts": dict(self.counts)}

    def start(self, version: int | None = None, *, overlap: str = "wait") -> str:
        """Start a publish in the background; say how that ended."""
        try:
            handle = self.publisher.start(version, overlap=overlap)
        except Exception as exc:
            return type(exc).__name__
        if handle is None:
            return "skipped"
        self.handle = handle
        return "packed" if handle.packed() else "not packed"

    def spoil_weights(self) -> None:
        """Overwrite all that this rank holds, in place."""
        for held in self.source.regions().values():
            for _, view in held:
                view.fill_(1)

    def result(self) -> dict[str, Any]:
        return self._outcome(lambda: self.handle.result(DEADLINE_SECONDS))

    def cancel(self) -> bool:
        return bool(self.handle.cancel())

    def hold_install(self, message: str = "") -> None:
        """Hold the first engine's next install up until `let_install`; or the message of that type before it."""
        engine, self.goes_on = self.engines[0], threading.Event()
        call = "update" if message else "finish"
        original = getattr(engine, call)

        def held_up(argument: Any) -> None:
            if not message or type(argument).__name__ == message:
                setattr(engine, call, original)
                assert self.goes_on.wait(DEADLINE_SECONDS)
            original(argument)

        setattr(engine, call, held_up)

    def let_install(self) -> None:
        self.goes_on.set()

    def check(self, content: int) -> list[str]:
        """The tensors of the engines that are not those of this content, bit for bit."""
        wrong = []
        workers = [worker for each in self.engines for worker in _workers(each)]
        for number, worker in enumerate(workers):
            held = worker.held
            expected = MODELS[self.source.model](content)
            if "odd" in expected:
                expected["odd.alias"] = expected["odd"]
            wrong += [f"{number}: {name} is missing" for name in expected.keys() - held.keys()]
            wrong += [f"{number}: {name} is not known" for name in held.keys() - expected.keys()]
            wrong += [
                f"{number}: {name}" for name in expected.keys() & held.keys() if not _same(expected[name], held[name])
            ]
        return wrong

    def serves(self) -> list[int]:
        return [engine.engine.versions[-1].number if engine.engine.versions else -1 for engine in self.engines]

    def stop_at(self, bucket: int) -> None:
        """Say so over the pipe and wait for a word, when this rank is about to pack its part of that bucket."""

        def stop() -> None:
            self.pipe.send(("at", bucket))
            self.pipe.recv()

        self._at(bucket, stop)

    def fail_at(self, bucket: int, error: BaseException) -> None:
        """Raise, once, when this rank packs its part of that bucket."""

        def fail() -> None:
            raise error

        self._at(bucket, fail)

    def _at(self, bucket: int, call: Callable[[], None]) -> None:
        from weightcast.trainer.packer import Packer

        original = Packer.pack

        def pack(part: Packer, index: int, *args: Any) -> Any:
            if index == bucket:
                Packer.pack = original  # type: ignore[method-assign]
                call()
            return original(part, index, *args)

        Packer.pack = pack  # type: ignore[method-assign]

    def rewind(self, at: int) -> None:
        """Once, lose every bucket, notice it at bucket `at`, and begin again when opened again."""
        from weightcast.format.bucket import BucketBuffer, slot_size_bytes
        from weightcast.host.memory import SharedMemory

        sender = self.publisher._group._sender
        open_, buffer, send = sender.open, sender.buffer, sender.send
        manifest = self.publisher._pack_plan.layout.manifest
        lost = BucketBuffer.of(SharedMemory.make(slot_size_bytes(manifest)).map().tensor())
        survivors: list[str] = []

        def losing_open(*args: Any, peers: Sequence[str], staged: bool) -> int:
            if survivors:
                sender.open, sender.buffer, sender.send = open_, buffer, send
                return 0
            survivors.extend(peers)
            return int(open_(*args, peers=peers, staged=staged))

        def losing_buffer(index: int) -> BucketBuffer:
            return lost

        def losing_send(index: int, num_bytes: int) -> None:
            if index == at:
                raise PeersLostError("as if an engine had been lost", survivors)

        sender.open, sender.buffer, sender.send = losing_open, losing_buffer, losing_send

    def keep_buckets_private(self) -> None:
        """Have this rank's sender pack into memory that no other rank can map."""
        from weightcast.format.bucket import BucketBuffer, slot_size_bytes

        size_bytes = slot_size_bytes(self.publisher._pack_plan.layout.manifest)
        self.publisher._group._sender.buffer = lambda index: BucketBuffer.of(torch.zeros(size_bytes, dtype=torch.uint8))

    def add_stock(self) -> None:
        """Add an engine that brings a sender of its own, which is known only once it was asked what it is."""
        from core.test_brought_sender import Bringing, ListedSender

        from weightcast.format.bucket import BucketBuffer, slot_size_bytes
        from weightcast.host.memory import SharedMemory
        from weightcast.seams.client import EngineClient

        class Keeping(ListedSender):
            def open(self, manifest: Any, version: Any, *, peers: Sequence[str], staged: bool) -> int:
                self.kept: dict[int, bytes] = {}
                return super().open(manifest, version, peers=peers, staged=staged)

            def buffer(self, index: int) -> Any:
                """In memory that the other ranks can map."""
                self.last = BucketBuffer.of(SharedMemory.make(slot_size_bytes(self._manifest)).map().tensor())
                return self.last

            def send(self, index: int, num_bytes: int) -> None:
                self.kept[index] = bytes(self.last.payload[: self._manifest.buckets[index]].tolist())

        class Stock(Bringing):
            name = "stock"

            def __init__(self) -> None:
                super().__init__()
                self.own = Keeping()

        class Unknown(EngineClient):
            name = "stock"

            def connect(self) -> Any:
                return stock

        self.stock = stock = Stock()
        self.publisher.add_engine(Unknown())  # type: ignore[abstract]

    def remove(self, name: str) -> None:
        self.publisher.remove_engine(name)

    def check_stock(self, content: int) -> list[str]:
        """The tensors that the stock engine was not sent."""

        manifest = self.stock.own._manifest
        layout, wrong = Layout(manifest), []
        expected = MODELS[self.source.model](content)
        for index in range(len(manifest.buckets)):
            payload = torch.frombuffer(bytearray(self.stock.own.kept[index]), dtype=torch.uint8)
            for entry, view in zip(layout.entries[index], layout.views(index, payload), strict=True):
                if not _same(narrow(expected[entry.record.name], entry.piece.region), view):
                    wrong.append(entry.record.name)
        return wrong

    def offered_workers(self) -> list[list[int]]:
        """Have the engines take the next offers as ever; return how many workers on each host they named so far."""
        for engine in self.engines:
            if "update" not in vars(engine):
                update, engine.offers = engine.update, []

                def note(info: Any, engine: Any = engine, update: Any = update) -> None:
                    if type(info).__name__ == "Offer":
                        engine.offers.append([] if info.workers is UNSET else sorted(info.workers.values()))
                    update(info)

                engine.update = note
        return [offer for engine in self.engines for offer in engine.offers]

    def release(self) -> list[int]:
        """Give back the transport's memory; how many bytes each sender of this rank kept before, and keeps now."""
        group = self.publisher._group
        senders: list[Any] = [] if group._sender is None else [group._sender]
        before = [sender._slots.size_bytes for sender in senders]
        self.publisher.release()
        return before + [sender._slots.size_bytes for sender in senders]

    def spans(self) -> list[range]:
        """The numbers of each origin's buckets."""
        return list(self.publisher._pack_plan.layout.manifest.spans)

    def fill_disk(self, after: int) -> None:
        """This rank's disk takes so many more writes of buckets, then it is full, for one."""
        from weightcast.store import files

        write_at, left = files.write_at, [after]

        def write(*args: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                files.write_at = write_at
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_at(*args)

        files.write_at = write

    def mount_elsewhere(self, directory: str) -> None:
        """What this rank finds under the path of any store is another directory."""
        import dataclasses
        from pathlib import Path

        from weightcast.transports import store

        parse = store.StoreAddress.parse

        class Elsewhere(store.StoreAddress):
            @staticmethod
            def parse(url: str) -> Any:
                return dataclasses.replace(parse(url), directory=Path(directory))

        store.StoreAddress = Elsewhere  # type: ignore[misc]

    def lose_nobody(self, at: int, *, loses_all: bool = False) -> None:
        """Once, this rank's sender notices at its bucket `at` that its group is broken, and nobody to blame for it.

        `loses_all`: all of the group are to blame.
        """
        sender = self.publisher._group._sender
        send = sender.send

        def losing_send(index: int, num_bytes: int) -> None:
            if index == at:
                sender.send = send
                error = PeerDiedError("as if a connection had broken", peer="x")
                with sender.condition:
                    blamed = dict.fromkeys(sender._group.members, error) if loses_all else {}
                    sender._interrupt(sender._update, blamed, error)
            send(index, num_bytes)

        sender.send = losing_send

    def publish_often(self, number: int) -> None:
        for _ in range(number):
            self.publisher.publish()
            for engine in self.engines:
                engine.engine.calls.clear()

    def footprint(self) -> dict[str, int]:
        from faults.actors import footprint

        return footprint()


def _late(owner: object, call: Callable[..., Any], seconds: float, *args: Any) -> Any:
    time.sleep(seconds)
    return call(owner, *args)


def _workers(client: Any) -> list[Any]:
    """The engines of a client, one for each of its ranks."""
    return client.engines if hasattr(client, "engines") else [client.engine]


def _no_base(*_: Any) -> None:
    raise InsufficientMemoryError("the base of deltas needs more than there is")


def _can_not_map(location: object) -> bool:
    """Stand in for `rank._can_map` where nothing can be mapped."""
    return False


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)))


def _count(counts: dict[str, int]) -> None:
    """Count the exchanges, what goes through every group of weightcast's, and of that "bucket", by a sender.

    "bucket" also counts what is written into a store.
    """
    from weightcast.process_group import ProcessGroup
    from weightcast.store.directory import LockedSlot
    from weightcast.trainer.group.group import Group
    from weightcast.transports.collective.group import BroadcastGroup

    def counted(owner: Any, name: str, size_at: int, word: str) -> Any:
        original = getattr(owner, name)

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[word] = counts.get(word, 0) + 1
            counts[f"{word} bytes"] = counts.get(f"{word} bytes", 0) + args[size_at].nbytes
            return original(self, *args, **kwargs)

        return counting

    for name, size_at in (("send", 0), ("receive", 0), ("all_gather", 1), ("broadcast", 0)):
        setattr(ProcessGroup, name, counted(ProcessGroup, name, size_at, name))
    BroadcastGroup.send = counted(BroadcastGroup, "send", 1, "bucket")  # type: ignore[method-assign]
    exchange = Group.exchange

    def exchanging(self: Group, record: Any) -> Any:
        counts["exchange"] = counts.get("exchange", 0) + 1
        return exchange(self, record)

    Group.exchange = exchanging  # type: ignore[method-assign]
    write = LockedSlot.write

    def writing(self: LockedSlot, number: int, data: memoryview) -> None:
        counts["bucket bytes"] = counts.get("bucket bytes", 0) + len(data)
        write(self, number, data)

    LockedSlot.write = writing  # type: ignore[method-assign]


def rank_main(pipe: Connection, rank: int, size: int) -> None:
    """The store is served by rank 0's process, as without torchrun."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    from weightcast.process_group import join_store, serve_store

    torch.set_num_threads(1)
    if rank == 0:
        store, port = serve_store("127.0.0.1", DEADLINE_SECONDS)
        pipe.send(("port", port))
    else:
        store = join_store("127.0.0.1", pipe.recv(), DEADLINE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    held = Rank(rank, size, pipe)
    _count(held.counts)
    pipe.send(("ready", None))
    while (message := pipe.recv())[0] != "end":
        name, args, kwargs = message
        try:
            pipe.send(("done", getattr(held, name)(*args, **kwargs)))
        except Exception as exc:
            pipe.send(("failed", f"{type(exc).__name__}: {exc}"))
    held.unmake()
    dist.destroy_process_group()


# --- in the test's process ------------------------------------------------------------------------


class Member:
    """The test's handle on one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=rank_main, args=(theirs, rank, size), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.pipe.send((name, args, kwargs))

    def hear(self, word: str = "done", seconds: float = DEADLINE_SECONDS) -> Any:
        assert self.pipe.poll(seconds), f"no {word!r} from {self.process.pid} within {seconds} s"
        heard, value = self.pipe.recv()
        assert heard == word, f"expected {word!r}, heard {heard!r}: {value!r}"
        return value

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.tell(name, *args, **kwargs)
        return self.hear()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        send_signal(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(DEADLINE_SECONDS)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self.pipe.send(("end",))
        self.process.join(DEADLINE_SECONDS)
        is_alive = self.process.is_alive()
        if is_alive:
            self.process.kill()
            self.process.join()
        self.pipe.close()
        assert not is_alive, f"{self.process.pid} did not end when asked"


class Squad:
    """All ranks of one trainer."""

    def __init__(self, size: int) -> None:
        self.members = [Member(rank, size) for rank in range(size)]
        port = self.members[0].hear("port")
        for member in self.members[1:]:
            member.pipe.send(port)
        for member in self.members:
            member.hear("ready")

    def __getitem__(self, rank: int) -> Member:
        return self.members[rank]

    def all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        for member in self.members:
            member.tell(name, *args, **kwargs)
        return [member.hear() for member in self.members]

    def publish(self, content: int, version: int | None = None) -> list[dict[str, Any]]:
        self.all("fill", content)
        return self.all("publish", version)

    def require_no_growth(self) -> None:
        """Publishes leave no descriptor and no thread behind. A pool starts its threads when it has work for them."""
        self.all("publish_often", 5)
        for is_last in (False, False, True):
            before = self.all("footprint")
            self.all("publish_often", 20)
            pairs = list(zip(before, self.all("footprint"), strict=True))
            if not is_last and any(now["threads"] > former["threads"] for former, now in pairs):
                continue
            for former, now in pairs:
                assert now["fds"] <= former["fds"]
                assert now["threads"] <= former["threads"]
            return


@contextlib.contextmanager
def squad(size: int) -> Iterator[Squad]:
    ranks = Squad(size)
    try:
        yield ranks
    finally:
        # Rank 0 serves the store.
        for member in reversed(ranks.members):
            member.close()
