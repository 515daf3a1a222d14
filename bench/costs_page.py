"""Makes docs/costs.md and its picture of bench/costs.json: `python bench/costs.py page`."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import costs
import numpy

from weightcast import cli
from weightcast.bench import shapes
from weightcast.bench.cost import Estimate, estimate
from weightcast.bench.deployment import Deployment
from weightcast.bench.parts import STAGES, Parts
from weightcast.bench.result import BenchSettings
from weightcast.format.manifest import decode

DOCS = costs.ROOT / "docs"
HEAD = Path(__file__).with_suffix(".md")
CURVES = {name: label for name, (label, _) in costs.CURVES.items()} | {
    "engines": "engines in one process, 64 MiB",
    "small-engines": "engines in one process, 0.25 MiB",
}
TITLES = {
    "bytes": "bytes",
    "tensors": "tensors",
    "engines": "engines that check 64 MiB each",
    "small-engines": "engines that check next to nothing",
    "ranks": "trainer ranks",
}
BAR = 0.15
_PLANNED = re.compile(
    r"```sh\n(weightcast plan [^\n]* bench/parts.json[^\n]*)\n```\n\n"
    r"(?:<!-- output -->\n|```text\n.*?\n```\n)",
    re.DOTALL,
)


def parts_of(result: dict[str, Any]) -> Parts:
    """What was measured with a row, or by itself."""
    parts: Parts = decode(result["found"]["parts"].encode(), Parts)
    return parts


def estimated(asked: dict[str, Any], parts: Parts) -> Estimate:
    settings = BenchSettings(**asked)
    fields = ("layers", "scale", "num_tensors", "num_bytes")
    specs = shapes.named(settings.shapes, **{name: getattr(settings, name) for name in fields})
    deployment = Deployment(
        transport=settings.transport,  # type: ignore[arg-type]
        install=settings.install,
        ranks_per_host=settings.trainer_ranks,
        sharding="whole" if settings.trainer_ranks == 1 else "fsdp",
        num_engines=settings.num_engines,
        takes_parts=True,
        bucket_size_bytes=settings.bucket_size_bytes,
    )
    return estimate(specs, deployment, parts)


def power(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of a power law through these points, by least squares of logarithms."""
    x, y = (numpy.log([point[axis] for point in points]) for axis in (0, 1))
    return float(numpy.polyfit(x, y, 1)[0])


def linear(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """a + b x, and by how much of a point's own value it misses at most; each point counts by its ratio."""
    x, y = (numpy.array([point[axis] for point in points]) for axis in (0, 1))
    slope, start = numpy.polyfit(x, y, 1, w=1 / y)
    return float(start), float(slope), float(numpy.max(numpy.abs(start + slope * x - y) / y))


def points(results: dict[str, Any], curve: str) -> list[tuple[int, dict[str, Any], float]]:
    """Of a curve, in order: where, what was found, what others took."""
    names = (name.partition("/") for name in results)
    found = [(int(x), results[f"{curve}/{x}"]) for kind, _, x in names if kind == curve]
    return [(x, each["found"], each["others"]) for x, each in sorted(found, key=lambda pair: pair[0])]


def page(results: dict[str, Any]) -> str:
    head, between = HEAD.read_text().split("<!-- rows -->\n")
    return "".join([head, *_curves(results), between, *_rows(results)])


def _curves(results: dict[str, Any]) -> Iterator[str]:
    for curve, label in CURVES.items():
        found = points(results, curve)
        if not found:
            continue
        yield f"### {TITLES[curve][0].upper()}{TITLES[curve][1:]}\n\n"
        yield f"| {label} | seconds (least to most) | CPU, s | first publish, s | others took, cores |\n|{'---|' * 5}\n"
        for x, it, others in found:
            low, high = it["range"]
            yield f"| {x:,} | {it['seconds']:.3f} ({low:.3f} to {high:.3f}) | {it['cpu']:.3f} "
            yield f"| {it['first']:.2f} | {others:.2f} |\n"
        yield "\n"
        for what in ("seconds", "cpu"):
            pairs = [(x, it[what]) for x, it, _ in found]
            start, slope, miss = linear(pairs)
            shown = "CPU seconds" if what == "cpu" else "Seconds"
            yield f"{shown}: exponent {power(pairs):.2f}; {start:.4f} + {slope:.3g} x, which misses a point by "
            yield f"{miss:.0%} at most.\n"
        yield "\n"


def _rows(results: dict[str, Any]) -> Iterator[str]:
    ratios, quiet = [], []
    yield f"| row | measured, s (least to most) | predicted | ratio | {' | '.join(STAGES)} | others took, cores |\n"
    yield f"|{'---|' * (len(STAGES) + 5)}\n"
    for name, asked in costs.ROWS.items():
        if (row := results.get(f"rows/{name}")) is None:
            continue
        it, foreseen = row["found"], estimated(asked, parts_of(row))
        ratio = foreseen.publish_seconds / it["seconds"]
        ratios.append(ratio)
        if row["others"] <= costs.QUIET_CORES:
            quiet.append(ratio)
        stages = (f"{it['stages'][stage] * 1e3:.0f} / {foreseen.seconds[stage] * 1e3:.0f}" for stage in STAGES)
        low, high = it["range"]
        shown = f"{ratio:.2f}" if abs(ratio - 1) <= BAR else f"**{ratio:.2f}**"
        yield f"| {name} | {it['seconds']:.3f} ({low:.3f} to {high:.3f}) | {foreseen.publish_seconds:.3f} | {shown} "
        yield f"| {' | '.join(stages)} | {row['others']:.2f} |\n"
    within = [sum(abs(ratio - 1) <= BAR for ratio in each) for each in (ratios, quiet)]
    yield f"\n{within[0]} of {len(ratios)} rows are within {BAR:.0%}"
    yield f"; of those measured while others took at most {costs.QUIET_CORES} cores, {within[1]} of {len(quiet)}. "
    spread = math.exp(sum(abs(math.log(ratio)) for ratio in ratios) / max(len(ratios), 1)) - 1
    yield f"A row is off by {spread:.0%} in the mean. Measured on {results['machine']}.\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel for each curve: seconds and CPU seconds, and the straight line through the seconds."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "weightcast", "font.size": 9}
    curves = [curve for curve in CURVES if len(points(results, curve)) > 1]
    figure = Figure(figsize=(2.6 * len(curves), 2.8), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        found = points(results, curve)
        x = [each[0] for each in found]
        start, slope, _ = linear([(at, it["seconds"]) for at, it, _ in found])
        axes.plot(x, [start + slope * at for at in x], color="#b9c2c9", linewidth=4, label="linear")
        axes.plot(x, [it["seconds"] for _, it, _ in found], "o-", color="#1f6f8b", label="seconds")
        axes.plot(x, [it["cpu"] for _, it, _ in found], "x--", color="#8a6d3b", label="CPU seconds")
        axes.set(xscale="log", yscale="log", title=TITLES[curve].partition(" that")[0], xlabel=CURVES[curve])
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def with_outputs(text: str) -> str:
    """A page with what each of its `weightcast plan` commands prints, in place of what it has there."""

    def ran(found: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.chdir(costs.ROOT), contextlib.redirect_stdout(printed):
            status = cli.main(shlex.split(found[1])[1:])
        if status:
            raise RuntimeError(f"{found[1]} ended with {status}")
        return f"```sh\n{found[1]}\n```\n\n```text\n{printed.getvalue().rstrip()}\n```\n"

    return _PLANNED.sub(ran, text)


def main() -> None:
    results = json.loads(costs.RESULTS.read_text())
    (costs.ROOT / "bench" / "parts.json").write_bytes(parts_of(results["parts/"]).encode() + b"\n")
    (DOCS / "costs.md").write_text(page(results))
    draw(results, DOCS / "costs.svg")
    planning = DOCS / "planning.md"
    planning.write_text(with_outputs(planning.read_text()))
