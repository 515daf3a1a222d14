"""Checkpoints with quantised layers, as the tools of compressed-tensors and DeepSeek write them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_BLOCK = 128
_FP8_MAX = 448


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"dynamic": False, "observer": "minmax"} | weights,
        "input_activations": common | {"dynamic": True, "observer": None} | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


KINDS: dict[str, dict[str, Any]] = {
    "int8": _compressed("int", {"strategy": "channel"}, {"strategy": "token"}),
    "fp8": _compressed("float", {"strategy": "channel"}, {"strategy": "token"}),
    "fp8-blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [_BLOCK, _BLOCK],
    },
}
"""The quantisation that a checkpoint's config names, by the tests' name of it."""


def quantise(folder: Path, kind: str) -> None:
    """Quantise the projections of a checkpoint in place; embeddings, the head, norms and routers stay as they are."""
    file, config = folder / "model.safetensors", folder / "config.json"
    found: dict[str, torch.Tensor] = {}
    for name, weight in load_file(file).items():
        if name.endswith("_proj.weight"):
            found |= {name.removesuffix("weight") + leaf: tensor for leaf, tensor in _quantised(weight, kind).items()}
        else:
            found[name] = weight
    save_file(found, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": KINDS[kind]}))


def _quantised(weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    if kind == "fp8-blocks":
        with warnings.catch_warnings(action="ignore"), torch.compiler.set_stance("force_eager"):
            from vllm.utils.deep_gemm import per_block_cast_to_fp8

            values, scale = per_block_cast_to_fp8(weight, [_BLOCK, _BLOCK])  # eager: to compile it takes half a minute
        return {"weight": values, "weight_scale_inv": scale}
    weight = weight.float()
    largest = weight.abs().amax(1, keepdim=True)
    if kind == "fp8":
        return {"weight": (weight * _FP8_MAX / largest).to(torch.float8_e4m3fn), "weight_scale": largest / _FP8_MAX}
    return {"weight": (weight * 127 / largest).round().to(torch.int8), "weight_scale": largest / 127}
