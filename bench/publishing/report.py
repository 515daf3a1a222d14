"""A bench result for people: a table in the terminal, or a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from rich.table import Column, Table

from publishing.result import BenchResult
from weightcast.format.amounts import count, size

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_MIB = 1 << 20
_STAGES = ("gather", "offer", "pack", "send", "seal")


def view(result: BenchResult) -> Iterator[str | Table]:
    """What was measured, one figure a row, with what it is measured against."""
    yield _title(result)
    grid = Table("figure", Column("value", justify="right"), "against")
    for row in _rows(result):
        grid.add_row(*row)
    yield grid


def _title(result: BenchResult) -> str:
    engines = count(result.num_engines, "engine")
    ranks = f"{result.trainer_ranks} trainer ranks, " if result.trainer_ranks > 1 else ""
    return f"{result.shapes} over {result.transport}, {result.install}, {ranks}{engines}"


def _rows(result: BenchResult) -> Iterator[tuple[str, str, str]]:
    extra, cpu = result.extra_bytes, result.cpu_seconds
    memcpy = f"{result.memcpy_gb_per_s:.1f} GB/s, one thread; {result.all_threads_copy_gb_per_s:.1f} by torch"
    publish = f"{result.memcpy_ratio:.2f} x one memcpy, {result.gb_per_second:.2f} GB/s"
    yield "tensors", f"{result.num_tensors:,}", f"{size(result.num_bytes)} in {count(result.num_buckets, 'bucket')}"
    yield "one memcpy", _ms(result.memcpy_seconds), f"{memcpy} with {result.torch_threads}"
    yield "publish to installed", _ms(result.publish_seconds), publish
    if result.raw_seconds is not None:
        raw = f"{result.num_bytes / result.raw_seconds / 1e9:.2f} GB/s"
        reached = f"publish reaches {result.of_raw:.0%} of it, its transfer {result.transfer_of_raw:.0%}"
        yield "raw broadcast", _ms(result.raw_seconds), f"{raw}; {reached}"
    yield "pause", _ms(result.pause_seconds), f"{result.pause_seconds / result.memcpy_seconds:.2f} x one memcpy"
    both_cpu = f"{cpu.publisher * 1e3:.0f} + {cpu.engine * 1e3:.0f} ms"
    yield "CPU, publisher + engines", both_cpu, f"{result.cpu_us_per_tensor:.1f} us per tensor"
    host = f"{_mib(result.host_extra_bytes)} MiB on the host; bucket {_mib(result.bucket_size_bytes)} MiB"
    both_extra = f"{_mib(extra.publisher)} / {_mib(extra.engine)} MiB"
    largest = f"largest tensor {_mib(result.largest_tensor_bytes)} MiB"
    yield "extra memory, publisher / engine", both_extra, f"{host}, {largest}"
    if result.other_ranks_extra_bytes is not None:
        shard = f"a bucket's shard is {result.bucket_size_bytes / result.trainer_ranks / _MIB:.1f} MiB"
        yield "extra memory, other trainer ranks", f"{_mib(result.other_ranks_extra_bytes)} MiB", shard
    if result.full_tensor_seconds is not None and result.full_tensor_speedup is not None:
        speedup = f"the whole {_speedup(result.full_tensor_speedup)}"
        yield "full_tensor() of each parameter", _ms(result.full_tensor_seconds), speedup
    if result.per_tensor_seconds is not None and result.per_tensor_speedup is not None:
        speedup = _speedup(result.per_tensor_speedup)
        yield f"one {result.per_tensor_way} per tensor", _ms(result.per_tensor_seconds), speedup
    yield "first publish", _ms(result.first_publish_seconds), "connections and arena included"
    yield "engines hold what was sent", "yes" if result.verified else "NO", "digest of every tensor"


def _speedup(speedup: float) -> str:
    return f"publish is {speedup:.1f} x faster" if speedup >= 1 else f"publish is {1 / speedup:.1f} x slower"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.0f}"


def check_plot(path: Path) -> None:
    """Raise what `plot` would raise, so that nothing is measured in vain.

    ValueError for another suffix than those of PLOT_SUFFIXES, FileNotFoundError where there is no directory,
    ModuleNotFoundError, with the remedy, without matplotlib.
    """
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ValueError(f"can't draw a plot to {path}; its name must end in {', '.join(PLOT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path.parent}, where the plot is to be, is not a directory")
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install 'PATH_TO_WEIGHTCAST[dev]'")


def plot(result: BenchResult, path: Path) -> None:
    """Draw the publish against memcpy and the baseline, and each run by stage. The suffix of `path` is the format.

    Raises as `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 7.4), layout="constrained")
    figure.suptitle(f"{_title(result)}: {count(result.num_tensors, 'tensor')}, {size(result.num_bytes)}")
    comparison, stages = figure.subplots(2, 1, height_ratios=(2, 3))
    measured = {
        "one memcpy": result.memcpy_seconds,
        "raw broadcast": result.raw_seconds,
        "publish": result.publish_seconds,
        "per tensor": result.per_tensor_seconds,
        "full_tensor()": result.full_tensor_seconds,
    }
    bars = {name: seconds * 1e3 for name, seconds in measured.items() if seconds is not None}
    drawn = comparison.barh(list(bars), list(bars.values()))
    comparison.bar_label(drawn, fmt="{:,.1f} ms", padding=4)
    comparison.invert_yaxis()
    comparison.margins(x=0.2)
    comparison.set_xlabel("milliseconds, median")
    # A bar for each run, of stages that follow one another; the pause, which overlaps them, is a mark.
    labels = [str(index + 1) for index in range(len(result.runs))]
    bottom = [0.0] * len(labels)
    for stage in (*_STAGES, "install"):
        heights = [run.seconds.get(stage, 0.0) * 1e3 for run in result.runs]
        if stage == "install":  # what the stages of the publisher's report leave of the whole
            heights = [max(run.publish_seconds * 1e3 - low, 0.0) for run, low in zip(result.runs, bottom, strict=True)]
        stages.bar(labels, heights, bottom=bottom, label=stage)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    pauses = [run.pause_seconds * 1e3 for run in result.runs]
    stages.plot(labels, pauses, "k_", markersize=20, label="pause")
    stages.set(xlabel="run", ylabel="milliseconds")
    stages.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")
    for axes in (comparison, stages):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=144)
