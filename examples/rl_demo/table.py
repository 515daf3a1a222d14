"""Shows the events of a run: as a live table on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rl_demo.messages import Checked, Evaluated, Event, RunEnded, Saved, Stepped, Warming
from weightcast.errors import StageSeconds

STAGES = ("gather", "offer", "pack", "send", "seal", "pause")
_BARS = " ▁▂▃▄▅▆▇█"


@contextlib.contextmanager
def view(console: Console) -> Iterator[Callable[[Event], None]]:
    """Yield a function that shows an event."""
    if not console.is_terminal:
        yield partial(print_event, console)
        return
    with Live(console=console, auto_refresh=False) as live:
        live_table = LiveTable(live)
        yield live_table.show
        live_table.show(RunEnded())


def print_event(console: Console, event: Event) -> None:
    """Print an event as a line; of the warm start only every quarter."""
    if isinstance(event, Stepped):
        titles, cells = columns(event), row(event)
        text = "  ".join(cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True))
        if event.report.version == 0:
            text = "  ".join(titles) + "\n" + text
    elif isinstance(event, Warming) and 4 * event.step % event.num_steps:
        text = ""
    else:
        text = describe(event)
    if text:
        console.print(text, soft_wrap=True, markup=False, highlight=False)


class LiveTable:
    """Draws the table again for each event. The last drawing stays on the screen."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._steps: list[Stepped] = []
        self._notes: list[str] = []
        self._draw("starting the trainer")

    def show(self, event: Event) -> None:
        text = describe(event)
        if isinstance(event, Stepped):
            self._steps.append(event)
        elif isinstance(event, (Evaluated, Checked)):
            self._notes.append(text)
            text = ""
        self._draw(text)

    def _draw(self, status: str) -> None:
        console, parts = self._live.console, list[Table | Text]()
        if self._steps:
            table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if console.width >= 100 else 0), pad_edge=False)
            for title in columns(self._steps[-1]):
                table.add_column(title.strip().replace(" ", "\n"), justify="right", no_wrap=True)
            num_rows = max(5, console.height - 10 - len(self._notes))  # the header and the lines below take 10
            for step in self._steps[-num_rows:]:
                table.add_row(*row(step))
            rewards = sparkline([step.reward for step in self._steps if step.num_rollouts])
            parts += [table, Text(f"reward {rewards}", style="green")]
        parts += map(Text, self._notes)
        if status:
            parts.append(Text(f"… {status}", style="dim"))
        self._live.update(Group(*parts), refresh=True)


def describe(event: Event) -> str:
    """An event in words; empty for one that the table shows."""
    match event:
        case Saved():
            return f"a Qwen3 of {event.num_parameters:,} parameters is made; the engines start, the trainer warms up"
        case Warming():
            return f"warm start, step {event.step} of {event.num_steps}: loss {event.loss:.3f}"
        case Evaluated(when, version, reward, solved):
            return f"reward at the {when} (version {version}): {reward:.3f}, {solved:.0%} solved"
        case Checked(problems=[problem, *_]):
            return f"{event.engine} DIFFERS from the trainer's model at version {event.version}: {problem}"
        case Checked():
            return (
                f"{event.engine} equals the trainer's model at version {event.version}: {event.num_tokens} greedy "
                f"tokens of {event.num_prompts} prompts are the same, log-probabilities within "
                f"{event.max_difference:.4f} (allowed {event.tolerance}; the first version's are "
                f"{event.control_difference:.2f} away)"
            )
        case RunEnded(is_early=True):
            return "the time for this run is over: the remaining steps were left out"
    return ""


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value; the highest stands for 1."""
    return "".join(_BARS[min(len(_BARS) - 1, max(0, round(value * (len(_BARS) - 1))))] for value in values)


def columns(step: Stepped) -> list[str]:
    """The titles, as wide as their columns."""
    engines = [f"engine {index}" for index in range(len(step.report.engines))]
    titles = (f"{title} ms" for title in (*STAGES, "rest", "total"))
    return ["step", "reward", *engines, "   MB", *(title.rjust(len("gather ms")) for title in titles)]


def row(step: Stepped) -> list[str]:
    report = step.report
    return [
        str(report.version),
        f"{step.reward:.3f}" if step.num_rollouts else "",
        *(f"v{report.version}" if result.ok else "failed" for _, result in sorted(report.engines.items())),
        f"{report.num_bytes / 1e6:.2f}",
        *(f"{ms:.1f}" for ms in stages(report.seconds).values()),
        f"{report.seconds.total * 1e3:.1f}",
    ]


def stages(seconds: StageSeconds) -> dict[str, float]:
    """Milliseconds of a publish by stage and the "rest", rounded, so that they add up to the total as it is shown."""
    found = {stage: round(1e3 * getattr(seconds, stage), 1) for stage in STAGES}
    return {**found, "rest": max(0.0, round(1e3 * seconds.total, 1) - sum(found.values()))}
