"""The plugin in one of SGLang's scheduler processes: answers weightcast's rank calls between two steps of the model.

Invariants: a call comes to all ranks, in the same order, and is answered alike by all; none raises (that would end the
server); an install begins only while the scheduler is paused with nothing running, so that no token is made with
weights of one version and caches of another.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from weightcast.control.worker_rpc import RankReply
from weightcast.errors import ClosedError, ErrorRecord, PeerError, to_record, warn_if_untested
from weightcast.format.messages import WeightInfo
from weightcast.integrations.plugin import TOKEN_VARIABLE
from weightcast.integrations.plugin.rank_consensus import Attempt, RankConsensus
from weightcast.integrations.plugin.rank_worker import RankWorker
from weightcast.integrations.sglang import internals
from weightcast.integrations.sglang.model import SglangModel

FORMAT = "weightcast"
"""The `load_format` of a message that is a rank call, as JSON in place of tensors."""
_RANK = "weightcast_rank"
logger = logging.getLogger(__name__)


def made(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After a scheduler was made: prepare its rank, while nothing is served yet. Calls are answered with a failure."""
    rank: SchedulerRank | None = None
    error: ErrorRecord | None = None
    with Attempt() as exchange:
        ranks = RankConsensus([internals.parallel().tp_group.cpu_group])
        with Attempt() as making:
            rank = SchedulerRank(scheduler, ranks)
        error = ranks.common_error(making.error)
    error = exchange.error or error
    if error is not None:
        logger.warning("this SGLang can't be updated by weightcast: %s", error.message)
    setattr(scheduler, _RANK, rank if error is None else error)


def called(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """In place of SGLang's update from tensors: a rank call is answered here, anything else there."""
    if request.load_format != FORMAT:
        loads(manager)
        return original(manager, request)
    reply = internals.io("UpdateWeightsFromTensorReqOutput", success=True, message="")
    rank: SchedulerRank | ErrorRecord | None = getattr(manager.scheduler, _RANK, None)
    if isinstance(rank, SchedulerRank):
        reply.message = rank.answer(request.serialized_named_tensors[0])
    else:
        error = rank or to_record(ClosedError("this SGLang has not started yet"))
        reply.message = msgspec.json.encode([RankReply(0, WeightInfo("default"), error)]).decode()
    return reply


def loads(manager: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang loads weights that another client sends, or has it read: they are of no version of ours then.

    Also where the load fails, which may have written some of them.
    """
    _interrupt(manager, "SGLang loads weights by itself", changes=True)


def checks(manager: Any, request: Any) -> None:
    """Before SGLang checks weights, which includes to overwrite them."""
    if request.action == "reset_tensors":
        _interrupt(manager, "SGLang resets the weights", changes=True)


def releases(manager: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang releases memory: once it is back, buffers are as they were here."""
    _interrupt(manager, "its memory is released", changes=False)


def _interrupt(manager: Any, reason: str, *, changes: bool) -> None:
    rank = getattr(manager.scheduler, _RANK, None)
    if isinstance(rank, SchedulerRank):
        rank.interrupt(reason)
        if changes:
            rank.changed(is_whole=False)


class SchedulerRank:
    """One rank of the engine. Raises UnsupportedError if this SGLang lacks what is leant on."""

    def __init__(self, scheduler: Any, ranks: RankConsensus) -> None:
        internals.require(scheduler, "flush_cache", "is_fully_idle", "_engine_paused", "tp_worker", "server_args")
        internals.require(scheduler, "weight_updater")
        internals.require(scheduler.weight_updater, "offload_tags", *internals.CHANGES)
        internals.require(scheduler.tp_worker, "model_runner")
        internals.require_arguments(scheduler.flush_cache, "empty_cache")
        self._scheduler, self._ranks = scheduler, ranks
        runner, parallel = scheduler.tp_worker.model_runner, internals.parallel()
        self._engine_rank = parallel.tp_rank
        if parallel.tp_rank == 0:
            warn_if_untested(logger, "SGLang", internals.version(), internals.TESTED_WITH)
        unsupported = internals.unsupported(scheduler.server_args, runner.model)
        self._rank = RankWorker(
            SglangModel(
                runner,
                unsupported=unsupported,
                # A collection of all garbage, or giving a GPU's free memory back, takes longer than the install.
                flush=lambda: bool(scheduler.flush_cache(empty_cache=False)),
                is_alone=parallel.tp_size == 1,
            ),
            ranks,
            engine_rank=self._engine_rank,
            world_size=parallel.tp_size,
            token=os.environ.get(TOKEN_VARIABLE, ""),
            unsupported=tuple(unsupported),
            require_ready=self._require_still,
        )
        self.interrupt, self.changed = self._rank.interrupt, self._rank.changed

    def answer(self, message: bytes) -> str:
        """A `RankCall`; the `RankReply` of every rank, as JSON."""
        values: Any = None
        try:
            with contextlib.suppress(msgspec.DecodeError):  # no call then, which the rank answers
                values = msgspec.json.decode(message)
            reply = self._rank.answer(values)
        except Exception as exc:
            # The other ranks wait for an answer of this one, whatever has happened here.
            logger.exception("a weight call failed")
            reply = msgspec.to_builtins(RankReply(self._engine_rank, WeightInfo("default"), to_record(exc)))
        try:
            replies = [msgspec.json.decode(each) for each in self._ranks.gather(msgspec.json.encode(reply))]
        except PeerError as exc:
            replies = [reply | {"error": msgspec.to_builtins(to_record(exc))}]
        return msgspec.json.encode(replies).decode()

    def _require_still(self) -> None:
        if not (self._scheduler._engine_paused and self._scheduler.is_fully_idle(ignore_waiting=True)):
            raise ClosedError("requests are running: /pause_generation in the mode 'retract' comes before an install")
        if "weights" in self._scheduler.weight_updater.offload_tags:
            raise ClosedError("the weights' memory is released: /resume_memory_occupation comes before an install")
