"""Weights in fp8 by blocks: float8_e4m3fn, with one float32 scale for each block, smaller at the edges.

The arithmetic is that of `per_block_cast_to_fp8` of DeepGEMM and vLLM, bit for bit, on every device: in host memory by
the native core, elsewhere by torch.
"""

from __future__ import annotations

import math
import os

import torch

from weightcast.native import tables

_MAX = 448.0
"""Largest float8_e4m3fn."""
_SMALLEST = 1e-4
"""The largest value of a block counts as at least this, so that a block of zeros has a scale."""
_TILE_ELEMENTS = {"cpu": 1 << 18}
"""Number of elements that are cast at once: on a CPU so few that they stay in its cache."""
_TILE_ELEMENTS_ON_DEVICE = 1 << 22
_LARGEST_INNER = 16
"""A view's last dim may be split in two, of which the second divides this (see `seams.source.Held`)."""


def num_blocks(size: int, of_block: int) -> int:
    """Return the number of blocks along a dim, with the one at the edge."""
    return -(-size // of_block)


class BlockQuantiser:
    """Quantises weights of one device by blocks. Keeps memory for a tile of a weight in float32, up to 16 MiB.

    Large blocks need more: 64 bytes for each of their elements.
    """

    def __init__(self, device: torch.device, block: tuple[int, int]) -> None:
        self._block = block
        num_elements = _TILE_ELEMENTS.get(device.type, _TILE_ELEMENTS_ON_DEVICE)
        self._tile = torch.empty(max(num_elements, math.prod(block) * _LARGEST_INNER), device=device)

    def quantise(self, source: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Quantise a view of a matrix (see `Held`), cast to `dtype`, into `weight` and `scale`.

        NaN and infinity in a block make its scale one of these.
        """
        is_plain = type(source) in (torch.Tensor, torch.nn.Parameter) and source.ndim == 2 and not source.is_neg()
        if (
            is_plain
            and source.is_cpu
            and source.dtype is dtype
            and dtype in (torch.bfloat16, torch.float32)
            and (source.stride(1), weight.stride(1)) == (1, 1)
        ):
            threads = min(tables.MAX_THREADS, len(os.sched_getaffinity(0)))
            tables.quantise(source, weight, scale, self._block, threads=threads)
            return
        (block_rows, block_columns), (num_rows, num_columns) = self._block, weight.shape
        unit = block_columns * _LARGEST_INNER
        columns = unit * max(1, len(self._tile) // (unit * block_rows))
        columns = min(columns, num_blocks(num_columns, block_columns) * block_columns)
        rows = block_rows * max(1, len(self._tile) // (block_rows * columns))
        for row in range(0, num_rows, rows):
            for column in range(0, num_columns, columns):
                part = weight[row : row + rows, column : column + columns]
                size = part.shape[0], part.shape[1]
                values = self._tile[: math.prod(size)].view(size)
                if source.ndim == 2:
                    values.copy_(source[row : row + rows, column : column + columns].to(dtype))
                else:
                    inner = source.shape[-1]
                    view = source[row : row + rows, column // inner : (column + columns) // inner]
                    values.view(size[0], -1, inner).copy_(view.to(dtype))
                down, across = row // block_rows, column // block_columns
                scales = scale[
                    down : down + num_blocks(size[0], block_rows), across : across + num_blocks(size[1], block_columns)
                ]
                if values.is_cpu:
                    tables.quantise(values, part, scales, self._block)
                else:
                    quantise_by_torch(values, part, scales, self._block)


def quantise_by_torch(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    """Quantise a matrix of float32 into `weight` and `scale`, on any device."""
    (num_rows, num_columns), (down, across) = values.shape, scale.shape
    padding = across * block[1] - num_columns, down * block[0] - num_rows
    if any(padding):
        values = torch.nn.functional.pad(values, (0, padding[0], 0, padding[1]))
    blocks = values.view(down, block[0], across, block[1])
    # The divisor is a tensor, since torch's GPU kernels multiply by the reciprocal of a number.
    scale.copy_(blocks.abs().amax((1, 3)).clamp_(_SMALLEST) / torch.tensor(_MAX, device=values.device))
    quantised = blocks * (1.0 / scale)[:, None, :, None]
    weight.copy_(quantised.view(values.shape)[:num_rows, :num_columns])
