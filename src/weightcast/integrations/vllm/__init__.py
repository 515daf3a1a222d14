"""Stock vLLM as an engine: a weight-transfer backend, its routes, and the clients that drive it from the trainer.

`internals` names everything undocumented of vLLM that this package leans on. What is exported here needs no vLLM to be
imported, and is imported when it is asked for: a trainer has none, and vLLM itself needs no client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcast.integrations.vllm.clients import AsyncLLMEngine, LLMEngine, RayEngine

__all__ = ["AsyncLLMEngine", "LLMEngine", "RayEngine"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("weightcast.integrations.vllm.clients"), name)
