"""AdamW for a bf16 model: the optimizer keeps fp32 masters, the model its bf16 rounding of them.

A bf16 weight has 8 significant bits, so a step below about 1/256 of the weight would be rounded away, and at the
learning rates of RL most steps are: weights would stand still. The masters gather such steps until they show.
What is published is the bf16 model, the same weights that the trainer computes with. Of a sharded model each rank keeps
and updates the masters of its own shards; only the norm of the gradients is theirs together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor


class MasterAdamW:
    """Peak memory: 16 bytes for each parameter held (master, its gradient, two moments) besides the model."""

    def __init__(self, model: torch.nn.Module, *, learning_rate: float, max_grad_norm: float = 1.0) -> None:
        self._weights: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._weights]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )
        self._max_grad_norm = max_grad_norm

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    @torch.no_grad()
    def step(self) -> float:
        """Apply the model's gradients, clipped, and clear them; return their norm before clipping.

        A collective if the model is sharded.
        """
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm)
        self._optimizer.step()
        torch._foreach_copy_(_held(self._weights), _held(self._masters))
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _held(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's shards, which can be copied all at once; DTensors can't."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
