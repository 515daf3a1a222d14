"""The result of a run, as `report.json` and as one HTML page that refers to nothing outside it."""

from __future__ import annotations

import io
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import median

import msgspec
import numpy
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rl_demo import table
from rl_demo.messages import Checked, DemoSettings, Evaluated, Event, RunEnded, Saved, Stepped
from weightcast import __version__
from weightcast.format.amounts import count
from weightcast.store.files import replace_file

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 940px; padding: 16px; font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
body { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; }
.good { color: light-dark(#1a7f4b, #5ad08f); } .bad { color: light-dark(#c4314b, #ff8095); }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
td, th { padding: 4px 9px; border-bottom: 1px solid #8884; text-align: right; }
@media (max-width: 700px) { table { font-size: 11px; white-space: normal; } td, th { padding: 4px 3px; } }
td + td, th { overflow-wrap: normal; } details { overflow-x: auto; }
@media (prefers-color-scheme: dark) { svg { filter: invert(1) hue-rotate(180deg); } }
"""


class Result(msgspec.Struct, kw_only=True):
    """Collects the events of a run. `problem`: why the run has failed, or empty."""

    settings: DemoSettings
    num_engines: int
    machine: dict[str, str | int]
    num_parameters: int = 0
    start: Evaluated | None = None
    end: Evaluated | None = None
    steps: list[Stepped] = msgspec.field(default_factory=list)
    checks: list[Checked] = msgspec.field(default_factory=list)
    problem: str = ""
    is_early: bool = False
    has_ended: bool = False
    wall_seconds: float = 0.0

    def add(self, event: Event) -> None:
        match event:
            case Saved(num_parameters):
                self.num_parameters = num_parameters
            case Stepped():
                self.steps.append(event)
            case Checked():
                self.checks.append(event)
            case Evaluated("start"):
                self.start = event
            case Evaluated():
                self.end = event
            case RunEnded(problem, is_early):
                self.problem, self.is_early, self.has_ended = problem, is_early, True

    @property
    def updates(self) -> list[Stepped]:
        """The steps with rollouts: all but the first publish, which also connects the engines."""
        return [step for step in self.steps if step.num_rollouts]

    def typical(self, figure: Callable[[Stepped], float]) -> float:
        """The median of a figure over the updates; 0 if there were none."""
        return median(map(figure, self.updates)) if self.updates else 0.0

    def failures(self) -> list[str]:
        """Every reason why this run is not a success."""
        if self.problem:
            return [self.problem]
        if not (self.has_ended and self.start and self.end):
            return ["the trainer ended before its work was done"]
        found = [f"{check.engine}: {problem}" for check in self.checks for problem in check.problems]
        if len(self.checks) != self.num_engines:
            found.insert(0, f"{len(self.checks)} of {self.num_engines} engines were checked")
        gain, least = self.end.reward - self.start.reward, self.settings.min_reward_gain
        if least is not None and gain < least:
            found.append(f"the reward rose by {gain:.3f}, less than {least}")
        return found

    def success(self) -> str:
        """The verdict on a run without failures."""
        serves = "every engine serves exactly the trainer's last version"
        if self.settings.min_reward_gain is None:
            return f"{serves}; {count(self.settings.num_steps, 'step')} are too few to judge the reward"
        return f"passed: the reward rose, and {serves}"

    def summary(self) -> list[str]:
        found = []
        if self.start and self.end:
            found.append(f"reward: {self.start.reward:.3f} at the start, {self.end.reward:.3f} at the end")
        if self.updates:
            num_spanning = sum(s.num_spanning for s in self.steps)
            num_rollouts = sum(s.num_rollouts for s in self.steps)
            publish_ms = 1e3 * self.typical(lambda s: s.report.seconds.total)
            pause_ms = 1e3 * self.typical(lambda s: s.report.seconds.pause)
            found.append(
                f"{count(len(self.steps), 'version')} published to {count(self.num_engines, 'engine')} during "
                f"generation; {num_spanning} of {count(num_rollouts, 'rollout')} went on across an update; "
                f"median publish {publish_ms:.0f} ms, pause {pause_ms:.0f} ms; {self.wall_seconds:.0f} s in all"
            )
        return found


def this_machine() -> dict[str, str | int]:
    processor = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(errors="replace"))
    name = processor.group(1) if processor else platform.machine()
    versions: dict[str, str | int] = {"weightcast": __version__, "python": platform.python_version()}
    return {**versions, "processor": name, "num_cores": os.cpu_count() or 1}


def write(result: Result, directory: Path) -> list[Path]:
    """Write both files, each in one step in place of a former one, and return their paths. Makes the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    found = {**msgspec.to_builtins(result), "failures": result.failures()}
    paths = [directory / "report.json", directory / "report.html"]
    replace_file(paths[0], msgspec.json.format(msgspec.json.encode(found), indent=2))
    replace_file(paths[1], render(result).encode())
    return paths


def render(result: Result) -> str:
    """The HTML page. A run that failed early shows what there is."""
    settings, failures, svg = result.settings, result.failures(), io.StringIO()
    if result.updates:
        # Letters as paths: a browser's own font would be wider than the room that was left for it.
        with rc_context({"svg.fonttype": "path", "font.size": 11}):
            metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            draw(result).savefig(svg, format="svg", metadata=metadata, transparent=True)
    is_judged = "" if settings.min_reward_gain is None else "good"
    verdict = [f'<p class="bad">failed: {escape(failure)}</p>' for failure in failures]
    checks = [
        (c.engine, "differs" if c.problems else "equal", c.version, f"{c.num_tokens} in {c.num_prompts} prompts")
        + tuple(f"{value:.4f}" for value in (c.max_difference, c.tolerance, c.control_difference))
        for c in result.checks
    ]
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    check_titles = "engine", "verdict", "version", "greedy tokens", "largest Δ log-prob", "allowed", "control"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>weightcast demo</title><style>{_STYLE}</style></head><body>
<h1>weightcast demo</h1>
<p>A trainer taught a small Qwen3 to sort digits with GRPO and published every step to
{count(result.num_engines, "inference server")} over <code>{settings.transport}://</code>, during the rollouts.</p>
{"".join(verdict) or f'<p class="{is_judged}">{escape(result.success())}</p>'}
{"".join(f"<p>{escape(sentence)}</p>" for sentence in result.summary())}
{"".join(svg.getvalue().partition("<svg")[1:])}
<p>The first publish, which also connects the engines and makes the arena, is left out of the plots. The model is small,
so they show latency; <code>scripts/bench</code> measures bandwidth.</p>
<h2>Engines compared with the trainer's model</h2>
<p>After the last publish every engine continued prompts greedily, and so did the trainer's model with
<code>transformers</code>' <code>generate</code>. The control is the difference to the weights of the warm start, which
must be above what is allowed.</p>
{_table(check_titles, checks)}
<h2>The run</h2>
<p>Qwen3, {count(settings.num_layers, "layer")}, hidden size {settings.hidden_size},
{count(result.num_parameters, "parameter")}, trained in fp32, published in bf16;
{count(settings.answers_per_prompt, "answer")} for each of {count(settings.prompts_per_step, "prompt")} a step;
seed {settings.seed}. A step took {result.typical(lambda s: s.step_seconds):.2f} s (median), of which
{result.typical(lambda s: s.rollout_seconds):.2f} s waiting for rollouts and
{result.typical(lambda s: s.train_seconds):.2f} s training. {escape(machine)}</p>
<details><summary>All {len(result.steps)} publishes</summary>
{_table(table.columns(result.steps[0]), map(table.row, result.steps)) if result.steps else ""}
</details></body></html>
"""


def draw(result: Result) -> Figure:
    """The reward, the time of each publish by stage, and the pause, over the updates.

    A publish that took far longer than the others is drawn to the upper edge, with its time written there.
    """
    steps, seconds = [s.report.version for s in result.updates], [s.report.seconds for s in result.updates]
    figure = Figure(figsize=(7.6, 9.6), layout="constrained")
    reward, stages, pause = figure.subplots(3, 1)
    reward.plot(steps, [s.reward for s in result.updates], marker="o", markersize=4, label="rollouts")
    for each in filter(None, (result.start, result.end)):
        label = f"evaluation at the {each.when}: {each.reward:.2f}"
        reward.axhline(each.reward, linestyle=":" if each.when == "start" else "--", color="grey", label=label)
    reward.set(title="Mean reward of each step's rollouts (1: all answers are right)", ylim=(0, 1.05))
    by_step = [table.stages(report_seconds) for report_seconds in seconds]
    parts = {stage: numpy.array([each[stage] for each in by_step]) for stage in (*table.STAGES, "rest")}
    bottom = numpy.zeros(len(steps))
    for stage, heights in parts.items():
        stages.bar(steps, heights, bottom=bottom, label=stage)
        bottom = bottom + heights
    stages.set(title="Time to publish, by stage", ylabel="ms")
    pause.bar(steps, parts["pause"])
    _limit(stages, steps, bottom)
    _limit(pause, steps, parts["pause"])
    pause.set(title="Pause of the engine that was paused longest", ylabel="ms", xlabel="step (= weight version)")
    for axes in (reward, stages, pause):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    reward.legend(frameon=False)
    stages.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.1))
    return figure


def _limit(axes: Axes, steps: Sequence[int], heights: NDArray[numpy.float64]) -> None:
    """End the axis a little above the ordinary bars, and write their heights onto those that are cut."""
    ordinary = 1.2 * float(numpy.percentile(heights, 90, method="lower"))
    if not 0 < 1.5 * ordinary < heights.max():
        return
    axes.set_ylim(0, ordinary)
    for step, height in zip(steps, heights, strict=True):
        if height > ordinary:
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "grey"}
            axes.text(step, 0.99 * ordinary, f"{height:,.0f}", ha="center", va="top", fontsize="small", bbox=box)


def _table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    header = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{header}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
