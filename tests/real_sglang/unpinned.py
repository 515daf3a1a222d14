"""A plugin of the tests that lets SGLang serve LoRA on a CPU: its LoRA code gets plain memory where it wants pinned.

SGLang's LoRA layers and backends ask for pinned memory always, which torch refuses on a host without an accelerator.
Pinned memory holds the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"


class Unpinned(TorchFunctionMode):
    """A context in which requests for pinned memory get plain memory."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **options)


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("__init__", "prepare_lora_batch", "fetch_new_loras"):
        HookRegistry.register(f"{_MANAGER}.{name}", _unpinned, HookType.AROUND)


def _unpinned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Unpinned():
        return original(*args, **kwargs)
