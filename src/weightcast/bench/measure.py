"""One bench run: build the model, start the engines, publish, and read the meters.

Nothing else runs while a publish is timed: memory is the kernel's own high-water mark, CPU time is read around it.
What a publish is measured against in the same breath (memcpy, the raw broadcast) has its memory before that is metered.
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
from weightcast.bench.broadcasts import Broadcasts
from weightcast.bench.ends import UsageMeters, difference
from weightcast.bench.engines import BenchEngine, lend_slot, make_group, started
from weightcast.bench.memcpy import Memcpy
from weightcast.bench.result import BenchResult, Bytes, Ends, Run, median
from weightcast.bench.settings import BenchSettings
from weightcast.bench.trainer import Trainer, trainer
from weightcast.control.client import HttpEngine
from weightcast.format.manifest import TensorSpec
from weightcast.format.plan import fitting_bucket_size
from weightcast.format.tensor_digest import tensor_digest
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.report import PublishReport

Note = Callable[[str], None]
MAX_SLOW_RUNS = 3


@dataclasses.dataclass
class _Publishes:
    """What the publishes of a run have shown."""

    runs: list[Run]
    last: PublishReport
    first_seconds: float
    extra_bytes: Bytes
    host_extra_bytes: int
    other_ranks_extra_bytes: int | None


@dataclasses.dataclass
class _Slow:
    """Seconds of the ways that bucketing replaced."""

    per_tensor: float | None = None
    per_tensor_way: str | None = None
    full_tensor: float | None = None


def measure(settings: BenchSettings, note: Note = lambda text: None) -> BenchResult:
    """Run the bench; `note` is told what happens next.

    Memory: the model once for the trainer and once for each engine, what the transport takes, and the two buffers of
    `Memcpy`. Raises what `publish` raises, PeerDiedError if a process of the bench ends.
    """
    note(f"building {settings.shapes}")
    specs = shapes.named(
        settings.shapes,
        layers=settings.layers,
        scale=settings.scale,
        num_tensors=settings.num_tensors,
        num_bytes=settings.num_bytes,
    )
    with contextlib.ExitStack() as stack:
        trained = stack.enter_context(trainer(specs, settings))
        note("measuring memcpy")
        memcpy = Memcpy(sum(spec.num_bytes for spec in specs), settings.device)
        note(f"starting {settings.num_engines} engines")
        engines = stack.enter_context(started(specs, settings))
        bench = _Bench(settings, specs, trained, engines, memcpy, note)
        stack.callback(bench.close)
        publishes = bench.publish_all()
        note("checking what the engines hold")
        verified = bench.verify()
        slow = bench.slow_ways() if settings.per_tensor else _Slow()
    return _result(settings, specs, publishes, memcpy, verified, slow)


class _Bench:
    """The measurements of one run, in the order of the methods."""

    def __init__(
        self,
        settings: BenchSettings,
        specs: Sequence[TensorSpec],
        trained: Trainer,
        engines: Sequence[BenchEngine],
        memcpy: Memcpy,
        note: Note,
    ) -> None:
        self._settings = settings
        self._trainer = trained
        self._engines = engines
        self._channels = [engine.channel for engine in engines]
        self._memcpy = memcpy
        self._note = note
        self._num_bytes = sum(spec.num_bytes for spec in specs)
        self._group: Broadcasts | None = None
        if settings.is_collective:
            self._group = make_group(engines, settings, bucket_size_bytes(settings, self._num_bytes), self._num_bytes)
            self._raw_seconds()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def publish_all(self) -> _Publishes:
        meters = UsageMeters(
            [engine.pid for engine in self._engines if engine.pid is not None], self._trainer.other_pids
        )
        meters.begin_memory()
        with self._trainer.publisher(self._settings, [engine.url for engine in self._engines]) as publisher:
            self._note("first publish")
            start = time.perf_counter()
            report = self._trainer.publish(publisher)
            first_seconds = time.perf_counter() - start
            runs: list[Run] = []
            for index in range(self._settings.num_runs):
                self._note(f"publish {index + 1} of {self._settings.num_runs}")
                self._trainer.change()
                run, report = self._timed(publisher, meters)
                runs.append(run)
            extra_bytes, host_extra_bytes = meters.extra()
            return _Publishes(runs, report, first_seconds, extra_bytes, host_extra_bytes, meters.other_ranks_extra())

    def _timed(self, publisher: Publisher, meters: UsageMeters) -> tuple[Run, PublishReport]:
        memcpy_seconds, raw_seconds = self._memcpy.seconds(), self._raw_seconds()
        before, start = meters.cpu(), time.perf_counter()
        report = self._trainer.publish(publisher)
        seconds, after = time.perf_counter() - start, meters.cpu()
        results = report.engines.values()
        run = Run(
            publish_seconds=seconds,
            pause_seconds=max(result.pause_seconds for result in results),
            install_seconds=max(result.install_seconds for result in results),
            memcpy_seconds=memcpy_seconds,
            cpu_seconds=difference(after, before),
            seconds={name: getattr(report.seconds, name) for name in report.seconds.__struct_fields__},
            raw_seconds=raw_seconds,
        )
        return run, report

    def _raw_seconds(self) -> float | None:
        return None if self._group is None else self._group.send_raw(self._num_bytes, self._channels)

    def verify(self) -> bool:
        """Whether every engine holds exactly what the trainer has."""
        expected = {name: tensor_digest(tensor) for name, tensor in self._trainer.whole_tensors()}
        held = []
        for engine in self._engines:
            with contextlib.closing(HttpEngine(engine.url, timeout_seconds=600.0)) as client:
                held.append(client.digests())
        return all(digests == expected for digests in held)

    def slow_ways(self) -> _Slow:
        """The medians of the baselines' seconds, each after one round to warm up."""
        if self._settings.trainer_ranks > 1:
            self._note("full_tensor() of every parameter")
            return _Slow(full_tensor=self._median(self._trainer.gather_each_seconds))
        if self._group is not None:
            self._note("one broadcast per tensor")
            group, tensors = self._group, self._trainer.tensors
            return _Slow(self._median(lambda: group.send_each(tensors, self._channels)), "broadcast")
        self._note("one round trip per tensor")
        return _Slow(self._round_trips(self._trainer.tensors), "round trip")

    def _round_trips(self, tensors: Mapping[str, torch.Tensor]) -> float:
        with contextlib.closing(per_tensor.make_slot(tensors)) as slot:
            lend_slot(self._engines, slot)
            seconds = self._median(lambda: per_tensor.publish(tensors, slot.tensor, self._channels))
            per_tensor.end(self._channels)
        return seconds

    def _median(self, seconds: Callable[[], float]) -> float:
        num_rounds = 1 + min(self._settings.num_runs, MAX_SLOW_RUNS)
        return statistics.median([seconds() for _ in range(num_rounds)][1:])


def bucket_size_bytes(settings: BenchSettings, num_bytes: int) -> int:
    """What was asked for, or what a publisher chooses by itself."""
    default = registry.transport(settings.transport_url).default_bucket_size_bytes[settings.device]
    return settings.bucket_size_bytes or fitting_bucket_size(num_bytes, default)


def _result(
    settings: BenchSettings,
    specs: Sequence[TensorSpec],
    publishes: _Publishes,
    memcpy: Memcpy,
    verified: bool,
    slow: _Slow,
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
        per_tensor_seconds=slow.per_tensor,
        per_tensor_speedup=slow.per_tensor and slow.per_tensor / publish_seconds,
        layers=settings.layers,
        scale=settings.scale,
        verified=verified,
        host_extra_bytes=publishes.host_extra_bytes,
        cpu_seconds=cpu,
        memcpy_seconds=memcpy_seconds,
        all_threads_copy_gb_per_s=num_bytes / memcpy.all_threads_seconds() / 1e9,
        first_publish_seconds=publishes.first_seconds,
        bucket_size_bytes=bucket_size_bytes(settings, num_bytes),
        num_buckets=publishes.last.num_buckets,
        largest_tensor_bytes=max(spec.num_bytes for spec in specs),
        torch_threads=torch.get_num_threads(),
        num_cpus=len(os.sched_getaffinity(0)),
        torch_version=str(torch.__version__),
        runs=publishes.runs,
        device=settings.device,
        trainer_ranks=settings.trainer_ranks,
        per_tensor_way=slow.per_tensor_way,
        transfer_seconds=median(publishes.runs, lambda run: run.transfer_seconds),
        **_raw_figures(publishes.runs),
        other_ranks_extra_bytes=publishes.other_ranks_extra_bytes,
        full_tensor_seconds=slow.full_tensor,
        full_tensor_speedup=slow.full_tensor and slow.full_tensor / publish_seconds,
    )


def _median_cpu(runs: Sequence[Run]) -> Ends:
    return Ends(
        publisher=median(runs, lambda run: run.cpu_seconds.publisher),
        engine=median(runs, lambda run: run.cpu_seconds.engine),
    )


def _raw_figures(runs: Sequence[Run]) -> dict[str, float | None]:
    """What the raw broadcast takes, and what a publish and its transfer reach of it."""
    raw = [(run.raw_seconds, run) for run in runs if run.raw_seconds is not None]
    if not raw:
        return dict.fromkeys(("raw_seconds", "of_raw", "transfer_of_raw"))
    return {
        "raw_seconds": statistics.median(seconds for seconds, _ in raw),
        "of_raw": statistics.median(seconds / run.publish_seconds for seconds, run in raw),
        "transfer_of_raw": statistics.median(seconds / run.transfer_seconds for seconds, run in raw),
    }
