"""The sizes and rates of a demo run."""

from __future__ import annotations

from typing import Any

import msgspec

MODEL_DIRECTORY = "model"
"""Inside the run directory: the config and tokenizer that the engines are started from."""

TRANSPORTS = {"ipc": "ipc://", "gloo": "gloo://127.0.0.1:0"}
"""The choices of --transport -> the URL that the publisher gets."""


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Passed to the trainer as JSON.

    The warm start ends after `warmup_seconds` at the latest, the training `budget_seconds` after the trainer's start:
    a slow machine does fewer steps in the same time. A step's rollouts are `prompts_per_step` puzzles, each answered
    `answers_per_prompt` times, spread over all engines in requests of `prompts_per_request`.
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
    min_reward_gain: float = 0.1


QUICK: dict[str, Any] = {
    "num_digits": 2,
    "hidden_size": 64,
    "num_layers": 1,
    "warmup_steps": 40,
    "warmup_batch_size": 32,
    "warmup_learning_rate": 1e-2,
    "learning_rate": 2e-3,
    "prompts_per_step": 8,
    "answers_per_prompt": 4,
    "prompts_per_request": 2,
    "eval_prompts": 8,
    "eval_answers": 2,
    "check_prompts": 4,
    "min_reward_gain": -1.0,
}
"""The settings of --quick: seconds of training, too short to learn much, so the reward need not rise."""
