"""LoRA adapters on a stock SGLang server, by its routes that load and unload an adapter.

SGLang checks the rank and the names of layers when it loads an adapter, but shapes only when a request first uses it,
and its process ends then. It unloads a version once that one's requests have ended; the route waits for them, and
loads wait for it. A version that was unloaded is loaded again from its directory if a request names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightcast.control.client import HttpRoutes
from weightcast.errors import UnsupportedError
from weightcast.format.adapters import LoraConfig
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.sglang import adapter_form
from weightcast.integrations.stock_adapters import AdapterApi


class SglangStockAdapters(AdapterApi):
    """SGLang's own routes for adapters."""

    kind = "sglang"
    load_route, unload_route = "/load_lora_adapter", "/unload_lora_adapter"
    limits = "a larger --max-lora-rank or --max-loaded-loras"
    is_uniform = True

    def __init__(
        self,
        http: HttpRoutes,
        checkpoint: Sequence[TensorSpec] | None,
        *,
        is_enabled: bool,
        max_rank: int | None,
        capacity: int | None,
    ) -> None:
        self.http, self.checkpoint = http, checkpoint
        self.is_enabled, self.max_rank, self.capacity = is_enabled, max_rank, capacity

    def require(self) -> None:
        if not self.is_enabled:
            raise UnsupportedError(
                f"{self.http.name} can't load adapters: start it with --enable-lora, --max-lora-rank and "
                "--lora-target-modules, or publish the merged model, ModuleSource(model)"
            )
        if any(".experts." in spec.name for spec in self.checkpoint or ()):
            raise UnsupportedError(
                f"{self.http.name} serves a mixture of experts with LoRA, which was not tried: publish the merged "
                "model, ModuleSource(model)"
            )

    def form(
        self, tensors: Mapping[str, torch.Tensor], config: LoraConfig
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
        return adapter_form.completed(tensors, config, self.shapes()), adapter_form.settings(config)

    def in_use(self) -> tuple[str, ...]:
        """Return none: an adapter's directory is read only when it is loaded."""
        return ()
