"""vLLM as an engine: a weight-transfer backend, its routes, and the clients for the trainer.

`internals` has every undocumented name of vLLM that this package uses. Exported names are imported at their first use:
a trainer needs vLLM only for `WeightcastTrainerInitInfo`, and vLLM itself needs no client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from weightcast.errors import import_of_extra

if TYPE_CHECKING:
    from weightcast.integrations.vllm.clients import AsyncLLMEngine, LLMEngine, RayEngine
    from weightcast.integrations.vllm.trainer_engine import WeightcastTrainerInitInfo

__all__ = ["AsyncLLMEngine", "LLMEngine", "RayEngine", "WeightcastTrainerInitInfo"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "trainer_engine" if name == "WeightcastTrainerInitInfo" else "clients"
    with import_of_extra():
        return getattr(importlib.import_module(f"weightcast.integrations.vllm.{home}"), name)
