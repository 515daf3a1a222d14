"""What supervisor and trainer send each other: the settings of a run, and back one JSON line for each event."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from weightcast.errors import PublishReport

TRANSPORTS = {"ipc": "ipc://", "gloo": "gloo://127.0.0.1:0"}
"""The choices of --transport -> the URL that the publisher gets."""


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The warm start ends after `warmup_seconds` at the latest, training `budget_seconds` after the trainer's start.

    A step's rollouts are `prompts_per_step` puzzles, each answered `answers_per_prompt` times, spread over all engines
    in requests of `prompts_per_request`. `min_reward_gain`: less is a failure; None: not judged.
    """

    seed: int
    num_steps: int
    num_trainer_ranks: int = 1
    transport: str = "ipc"
    num_digits: int = 5
    hidden_size: int = 192
    num_layers: int = 3
    warmup_steps: int = 160
    warmup_seconds: float = 45.0
    warmup_batch_size: int = 64
    warmup_learning_rate: float = 3e-3
    learning_rate: float = 4e-4
    prompts_per_step: int = 32
    answers_per_prompt: int = 8
    prompts_per_request: int = 4
    eval_prompts: int = 64
    eval_answers: int = 4
    check_prompts: int = 16
    budget_seconds: float = 120.0
    min_reward_gain: float | None = 0.1


QUICK: dict[str, Any] = {
    "num_digits": 2,
    "hidden_size": 64,
    "num_layers": 1,
    "warmup_steps": 40,
    "warmup_batch_size": 32,
    "warmup_learning_rate": 1e-2,
    "learning_rate": 2e-3,
    "prompts_per_step": 16,
    "answers_per_prompt": 8,
    "prompts_per_request": 4,
    "eval_prompts": 32,
    "eval_answers": 4,
    "check_prompts": 4,
}
"""The settings of --quick: a model that learns to sort two digits within seconds."""


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
