"""The backend "weightcast" of vLLM's weight transfer: a `RankWorker` in each worker, called by the plugin's routes.

Invariant: no call waits for the publisher.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightcast.control.worker_rpc import Leave
from weightcast.errors import UnsupportedError, warn_if_untested
from weightcast.integrations.plugin import TOKEN_VARIABLE
from weightcast.integrations.plugin.rank_consensus import Attempt, RankConsensus
from weightcast.integrations.plugin.rank_worker import RankWorker
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.model import VllmModel
from weightcast.integrations.vllm.plugin import PLUGINS

logger = logging.getLogger(__name__)


class WeightcastTransferEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Transfer engine that vLLM creates in each worker, once its model is loaded.

    Raises UnsupportedError for a vLLM that weightcast can't update.
    """

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        self._is_last = parallel.rank == parallel.world_size - 1
        if self._is_last:
            warn_if_untested(logger, "vLLM", internals.version(), internals.TESTED_WITH)
            if internals.keeps_draft(vllm_config):
                logger.warning("only the main model is updated: the draft model keeps the weights of vLLM's start")
        _hear_of_changes(internals.require().worker)
        self._started: tuple[VllmModel, RankWorker] | None = None
        if not internals.updates_draft(vllm_config):
            self.start(None)

    def start(self, draft: torch.nn.Module | None) -> None:
        """Take updates from now on. `draft`: the draft model, which vLLM's worker has, but not this engine."""
        if self._started is not None:
            return
        config, device, parallel = self.vllm_config, self.device, self.vllm_config.parallel_config
        # `world_size` is that of one data-parallel engine; for dense models vLLM keeps only the engine's index.
        first_rank = parallel.data_parallel_index * parallel.world_size
        groups = [get_tp_group().cpu_group, get_pp_group().cpu_group]
        model = VllmModel(self.model, config, device, draft=draft)
        rank = RankWorker(
            model,
            RankConsensus(groups, first_rank=first_rank),
            engine_rank=first_rank + parallel.rank,
            world_size=parallel.world_size_across_dp,
            token=os.environ.get(TOKEN_VARIABLE, ""),
            unsupported=model.unsupported,
            weights_asleep=lambda: "/wake_up?tags=weights" if internals.weights_sleep(config, device) else "",
        )
        self._started = model, rank

    def answer(self, values: object) -> Any:
        """Answer a call of `control.worker_rpc`."""
        with set_current_vllm_config(self.vllm_config):
            return self._require_started()[1].answer(values)

    @contextlib.contextmanager
    def changing(self, worker: Any, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Context of a call of one of `internals.HEARD` of the engine's worker, with these arguments."""
        if name == internals.STARTED:
            yield
            self.start(worker.get_draft_model())
            return
        model, rank = self._require_started()
        if name == "sleep":
            level = kwargs.get("level", *args[:1] or (1,))
            rank.interrupt(f"the engine was put to sleep (level {level})", loses_weights=level > 1)
            yield
        elif name == "discard":
            tags = kwargs.get("tags", *args[:1] or ((),))
            rank.interrupt("vLLM frees memory")
            yield
            if "weights" in tags:
                rank.interrupt("vLLM has freed the weights' memory", loses_weights=True)
        elif name == "reload_weights":
            rank.interrupt("vLLM reloads the weights by itself", loses_weights=True)
            yield
            if model.adapters is not None:
                # vLLM has removed all adapters, also those that running requests name.
                model.adapters.put_back()
            # vLLM reloads no draft model, and experts to where it has moved others.
            if not (internals.updates_draft(self.vllm_config) or self.vllm_config.parallel_config.enable_eplb):
                rank.changed(is_whole=True)
        else:
            rank.interrupt("vLLM resets the weights")
            try:
                yield
            finally:
                rank.changed(is_whole=False)

    # --- vLLM's own weight calls: an LLM's methods, or routes of a server that has not loaded weightcast's ---

    def _refuse(self, *_: Any) -> None:
        """Raise UnsupportedError, on the last rank alone: vLLM stops reading its ranks' replies at the first error."""
        if self._is_last:
            raise UnsupportedError(
                "vLLM's own weight-transfer calls are not supported by weightcast's backend: publish with "
                f"weightcast.Publisher, to a server that was started with {PLUGINS}"
            )

    init_transfer_engine = start_weight_update = receive_weights = finish_weight_update = _refuse

    def shutdown(self) -> None:
        """End the present run's session, with its threads, sockets and mapped memory. The engine goes on serving."""
        if self._started is not None:
            with Attempt():
                self._started[1].do(Leave())

    def _require_started(self) -> tuple[VllmModel, RankWorker]:
        assert self._started is not None, "vLLM calls its workers only after their start"
        return self._started


@functools.cache
def _hear_of_changes(worker_class: Any) -> None:
    """Wrap the methods of vLLM's workers that end their start or change weights, for every platform that is loaded."""

    def hearing(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
            engine = worker.weight_transfer_engine
            is_ours = isinstance(engine, WeightcastTransferEngine)
            with engine.changing(worker, name, *args, **kwargs) if is_ours else contextlib.nullcontext():
                return stock(worker, *args, **kwargs)

        return call

    for each in (worker_class, *worker_class.__subclasses__()):
        for name in internals.HEARD:
            if name in vars(each):
                setattr(each, name, hearing(name, vars(each)[name]))
