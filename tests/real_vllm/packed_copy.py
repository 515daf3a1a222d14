"""Damage of what vLLM packs of a weight, in whichever process the layer is."""

from __future__ import annotations

from typing import Any

import torch


def pack_with_a_flipped_bit(layer: Any, row: int, column: int, bit: int) -> None:
    """Have a layer compute with what vLLM packs of its table with one other bit. `bit`: -1 for the highest one.

    oneDNN's memory can't be reached from outside.
    """
    table = layer.weight.data.clone()
    words = table.view({2: torch.int16, 4: torch.int32}[table.itemsize])
    words[row, column] ^= torch.tensor(1 << bit % (8 * table.itemsize)).to(words.dtype)
    damaged: Any = torch.nn.Module()
    damaged.weight = torch.nn.Parameter(table, requires_grad=False)
    layer.quant_method.process_weights_after_loading(damaged)
    layer.cpu_linear = damaged.cpu_linear
