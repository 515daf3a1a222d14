"""The form in which SGLang's LoRAManager reads an adapter as it is meant, from memory or from a directory.

SGLang has one rank and one alpha for an adapter, divides by the rank whatever `use_rslora` is, ignores patterns of
ranks and alphas, and fails, or drops an adapted layer, if other layers that it has in one with it have no adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from weightcast.format.adapters import LoraConfig, tensor_name

STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""By SGLang's name of a layer, the checkpoint's layers in it."""


def settings(config: LoraConfig) -> dict[str, Any]:
    """Return the settings of an adapter whose modules have one rank and one alpha."""
    first = config.target_modules[0]
    rank, alpha = config.rank(first), config.alpha_pattern.get(first, config.lora_alpha)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha * math.sqrt(rank) if config.use_rslora else alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in config.target_modules}),
    }


def completed(
    tensors: Mapping[str, torch.Tensor], config: LoraConfig, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Return the tensors, with zeros for the layers that SGLang has in one with an adapted layer.

    `shapes`: by module, outputs and inputs of the engine's layers.
    """
    found = dict(tensors)
    for module in config.target_modules:
        parent, _, leaf = module.rpartition(".")
        given = tensors[tensor_name(module, "A")]
        siblings = next((parts for parts in STACKED.values() if leaf in parts), ())
        for sibling in (f"{parent}.{part}" for part in siblings):
            a, b = (tensor_name(sibling, half) for half in ("A", "B"))
            if sibling in shapes and a not in found:
                outputs, inputs = shapes[sibling]
                rank = config.rank(module)
                found[a], found[b] = given.new_zeros(rank, inputs), given.new_zeros(outputs, rank)
    return found
