"""What trainer rank 0 leads: GRPO, one step off policy, with a publish to every engine after each step.

Half of a step's rollouts is asked for before the policy is updated, so that engines and trainer work at the same
time; the other half just before the publish, which therefore lands in engines that generate. Invariants: every token
of a rollout is of a version that was published.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from weightcast.demo import grpo
from weightcast.demo.events import Evaluated, Event, Stepped
from weightcast.demo.grpo import Group
from weightcast.demo.learner import FIRST_VERSION, Learner
from weightcast.demo.rollouts import Pending, Rollouts
from weightcast.demo.settings import DemoSettings
from weightcast.demo.task import Puzzle, draw
from weightcast.errors import WeightcastError
from weightcast.trainer.report import PublishReport


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """A batch of rollouts in figures; `version` is the trainer's own when it took them."""

    reward: float
    solved: float
    num_rollouts: int
    num_spanning: int
    num_tokens: int
    num_stale_tokens: int

    @classmethod
    def of(cls, groups: Sequence[Group], version: int) -> Tally:
        rewards = [reward for group in groups for reward in group.rewards]
        versions = [answer.versions for group in groups for answer in group.answers]
        return cls(
            reward=sum(rewards) / len(rewards),
            solved=sum(reward == 1 for reward in rewards) / len(rewards),
            num_rollouts=len(rewards),
            num_spanning=sum(len(set(each)) > 1 for each in versions),
            num_tokens=sum(map(len, versions)),
            num_stale_tokens=sum(number < version for each in versions for number in each),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step: waiting for rollouts, training, and all of it with the publish."""

    rollouts: float
    train: float
    whole: float


class Training:
    """One run. `emit` is told what happens; `rng` decides every puzzle."""

    def __init__(
        self,
        learner: Learner,
        rollouts: Rollouts,
        settings: DemoSettings,
        *,
        rng: random.Random,
        emit: Callable[[Event], None],
    ) -> None:
        self._learner = learner
        self._rollouts = rollouts
        self._settings = settings
        self._rng = rng
        self._emit = emit
        self._eval_puzzles = self._draw(settings.eval_prompts)

    @property
    def version(self) -> int:
        """The last one that was published."""
        return self._learner.version

    def run(self, deadline: float) -> bool:
        """Train until `num_steps` are done or time.monotonic() has reached `deadline`; whether all were done.

        Raises PublishError if an engine does not take a version, PeerError if one does not answer.
        """
        self._publish_first()
        self._evaluate("start")
        halves = self._begin_half(), self._begin_half()
        for _ in range(self._settings.num_steps):
            if time.monotonic() > deadline:
                break
            halves = self._step(halves)
        self._learner.end()
        for half in halves:
            half.result()
        self._evaluate("end")
        return self.version - FIRST_VERSION == self._settings.num_steps

    def _publish_first(self) -> None:
        start = time.perf_counter()
        report = self._learner.publish()
        self._emit(_stepped(report, Tally(0, 0, 0, 0, 0, 0), Times(0, 0, time.perf_counter() - start)))

    def _step(self, halves: tuple[Pending, Pending]) -> tuple[Pending, Pending]:
        started = time.perf_counter()
        groups = [group for half in halves for group in half.result()]
        _check_versions(groups, self.version)
        received = time.perf_counter()
        first_half = self._begin_half()
        self._learner.learn(grpo.collate(groups))
        trained = time.perf_counter()
        second_half = self._begin_half()
        tally = Tally.of(groups, self.version)
        report = self._learner.publish()
        times = Times(received - started, trained - received, time.perf_counter() - started)
        self._emit(_stepped(report, tally, times))
        return first_half, second_half

    def _begin_half(self) -> Pending:
        puzzles = self._draw(self._settings.prompts_per_step // 2)
        return self._rollouts.begin(puzzles, self._settings.answers_per_prompt)

    def _draw(self, num_puzzles: int) -> list[Puzzle]:
        return [draw(self._rng, self._settings.num_digits) for _ in range(num_puzzles)]

    def _evaluate(self, when: str) -> None:
        groups = self._rollouts.begin(self._eval_puzzles, self._settings.eval_answers).result()
        tally = Tally.of(groups, self.version)
        self._emit(Evaluated(when=when, version=self.version, reward=tally.reward, solved=tally.solved))


def _stepped(report: PublishReport, tally: Tally, times: Times) -> Stepped:
    return Stepped(
        step=report.version,
        versions={name: report.version if result.ok else None for name, result in report.engines.items()},
        num_bytes=report.num_bytes,
        num_tensors=report.num_tensors,
        seconds=report.seconds,
        gb_per_second=report.gb_per_second,
        rollout_seconds=times.rollouts,
        train_seconds=times.train,
        step_seconds=times.whole,
        **dataclasses.asdict(tally),
    )


def _check_versions(groups: Sequence[Group], newest: int) -> None:
    """Every token is of a version that was published. Raises WeightcastError."""
    found = {version for group in groups for answer in group.answers for version in answer.versions}
    unknown = sorted(version for version in found if not FIRST_VERSION <= version <= newest)
    if unknown:
        raise WeightcastError(f"rollouts came from versions {unknown}; {FIRST_VERSION} to {newest} were published")
