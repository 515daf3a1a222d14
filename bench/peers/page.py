"""Make docs/benchmarks.md and its pictures of the results' JSON: `python -m peers.page`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from peers.results import RESULTS, Comparison, Row, read
from peers.ways import NOT_RUN, WAYS
from weightcast.format.amounts import count, size

DOCS = Path(__file__).parents[2] / "docs"
HEAD = Path(__file__).with_suffix(".md")
BOUNDARIES = {
    "process": (
        "Into a process",
        "A trainer process sends to an engine process that copies into its live parameters. The engine is the same "
        "for every way: a plain module.",
    ),
    "vllm": (
        "Into vLLM",
        "A trainer process sends to `vllm serve`. The time is from the call until the server answers with the new "
        "weights, pause and resume included.",
    ),
    "sglang": (
        "Into SGLang",
        "A trainer process sends to `sglang.launch_server`. The time is from the call until the server answers with "
        "the new weights, pause and continue included.",
    ),
}


def page(comparisons: Sequence[Comparison]) -> str:
    return "\n".join([HEAD.read_text(), *_sections(comparisons)]) + "\n"


def _sections(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for boundary, (title, text) in BOUNDARIES.items():
        found = [it for it in comparisons if it.boundary == boundary]
        if not found:
            continue
        yield f"## {title}\n\n{text}\n\n![Seconds to installed, by way](benchmarks-{boundary}.svg)\n"
        for model in dict.fromkeys(it.model for it in found):
            yield from _table([it for it in found if it.model == model])
    yield "## What was checked on the way\n"
    yield "| way | digest | completeness | version | rollback | remarks |\n|---|---|---|---|---|---|"
    measured = {row.name for it in comparisons for row in it.rows}
    for way in WAYS.values():
        if way.name in measured:
            checks = [way.checked.get(key, "-") for key in ("digest", "completeness", "version", "rollback")]
            yield f"| {way.name} | {' | '.join(checks)} | {way.note} |"
    yield "\n## What does not run on a CPU\n\n| way | why |\n|---|---|"
    yield from (f"| {name} | {reason} |" for name, reason in NOT_RUN.items())
    yield "\n## Where it was measured\n"
    for machine in dict.fromkeys(it.machine for it in comparisons):
        yield f"- {machine}"
    versions = {name: version for it in comparisons for name, version in it.versions.items()}
    yield f"- {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}"
    yield "\n```text"
    yield from dict.fromkeys(it.command for it in comparisons)
    yield "```"


def _table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    it = comparisons[0]
    yield f"### {it.shapes}: {count(it.num_tensors, 'tensor')}, {size(it.num_bytes)}\n"
    head = (
        "way",
        "installed, s",
        "x memcpy",
        "pause, s",
        "CPU, s",
        "memory, MiB",
        "time: x weightcast",
        "pause: x weightcast",
    )
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for name in dict.fromkeys(row.name for it in comparisons for row in it.rows[:-1]):
        yield _figures([row for it in comparisons for row in it.rows if row.name == name]) + " | |"
    for it in comparisons:
        *ours, peer = it.rows
        ratios = (_ratios(peer, ours, field) for field in ("seconds", "pause_seconds"))
        yield f"{_figures([peer])} {' | '.join(ratios)} |"
    yield ""


def _figures(rows: Sequence[Row]) -> str:
    turns = [turn for row in rows for turn in row.turns]
    median = {field: statistics.median(getattr(turn, field) for turn in turns) for field in turns[0].__struct_fields__}
    seconds = [turn.seconds for turn in turns]
    memcpy = statistics.median(turn.seconds / turn.memcpy_seconds for turn in turns)
    extra = " / ".join(f"{statistics.median(row.extra_bytes[end] for row in rows) / 2**20:.0f}" for end in (0, 1))
    return (
        f"| {rows[0].name} | {median['seconds']:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {memcpy:.1f} "
        f"| {median['pause_seconds']:.3f} | {median['trainer_cpu_seconds']:.2f} + {median['engine_cpu_seconds']:.2f} "
        f"| {extra} |"
    )


def ratio(peer: Row, ours: Row, field: str) -> float:
    """The median over the rounds of what the peer takes, as a multiple of what weightcast takes."""
    pairs = zip(peer.turns, ours.turns, strict=True)
    return statistics.median(getattr(one, field) / getattr(other, field) for one, other in pairs)


def _ratios(peer: Row, ours: Iterable[Row], field: str) -> str:
    found = [(ratio(peer, row, field), row.name.removeprefix("weightcast ")) for row in ours]
    return "; ".join(f"{f'{it:.1f}' if it >= 1 else f'**{it:.2f}**'} ({name})" for it, name in found)


def draw(comparisons: Sequence[Comparison], boundary: str, path: Path) -> None:
    """Bars of the seconds of every way, a panel for each model. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "weightcast", "font.size": 9}
    found = [it for it in comparisons if it.boundary == boundary]
    models = list(dict.fromkeys(it.model for it in found))
    rows = {model: [row for it in found if it.model == model for row in it.rows] for model in models}
    names = list(dict.fromkeys(row.name for row in (row for model in models for row in rows[model])))
    names.sort(key=list(WAYS).index)
    figure = Figure(figsize=(3 + 2.6 * len(models), 0.8 + 0.28 * len(names)), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), sharey=True, squeeze=False)[0], models, strict=True):
        turns = {
            name: [turn.seconds for row in rows[model] if row.name == name for turn in row.turns] for name in names
        }
        heights = [statistics.median(turns[name] or [0]) for name in names]
        colours = ["#1f6f8b" if WAYS[name].is_ours else "#b9c2c9" for name in names]
        axes.bar_label(axes.barh(names, heights, color=colours), fmt="%.2f", padding=3)
        axes.set_title(f"{model[1]}\n{model[2]:,} tensors, {size(model[3])}", fontsize=9)
        axes.set_xlabel("seconds to installed")
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    comparisons = read(RESULTS)
    (DOCS / "benchmarks.md").write_text(page(comparisons))
    for boundary in dict.fromkeys(it.boundary for it in comparisons):
        draw(comparisons, boundary, DOCS / f"benchmarks-{boundary}.svg")


if __name__ == "__main__":
    main()
