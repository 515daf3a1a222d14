"""WeightcastTransfer: TRL's `WeightTransferProtocol` over a publisher; WeightcastMetrics: its updates in TRL's logs.

TRL gathers the weights itself and hands whole tensors to its first process, which publishes them alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
import trl

from weightcast.checkpoint.live import CastTo
from weightcast.errors import PublishError, PublishReport, warn_if_untested
from weightcast.host.deadline import number_of_seconds
from weightcast.integrations.handed import HandedPublisher, Named, exhaust
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
        warn_if_untested(logger, "TRL", trl.__version__, TESTED_WITH, symptom="updates fail")
        self.report: PublishReport | None = None
        self._skips = on_failure == "skip"
        self._wait_ready_seconds = wait_ready_seconds
        self._has_updated = False
        self._source = TensorSource(dtype=dtype)
        self._is_on_host = not transport.startswith("nccl:")
        make_publisher = functools.partial(
            Publisher,
            self._source,
            transport=transport,
            engines=engines,
            token=token,
            trainer_group=None,  # TRL calls its first process only
            options=options,
        )
        self._handed = HandedPublisher(self._source, make_publisher)
        self._handed.open()

    def init_weight_transfer(self) -> None:
        """Nothing: the first update connects the engines."""

    def pause(self) -> None:
        """Nothing: engines serve while weights travel."""

    def resume(self) -> None:
        """Nothing: an update has resumed every engine when it ends."""

    def send_weights(self, iterator: Iterator[Named]) -> None:
        """Make every engine serve these tensors; blocks until they do.

        Each wait ends by `options.deadline_seconds`. Raises what `Publisher.publish` raises, but see `on_failure`.
        """
        # In a process group a tensor may have been gathered for this loop: the device has one of them at a time.
        is_gathered = dist.is_available() and dist.is_initialized()
        weights = map(self._copied, iterator) if is_gathered else iterator
        wait_ready_seconds = 0.0 if self._has_updated else self._wait_ready_seconds
        try:
            self.report = self._handed.publish(weights, wait_ready_seconds=wait_ready_seconds)
        except PublishError as error:
            if not (self._skips and self._has_updated):
                if self._skips:
                    error.add_note("on_failure='skip' holds after every engine has taken a first update")
                raise
            logger.warning("training goes on: %s", error)
            self.report = error.report
        finally:
            exhaust(iterator)  # a copy may have failed
        self._has_updated = True

    def _copied(self, named: Named) -> Named:
        """The tensor, copied to memory that is kept from update to update."""
        name, tensor = named
        copy = self._source.tensors.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            device = "cpu" if self._is_on_host else tensor.device
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return name, copy.copy_(tensor)

    def destroy(self) -> None:
        """Disconnect the engines. Idempotent; the next `send_weights` connects them again."""
        self._handed.close()
        self._has_updated = False


class WeightcastMetrics(transformers.TrainerCallback):
    """Logs each update of a trainer whose `weight_transfer` is a WeightcastTransfer, in a row of its own.

    `trainer.add_callback(WeightcastMetrics(trainer))`, on every process.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logged: PublishReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: transformers.TrainerControl, **_: Any) -> None:
        self._log(control)

    def on_step_end(self, args: Any, state: Any, control: transformers.TrainerControl, **_: Any) -> None:
        self._log(control)

    def _log(self, control: transformers.TrainerControl) -> None:
        transfer = self._trainer.weight_transfer  # None but on TRL's first process
        report = transfer.report if transfer else None
        if report is None or report is self._logged:
            return
        self._logged = report
        metrics = {
            "version_max": float(report.version),
            "update_s": report.seconds.total,
            "pause_s": report.seconds.pause,
            "gb_per_s": report.gb_per_second,
            "failed_engines_total": float(sum(not result.ok for result in report.engines.values())),
        }
        is_log_due = control.should_log
        # TRL's own `log` would add what it has collected for the step's row.
        transformers.Trainer.log(self._trainer, {f"weightcast/{name}": value for name, value in metrics.items()})
        control.should_log = is_log_due  # a row that was logged ends what asks for the next one
