"""The parts of a publish, each measured by itself on this machine: what `cost` adds up to a whole.

Bytes: copies, digests, broadcasts and files in warm memory, once alone and once beside copies on every other core.
The rest: publishes of next to nothing to real engine processes, whose stages are compared one difference at a time
(buckets, tensors, engines, trainer ranks). No part is measured by publishing a model.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy
import torch

from weightcast.bench import shapes
from weightcast.bench.baselines import BaselineGroup, make_group
from weightcast.bench.channel import BenchChannel
from weightcast.bench.meters import ProcessMeter
from weightcast.bench.model import build_model
from weightcast.bench.result import BenchSettings
from weightcast.bench.workers import Step, started_engines, started_trainer
from weightcast.errors import PublishReport
from weightcast.format.bucket import Layout, payload_digest
from weightcast.format.manifest import TensorSpec, WeightVersion, decode
from weightcast.format.plan import plan
from weightcast.host.copy import copy_all
from weightcast.sources.module import ModuleSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.packer import Packer, tiling
from weightcast.trainer.publisher import Publisher

_BYTES = 256 << 20
_BUCKET_BYTES = 64 << 20
_STORE_BUCKET_BYTES = 2 << 20
_CACHED_BUCKET_BYTES = 8 << 20
_FEW = shapes.named("uniform", num_tensors=64, num_bytes=64 * 4096)
_MANY = shapes.named("uniform", num_tensors=20_000, num_bytes=20_000 * 64)
_LARGE = shapes.named("uniform", num_tensors=64, num_bytes=_BYTES)
_NUM_ROUNDS = 7
_MAX_CROWD = 15

STAGES = ("gather", "offer", "transfer", "seal", "install")
"""A publish, end to end: `transfer` is packing, sending, receiving and checking; `install` the rest, after the seal."""


class PerByte(msgspec.Struct, frozen=True):
    """Seconds of one thread for a byte: with the machine to itself, and with every core copying."""

    alone: float
    crowded: float

    def at(self, num_busy: float, num_cores: int) -> float:
        """With that many cores busy, this one included."""
        share = 0.0 if num_cores == 1 else min(max(num_busy - 1, 0) / (num_cores - 1), 1.0)
        return self.alone + (self.crowded - self.alone) * share


class StageCosts(msgspec.Struct, frozen=True):
    """Seconds of one stage that don't depend on bytes: once, for each engine, each bucket, each tensor."""

    once: float
    engine: float
    bucket: float
    tensor: float


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's parts cost; the JSON of `weightcast plan --measure`.

    copy: one memcpy. pack: copy and digest of what lies in large tensors, block by block. check: the digest of a
    bucket. cached_pack: as `pack`, into two buckets in turn that fit into the cache; cached_load: the digest of such a
    bucket right after, and the copy out of it; None: not measured, larger ones stand for them. install: the copy of
    large tensors into a model, with as many threads as torch has; its seconds are of the whole call. write, read: a
    file of `directory`, in the page cache. raw: the broadcast of flat buffers by gloo from one process to another one
    on this host, in seconds until it has all of it; `send_cpu`, `receive_cpu`: the CPU seconds that it takes at either
    end, alone and beside copies.
    stages: by "transport install", then by stage. rank: what each further trainer rank of a host adds to them.
    """

    machine: str
    num_cores: int
    num_threads: int
    torch_version: str
    directory: str
    copy: PerByte
    pack: PerByte
    check: PerByte
    install: PerByte
    write: PerByte
    read: PerByte
    raw: float
    send_cpu: PerByte
    receive_cpu: PerByte
    stages: dict[str, dict[str, StageCosts]]
    rank: dict[str, StageCosts]
    cached_pack: PerByte | None = None
    cached_load: PerByte | None = None

    def encode(self) -> bytes:
        """The JSON, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def read_parts(path: Path) -> Parts:
    """Raises ValueError if the file can't be read, or is not what `weightcast plan --measure` writes."""
    try:
        parts: Parts = decode(path.read_bytes(), Parts)
    except Exception as exc:
        raise ValueError(
            f"{path} has no measured parts: {exc}; write it with weightcast plan --measure {path}"
        ) from exc
    return parts


def machine_name() -> str:
    """This machine, in words: cores, processor, kernel."""
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = found[0].partition(":")[2].strip() if found else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {name}, Linux {platform.release()}"


def measure_parts(note: Callable[[str], None] = lambda text: None) -> Parts:
    """Measure this machine. Under a minute; memory: 2 GiB. Raises what a bench run raises."""
    num_cores = len(os.sched_getaffinity(0))
    note("copies and digests")
    with tempfile.TemporaryDirectory() as directory:
        rates = _rates(num_cores, Path(directory))
        settings = BenchSettings(transport="gloo")
        with contextlib.ExitStack() as stack:
            note("starting engines")
            large = stack.enter_context(started_engines(_LARGE, settings))[0]
            few = stack.enter_context(started_engines(_FEW, BenchSettings(num_engines=2)))
            many = stack.enter_context(started_engines(_MANY, settings))[0]
            note("raw broadcasts")
            group = stack.enter_context(contextlib.closing(make_group(settings, _BYTES, [large.channel])))
            group.send_raw([large.channel])
            assert large.pid is not None
            raw, *alone = _raw(group, large.channel, large.pid, 0)
            _, *crowded = _raw(group, large.channel, large.pid, num_cores - 1)
            send, receive = (PerByte(one, max(one, other)) for one, other in zip(alone, crowded, strict=True))
            first, second = (engine.url for engine in few)
            stages, module = {}, ModuleSource(build_model(_FEW))
            wide = ModuleSource(build_model(_MANY))
            for transport in ("ipc", "gloo", "file"):
                url = {"ipc": "ipc://", "gloo": "gloo://127.0.0.1:0", "file": f"file://{directory}/store"}[transport]
                for install in ("staged", "streaming"):
                    note(f"publishes of next to nothing over {transport} {install}")
                    options = {"install": install}
                    one = _seconds(module, url, [first], 64 * 4096, options)
                    two = _seconds(module, url, [first, second], 64 * 4096, options)
                    buckets = _seconds(module, url, [first], 4096, options)
                    tensors = _seconds(wide, url, [many.url], 20_000 * 256, options)
                    stages[f"{transport} {install}"] = {
                        stage: _costs(one[stage], two[stage], buckets[stage], tensors[stage]) for stage in STAGES
                    }
            note("two trainer ranks")
            sharded = BenchSettings(trainer_ranks=2, transport="ipc", bucket_size_bytes=4096)
            one_rank = _seconds(module, "ipc://", [first], 4096, {})
            ranks = _seconds_of_ranks(_FEW, sharded, first)
    extra = {stage: max(ranks[stage] - one_rank[stage], 0.0) for stage in STAGES}
    bucket = extra.pop("transfer") / len(_FEW)
    rank = {stage: StageCosts(seconds, 0.0, 0.0, 0.0) for stage, seconds in extra.items()}
    rank["transfer"] = StageCosts(0.0, 0.0, bucket, 0.0)
    return Parts(
        machine=machine_name(),
        num_cores=num_cores,
        num_threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        directory=tempfile.gettempdir(),
        raw=raw,
        send_cpu=send,
        receive_cpu=receive,
        stages=stages,
        rank=rank,
        **rates,
    )


def _raw(group: BaselineGroup, engine: BenchChannel, pid: int, crowd: int) -> tuple[float, float, float]:
    """For each byte of raw broadcasts: seconds, CPU seconds of the sender and of the receiver."""
    ends = [ProcessMeter(os.getpid()), ProcessMeter(pid)]
    with _crowd(crowd) as crowd_seconds:
        before, crowd_before = [end.cpu_seconds() for end in ends], crowd_seconds()
        seconds = [group.send_raw([engine]) for _ in range(_NUM_ROUNDS)]
        sent, received = (end.cpu_seconds() - start for end, start in zip(ends, before, strict=True))
        sent -= crowd_seconds() - crowd_before
    return statistics.median(seconds) / _BYTES, sent / _NUM_ROUNDS / _BYTES, received / _NUM_ROUNDS / _BYTES


def _costs(one: float, two: float, buckets: float, tensors: float) -> StageCosts:
    """From one engine, bucket and 64 tensors; with two engines; with 64 buckets; with 20,000 tensors."""
    engine, bucket = max(two - one, 0.0), max(buckets - one, 0.0) / 63
    tensor = max(tensors - one, 0.0) / (len(_MANY) - len(_FEW))
    return StageCosts(max(one - engine - bucket - len(_FEW) * tensor, 0.0), engine, bucket, tensor)


def _median_stages(publish: Callable[[], PublishReport]) -> dict[str, float]:
    """By stage, the median of several publishes after two that connect and warm up."""
    runs, far = [], numpy.zeros(2 * _BUCKET_BYTES, dtype=numpy.uint8)
    for _ in range(2 + _NUM_ROUNDS):
        # As a training step does, which leaves nothing in caches.
        numpy.copyto(far[:_BUCKET_BYTES], far[_BUCKET_BYTES:])
        start = time.perf_counter()
        found = publish().seconds
        seconds = time.perf_counter() - start
        before = {"gather": found.gather, "offer": found.offer, "transfer": found.pack + found.send, "seal": found.seal}
        runs.append(before | {"install": seconds - sum(before.values())})
    return {stage: statistics.median(run[stage] for run in runs[2:]) for stage in STAGES}


def _seconds(
    source: ModuleSource, url: str, engines: Sequence[str], bucket_size_bytes: int, options: dict[str, str]
) -> dict[str, float]:
    chosen = PublishOptions(bucket_size_bytes=bucket_size_bytes, **options)  # type: ignore[arg-type]
    with contextlib.closing(Publisher(source, transport=url, engines=engines, options=chosen)) as publisher:
        return _median_stages(publisher.publish)


def _seconds_of_ranks(specs: Sequence[TensorSpec], settings: BenchSettings, engine: str) -> dict[str, float]:
    with started_trainer(specs, settings) as trainer, contextlib.closing(trainer.rank_0):
        trainer.step(Step("open", [engine]))
        found = _median_stages(lambda: trainer.step(Step("publish")))
        trainer.step(Step("close"))
    return found


def _rates(num_cores: int, directory: Path) -> dict[str, PerByte]:
    """Each rate of bytes, alone and crowded."""
    source = ModuleSource(build_model(_LARGE))
    layout = Layout(plan(_LARGE, _BUCKET_BYTES))
    packer, version = Packer(layout, tiling(_LARGE, source.regions())), WeightVersion("0" * 32, 0)
    payloads = [torch.zeros(size, dtype=torch.uint8) for size in layout.manifest.buckets]
    tensors = [data for held in source.regions().values() for _, data in held]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    arrays = [payload.numpy() for payload in payloads]
    targets = [numpy.zeros_like(array) for array in arrays]
    # Aligned, as buckets are.
    written, read = memoryview(mmap.mmap(-1, _STORE_BUCKET_BYTES)), memoryview(mmap.mmap(-1, _BYTES))
    descriptor = os.open(directory / "bytes", os.O_RDWR | os.O_CREAT)
    starts = range(0, _BYTES, _STORE_BUCKET_BYTES)

    def each(work: Callable[[int], object], count: int = len(payloads)) -> Callable[[], object]:
        return lambda: [work(number) for number in range(count)]

    def read_bucket(number: int) -> int:
        start = starts[number]
        return os.preadv(descriptor, [read[start : start + len(written)]], start)

    works: dict[str, Callable[[], object]] = {
        "copy": each(lambda number: numpy.copyto(targets[number], arrays[number])),
        "pack": each(lambda number: packer.fill(number, payloads[number], version)),
        "check": each(lambda number: payload_digest(payloads[number])),
        "install": lambda: copy_all(copies, tensors),
        "write": each(lambda number: os.pwrite(descriptor, written, starts[number]), len(starts)),
        "read": each(read_bucket, len(starts)),
    }
    cached = Layout(plan(_LARGE, _CACHED_BUCKET_BYTES))
    cached_packer = Packer(cached, tiling(_LARGE, source.regions()))
    slots = [torch.zeros(_CACHED_BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
    whole = numpy.zeros(_BYTES, dtype=numpy.uint8)

    def streamed() -> dict[str, float]:
        """What one bucket after the other takes at either end, of a stream through two slots."""
        seconds: dict[str, list[float]] = {"cached_pack": [], "cached_load": []}
        for _ in range(_NUM_ROUNDS):
            packing, loading = 0.0, 0.0
            for index, size in enumerate(cached.manifest.buckets):
                slot, start = slots[index % 2][:size], index * _CACHED_BUCKET_BYTES
                begun = time.perf_counter()
                cached_packer.fill(index, slot, version)
                packed = time.perf_counter()
                payload_digest(slot)
                numpy.copyto(whole[start : start + size], slot.numpy())
                packing, loading = packing + packed - begun, loading + time.perf_counter() - packed
            seconds["cached_pack"].append(packing)
            seconds["cached_load"].append(loading)
        return {name: statistics.median(found[1:]) / _BYTES for name, found in seconds.items()}

    try:
        alone = {name: _per_byte(work) for name, work in works.items()} | streamed()
        with _crowd(num_cores - 1):
            crowded = {name: _per_byte(work) for name, work in works.items()} | streamed()
    finally:
        os.close(descriptor)
    return {name: PerByte(alone[name], max(alone[name], crowded[name])) for name in alone}


def _per_byte(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_NUM_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) / _BYTES


@contextlib.contextmanager
def _crowd(num_threads: int) -> Iterator[Callable[[], float]]:
    """Threads that copy all the while, as the other end of a publish does; gives their CPU seconds so far."""
    has_ended, clocks = threading.Event(), list[int]()

    def work() -> None:
        source = numpy.ones(_BUCKET_BYTES, dtype=numpy.uint8)
        target = numpy.zeros_like(source)
        clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        while not has_ended.is_set():
            numpy.copyto(target, source)

    threads = [threading.Thread(target=work, name="bench-crowd") for _ in range(min(num_threads, _MAX_CROWD))]
    for thread in threads:
        thread.start()
    try:
        while len(clocks) < len(threads):
            time.sleep(0.001)
        yield lambda: sum(map(time.clock_gettime, clocks))
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()
