"""Make docs/benchmarks.md, its pictures, results.md and the README's summary of the JSON: `python -m peers.page`."""

from __future__ import annotations

import io
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from peers.results import RESULTS, Comparison, Row, read
from peers.ways import NOT_RUN, REASONS, WAYS, Way, reason
from weightcast.format.amounts import count, size

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
HEAD, DETAILS = Path(__file__).with_suffix(".md"), Path(__file__).with_name("results.md")
_TEXT = "#010101"
"""Stands for the text's colour until the picture is drawn."""
_COLOURS = "svg{color:#24292f} @media (prefers-color-scheme:dark){svg{color:#c9d1d9}} "
FIELDS = {"seconds": "time", "pause_seconds": "pause"}
BOUNDARIES = {
    "process": (
        "Into a process",
        "The engine process copies into the live parameters of a plain module, the same for every way.",
    ),
    "vllm": (
        "Into vLLM",
        "The engine is `vllm serve` with one thread. The time ends when it answers with the new weights, pause and "
        "resume included.",
    ),
    "sglang": (
        "Into SGLang",
        "The engine is `sglang.launch_server` with one thread and `--sleep-on-idle`. The time ends when it answers "
        "with the new weights, pause and continue included.",
    ),
}


def page(comparisons: Sequence[Comparison]) -> str:
    """The documentation's page: each peer beside each way of weightcast, a table for each model."""
    head = HEAD.read_text().replace("{other work}", _other_work(comparisons))
    return "\n".join([head, *_sections(comparisons)]) + "\n"


def details(comparisons: Sequence[Comparison]) -> str:
    """The whole of the results: each run with all of its figures, what was checked, what was not measured."""
    return "\n".join(["# The runs beside other libraries\n", *_details(comparisons)]) + "\n"


def _other_work(comparisons: Sequence[Comparison]) -> str:
    most = max(it.other_cores for it in comparisons)
    if all(it.is_quiet for it in comparisons):
        return f"Nothing else ran on the machine: other work took at most {most:.2f} cores."
    return f"Other work ran on the machine, up to {most:.1f} cores, so seconds are high and vary: compare ratios."


def _models(comparisons: Sequence[Comparison], boundary: str) -> dict[str, list[Comparison]]:
    """Title of a model -> its runs."""
    found: dict[str, list[Comparison]] = {}
    for it in comparisons:
        if it.boundary == boundary:
            _, name, num_tensors, num_bytes = it.model
            found.setdefault(f"{name}: {count(num_tensors, 'tensor')}, {size(num_bytes)}", []).append(it)
    return found


def _sections(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for boundary, (title, text) in BOUNDARIES.items():
        if models := _models(comparisons, boundary):
            yield f"## {title}\n\n{text}\n\n![Seconds to installed, by way](benchmarks-{boundary}.svg)\n"
            for model, runs in models.items():
                yield f"### {model}\n"
                yield "| peer | seconds | weightcast | seconds | time | pause | ahead |\n|---|---|---|---|---|---|---|"
                yield from (_pair(it, peer, ours) for it in runs for peer in it.peers for ours in it.against(peer))
                yield ""
    if reasons := dict.fromkeys(reason(*found[:3]) for it in comparisons for found in ahead(it)):
        yield "## Why others are ahead\n\n| reason | why | what would change it |\n|---|---|---|"
        yield from (f"| *{name}* | {' | '.join(REASONS[name])} |" for name in reasons)
    yield "\n## Machine and versions\n"
    for machine in dict.fromkeys(it.machine for it in comparisons):
        yield f"- {machine}"
    versions = {name: version for it in comparisons for name, version in it.versions.items()}
    yield f"- {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}"


def _pair(it: Comparison, peer: Row, ours: Row) -> str:
    """A peer beside a way of weightcast, of one run."""
    ratios = {field: ratio(peer, ours, field) for field in FIELDS}
    reasons = dict.fromkeys(reason(WAYS[peer.name], WAYS[ours.name], field) for field in FIELDS if ratios[field] < 1)
    figures = " | ".join(map(_ratio, ratios.values()))
    name = ours.name.removeprefix("weightcast ")
    return (
        f"| {peer.name} | {peer.median('seconds'):.3f} | {name} | {ours.median('seconds'):.3f} | {figures} "
        f"| {', '.join(f'*{reason}*' for reason in reasons)} |"
    )


def _details(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for boundary, (title, _) in BOUNDARIES.items():
        if models := _models(comparisons, boundary):
            yield f"## {title}\n"
            for model, runs in models.items():
                yield f"### {model}\n"
                for it in runs:
                    yield from _run(it)
    yield "## What was checked on the way\n"
    yield "| way | digest | completeness | version | rollback | remarks |\n|---|---|---|---|---|---|"
    measured = {row.name for it in comparisons for row in it.rows}
    for way in WAYS.values():
        if way.name in measured:
            checks = [way.checked.get(key, "-") for key in ("digest", "completeness", "version", "rollback")]
            yield f"| {way.name} | {' | '.join(checks)} | {way.note} |"
    yield "\n## What was not measured\n\n| way | why |\n|---|---|"
    yield from (f"| {name} | {reason} |" for name, reason in NOT_RUN.items())


def _run(it: Comparison) -> Iterator[str]:
    """A table of ways that took turns in one run: no figure of it is of another."""
    head = ("way", "installed, s", "x memcpy", "pause, s", "CPU, s", "memory, MiB", "time: x weightcast", "pause")
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for row in it.rows:
        yield f"{_figures(row)} {' | '.join(_ratios(it, row, field) for field in FIELDS)} |"
    rounds = count(len(it.rows[0].turns), "round")
    yield f"\n`{it.command}`: {rounds} of turns; other work took {it.other_cores:.2f} cores meanwhile.\n"


def ahead(it: Comparison) -> Iterator[tuple[Way, Way, str, float]]:
    """Where a peer takes less than weightcast: the two ways, the field, and the ratio."""
    for peer in it.peers:
        for ours in it.against(peer):
            for field in FIELDS:
                if (found := ratio(peer, ours, field)) < 1:
                    yield WAYS[peer.name], WAYS[ours.name], field, found


def summary(comparisons: Sequence[Comparison]) -> str:
    """The README's section: how long ways take that others bring, and in which one is ahead."""

    def times(peer: str) -> str:
        found = [
            ratio(row, other, "seconds")
            for it in comparisons
            for row in it.peers
            for other in it.against(row)
            if (it.shapes, row.name, other.name) == ("qwen3-0.6b", peer, "weightcast ipc")
        ]
        return f"{found[0]:.1f} times" if found else "(not measured)"

    def own(field: str) -> str:
        models = [it for it in comparisons if it.shapes == "qwen3-0.6b"]
        rows = [row for it in models for row in it.rows if row.name == "weightcast ipc"]
        return f"{rows[0].median(field):.2f} s" if rows else "(not measured)"

    disturbed = "" if all(it.is_quiet for it in comparisons) else ", which had other work too"
    text = (
        f"Qwen3-0.6B (1.2 GB of bfloat16) from one process to another on two CPU cores{disturbed}: over shared memory "
        f"weightcast takes {own('seconds')}, in which the engine is paused for {own('pause_seconds')}. verl's "
        f"`BucketedWeightSender` takes {times('verl BucketedWeightSender, 512 MiB')} as long, TorchRL's double buffer "
        f"{times('TorchRL double buffer')}, a safetensors file {times('safetensors file')}."
    )
    won = [(found, p, o) for it in comparisons for p, o, field, found in ahead(it) if field == "seconds"]
    if won:
        found, peer, ours = min(won, key=lambda each: each[0])
        text += (
            f" In some rows another way is ahead, at best with {found:.2f} times the time of ours: "
            f"`{peer.name}` beside `{ours.name}`."
        )
    text += " [Benchmarks](docs/benchmarks.md) has all rows."
    return f"## How fast\n\n{textwrap.fill(text, 125, break_long_words=False, break_on_hyphens=False)}\n"


def _figures(row: Row) -> str:
    seconds = [turn.seconds for turn in row.turns]
    memcpy = statistics.median(turn.seconds / turn.memcpy_seconds for turn in row.turns)
    extra = " / ".join(f"{num_bytes / 2**20:.0f}" for num_bytes in row.extra_bytes)
    return (
        f"| {row.name} | {row.median('seconds'):.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {memcpy:.1f} "
        f"| {row.median('pause_seconds'):.3f} "
        f"| {row.median('trainer_cpu_seconds'):.2f} + {row.median('engine_cpu_seconds'):.2f} | {extra} |"
    )


def ratio(peer: Row, ours: Row, field: str) -> float:
    """The median over the rounds of what the peer takes, as a multiple of what weightcast takes."""
    pairs = zip(peer.turns, ours.turns, strict=True)
    return statistics.median(getattr(one, field) / getattr(other, field) for one, other in pairs)


def _ratios(it: Comparison, peer: Row, field: str) -> str:
    found = [(ratio(peer, row, field), row.name.removeprefix("weightcast ")) for row in it.against(peer)]
    return "; ".join(f"{_ratio(times)} ({name})" for times, name in found)


def _ratio(times: float) -> str:
    """In bold where the peer is ahead."""
    return f"{times:.1f}" if times >= 1 else f"**{times:.2f}**"


def readme_parts(readme: str) -> tuple[str, str, str]:
    """What stands before the summary's section, that section, and what follows it."""
    title, _, _ = summary([]).partition("\n")
    start = readme.index(title)
    end = readme.index("\n## ", start)
    return readme[:start], readme[start:end], readme[end:]


def draw(comparisons: Sequence[Comparison], boundary: str, path: Path) -> None:
    """Bars of the seconds of every way, a panel for each model. Needs matplotlib.

    The picture is as narrow as a telephone's screen, and has no background: its text is light where the page is dark.
    """
    import matplotlib
    from matplotlib.figure import Figure

    text = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _TEXT)
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "weightcast", "font.size": 9, **text}
    found = [it for it in comparisons if it.boundary == boundary]
    models = list(dict.fromkeys(it.model for it in found))
    rows = {model: [row for it in found if it.model == model for row in it.rows] for model in models}
    names = list(dict.fromkeys(row.name for row in (row for model in models for row in rows[model])))
    names.sort(key=list(WAYS).index)
    figure = Figure(figsize=(4.6, (0.8 + 0.22 * len(names)) * len(models)), layout="constrained")
    for axes, model in zip(figure.subplots(len(models), squeeze=False)[:, 0], models, strict=True):
        turns = {
            name: [turn.seconds for row in rows[model] if row.name == name for turn in row.turns] for name in names
        }
        heights = [statistics.median(turns[name] or [0]) for name in names]
        colours = ["#2f8fb3" if WAYS[name].is_ours else "#8b98a1" for name in names]
        axes.bar_label(axes.barh(names, heights, color=colours), fmt="%.2f", padding=3)
        axes.set_title(f"{model[1]}: {model[2]:,} tensors, {size(model[3])}", fontsize=9, loc="right")
        axes.set_xlabel("seconds to installed")
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    style = '<style type="text/css">'
    path.write_text(drawn.getvalue().replace(_TEXT, "currentColor").replace(style, style + _COLOURS))


def main() -> None:
    comparisons = read(RESULTS)
    (DOCS / "benchmarks.md").write_text(page(comparisons))
    DETAILS.write_text(details(comparisons))
    before, _, after = readme_parts(README.read_text())
    README.write_text(before + summary(comparisons) + after)
    for boundary in dict.fromkeys(it.boundary for it in comparisons):
        draw(comparisons, boundary, DOCS / f"benchmarks-{boundary}.svg")


if __name__ == "__main__":
    main()
