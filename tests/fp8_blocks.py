"""The reference of fp8 by blocks, as DeepGEMM and vLLM (`per_block_cast_to_fp8`) have it. tests/real_vllm holds it to
vLLM's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


def reference(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantised weight, and the scale of each block."""
    num_rows, num_columns = weight.shape
    down, across = -(-num_rows // block[0]), -(-num_columns // block[1])
    padded = torch.zeros(down * block[0], across * block[1], dtype=weight.dtype)
    padded[:num_rows, :num_columns] = weight
    blocks = padded.view(down, block[0], across, block[1])
    scale = blocks.abs().float().amax((1, 3), keepdim=True).clamp(1e-4) / 448.0
    values = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).view(padded.shape)
    return values[:num_rows, :num_columns].contiguous(), scale.view(down, across)


def quantised(tensors: Mapping[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    """The tensors, those of these names quantised, each followed by its scale."""
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        found[name] = tensor
        if name in names:
            found[name], found[f"{name}_scale_inv"] = reference(tensor)
    return found
