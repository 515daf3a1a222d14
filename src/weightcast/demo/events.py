"""What trainer rank 0 reports to the process that started it: one JSON line for each event, in order."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weightcast.trainer.report import PublishReport


class _Event(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """The JSON object of an event names its class as `kind`."""


class Saved(_Event, frozen=True):
    """The model directory is written: engines can be started from it."""

    num_parameters: int


class Warming(_Event, frozen=True):
    """The warm start has done `step` of `num_steps`."""

    step: int
    num_steps: int
    loss: float


class Evaluated(_Event, frozen=True):
    """Mean reward over the evaluation puzzles, sampled from the engines; `solved` is the share of right answers."""

    when: str
    version: int
    reward: float
    solved: float


class Stepped(_Event, frozen=True):
    """One step: rollouts, an update of the policy, a publish. Step 0 publishes the warm start, without rollouts.

    `rollout_seconds`: waiting for rollouts. `num_spanning`: rollouts whose tokens come from more than one version.
    `num_stale_tokens`: tokens of an older version than the trainer had when it received them.
    """

    report: PublishReport
    rollout_seconds: float
    train_seconds: float
    step_seconds: float
    reward: float
    solved: float
    num_rollouts: int
    num_spanning: int
    num_tokens: int
    num_stale_tokens: int


class Checked(_Event, frozen=True):
    """One engine compared with the trainer's model at `version`; `problems` is empty if they are equal.

    `max_difference`: the largest difference of a log-probability. `control_difference`: the same against the weights
    of the warm start, which must be above `tolerance`, or the check could not tell one version from another.
    """

    engine: str
    version: int
    num_prompts: int
    num_tokens: int
    max_difference: float
    control_difference: float
    tolerance: float
    problems: tuple[str, ...] = ()


class RunEnded(_Event, frozen=True):
    """The last event: the run is complete, or `problem` says why not. `is_early`: the time budget ended the run."""

    problem: str = ""
    is_early: bool = False


Event: TypeAlias = Saved | Warming | Evaluated | Stepped | Checked | RunEnded

decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
