"""The backend "weightcast" of vLLM's weight transfer: in each worker, vLLM's stock calls over its `RankWorker`.

Invariants: no call waits for the publisher; a call that failed on any rank raises on the last one only, since vLLM
stops reading its ranks' replies at the first that raises and answers later calls with the rest. For the same reason
vLLM's own check of the calls' order, which raises on every rank, is passed by: the ranks check it together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightcast.control.worker_rpc import Init, Leave, UpdateCall, marked
from weightcast.errors import ClosedError, ManifestError, UnsupportedError, WeightcastError, warn_if_untested
from weightcast.format.messages import InitInfo, Offer, UpdateInfo
from weightcast.integrations.plugin import TOKEN_VARIABLE
from weightcast.integrations.plugin.rank_consensus import Attempt, RankConsensus
from weightcast.integrations.plugin.rank_worker import RankWorker
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.model import VllmModel

logger = logging.getLogger(__name__)


class WeightcastTransferEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """vLLM makes one in each worker, once its model is loaded. Raises UnsupportedError if this vLLM can't be updated.

    Requests and replies are plain JSON values here: what is wrong with one is agreed on like any other error.
    """

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        # `world_size` is one engine's, without its data-parallel siblings; only the index is kept for dense models.
        first_rank = parallel.data_parallel_index * parallel.world_size
        groups = [get_tp_group().cpu_group, get_pp_group().cpu_group]
        self._is_last = parallel.rank == parallel.world_size - 1
        if self._is_last:
            warn_if_untested(logger, "vLLM", internals.version(), internals.TESTED_WITH)
        are_asleep = functools.partial(internals.weights_sleep, vllm_config, device)

        def require_awake() -> None:
            if are_asleep():
                raise ClosedError("the weights' memory is asleep: wake it (/wake_up?tags=weights) before the install")

        self._rank = RankWorker(
            VllmModel(model, vllm_config, device),
            RankConsensus(groups, first_rank=first_rank),
            engine_rank=first_rank + parallel.rank,
            world_size=parallel.world_size_across_dp,
            token=os.environ.get(TOKEN_VARIABLE, ""),
            unsupported=tuple(internals.unsupported(vllm_config)),
            require_ready=require_awake,
            weights_asleep=are_asleep,
        )
        worker = internals.require().worker
        _pass_by_order_check(worker)
        _hear_of_changes(worker)

    def answer(self, values: object) -> Any:
        """The worker method of `control.worker_rpc`."""
        with set_current_vllm_config(self.vllm_config):
            return self._rank.answer(values)

    @contextlib.contextmanager
    def changing(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Around one of `internals.CHANGES`, called with these arguments."""
        rank = self._rank
        if name == "sleep":
            level = kwargs.get("level", *args[:1] or (1,))
            rank.interrupt(f"the engine was put to sleep (level {level})", loses_weights=level > 1)
            yield
        elif name == "discard":
            tags = kwargs.get("tags", *args[:1] or ((),))
            rank.interrupt("vLLM discards memory")
            yield
            if "weights" in tags:
                rank.interrupt("vLLM has discarded the weights' memory", loses_weights=True)
        elif name == "reload_weights":
            rank.interrupt("vLLM reloads the weights by itself", loses_weights=True)
            yield
            rank.changed(is_whole=True)
        else:
            rank.interrupt("vLLM resets the weights")
            try:
                yield
            finally:
                rank.changed(is_whole=False)

    # --- the stock calls, by the names that vLLM's workers call them ---

    def parse_init_info(self, init_dict: Any) -> Any:
        return init_dict

    def parse_update_info(self, update_dict: Any) -> Any:
        return update_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        """Let a run hold this engine; it connects in the background."""
        with self._stock_call():
            self._rank.do(Init(_typed(init_info, InitInfo)))

    def start_weight_update(self) -> None:
        """An offer begins an update; this only says whether there is a publisher to make one."""
        with self._stock_call():
            if not self._rank.info().holder:
                raise ClosedError("no publisher holds this engine: call init_weight_transfer_engine first")

    def start_draft_weight_update(self) -> None:
        with self._stock_call():
            raise UnsupportedError("weightcast does not update draft models")

    def update_weights(self, update_info: Any) -> None:
        """Take an offer, a seal or an abort. A streamed offer is refused: the caller might generate meanwhile."""
        with self._stock_call():
            info: UpdateInfo = _typed(update_info, UpdateInfo)
            if isinstance(info, Offer) and info.install == "streaming":
                raise UnsupportedError('install="streaming" needs weightcast\'s own routes: publish staged')
            self._rank.do(UpdateCall(info))

    receive_weights = update_weights

    def finish_weight_update(self) -> None:
        """Install what is sealed. The caller has paused the engine, and cleared its caches."""
        with self._stock_call():
            self._rank.finish()

    def shutdown(self) -> None:
        """End whichever run's hold and what belongs to it: threads, sockets, mapped memory. The engine serves on."""
        with Attempt():
            self._rank.do(Leave())

    @contextlib.contextmanager
    def _stock_call(self) -> Iterator[None]:
        """Raise what went wrong on the last rank alone."""
        with set_current_vllm_config(self.vllm_config), Attempt() as attempt:
            yield
        if attempt.error is not None and self._is_last:
            raise WeightcastError(marked(attempt.error))


def _typed(values: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as exc:
        raise ManifestError(f"not a request of weightcast's: {exc}", fault="type") from exc


@functools.cache
def _pass_by_order_check(worker_class: Any) -> None:
    """Have vLLM's worker hand its weight calls straight to a `WeightcastTransferEngine`; others are as they were."""

    def passing(stock: Callable[..., None], own_name: str) -> Callable[..., None]:
        @functools.wraps(stock)
        def call(worker: Any, *args: Any, **kwargs: Any) -> None:
            engine = worker.weight_transfer_engine
            if isinstance(engine, WeightcastTransferEngine):
                getattr(engine, own_name)(*args, **kwargs)
            else:
                stock(worker, *args, **kwargs)

        return call

    for name, own_name in internals.WEIGHT_CALLS.items():
        setattr(worker_class, name, passing(getattr(worker_class, name), own_name))


@functools.cache
def _hear_of_changes(worker_class: Any) -> None:
    """Have vLLM's workers, of every platform that is loaded, say so before they change the weights by themselves."""

    def hearing(name: str, stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def call(worker: Any, *args: Any, **kwargs: Any) -> None:
            engine = worker.weight_transfer_engine
            is_ours = isinstance(engine, WeightcastTransferEngine)
            with engine.changing(name, *args, **kwargs) if is_ours else contextlib.nullcontext():
                stock(worker, *args, **kwargs)

        return call

    for each in (worker_class, *worker_class.__subclasses__()):
        for name in internals.CHANGES:
            if name in vars(each):
                setattr(each, name, hearing(name, vars(each)[name]))
