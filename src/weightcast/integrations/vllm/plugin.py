"""vLLM's entry points for weightcast: `register` in every process, `endpoints` in the API server.

Modules that need torch are imported only when vLLM calls for them.
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
    """Register the backend with vLLM, and add the method of `control.worker_rpc` to its workers.

    The entry point of `vllm.general_plugins`, which may run more than once in a process.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    engine = "weightcast.integrations.vllm.transfer_engine"
    WeightTransferEngineFactory.register_engine(BACKEND, engine, "WeightcastTransferEngine")
    register_trainer()
    setattr(WorkerBase, METHOD, _answer)
    # weightcast's log is forwarded to vLLM's, unless it is configured, since vLLM sets no root handler.
    ours = logging.getLogger("weightcast")
    if not ours.hasHandlers() and ours.level == logging.NOTSET:
        ours.addHandler(_VllmLog())
        ours.setLevel(logging.DEBUG)  # vLLM's level applies


@functools.cache
def register_trainer() -> None:
    """Register the trainer-side backend with vLLM, which imports it on demand."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    engine = "weightcast.integrations.vllm.trainer_engine"
    WeightTransferTrainerFactory.register_engine(BACKEND, engine, "WeightcastTrainerEngine")


class _VllmLog(logging.Handler):
    """Forwards records to vLLM's logger. Some processes configure it only after plugins were loaded."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)


def endpoints() -> Any:
    """The plugin that serves the weight routes: the entry point of `vllm.endpoint_plugins`.

    vLLM loads it only if the environment variable VLLM_PLUGINS names it.
    """
    from weightcast.integrations.vllm.routes import WeightcastRoutes

    return WeightcastRoutes()


def _answer(worker: Any, values: object) -> Any:
    """Answer a call of `control.worker_rpc`, as plain JSON values, in one of vLLM's workers."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if engine is not None and worker.vllm_config.weight_transfer_config.backend == BACKEND:
        return engine.answer(values)
    error = UnsupportedError(f"this vLLM was started without weightcast's backend: start it with {OPTION}")
    return msgspec.to_builtins(RankReply(worker.rank, WeightInfo("default"), to_record(error)))
