"""The run as it goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightcast.demo.events import Checked, Evaluated, Event, RunEnded, Saved, Stepped, Warming

STAGE_COLUMNS = ("gather", "pack", "send", "seal", "pause")
PLAIN_WIDTH = 120
_NUM_LINES_AROUND = 10
_WIDE = 100
_BARS = " ▁▂▃▄▅▆▇█"


class View(Protocol):
    """Shows events. Entered while the run lasts."""

    def show(self, event: Event) -> None: ...

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def view(console: Console) -> View:
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView:
    """One line for each event that tells something new."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_rows = 0
        self._last_warming = -1

    def show(self, event: Event) -> None:
        if isinstance(event, Stepped):
            if not self._num_rows:
                self._say("  ".join(f"{title:>{width}}" for title, width in _plain_columns(event)))
            self._num_rows += 1
            cells = zip(_cells(event), _plain_columns(event), strict=True)
            self._say("  ".join(f"{cell:>{width}}" for cell, (_, width) in cells))
        elif not isinstance(event, Warming) or self._is_news(event):
            text = describe(event)
            if text:
                self._say(text)

    def _is_news(self, event: Warming) -> bool:
        quarter = 4 * event.step // event.num_steps
        is_news, self._last_warming = quarter != self._last_warming, quarter
        return is_news

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveView:
    """Drawn again for each event, without a thread. What is shown last stays on the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps: list[Stepped] = []
        self._notes: list[str] = []
        self._status = "starting the trainer"
        self._live = Live(console=console, auto_refresh=False)

    def show(self, event: Event) -> None:
        text = describe(event)
        if isinstance(event, Stepped):
            self._steps.append(event)
            self._status = ""
        elif isinstance(event, (Evaluated, Checked)):
            self._notes.append(text)
        elif text:
            self._status = text
        self._live.update(self._render(), refresh=True)

    def _render(self) -> Group:
        parts: list[Table | Text] = []
        if self._steps:
            num_rows = max(5, self._console.height - _NUM_LINES_AROUND - len(self._notes))
            rewards = Text(f"reward {sparkline(self._rewards())}", style="green")
            parts += [_table(self._steps[-num_rows:], self._console.width), rewards]
        parts += [Text(note) for note in self._notes]
        if self._status:
            parts.append(Text(f"… {self._status}", style="dim"))
        return Group(*parts)

    def _rewards(self) -> list[float]:
        return [step.reward for step in self._steps if step.num_rollouts]

    def __enter__(self) -> LiveView:
        self._live.start()
        self._live.update(self._render(), refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._status = ""
        self._live.update(self._render())
        self._live.stop()


def describe(event: Event) -> str:
    """An event in words; empty for one that the table shows."""
    if isinstance(event, Saved):
        return f"a Qwen3 of {event.num_parameters:,} parameters (bf16) is made; the engines start, the trainer warms up"
    if isinstance(event, Warming):
        return f"warm start, step {event.step} of {event.num_steps}: loss {event.loss:.3f}"
    if isinstance(event, Evaluated):
        return f"reward at the {event.when} (version {event.version}): {event.reward:.3f}, {event.solved:.0%} solved"
    if isinstance(event, Checked):
        return _describe_check(event)
    if isinstance(event, RunEnded) and event.is_early:
        return "the time for this run is over: the remaining steps were left out"
    return ""


def _describe_check(check: Checked) -> str:
    if check.problems:
        return f"{check.engine} DIFFERS from the trainer's model at version {check.version}: {check.problems[0]}"
    return (
        f"{check.engine} equals the trainer's model at version {check.version}: {check.num_tokens} greedy tokens of "
        f"{check.num_prompts} prompts are the same, log-probabilities within {check.max_difference:.4f} "
        f"(allowed {check.tolerance}; the first version's are {check.control_difference:.2f} away)"
    )


def sparkline(values: Sequence[float], top: float = 1.0) -> str:
    return "".join(_BARS[min(len(_BARS) - 1, max(0, round(value / top * (len(_BARS) - 1))))] for value in values)


def _table(steps: Sequence[Stepped], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if width >= _WIDE else 0), pad_edge=False)
    for title, _ in _plain_columns(steps[-1]):
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for step in steps:
        table.add_row(*_cells(step))
    return table


def _plain_columns(step: Stepped) -> list[tuple[str, int]]:
    engines = [(f"engine {index}", 8) for index in range(len(step.versions))]
    stages = [(f"{stage} ms", 9) for stage in STAGE_COLUMNS]
    return [("step", 4), ("reward", 6), *engines, ("MB", 5), *stages, ("total ms", 8), ("GB/s", 5)]


def _cells(step: Stepped) -> list[str]:
    return [
        str(step.step),
        f"{step.reward:.3f}" if step.num_rollouts else "",
        *("failed" if version is None else f"v{version}" for _, version in sorted(step.versions.items())),
        f"{step.num_bytes / 1e6:.2f}",
        *(f"{getattr(step.seconds, stage) * 1e3:.1f}" for stage in (*STAGE_COLUMNS, "total")),
        f"{step.gb_per_second:.2f}",
    ]
