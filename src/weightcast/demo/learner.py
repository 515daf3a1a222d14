"""A trainer rank's part of the learning: its share of each batch, the optimizer's step, the publish.

Invariants: all ranks take the same batches in the same order, and publish after each; the weights don't change while
they are published.
"""

from __future__ import annotations

import torch

from weightcast.demo import grpo
from weightcast.demo.grpo import Batch
from weightcast.demo.masters import MasterAdamW
from weightcast.demo.ranks import TrainerProcesses
from weightcast.errors import WeightcastError
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.report import PublishReport

FIRST_VERSION = 0
"""What the warm start is published as; step n publishes version n."""


class Learner:
    """Rank 0 is led by `Training`, which calls `learn`, `publish` and `end`; every other rank calls `follow`."""

    def __init__(
        self, model: torch.nn.Module, publisher: Publisher, ranks: TrainerProcesses, *, learning_rate: float
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._ranks = ranks
        self._optimizer = MasterAdamW(model, learning_rate=learning_rate)
        self.version = FIRST_VERSION - 1

    def learn(self, batch: Batch) -> None:
        """Take one step, and have the other ranks take theirs. Raises WeightcastError if the training diverges."""
        self._ranks.tell(batch)
        self._update(batch)

    def publish(self) -> PublishReport:
        """Publish the next version, on every rank at the same time. Raises PublishError."""
        report = self._publisher.publish(self.version + 1)
        self.version += 1
        return report

    def end(self) -> None:
        """Tell the other ranks that this was all."""
        self._ranks.tell(None)

    def follow(self) -> None:
        """Do what rank 0 does until it ends."""
        self.publish()
        while (batch := self._ranks.tell(None)) is not None:
            self._update(batch)
            self.publish()

    def _update(self, batch: Batch) -> None:
        # Ranks have different numbers of tokens, and FSDP2 takes the mean of their gradients.
        num_tokens = grpo.num_tokens(batch) / self._ranks.size
        loss = grpo.loss(self._model, self._ranks.share(batch), num_tokens=num_tokens)
        mean = self._ranks.mean(loss)
        if not torch.isfinite(mean):
            raise WeightcastError(f"the loss became {float(mean)} at version {self.version}: the training diverged")
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
