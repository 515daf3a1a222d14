"""The entry points by which vLLM finds weightcast: `register` in every process, `endpoints` in the API server.

Nothing of weightcast's that needs torch is imported here before vLLM asks for it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import msgspec

from weightcast.control.worker_rpc import METHOD, RankReply
from weightcast.errors import UnsupportedError, to_record
from weightcast.format.messages import WeightInfo

BACKEND = "weightcast"
PLUGINS = "VLLM_PLUGINS=weightcast"
OPTION = f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}'"""
"""The environment variable and the option that a vLLM server must be started with."""


@functools.cache
def register() -> None:
    """Make the backend known to vLLM, and give its workers the method of `control.worker_rpc`.

    The entry point of `vllm.general_plugins`, which may run more than once in a process.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    engine = "weightcast.integrations.vllm.transfer_engine"
    WeightTransferEngineFactory.register_engine(BACKEND, engine, "WeightcastTransferEngine")
    register_trainer()
    setattr(WorkerBase, METHOD, _answer)
    _log_as_vllm()


@functools.cache
def register_trainer() -> None:
    """Make the backend of the trainer's side known to vLLM, which imports it when it is asked for."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    engine = "weightcast.integrations.vllm.trainer_engine"
    WeightTransferTrainerFactory.register_engine(BACKEND, engine, "WeightcastTrainerEngine")


class _VllmLog(logging.Handler):
    """Hands a record to vLLM's log, as that is configured by then: some processes load plugins before they do that."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)


def _log_as_vllm() -> None:
    """Have vLLM's log say what weightcast's says, unless somebody has configured it: vLLM has no root handler."""
    ours = logging.getLogger("weightcast")
    if not ours.hasHandlers() and ours.level == logging.NOTSET:
        ours.addHandler(_VllmLog())
        ours.setLevel(logging.DEBUG)  # vLLM's level decides


def endpoints() -> Any:
    """The plugin that serves the weight routes: the entry point of `vllm.endpoint_plugins`.

    vLLM loads it only if the environment variable VLLM_PLUGINS names it.
    """
    from weightcast.integrations.vllm.routes import WeightcastRoutes

    return WeightcastRoutes()


def _answer(worker: Any, values: object) -> Any:
    """A call of `control.worker_rpc`, as plain JSON values, in one of vLLM's workers."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if engine is not None and worker.vllm_config.weight_transfer_config.backend == BACKEND:
        return engine.answer(values)
    error = UnsupportedError(f"this vLLM was not started to be updated by weightcast: start it with {OPTION}")
    return msgspec.to_builtins(RankReply(worker.rank, WeightInfo("default"), to_record(error)))
