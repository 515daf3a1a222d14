"""Measures cost curves, and rows of `weightcast bench` with the machine's parts before each; makes docs/costs.md.

    python bench/costs.py parts|rows|bytes|tensors|engines|ranks ...     measures these, into bench/costs.json
    python bench/costs.py page                                          makes the page and its picture of that

Each measurement also says how many cores other work took meanwhile; a later one takes the place of an earlier one only
if others took less.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from others import QUIET_CORES, Others

from weightcast import LocalEngine, ModuleSource, Publisher
from weightcast.bench import shapes
from weightcast.bench.measure import measure
from weightcast.bench.model import build_model, fill
from weightcast.bench.parts import machine_name, measure_parts
from weightcast.bench.result import BenchSettings
from weightcast.format.manifest import TensorSpec, WeightVersion

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_suffix(".json")
MIB = 1 << 20
UNIFORM = {"shapes": "uniform", "num_tensors": 500}
MODELS: dict[str, dict[str, Any]] = {
    "12 layers of qwen3-0.6b": {"shapes": "qwen3-0.6b", "layers": 12},
    "many-small": {"shapes": "many-small"},
}
ROWS: dict[str, dict[str, Any]] = {
    f"{model}, {transport}, {install}": asked | {"transport": transport, "install": install}
    for transport in ("ipc", "gloo", "file", "memory")
    for install in ("staged", "streaming")
    for model, asked in MODELS.items()
} | {
    f"{what}, ipc, {install}": UNIFORM | asked | {"install": install}
    for install in ("staged", "streaming")
    for what, asked in {
        "500 tensors of 1 MiB": {"num_bytes": 512 * MIB},
        "50,000 tensors of 10 KiB": {"num_tensors": 50_000, "num_bytes": 512 * MIB},
        "two engines, 500 tensors": {"num_bytes": 256 * MIB, "num_engines": 2},
        "two trainer ranks, 500 tensors": {"num_bytes": 256 * MIB, "trainer_ranks": 2},
    }.items()
}
CURVES: dict[str, tuple[str, dict[int, dict[str, Any]]]] = {
    "bytes": ("MiB, 500 tensors", {x: UNIFORM | {"num_bytes": x * MIB} for x in (64, 256, 1024, 2048)}),
    "tensors": (
        "tensors, 256 MiB",
        {x: UNIFORM | {"num_tensors": x, "num_bytes": 256 * MIB} for x in (500, 5000, 50_000, 500_000)},
    ),
    "ranks": (
        "trainer ranks, 256 MiB, 500 tensors",
        {x: UNIFORM | {"num_bytes": 256 * MIB, "trainer_ranks": x} for x in (1, 2, 4, 8)},
    ),
}
ENGINES = (1, 2, 4, 8, 16, 32, 64)


class StandIn:
    """An engine in the trainer's process that takes everything and keeps nothing."""

    def specs(self) -> Sequence[TensorSpec] | None:
        return None

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in tensors:
            pass

    def commit(self, version: WeightVersion) -> None:
        pass

    def discard(self) -> None:
        pass


def bench(asked: dict[str, Any]) -> dict[str, Any]:
    """One row: medians of five publishes, their range, and what each stage took."""
    settings = BenchSettings(**asked, per_tensor=False)
    result = measure(settings)
    stages: dict[str, list[float]] = {}
    for run in result.runs:
        found = run.seconds
        stage = {name: found[name] for name in ("gather", "offer", "seal")} | {
            "transfer": found["pack"] + found["send"]
        }
        for name, seconds in (stage | {"install": run.publish_seconds - sum(stage.values())}).items():
            stages.setdefault(name, []).append(seconds)
    return {
        "seconds": result.publish_seconds,
        "range": [f(run.publish_seconds for run in result.runs) for f in (min, max)],
        "cpu": result.cpu_seconds.publisher + result.cpu_seconds.engine,
        "first": result.first_publish_seconds,
        "memcpy": result.memcpy_seconds,
        "stages": {name: statistics.median(each) for name, each in stages.items()},
    }


def with_parts(asked: dict[str, Any]) -> dict[str, Any]:
    """One row, and as a text what this machine's parts cost in the minute before it."""
    parts = measure_parts()
    return bench(asked) | {"parts": msgspec.json.encode(parts).decode()}


def with_stand_ins(num_engines: int, num_bytes: int) -> dict[str, Any]:
    """A publish over ipc to that many stand-ins in this process."""
    model = build_model(shapes.named("uniform", num_tensors=64, num_bytes=num_bytes))
    fill(model, 0)
    engines = [LocalEngine(StandIn(), name=f"engine-{number}") for number in range(num_engines)]
    seconds, cpu = [], []
    with contextlib.closing(Publisher(ModuleSource(model), transport="ipc://", engines=engines)) as publisher:
        start = time.perf_counter()
        publisher.publish()
        first = time.perf_counter() - start
        for _ in range(7):
            before, start = time.process_time(), time.perf_counter()
            publisher.publish()
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - before)
    for engine in engines:
        engine.close()
    return {
        "seconds": statistics.median(seconds),
        "range": [min(seconds), max(seconds)],
        "cpu": statistics.median(cpu),
        "first": first,
    }


def jobs() -> dict[str, Callable[[], Any]]:
    """By "kind/name", what is measured."""
    found: dict[str, Callable[[], Any]] = {"parts/": lambda: {"parts": msgspec.json.encode(measure_parts()).decode()}}
    found |= {f"rows/{name}": lambda asked=asked: with_parts(asked) for name, asked in ROWS.items()}  # type: ignore[misc]
    for curve, (_, points) in CURVES.items():
        found |= {f"{curve}/{x}": lambda asked=asked: bench(asked) for x, asked in points.items()}  # type: ignore[misc]
    for what, num_bytes in (("engines", 64 * MIB), ("small-engines", 64 * 4096)):
        found |= {f"{what}/{x}": lambda x=x, n=num_bytes: with_stand_ins(x, n) for x in ENGINES}  # type: ignore[misc]
    return found


def main(words: Sequence[str]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, job in jobs().items():
        known = results.get(name)
        if not any(name.startswith(word) for word in words) or (known and known["others"] <= QUIET_CORES):
            continue
        with Others() as others:
            time.sleep(1)
        if others.cores > 2 * QUIET_CORES and "--anyway" not in words:
            print(f"{name}: not measured, others take {others.cores:.2f} cores; --anyway measures all the same")
            return
        with Others() as others:
            found = job()
        if known is None or others.cores < known["others"]:
            results[name] = {"others": others.cores, "load": os.getloadavg()[0], "found": found}
        results["machine"] = machine_name()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {found.get('seconds', 0.0):.3f} s, others took {others.cores:.2f} cores", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["page"]:
        import costs_page

        costs_page.main()
    else:
        main(sys.argv[1:])
