"""One bench run: build the model, start the engines, publish, and read the meters.

Nothing else runs while a publish is timed: memory is the kernel's own high-water mark, CPU time is read around it.
What a publish is measured against in the same breath (memcpy, the raw broadcast) has its memory before that is metered.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from publishing import shapes
from publishing.baselines import MAX_MEMCPY_BYTES, BaselineGroup, Memcpy, TensorSlot, make_group
from publishing.channel import BenchChannel
from publishing.meters import UsageMeters
from publishing.model import local_tensors
from publishing.result import Asked, BenchResult, BenchSettings, Ends, Run
from publishing.workers import Step, Trainer, started_engines, started_trainer
from weightcast.control.client import HttpEngine
from weightcast.errors import PublishReport
from weightcast.format.amounts import count
from weightcast.host.memory import require

Note = Callable[[str], None]
MAX_SLOW_RUNS = 3


def measure(settings: BenchSettings, note: Note = lambda text: None) -> BenchResult:
    """Run the bench; `note` is called with what happens next.

    Memory: the model once for the trainer and once for each engine, what the transport takes, and the two buffers of
    `Memcpy`. Raises what `publish` raises, PeerDiedError if a process of the bench ends, ValueError where there is no
    such device.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this torch finds no CUDA device here: leave out --device to measure on the CPU")
    note(f"building {settings.shapes}")
    specs = shapes.named(
        settings.shapes,
        layers=settings.layers,
        scale=settings.scale,
        num_tensors=settings.num_tensors,
        num_bytes=settings.num_bytes,
    )
    num_bytes = sum(spec.num_bytes for spec in specs)
    if settings.device == "cpu":
        needed = (1 + settings.num_engines) * num_bytes + 2 * min(num_bytes, MAX_MEMCPY_BYTES)
        require(needed, f"{settings.shapes} for {count(settings.num_engines, 'engine')}", "measure a smaller model")
    with contextlib.ExitStack() as stack:
        if settings.transport == "file":
            parent = settings.directory or None
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="weightcast-bench-", dir=parent))
            settings = msgspec.structs.replace(settings, directory=store)
        trainer = stack.enter_context(started_trainer(specs, settings))
        note("measuring memcpy")
        memcpy = Memcpy(num_bytes, settings.device)
        note(f"starting {settings.num_engines} engines")
        engines = stack.enter_context(started_engines(specs, settings))
        urls, channels = [engine.url for engine in engines], [engine.channel for engine in engines]
        group = None
        if settings.is_collective:
            group = stack.enter_context(contextlib.closing(make_group(settings, num_bytes, channels)))
            group.send_raw(channels)  # warms up
        meters = UsageMeters([engine.pid for engine in engines if engine.pid is not None], trainer.other_pids)
        stack.callback(trainer.rank_0.close)  # before the engines end, also after an error
        trainer.step(Step("open", urls))
        note("first publish")
        start = time.perf_counter()
        trainer.step(Step("publish"))
        measured: dict[str, Any] = {"first_publish_seconds": time.perf_counter() - start}
        runs = []
        for index in range(settings.num_runs):
            note(f"publish {index + 1} of {settings.num_runs}")
            trainer.step(Step("change"))
            memcpy_seconds = memcpy.seconds()
            raw_seconds = None if group is None else group.send_raw(channels)
            before, start = meters.cpu(), time.perf_counter()
            report: PublishReport = trainer.step(Step("publish"))
            seconds, after = time.perf_counter() - start, meters.cpu()
            results = report.engines.values()
            run = Run(
                publish_seconds=seconds,
                pause_seconds=max(result.pause_seconds for result in results),
                install_seconds=max(result.install_seconds for result in results),
                memcpy_seconds=memcpy_seconds,
                cpu_seconds=Ends(after.publisher - before.publisher, after.engine - before.engine),
                seconds=msgspec.structs.asdict(report.seconds),
                raw_seconds=raw_seconds,
            )
            runs.append(run)
        measured |= meters.extra()
        trainer.step(Step("close"))
        note("checking what the engines hold")
        expected, held = trainer.step(Step("digests")), []
        for url in urls:
            with contextlib.closing(HttpEngine(url, timeout_seconds=600.0)) as client:
                held.append(client.digests())
        measured["verified"] = all(digests == expected for digests in held)
        if settings.per_tensor:
            measured |= _slow_ways(settings, trainer, channels, group, note)
    measured["all_threads_copy_gb_per_s"] = num_bytes / memcpy.all_threads_seconds() / 1e9
    measured["largest_tensor_bytes"] = max(spec.num_bytes for spec in specs)
    return _result(settings, runs, report, measured)


def _slow_ways(
    settings: BenchSettings, trainer: Trainer, engines: Sequence[BenchChannel], group: BaselineGroup | None, note: Note
) -> dict[str, Any]:
    """The medians of what buckets replaced, as fields of BenchResult."""

    def median(seconds: Callable[[], float]) -> float:
        """After one round to warm up."""
        num_rounds = 1 + min(settings.num_runs, MAX_SLOW_RUNS)
        return statistics.median([seconds() for _ in range(num_rounds)][1:])

    def gather_each() -> float:
        start = time.perf_counter()
        trainer.step(Step("gather_each"))
        return time.perf_counter() - start

    if settings.trainer_ranks > 1:
        note("full_tensor() of every parameter")
        return {"full_tensor_seconds": median(gather_each)}
    way = "round trip" if group is None else "broadcast"
    note(f"one {way} per tensor")
    tensors = local_tensors(trainer.rank_0.model)
    if group is not None:
        seconds = median(lambda: group.publish(tensors, engines))
    else:
        with contextlib.closing(TensorSlot(max(tensor.nbytes for tensor in tensors.values()))) as slot:
            slot.lend(engines)
            seconds = median(lambda: slot.publish(tensors, engines))
            slot.end(engines)
    return {"per_tensor_seconds": seconds, "per_tensor_way": way}


def _result(settings: BenchSettings, runs: list[Run], report: PublishReport, measured: dict[str, Any]) -> BenchResult:
    """What was asked for, what was measured, the medians of the runs, and the ratios of them all."""
    figures = ["publish_seconds", "pause_seconds", "memcpy_seconds", "transfer_seconds"]
    figures += ["raw_seconds", "of_raw", "transfer_of_raw"] if settings.is_collective else []
    medians = {name: statistics.median(getattr(run, name) for run in runs) for name in figures}
    cpu = Ends(*(statistics.median(getattr(run.cpu_seconds, end) for run in runs) for end in ("publisher", "engine")))
    publish_seconds, memcpy_seconds = medians["publish_seconds"], medians["memcpy_seconds"]
    for way in ("per_tensor", "full_tensor"):
        if f"{way}_seconds" in measured:
            measured[f"{way}_speedup"] = measured[f"{way}_seconds"] / publish_seconds
    return BenchResult(
        **{name: getattr(settings, name) for name in Asked.__struct_fields__},
        **{name: getattr(report, name) for name in ("num_tensors", "num_bytes", "num_buckets")},
        **measured,
        **medians,
        runs=runs,
        cpu_seconds=cpu,
        cpu_us_per_tensor=(cpu.publisher + cpu.engine) / report.num_tensors * 1e6,
        memcpy_ratio=publish_seconds / memcpy_seconds,
        memcpy_gb_per_s=report.num_bytes / memcpy_seconds / 1e9,
        bucket_size_bytes=settings.bucket_size_for(report.num_bytes),
        torch_threads=torch.get_num_threads(),
        num_cpus=len(os.sched_getaffinity(0)),
        torch_version=str(torch.__version__),
    )
