"""LoRA adapters in one vLLM worker: loaded from tensors in memory, under ids that no other adapter has.

Invariants: a version that was added stays in vLLM's own manager until it is removed, whatever other adapters come: a
request for one that vLLM has evicted would be loaded from its path, which does not exist, and end the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.format.adapters import LoraConfig
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.checkpoint_header import linear_shapes
from weightcast.integrations.vllm import internals
from weightcast.seams.adapters import AdapterLayers

_FIRST_ID = 1 << 20
"""Above the ids that vLLM's servers count up for the adapters that they load from paths."""


class VllmAdapters(AdapterLayers):
    """The layers with LoRA of a vLLM worker's model. `reference`: returns the specs of the start-up checkpoint.

    `ids`: by label, the ids of loaded versions in vLLM's requests; equal on all ranks.
    """

    limits = "larger --max-lora-rank or --max-cpu-loras"
    is_uniform = False

    def __init__(
        self, model: nn.Module, vllm_config: Any, reference: Callable[[], Sequence[TensorSpec] | None]
    ) -> None:
        self._model: Any = model
        self._config = vllm_config.lora_config
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._reference = reference
        self.max_rank = int(self._config.max_lora_rank)
        self.capacity = int(self._config.max_cpu_loras)
        self.ids = dict[str, int]()
        self._loras: dict[str, Any] = {}

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        manager = self._model.lora_manager
        layers = manager.modules.keys() - manager.packed_modules.keys()
        layers |= {part for parts in manager.packed_modules.values() for part in parts}
        vllms_name, mapper = internals.require().lora_module, self._mapper

        def is_adaptable(module: str) -> bool:
            return vllms_name(f"base_model.model.{module}.lora_A.weight", mapper)[0] in layers

        return linear_shapes(self._reference(), "start vLLM from safetensors", is_adaptable)

    @property
    def _mapper(self) -> Any:
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        return self._shapes

    def add(self, label: str, tensors: Mapping[str, torch.Tensor], config: LoraConfig, *, origin: str) -> None:
        vllm, manager = internals.require(), self._model.lora_manager
        helper = vllm.lora_settings.from_dict(config.peft())
        helper.validate_legal(self._config)
        number = max(self.ids.values(), default=_FIRST_ID) + 1
        lora = vllm.lora_model.from_lora_tensors(
            number,
            dict(tensors),
            helper,
            device="cpu",
            dtype=self._config.lora_dtype,
            model_vocab_size=self._vocab_size,
            weights_mapper=self._mapper,
            skip_prefixes=getattr(self._model, "lora_skip_prefixes", None),
        )
        manager.add_adapter(lora)
        manager._pin_lora_in_cpu_cache(number)
        self.ids[label], self._loras[label] = number, lora

    def remove(self, label: str) -> None:
        if label in self.ids:
            self._model.lora_manager.remove_adapter(self.ids.pop(label))
            del self._loras[label]

    def put_back(self) -> None:
        """Add all versions again, after vLLM has removed every adapter by itself."""
        manager = self._model.lora_manager
        for label, lora in self._loras.items():
            manager.add_adapter(lora)
            manager._pin_lora_in_cpu_cache(self.ids[label])

    def name(self, labels: Mapping[str, str]) -> None:
        """Do nothing: the API server names them, once all ranks have them."""

    def in_use(self) -> Collection[str]:
        """Return all versions, since only the API server knows the requests; it has them unloaded by `Unload`."""
        return self.ids.keys()
