"""What a run came to: everything its report and its last lines are made of, as one JSON object."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from weightcast import __version__
from weightcast.demo.events import Checked, Evaluated, Event, RunEnded, Saved, Stepped
from weightcast.demo.settings import DemoSettings


class Machine(msgspec.Struct, frozen=True):
    """Where it ran."""

    weightcast: str
    python: str
    processor: str
    num_cores: int

    @classmethod
    def this(cls, num_cores: int) -> Machine:
        return cls(__version__, platform.python_version(), _processor(), num_cores)


class Result(msgspec.Struct, kw_only=True):
    """Grows with each event. `problem`: why the run has failed, or empty."""

    settings: DemoSettings
    machine: Machine
    num_engines: int
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
        """Take one event in."""
        if isinstance(event, Saved):
            self.num_parameters = event.num_parameters
        elif isinstance(event, Stepped):
            self.steps.append(event)
        elif isinstance(event, Checked):
            self.checks.append(event)
        elif isinstance(event, Evaluated):
            if event.when == "start":
                self.start = event
            else:
                self.end = event
        elif isinstance(event, RunEnded):
            self.problem, self.is_early, self.has_ended = event.problem, event.is_early, True

    @property
    def updates(self) -> list[Stepped]:
        """The steps that followed rollouts: all but the first publish, which also connects everything."""
        return [step for step in self.steps if step.num_rollouts]

    @property
    def num_rollouts(self) -> int:
        return sum(step.num_rollouts for step in self.steps)

    @property
    def num_spanning(self) -> int:
        return sum(step.num_spanning for step in self.steps)

    @property
    def reward_gain(self) -> float:
        return self.end.reward - self.start.reward if self.start and self.end else 0.0

    def typical(self, figure: Callable[[Stepped], float]) -> float:
        """The median of a figure over the updates; 0 if there were none."""
        return median(map(figure, self.updates)) if self.updates else 0.0

    def failures(self) -> Sequence[str]:
        """Every reason why this run is not a success."""
        found = [self.problem] if self.problem else []
        if not found and not (self.has_ended and self.start and self.end):
            return ["the trainer ended before its work was done"]
        if found:
            return found
        if len(self.checks) != self.num_engines:
            found.append(f"{len(self.checks)} of {self.num_engines} engines were checked")
        found += [f"{check.engine}: {problem}" for check in self.checks for problem in check.problems]
        if self.reward_gain < self.settings.min_reward_gain:
            found.append(f"the reward rose by {self.reward_gain:.3f}, less than {self.settings.min_reward_gain}")
        return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
