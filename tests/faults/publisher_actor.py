"""A publisher in a process of its own, or several trainer ranks: told over a pipe what to publish, where to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import random
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import torch
from publishers import publisher_of
from torch import nn

import weightcast
from faults.actors import WIDTH, Actor, Stops, bucket_size_bytes, build_model, fill, footprint, settle_in
from weightcast import registry
from weightcast.format.bucket import BucketBuffer
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import Offer, Seal
from weightcast.format.tensor_digest import tensor_digest
from weightcast.host import memory as host_memory
from weightcast.seams.source import Regions
from weightcast.trainer.deltas import OriginBase

_JOIN_SECONDS = 60.0
_AVAILABLE_BYTES = host_memory.available_bytes


class Rank(NamedTuple):
    """One of the trainer ranks of a publisher. Their store is at this address, by default served by the test.

    `interface`: by which the ranks reach each other; `serves_store`: this one serves the store.
    """

    number: int
    size: int
    store_port: int
    store_host: str = "127.0.0.1"
    interface: str = "lo"
    serves_store: bool = False


class RowShards:
    """A source of which every rank has some rows of every tensor."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        tensors = model.state_dict()
        self._specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]
        self._regions = {name: [_rows(tensor, rank)] for name, tensor in tensors.items()}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def _rows(tensor: torch.Tensor, rank: Rank) -> tuple[Region, torch.Tensor]:
    start, end = (len(tensor) * number // rank.size for number in (rank.number, rank.number + 1))
    rows = tensor[start:end]
    return Region((start, *([0] * (tensor.ndim - 1))), tuple(rows.shape)), rows


def _shard(model: nn.Module, rank: Rank) -> nn.Module:
    """Shard a model by FSDP2, as users do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (rank.size,)))


def _fill_shards(model: nn.Module, content: int) -> None:
    """As `fill` does: every rank's shards of the same tensors. A collective."""
    from torch.distributed.tensor import distribute_tensor

    parameters: list[Any] = list(model.parameters())
    whole = build_model(len(parameters[1]))
    fill(whole, content)
    for parameter, tensor in zip(parameters, whole.parameters(), strict=True):
        parameter.to_local().copy_(distribute_tensor(tensor, parameter.device_mesh, parameter.placements).to_local())


class StoppingClient(weightcast.HttpEngine):
    stops: Stops
    scheme: str

    def init(self, info: Any) -> None:
        # The engine's process does not have this wrapper's scheme.
        url = info.transport.replace("stopping", self.scheme)
        super().init(msgspec.structs.replace(info, transport=url))
        self.stops.reach("init")

    def update(self, info: Any) -> None:
        if isinstance(info, Seal):
            self.stops.reach("before seal")
            if self.stops.is_armed("paused"):
                self.paused_seconds = None  # so that the publisher pauses the engine, and does not leave it to `finish`
        super().update(info)
        if isinstance(info, Offer):
            self.stops.reach("offer")

    def pause(self, run: str) -> None:
        super().pause(run)
        self.stops.reach("paused")

    def finish(self, version: int) -> None:
        super().finish(version)
        self.stops.reach("after commit")


class Senders:
    """Makes a transport's senders: they stop after buckets 0 and 1, send 1 corrupt once, and pack slowly."""

    def __init__(self, url: str, stops: Stops, pack_seconds: float) -> None:
        self.scheme, _, rest = url.partition("://")
        self._transport = registry.transport(url)
        self._stops = stops
        self._pack_seconds = pack_seconds
        self.corrupts = False
        self.url = f"stopping://{rest}"
        registry.TRANSPORTS["stopping"] = f"{__name__}:stopping_transport"
        # Those that must share a host have origins there alone; here several hosts are played.
        globals()["stopping_transport"] = dataclasses.replace(self._transport, sender=self._make, origins="any")

    def _make(self, url: str, **options: Any) -> Any:
        sender = self._transport.sender(url.replace("stopping", self.scheme), **options)
        send, buffer = sender.send, sender.buffer

        def slow_buffer(index: int) -> BucketBuffer:
            found: BucketBuffer = buffer(index)
            time.sleep(self._pack_seconds)
            return found

        def stopping_send(index: int, num_bytes: int) -> None:
            if self.corrupts and index == 1:
                self.corrupts = False
                buffer(index).payload[7] ^= 255
            send(index, num_bytes)
            if index < 2:
                self._stops.reach(("first bucket", "mid-bucket")[index])

        sender.send, sender.buffer = stopping_send, slow_buffer
        return sender


class Trainer:
    """The publisher, its engines' clients and its model."""

    def __init__(self, pipe: Connection, urls: list[str], url: str, width: int, options: dict[str, Any]) -> None:
        self.pipe = pipe
        self.stops = Stops(pipe)
        _stop_while_encoding(self.stops)
        rank: Rank | None = options.pop("rank", None)
        self.senders = Senders(url, self.stops, options.pop("pack_seconds", 0.0))
        self._access = {"token": options.get("token"), "timeout_seconds": options.get("deadline_seconds", 60.0)}
        self._clients: dict[str, StoppingClient] = {}
        self._model = build_model(width)
        self._is_fsdp = options.pop("fsdp", False)
        self._trains_on = options.pop("trains_on", False)
        if rank is not None:
            _join(rank)
            if self._is_fsdp:
                self._model = _shard(self._model, rank)
        is_module = rank is None or self._is_fsdp
        self.publisher = publisher_of(
            weightcast.ModuleSource(self._model) if is_module else RowShards(self._model, rank),
            transport=self.senders.url,
            **options,
            bucket_size_bytes=bucket_size_bytes(width),
        )
        for engine in urls:
            self.add(engine)

    def add(self, engine: str) -> None:
        self._clients[engine] = client = StoppingClient(engine, **self._access)
        client.stops, client.scheme = self.stops, self.senders.scheme
        self.publisher.add_engine(client)

    def remove(self, engine: str) -> None:
        self.publisher.remove_engine(engine)
        self._clients.pop(engine).close()

    def full_digests(self) -> None:
        """Of every parameter's `full_tensor()`. A collective."""
        whole = {name: tensor.full_tensor() for name, tensor in self._model.state_dict().items()}
        self.pipe.send(("full digests", {name: tensor_digest(tensor) for name, tensor in whole.items()}))

    def publish(self, content: int, version: int | None) -> None:
        self._fill(content)
        self.pipe.send(("published", self._outcome(version)))

    def start_often(self, first: int, number: int, seed: int) -> None:
        """Start that many publishes, of content and version `first` and up; cancel and skip some. Says so at each.

        Ends at the first that fails, as it does where another trainer rank is dead.
        """
        chance = random.Random(seed)
        try:
            for version in range(first, first + number):
                self._fill(version)
                handle = self.publisher.start(version, overlap=chance.choice(["wait", "skip"]))
                if handle is not None and chance.random() < 0.2:
                    handle.cancel()
                self.pipe.send(("started", version))
            with contextlib.suppress(weightcast.UpdateAbortedError):
                if handle is not None:
                    handle.result()
        except Exception as exc:
            self.pipe.send(("failed", f"{type(exc).__name__}: {exc}"))

    def _fill(self, content: int) -> None:
        if self._is_fsdp:
            _fill_shards(self._model, content)
        else:
            fill(self._model, content)

    def _outcome(self, version: int | None) -> dict[str, Any]:
        try:
            report = self._published_meanwhile(version) if self._trains_on else self.publisher.publish(version)
        except weightcast.PublishError as exc:
            failures = {name: (type(e).__name__, str(e)) for name, e in exc.failures.items()}
            return {"version": getattr(exc.report, "version", None), "failures": failures}
        except Exception as exc:
            return {"version": None, "error": (type(exc).__name__, str(exc))}
        figures = {name: getattr(report, name) for name in ("version", "num_bytes", "num_buckets")}
        if report.delta is not None:
            figures["num_deltas"] = report.delta.num_engines
        return {"failures": {}, "seconds": msgspec.to_builtins(report.seconds), **figures}

    def _published_meanwhile(self, version: int | None) -> weightcast.PublishReport:
        """Publish in the background, with other weights at once."""
        handle = self.publisher.start(version)
        for parameter in self._model.parameters():
            parameter.data.fill_(-1.0)
        return handle.result()


def refuse_memory(is_refused: bool) -> None:
    """Have this process find no memory for an arena, or find it again."""
    host_memory.available_bytes = (lambda: 0) if is_refused else _AVAILABLE_BYTES


def _join(rank: Rank) -> None:
    """Make torch's default group."""
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = rank.interface
    timeout = datetime.timedelta(seconds=_JOIN_SECONDS)
    serves = rank.serves_store
    store = distributed.TCPStore(rank.store_host, rank.store_port, None, serves, timeout, wait_for_workers=False)
    distributed.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.size, timeout=timeout)


def _stop_while_encoding(stops: Stops) -> None:
    """Make this process stop once it has encoded a bucket."""
    encode = OriginBase.encode

    def stopping(base: OriginBase, *args: Any) -> None:
        encode(base, *args)
        stops.reach("encoded")

    OriginBase.encode = stopping  # type: ignore[method-assign]


def publisher_main(pipe: Connection, urls: list[str], url: str, width: int, options: dict[str, Any]) -> None:
    settle_in(options)
    trainer = Trainer(pipe, urls, url, width, options)
    pipe.send(("run", trainer.publisher.run))
    while (words := pipe.recv())[0] != "end":
        match words:
            case ("publish", content, version):
                threading.Thread(target=trainer.publish, args=(content, version), daemon=True).start()
            case ("start often", *numbers):
                threading.Thread(target=trainer.start_often, args=numbers, daemon=True).start()
            case ("go",):
                trainer.stops.go.set()
            case ("full digests",):
                trainer.full_digests()
            case ("footprint",):
                pipe.send(("footprint", footprint()))
            case (what, *arguments):
                calls = {"stop at": trainer.stops.arm, "add": trainer.add, "remove": trainer.remove}
                calls["refuse memory"] = refuse_memory
                calls["corrupt"] = lambda: setattr(trainer.senders, "corrupts", True)
                calls[what](*arguments)
                pipe.send(("done",))
    trainer.publisher.close()


class PublisherProcess(Actor):
    """Call `wait` before anything else; trainer ranks wait for each other, so start all of them first."""

    def __init__(self, urls: list[str], *, transport: str = "ipc://", width: int = WIDTH, **options: Any) -> None:
        super().__init__(publisher_main, urls, transport, width, options)
        self.run = ""

    def wait(self) -> PublisherProcess:
        self.run = self.hear("run")
        return self

    def publish(self, content: int, version: int | None = None) -> dict[str, Any]:
        self.tell("publish", content, version)
        return self.hear("published")  # type: ignore[no-any-return]


def publish_together(ranks: Sequence[PublisherProcess], content: int, version: int | None = None) -> dict[str, Any]:
    """One publish of several trainer ranks, which all say the same of it."""
    for rank in ranks:
        rank.tell("publish", content, version)
    outcome, *others = [rank.hear("published") for rank in ranks]
    assert all(other == outcome for other in others)
    return outcome  # type: ignore[no-any-return]
