"""The trainer's processes among themselves: how they meet, what one tells the others, who holds which part.

Invariants: only tensors travel, never a pickle; no wait lasts longer than DEADLINE_SECONDS; one process alone sends
nothing and keeps its model as it is.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weightcast.demo.grpo import Batch

RENDEZVOUS_FILE = "rendezvous"
DEADLINE_SECONDS = 300.0
"""Longer than the supervisor's patience, which is meant to come first."""


class TrainerProcesses:
    """This process's place among `size` trainer ranks. Rank 0 leads: it alone asks engines and tells events.

    Everything but `take` and `share` is a collective: every rank calls it, in the same order.
    """

    def __init__(self, trainer_rank: int = 0, size: int = 1) -> None:
        self.trainer_rank = trainer_rank
        self.size = size

    @property
    def leads(self) -> bool:
        return self.trainer_rank == 0

    def shard(self, model: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> None:
        """Shard the model over all ranks, in place (FSDP2); every rank holds the same weights before."""
        if self.size == 1:
            return
        mesh = init_device_mesh("cpu", (self.size,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in [*layers, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's share of some rows."""
        return rows[self.trainer_rank :: self.size]

    def share(self, batch: Batch) -> Batch:
        """This rank's share of a batch."""
        return Batch(*map(self.take, _tensors(batch)))

    def agree(self, value: float) -> float:
        """Rank 0's value."""
        return float(self._tell(torch.tensor(value, dtype=torch.float64)))

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks of a detached scalar."""
        total = value.detach().clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total / self.size

    def tell(self, batch: Batch | None) -> Batch | None:
        """Rank 0's batch; what the others pass is not looked at. None ends the work."""
        sizes = torch.tensor([0, 0, 0] if batch is None else [*batch.tokens.shape, batch.targets.shape[1]])
        num_rows, width, answer_width = self._tell(sizes).tolist()
        if num_rows == 0:
            return None
        if not self.leads:
            batch = _blank(num_rows, width, answer_width)
        assert batch is not None
        for tensor in _tensors(batch):
            self._tell(tensor)
        return batch

    def whole(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """A copy of all weights, on every rank."""
        return {name: _gathered(tensor).clone() for name, tensor in model.state_dict().items()}

    def _tell(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor


@contextlib.contextmanager
def joined(directory: Path, trainer_rank: int, size: int) -> Iterator[TrainerProcesses]:
    """Meet the other trainer ranks by a file in the run directory; waits for them. Gloo, over loopback."""
    if size == 1:
        yield TrainerProcesses()
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / RENDEZVOUS_FILE}",
        rank=trainer_rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=DEADLINE_SECONDS),
    )
    try:
        yield TrainerProcesses(trainer_rank, size)
    finally:
        dist.destroy_process_group()


def _blank(num_rows: int, width: int, answer_width: int) -> Batch:
    return Batch(
        torch.empty(num_rows, width, dtype=torch.int64),
        torch.empty(num_rows, answer_width, dtype=torch.int64),
        torch.empty(num_rows, answer_width),
        torch.empty(num_rows),
    )


def _tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.tokens, batch.targets, batch.old_logprobs, batch.advantages


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
