"""LoRA adapters in one of SGLang's scheduler processes: loaded from tensors in memory, under ids that are never reused.

Invariants: a version has an id of its own, by its label and run, equal on all ranks, so that SGLang's prefix cache,
which has the id in its keys, never mixes versions; a version that was added stays in SGLang's memory until it is
removed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from weightcast.errors import InstallError, UnsupportedError
from weightcast.format.adapters import LoraConfig, tensor_name
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.sglang import internals
from weightcast.seams.adapters import AdapterLayers

_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""By SGLang's name of a layer, the checkpoint's layers in it."""


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
        reference = self._reference()
        if reference is None:
            raise UnsupportedError(
                "the checkpoint that this engine was started from has no headers to read, so an adapter's shapes can't "
                "be checked: start SGLang from a directory or repository with safetensors"
            )
        layers = set[str]()
        for name in (name for modules in self._manager.lora_modules for name in modules):
            parent, _, leaf = name.rpartition(".")
            layers |= {f"{parent}.{part}" for part in _STACKED.get(leaf, (leaf,))}
        return {
            spec.name.removesuffix(".weight"): (spec.shape[0], spec.shape[1])
            for spec in reference
            if spec.name.removesuffix(".weight") in layers and len(spec.shape) == 2
        }

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        return self._shapes

    def add(self, label: str, tensors: Mapping[str, torch.Tensor], config: LoraConfig, *, origin: str) -> None:
        # Equal for all modules.
        first = config.target_modules[0]
        rank, alpha = config.rank(first), config.alpha_pattern.get(first, config.lora_alpha)
        settings = {
            "peft_type": "LORA",
            "r": rank,
            # SGLang divides by the rank, whatever `use_rslora` is.
            "lora_alpha": alpha * math.sqrt(rank) if config.use_rslora else alpha,
            "target_modules": sorted({module.rpartition(".")[2] for module in config.target_modules}),
        }
        adapter = internals.adapter(label, origin, is_pinned=False)
        completed = self._completed(tensors, config)
        loaded = self._manager.load_lora_adapter_from_tensors(lora_ref=adapter, tensors=completed, config_dict=settings)
        if not loaded.success:
            self._manager.unload_lora_adapter(adapter)
            raise InstallError(f"SGLang can't load {label}: {loaded.error_message}")
        self._adapters[label], self.ids[label] = adapter, adapter.lora_id

    def _completed(self, tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> dict[str, torch.Tensor]:
        """Return the tensors, with zeros for the layers that SGLang has in one with an adapted layer.

        SGLang would fail, or drop the adapted layer, without some of them.
        """
        completed = dict(tensors)
        for module in config.target_modules:
            parent, _, leaf = module.rpartition(".")
            given = tensors[tensor_name(module, "A")]
            siblings = next((parts for parts in _STACKED.values() if leaf in parts), ())
            for sibling in (f"{parent}.{part}" for part in siblings):
                a, b = (tensor_name(sibling, half) for half in ("A", "B"))
                if sibling in self._shapes and a not in completed:
                    outputs, inputs = self._shapes[sibling]
                    rank = config.rank(module)
                    completed[a], completed[b] = given.new_zeros(rank, inputs), given.new_zeros(outputs, rank)
        return completed

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
