"""What the trainer tells the process that started it: one JSON line for each event, in the order they happen."""

from __future__ import annotations

import os
from typing import TypeAlias

import msgspec

from weightcast.trainer.report import StageSeconds


class Saved(msgspec.Struct, frozen=True, tag="saved", tag_field="kind"):
    """The model directory is written: engines can be started from it."""

    num_parameters: int


class Warming(msgspec.Struct, frozen=True, tag="warming", tag_field="kind"):
    """The warm start has done `step` of `num_steps`."""

    step: int
    num_steps: int
    loss: float


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated", tag_field="kind"):
    """Mean reward over the evaluation puzzles, sampled from the engines; `solved` is the share of right answers."""

    when: str
    version: int
    reward: float
    solved: float


class Stepped(msgspec.Struct, frozen=True, tag="stepped", tag_field="kind"):
    """One step: rollouts, an update of the policy, a publish. Version 0 is the warm start's, with no rollouts.

    `versions`: what each engine serves now, None where it did not take the version. `num_spanning`: rollouts whose
    tokens come from more than one version. `num_stale_tokens`: tokens of an older version than the trainer's own.
    """

    step: int
    reward: float
    solved: float
    versions: dict[str, int | None]
    num_bytes: int
    num_tensors: int
    seconds: StageSeconds
    gb_per_second: float
    num_rollouts: int = 0
    num_spanning: int = 0
    num_tokens: int = 0
    num_stale_tokens: int = 0
    rollout_seconds: float = 0.0
    train_seconds: float = 0.0
    step_seconds: float = 0.0


class Checked(msgspec.Struct, frozen=True, tag="checked", tag_field="kind"):
    """One engine against the trainer's own model at `version`; `problems` is empty if they are equal.

    `max_difference`: the largest difference of a log-probability. `control_difference`: the same against the weights
    that the run began with, which must be above `tolerance`, or the check could not tell one version from another.
    """

    engine: str
    version: int
    num_prompts: int
    num_tokens: int
    max_difference: float
    control_difference: float
    tolerance: float
    problems: tuple[str, ...] = ()


class RunEnded(msgspec.Struct, frozen=True, tag="ended", tag_field="kind"):
    """The last event: everything has been done, or `problem` says why not. `is_early`: the time budget ended it."""

    problem: str = ""
    is_early: bool = False


Event: TypeAlias = Saved | Warming | Evaluated | Stepped | Checked | RunEnded

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class EventWriter:
    """Writes events to a descriptor of its own, so that nothing which prints can come between them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, event: Event) -> None:
        data = memoryview(msgspec.json.encode(event) + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]


class EventReader:
    """Turns what was read from the other end of the pipe into events; keeps an unfinished line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Raises msgspec.DecodeError for a line that is no event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_decoder.decode(line) for line in lines]
