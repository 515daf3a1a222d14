"""The warm start: supervised imitation of an unreliable teacher, so that rewards begin above zero and below the top."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from weightcast.demo import task
from weightcast.demo.masters import MasterAdamW
from weightcast.demo.ranks import TrainerProcesses

WARMUP_STEPS = 20


def warm_start(
    model: torch.nn.Module,
    rng: random.Random,
    ranks: TrainerProcesses,
    *,
    num_digits: int,
    num_steps: int,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    max_seconds: float = math.inf,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train in place for `num_steps`, or until `max_seconds` are over on rank 0; return the last loss.

    Every rank draws the same batches, from an `rng` in the same state, and learns from its share of each.
    `progress(step, loss)` is called after each step.
    """
    optimizer, loss_value = MasterAdamW(model, learning_rate=learning_rate), float("nan")
    deadline = time.monotonic() + max_seconds
    for step in range(num_steps):
        ramp = min(1.0, (step + 1) / WARMUP_STEPS)
        decay = 1.0 - 0.9 * step / num_steps
        optimizer.set_learning_rate(learning_rate * ramp * decay)
        loss = _imitation_loss(model, ranks.take(_batch(rng, num_digits, batch_size)), num_digits + 1)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss_value = float(ranks.mean(loss))
        progress(step + 1, loss_value)
        if ranks.agree(time.monotonic() > deadline):
            break
    return loss_value


def _batch(rng: random.Random, num_digits: int, batch_size: int) -> torch.Tensor:
    puzzles = [task.draw(rng, num_digits) for _ in range(batch_size)]
    return torch.tensor([p.prompt_ids + task.demonstrate(p, rng) for p in puzzles])


def _imitation_loss(model: torch.nn.Module, tokens: torch.Tensor, num_answer_tokens: int) -> torch.Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=num_answer_tokens).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, -num_answer_tokens:].flatten())
