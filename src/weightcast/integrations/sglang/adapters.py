"""LoRA adapters in one of SGLang's scheduler processes: loaded from tensors in memory, under ids that are never reused.

Invariants: a version has an id of its own, by its label and run, equal on all ranks, so that SGLang's prefix cache,
which has the id in its keys, never mixes versions; a version that was added stays in SGLang's memory until it is
removed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from weightcast.errors import InstallError
from weightcast.format.adapters import LoraConfig
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.checkpoint_header import linear_shapes
from weightcast.integrations.sglang import adapter_form, internals
from weightcast.seams.adapters import AdapterLayers


class SglangAdapters(AdapterLayers):
    """The layers with LoRA of a scheduler's model. `manager`: SGLang's LoRAManager.

    `reference`: returns the specs of the start-up checkpoint. `ids`: by label, the ids of loaded versions in SGLang's
    requests. Host memory: each version whole on every rank. Raises UnsupportedError if this SGLang lacks a required
    name.
    """

    limits = "larger --max-lora-rank or --max-loaded-loras"
    is_uniform = True

    def __init__(self, manager: Any, server_args: Any, reference: Callable[[], Sequence[TensorSpec] | None]) -> None:
        internals.require(
            manager, "load_lora_adapter_from_tensors", "unload_lora_adapter", "lora_modules", "max_lora_rank"
        )
        internals.require_arguments(manager.load_lora_adapter_from_tensors, "lora_ref", "tensors", "config_dict")
        internals.require(server_args, "max_loaded_loras")
        internals.adapter_record()
        self._manager = manager
        self._reference = reference
        self.max_rank = int(manager.max_lora_rank)
        self.capacity = server_args.max_loaded_loras
        self.ids = dict[str, str]()
        self._adapters: dict[str, Any] = {}

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        layers = set[str]()
        for name in (name for modules in self._manager.lora_modules for name in modules):
            parent, _, leaf = name.rpartition(".")
            layers |= {f"{parent}.{part}" for part in adapter_form.STACKED.get(leaf, (leaf,))}
        return linear_shapes(self._reference(), "start SGLang from safetensors", layers.__contains__)

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        return self._shapes

    def add(self, label: str, tensors: Mapping[str, torch.Tensor], config: LoraConfig, *, origin: str) -> None:
        adapter = internals.adapter(label, origin, is_pinned=False)
        loaded = self._manager.load_lora_adapter_from_tensors(
            lora_ref=adapter,
            tensors=adapter_form.completed(tensors, config, self._shapes),
            config_dict=adapter_form.settings(config),
        )
        if not loaded.success:
            self._manager.unload_lora_adapter(adapter)
            raise InstallError(f"SGLang can't load {label}: {loaded.error_message}")
        self._adapters[label], self.ids[label] = adapter, adapter.lora_id

    def remove(self, label: str) -> None:
        if label in self.ids:
            del self.ids[label]
            unloaded = self._manager.unload_lora_adapter(self._adapters.pop(label))
            if not unloaded.success:
                raise InstallError(f"SGLang can't unload {label}: {unloaded.error_message}")

    def name(self, labels: Mapping[str, str]) -> None:
        """Do nothing: the HTTP server names them, once all ranks have them."""

    def in_use(self) -> Collection[str]:
        """Return all versions, since only the HTTP server knows the requests; it has them unloaded by `Unload`."""
        return self.ids.keys()
