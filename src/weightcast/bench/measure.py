"""One bench run: build the model, start the engines, publish, and read the meters.

Nothing else runs while a publish is timed: memory is the kernel's own high-water mark, CPU time is read around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from weightcast import registry
from weightcast.bench import per_tensor, shapes
from weightcast.bench.ends import EndMeters, difference
from weightcast.bench.engines import BenchEngine, lend_slot, started
from weightcast.bench.memcpy import Memcpy
from weightcast.bench.model import build_model, change, fill
from weightcast.bench.result import BenchResult, Bytes, Ends, Run, median
from weightcast.bench.settings import Settings
from weightcast.control.client import HttpEngine
from weightcast.plan import fitting_bucket_size
from weightcast.publisher import Publisher
from weightcast.report import PublishReport
from weightcast.sources.module import ModuleSource
from weightcast.tensor_digest import tensor_digest

Note = Callable[[str], None]
MAX_PER_TENSOR_RUNS = 3


@dataclasses.dataclass
class _Publishes:
    """What the publishes of a run have shown."""

    runs: list[Run]
    last: PublishReport
    first_seconds: float
    extra_bytes: Bytes
    host_extra_bytes: int


def measure(settings: Settings, note: Note = lambda text: None) -> BenchResult:
    """Run the bench; `note` is told what happens next.

    Memory: the model once for the publisher and once for each engine, what the transport takes, and the two buffers of
    `Memcpy`. Raises what `publish` raises, PeerDiedError if an engine process ends.
    """
    note(f"building {settings.shapes}")
    specs = shapes.named(
        settings.shapes,
        layers=settings.layers,
        scale=settings.scale,
        num_tensors=settings.num_tensors,
        num_bytes=settings.num_bytes,
    )
    model = build_model(specs)
    fill(model, seed=0)
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    note("measuring memcpy")
    memcpy = Memcpy(sum(spec.num_bytes for spec in specs))
    note(f"starting {settings.num_engines} engines")
    with started(specs, settings.num_engines, one_process=settings.one_process) as engines:
        publishes = _publish_all(settings, model, tensors, engines, memcpy, note)
        note("checking what the engines hold")
        verified = _verify(tensors, engines)
        per_tensor_seconds = _per_tensor(settings, tensors, engines, note) if settings.per_tensor else None
    return _result(settings, tensors, publishes, memcpy, verified, per_tensor_seconds)


def _publish_all(
    settings: Settings,
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    engines: Sequence[BenchEngine],
    memcpy: Memcpy,
    note: Note,
) -> _Publishes:
    meters = EndMeters([engine.pid for engine in engines if engine.pid is not None])
    meters.begin_memory()
    publisher = Publisher(
        ModuleSource(model),
        transport=settings.transport_url,
        engines=[engine.url for engine in engines],
        bucket_size_bytes=settings.bucket_size_bytes,
        install=settings.install,
    )
    with publisher:
        note("first publish")
        start = time.perf_counter()
        report = publisher.publish()
        first_seconds = time.perf_counter() - start
        runs: list[Run] = []
        for index in range(settings.num_runs):
            note(f"publish {index + 1} of {settings.num_runs}")
            change(list(tensors.values()))
            run, report = _timed(publisher, meters, memcpy.seconds())
            runs.append(run)
        extra_bytes, host_extra_bytes = meters.extra()
    return _Publishes(runs, report, first_seconds, extra_bytes, host_extra_bytes)


def _timed(publisher: Publisher, meters: EndMeters, memcpy_seconds: float) -> tuple[Run, PublishReport]:
    before, start = meters.cpu(), time.perf_counter()
    report = publisher.publish()
    seconds, after = time.perf_counter() - start, meters.cpu()
    results = report.engines.values()
    run = Run(
        publish_seconds=seconds,
        pause_seconds=max(result.pause_seconds for result in results),
        install_seconds=max(result.install_seconds for result in results),
        memcpy_seconds=memcpy_seconds,
        cpu_seconds=difference(after, before),
        seconds={name: getattr(report.seconds, name) for name in report.seconds.__struct_fields__},
    )
    return run, report


def _verify(tensors: Mapping[str, torch.Tensor], engines: Sequence[BenchEngine]) -> bool:
    """Whether every engine holds exactly these tensors."""
    expected = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    held = []
    for engine in engines:
        with contextlib.closing(HttpEngine(engine.url, timeout_seconds=600.0)) as client:
            held.append(client.digests())
    return all(digests == expected for digests in held)


def _per_tensor(
    settings: Settings, tensors: Mapping[str, torch.Tensor], engines: Sequence[BenchEngine], note: Note
) -> float:
    """The median of the baseline's seconds, after one round to warm up."""
    channels = [engine.channel for engine in engines]
    with contextlib.closing(per_tensor.make_slot(tensors)) as slot:
        lend_slot(engines, slot)
        note("one round trip per tensor")
        num_rounds = 1 + min(settings.num_runs, MAX_PER_TENSOR_RUNS)
        seconds = [per_tensor.publish(tensors, slot.tensor, channels) for _ in range(num_rounds)]
        per_tensor.end(channels)
    return statistics.median(seconds[1:])


def _result(
    settings: Settings,
    tensors: Mapping[str, torch.Tensor],
    publishes: _Publishes,
    memcpy: Memcpy,
    verified: bool,
    per_tensor_seconds: float | None,
) -> BenchResult:
    num_bytes, num_tensors = publishes.last.num_bytes, publishes.last.num_tensors
    publish_seconds = median(publishes.runs, lambda run: run.publish_seconds)
    memcpy_seconds = median(publishes.runs, lambda run: run.memcpy_seconds)
    cpu = _median_cpu(publishes.runs)
    return BenchResult(
        transport=settings.transport,
        shapes=settings.shapes,
        install=settings.install,
        num_engines=settings.num_engines,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        memcpy_gb_per_s=num_bytes / memcpy_seconds / 1e9,
        publish_seconds=publish_seconds,
        memcpy_ratio=publish_seconds / memcpy_seconds,
        pause_seconds=median(publishes.runs, lambda run: run.pause_seconds),
        cpu_us_per_tensor=(cpu.publisher + cpu.engine) / num_tensors * 1e6,
        extra_bytes=publishes.extra_bytes,
        per_tensor_seconds=per_tensor_seconds,
        per_tensor_speedup=per_tensor_seconds and per_tensor_seconds / publish_seconds,
        layers=settings.layers,
        scale=settings.scale,
        verified=verified,
        host_extra_bytes=publishes.host_extra_bytes,
        cpu_seconds=cpu,
        memcpy_seconds=memcpy_seconds,
        all_threads_copy_gb_per_s=num_bytes / memcpy.all_threads_seconds() / 1e9,
        first_publish_seconds=publishes.first_seconds,
        bucket_size_bytes=settings.bucket_size_bytes or _chosen_bucket_size_bytes(settings.transport_url, num_bytes),
        num_buckets=publishes.last.num_buckets,
        largest_tensor_bytes=max(tensor.nbytes for tensor in tensors.values()),
        torch_threads=torch.get_num_threads(),
        num_cpus=len(os.sched_getaffinity(0)),
        torch_version=str(torch.__version__),
        runs=publishes.runs,
    )


def _median_cpu(runs: Sequence[Run]) -> Ends:
    return Ends(
        publisher=median(runs, lambda run: run.cpu_seconds.publisher),
        engine=median(runs, lambda run: run.cpu_seconds.engine),
    )


def _chosen_bucket_size_bytes(url: str, num_bytes: int) -> int:
    """What a publisher chooses by itself."""
    return fitting_bucket_size(num_bytes, registry.transport(url).default_bucket_size_bytes["cpu"])
