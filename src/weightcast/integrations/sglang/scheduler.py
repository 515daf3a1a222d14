"""The plugin in one of SGLang's scheduler processes: answers weightcast's rank calls between two steps of the model.

Invariants: a call comes to all ranks, in the same order, and all give the same answer; none raises, which would end the
server; an install begins only while the scheduler is paused and nothing runs, so that no token is generated with
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
    """Prepare the rank of a new scheduler before it serves. If that fails, every call is answered with the error."""
    rank: SchedulerRank | None = None
    error: ErrorRecord | None = None
    with Attempt() as exchange:
        ranks = RankConsensus([internals.parallel().tp_group.cpu_group])
        with Attempt() as making:
            rank = SchedulerRank(scheduler, ranks)
        error = ranks.common_error(making.error)
    error = exchange.error or error
    if error is not None:
        logger.warning("weightcast can't update this SGLang: %s", error.message)
    setattr(scheduler, _RANK, rank if error is None else error)


def called(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Answer a rank call; pass any other update from tensors on to SGLang."""
    if request.load_format != FORMAT:
        loads(manager)
        return original(manager, request)
    reply = internals.io("UpdateWeightsFromTensorReqOutput", success=True, message="")
    rank: SchedulerRank | ErrorRecord | None = getattr(manager.scheduler, _RANK, None)
    if isinstance(rank, SchedulerRank):
        reply.message = rank.answer_all(request.serialized_named_tensors[0])
    else:
        error = rank or to_record(ClosedError("this SGLang has not started yet"))
        reply.message = msgspec.json.encode([RankReply(0, WeightInfo("default"), error)]).decode()
    return reply


def loads(manager: Any, *args: Any, **kwargs: Any) -> None:
    """Called before SGLang loads weights for another client: they are of no version of ours then.

    This holds also if the load fails, since it may have written some of them.
    """
    _interrupt(manager, "SGLang loads weights by itself")


def checks(manager: Any, request: Any) -> None:
    """Called before SGLang's weight checker, which may overwrite the weights."""
    if request.action == "reset_tensors":
        _interrupt(manager, "SGLang resets the weights")


def releases(manager: Any, request: Any) -> None:
    """Called before SGLang releases memory. When it is resumed, buffers have their values of this moment."""
    rank = getattr(manager.scheduler, _RANK, None)
    if isinstance(rank, SchedulerRank):
        are_weights = not request.tags or "weights" in request.tags
        rank.interrupt("its memory is released", loses_weights=are_weights and rank.drops_weights, others_load=True)


def _interrupt(manager: Any, reason: str) -> None:
    rank = getattr(manager.scheduler, _RANK, None)
    if isinstance(rank, SchedulerRank):
        rank.interrupt(reason)
        rank.changed(is_whole=False)


class SchedulerRank(RankWorker):
    """One rank of the engine. Raises UnsupportedError if this SGLang lacks a required name."""

    def __init__(self, scheduler: Any, ranks: RankConsensus) -> None:
        internals.require(scheduler, "flush_cache", "is_fully_idle", "_engine_paused", "tp_worker", "server_args")
        internals.require(scheduler, "weight_updater", "draft_worker")
        updater = scheduler.weight_updater
        internals.require(updater, "offload_tags", *internals.CHANGES)
        internals.require(scheduler.tp_worker, "model_runner")
        internals.require_arguments(scheduler.flush_cache, "empty_cache")
        self._scheduler = scheduler
        runner, parallel = scheduler.tp_worker.model_runner, internals.parallel()
        internals.require(runner, "model", "model_config", "lora_manager")
        if parallel.tp_rank == 0:
            warn_if_untested(logger, "SGLang", internals.version(), internals.TESTED_WITH)
        draft = internals.draft_runner(scheduler)
        keeps_draft = draft is not None and internals.keeps_draft(os.environ.get(internals.DRAFT_VARIABLE, ""))
        if keeps_draft:
            draft = None
            if parallel.tp_rank == 0:
                logger.warning("only the main model is updated: the draft model keeps the weights of SGLang's start")
        options = internals.resolved(scheduler.server_args)
        unsupported = internals.unsupported(options, runner, draft, keeps_draft=keeps_draft)
        # Parameters without a copy in host memory have no values once their memory was released.
        self.drops_weights = options.enable_memory_saver and not options.enable_weights_cpu_backup
        super().__init__(
            SglangModel(
                runner,
                unsupported=unsupported,
                # Without emptying torch's cache and a full garbage collection, which take longer than an install.
                flush=lambda: bool(scheduler.flush_cache(empty_cache=False)),
                draft=draft,
                is_alone=parallel.tp_size == 1,
            ),
            ranks,
            engine_rank=parallel.tp_rank,
            world_size=parallel.tp_size,
            token=os.environ.get(TOKEN_VARIABLE, ""),
            unsupported=unsupported,
            weights_asleep=lambda: "/resume_memory_occupation" if "weights" in updater.offload_tags else "",
        )

    def answer_all(self, message: bytes) -> str:
        """Answer a `RankCall` by the `RankReply` of every rank, both as JSON."""
        values: Any = None
        try:
            with contextlib.suppress(msgspec.DecodeError):  # the rank replies with an error
                values = msgspec.json.decode(message)
            reply = self.answer(values)
        except Exception as exc:
            # The other ranks wait for this one's answer, also after an unexpected error.
            logger.exception("a weight call failed")
            reply = msgspec.to_builtins(RankReply(self._worker.engine_rank, WeightInfo("default"), to_record(exc)))
        try:
            replies = [msgspec.json.decode(each) for each in self._ranks.gather(msgspec.json.encode(reply))]
        except PeerError as exc:
            replies = [reply | {"error": msgspec.to_builtins(to_record(exc))}]
        return msgspec.json.encode(replies).decode()

    def _require_ready(self) -> None:
        is_still = self._scheduler._engine_paused and self._scheduler.is_fully_idle(ignore_waiting=True)
        # An adapter is added beside the others, between two steps.
        if not (is_still or self._worker.offered_adapter):
            raise ClosedError("requests are running: send /pause_generation with mode 'retract' before an install")
        super()._require_ready()
