"""WeightcastTransfer: TRL's `WeightTransferProtocol` over a publisher.

TRL gathers the weights itself and hands whole tensors to its first process, one at a time, in step with the other
processes. So the tensors are all taken before anything else can fail, and published by that process alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import trl

from weightcast.checkpoint.live import CastTo, memory_key
from weightcast.errors import PublishError, PublishReport, warn_if_untested
from weightcast.host.deadline import number_of_seconds
from weightcast.seams.client import EngineClient
from weightcast.sources.tensors import TensorSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

logger = logging.getLogger(__name__)

TESTED_WITH = "1.16"


class WeightcastTransfer:
    """The `weight_transfer` of an `AsyncGRPOTrainer` or an `AsyncDistillationTrainer`: each update is one publish.

    Engines generate while weights travel, and pause to install. TRL's first process publishes; the others don't use
    this object. `report`: of the last update; None before the first.

    Memory on the first process: the transport's. With several processes, besides: the whole model, kept from the first
    update on, in host memory (for "nccl://" on its GPU).
    """

    def __init__(
        self,
        engines: Sequence[str | EngineClient],
        *,
        on_failure: Literal["raise", "skip"] = "raise",
        dtype: CastTo | None = None,
        transport: str = "ipc://",
        token: str | None = None,
        options: PublishOptions | None = None,
        wait_ready_seconds: float = 240.0,
    ) -> None:
        """`engines`, `transport`, `token`, `options`: as of `Publisher`. Nothing is connected before the first update.

        `on_failure`: what happens when an engine does not take an update. "raise": the PublishError ends the training.
        "skip": a warning is logged and training goes on; that engine keeps the version that it has, and the next update
        tries it again. The first update always raises.
        `dtype`: what the weights are cast to while they are packed, as of `TensorSource`; "engine": what the
        engines have.
        `wait_ready_seconds`: how long the first update waits for engines that are starting.

        Raises ValueError or TypeError for other arguments than these.
        """
        if on_failure not in ("raise", "skip"):
            raise ValueError(f"on_failure is {on_failure!r}; it must be 'raise' or 'skip'")
        if not engines:
            raise ValueError("engines is empty: name every server that is to be updated, ['http://127.0.0.1:8000']")
        if wait_ready_seconds != 0:
            number_of_seconds("wait_ready_seconds", wait_ready_seconds)
        if options is not None and getattr(options, "on_failure", "raise") != "raise":
            raise ValueError("options.on_failure is 'report': pass on_failure='skip' to WeightcastTransfer instead")
        symptom = "updates fail, or the logs have no metrics of weightcast"
        warn_if_untested(logger, "TRL", trl.__version__, TESTED_WITH, symptom=symptom)
        self.report: PublishReport | None = None
        self._skips = on_failure == "skip"
        self._wait_ready_seconds = wait_ready_seconds
        self._has_updated = False
        self._source = TensorSource(dtype=dtype)
        self._is_on_host = not transport.startswith("nccl:")
        self._open = functools.partial(
            Publisher,
            self._source,
            transport=transport,
            engines=engines,
            token=token,
            trainer_group=None,  # TRL calls its first process only
            options=options,
        )
        self._publisher: Publisher | None = self._open()

    def init_weight_transfer(self) -> None:
        """Nothing: the first update connects the engines."""

    def pause(self) -> None:
        """Nothing: engines serve while weights travel."""

    def resume(self) -> None:
        """Nothing: an update has resumed every engine when it ends."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Make every engine serve these tensors; blocks until they do.

        Each wait ends by `options.deadline_seconds`. Raises what `Publisher.publish` raises, but see `on_failure`.
        """
        metrics = _metrics(iterator)
        tensors = self._held(iterator)
        if [*map(id, tensors.values())] != [*map(id, self._source.tensors.values())]:
            self._source.replace(tensors)
        if self._publisher is None:  # `train` was called once more
            self._publisher = self._open()
        try:
            wait_ready_seconds = 0.0 if self._has_updated else self._wait_ready_seconds
            report: PublishReport | None = self._publisher.publish(wait_ready_seconds=wait_ready_seconds)
        except PublishError as error:
            if not (self._skips and self._has_updated):
                if self._skips:
                    error.add_note("on_failure='skip' holds after every engine has taken a first update")
                raise
            logger.warning("training goes on: %s", error)
            report = error.report
        self.report, self._has_updated = report, True
        if report is not None and metrics is not None:
            _note(report, metrics)

    def _held(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The tensors; where they can be the same objects as before, they are: a publisher then keeps its plans.

        In a process group they may have been gathered for this loop, and are copied, so that the device has one of them
        at a time.
        """
        may_be_gathered = dist.is_available() and dist.is_initialized()
        tensors = {}
        for name, tensor in iterator:
            held = self._source.tensors.get(name)
            if may_be_gathered:
                if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                    device = "cpu" if self._is_on_host else tensor.device
                    held = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                tensors[name] = held.copy_(tensor.detach())
            else:
                tensors[name] = held if held is not None and memory_key(held) == memory_key(tensor) else tensor
        return tensors

    def destroy(self) -> None:
        """Disconnect the engines. Idempotent; the next `send_weights` connects them again."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher, self._has_updated = None, False
        self._source.replace({})


def _metrics(iterator: Iterator[Any]) -> dict[str, list[Any]] | None:
    """The dict in which the trainer collects its next log; None if it is not found.

    TRL passes a transfer no trainer, but a generator that is a method of it.
    """
    trainer = inspect.getgeneratorlocals(iterator).get("self") if inspect.isgenerator(iterator) else None
    metrics: dict[str, list[Any]] | None = getattr(trainer, "_metrics", {}).get("train")
    return metrics


def _note(report: PublishReport, metrics: dict[str, list[Any]]) -> None:
    """Add the update to the trainer's next log. TRL reduces values by the key's last word; a pair is a rate."""
    seconds, num_failed = report.seconds, sum(not result.ok for result in report.engines.values())
    values = {
        "version_max": float(report.version),
        "update_s": seconds.total,
        "pause_s": seconds.pause,
        "gb_per_s": (report.num_bytes / 1e9, seconds.total),
        "failed_engines_total": float(num_failed),
    }
    for name, value in values.items():
        metrics[f"weightcast/{name}"].append(value)
