"""WeightcastTransfer: TRL's `WeightTransferProtocol` over a publisher; WeightcastMetrics: its updates in TRL's logs.

TRL gathers the weights and passes whole tensors to its first process, which publishes them alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl

from weightcast.checkpoint.live import CastTo
from weightcast.errors import PublishReport, publish_error, warn_if_untested
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

    Engines generate during the transfer, and pause to install. TRL's first process publishes; the others don't use this
    object. `report`: that of the last update; None before the first.

    Memory on the first process: the transport's. With several processes also the whole model, kept from the first
    update on, in host memory (for "nccl://" on its GPU).
    """

    def __init__(
        self,
        engines: Sequence[str | EngineClient],
        *,
        dtype: CastTo | None = None,
        transport: str = "ipc://",
        token: str | None = None,
        options: PublishOptions | None = None,
        wait_ready_seconds: float = 240.0,
    ) -> None:
        """`engines`, `transport`, `token`: see `Publisher`. Nothing is connected before the first update.

        `options`: see `PublishOptions`. With `on_failure="raise"`, the default, an engine that does not install an
        update ends the training with a PublishError. With "report" a warning is logged and training goes on; that
        engine keeps its version, and the next update tries it again. The first update always raises.

        `dtype`: the weights are cast to it while they are packed, see `TensorSource`; "engine": to the engines' dtypes.

        `wait_ready_seconds`: time that the first update waits for engines that are starting.

        Raises ValueError or TypeError for wrong arguments.
        """
        if not engines:
            raise ValueError("engines is empty: name every server to update, such as ['http://127.0.0.1:8000']")
        if wait_ready_seconds != 0:
            number_of_seconds("wait_ready_seconds", wait_ready_seconds)

        warn_if_untested(logger, "TRL", trl.__version__, TESTED_WITH, symptom="updates fail")
        self.report: PublishReport | None = None
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
            trainer_group=None,  # TRL calls only its first process
            options=options,
        )
        self._handed = HandedPublisher(self._source, make_publisher)
        self._handed.open()

    def init_weight_transfer(self) -> None:
        """Do nothing, since the first update connects the engines."""

    def pause(self) -> None:
        """Do nothing, since engines serve during the transfer."""

    def resume(self) -> None:
        """Do nothing, since an update has resumed every engine when it ends."""

    def send_weights(self, iterator: Iterator[Named]) -> None:
        """Make every engine serve these tensors; block until they do.

        Each wait ends by `options.deadline_seconds`. Raises what `Publisher.publish` raises; `options.on_failure`
        applies.
        """
        # In a process group a tensor may have been gathered, and is valid only until the next one.
        is_gathered = dist.is_available() and dist.is_initialized()
        weights = map(self._copied, iterator) if is_gathered else iterator
        wait_ready_seconds = 0.0 if self._has_updated else self._wait_ready_seconds
        try:
            report = self._handed.publish(weights, wait_ready_seconds=wait_ready_seconds)
        finally:
            exhaust(iterator)  # a copy may have failed
        if not report.ok:
            error = publish_error(report)
            if not self._has_updated:
                error.add_note("on_failure='report' applies only after every engine has installed a first update")
                raise error
            logger.warning("training goes on after a failed update: %s", error)
        self.report, self._has_updated = report, True

    def _copied(self, named: Named) -> Named:
        """Copy the tensor to memory that is kept from update to update."""
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
    """Logs each update of a trainer whose `weight_transfer` is a WeightcastTransfer, as a separate row.

    Use: `trainer.add_callback(WeightcastMetrics(trainer))`, on every process.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logged: PublishReport | None = None

    def on_step_end(self, args: Any, state: Any, control: transformers.TrainerControl, **_: Any) -> None:
        """Log the last update, unless it was logged."""
        transfer = self._trainer.weight_transfer  # None except on TRL's first process
        report = transfer.report if transfer else None
        if report is None or report is self._logged:
            return
        self._logged = report
        is_log_due = control.should_log
        # TRL's own `log` would add the metrics that it has collected for the step's row.
        transformers.Trainer.log(self._trainer, report.metrics())
        control.should_log = is_log_due  # logging a row has reset it

    on_train_begin = on_step_end
