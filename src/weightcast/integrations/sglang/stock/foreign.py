"""Flattened buckets that other frameworks have made, or will take: SGLang's metadata says where each tensor lies."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from weightcast.errors import ManifestError
from weightcast.format.bucket import DTYPE_NAMES, TORCH_DTYPES
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.sglang.stock.buckets import lay_out


class Metadata(Protocol):
    """One tensor's place, as SGLang's FlattenedTensorMetadata has it; `numel` is its size in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def read(buckets: Iterable[tuple[torch.Tensor, Iterable[Metadata]]]) -> dict[str, torch.Tensor]:
    """The tensors of all these buckets, as views; one that is not aligned to its element size is a copy.

    Raises ManifestError, naming the tensor, if a place is not in its bucket, is not of its tensor's size, or overlaps
    another; if a name comes twice or a dtype can't travel; TypeError for a bucket that is not flat bytes.
    """
    tensors: dict[str, torch.Tensor] = {}
    for flat, metadata in buckets:
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise TypeError(f"a flattened bucket is a contiguous uint8 vector, not {flat.dtype}{list(flat.shape)}")
        last = 0
        for entry in sorted(metadata, key=lambda entry: (entry.start_idx, entry.end_idx)):
            name, dtype, shape, start, end = entry.name, entry.dtype, tuple(entry.shape), entry.start_idx, entry.end_idx
            if dtype not in DTYPE_NAMES:
                raise ManifestError(f"{name!r} is {dtype}, which can't travel", fault="dtype")
            num_bytes = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or end - start != num_bytes or entry.numel != num_bytes:
                raise ManifestError(
                    f"{name!r} {DTYPE_NAMES[dtype]}{list(shape)} has bytes {start} to {end} and says {entry.numel}, "
                    f"it needs {num_bytes}",
                    fault="size",
                )
            if name in tensors:
                raise ManifestError(f"{name!r} comes twice, in one bucket or in two buckets", fault="duplicate")
            if start < 0 or end > flat.numel():
                raise ManifestError(
                    f"{name!r} has bytes {start} to {end} of a bucket of {flat.numel()}", fault="bucket"
                )
            if start < last and end > start:
                raise ManifestError(f"{name!r} begins at byte {start}, inside of another tensor", fault="overlap")
            last = max(last, end)
            part = flat[start:end]
            is_aligned = part.storage_offset() % dtype.itemsize == 0 and part.data_ptr() % dtype.itemsize == 0
            tensors[name] = (part if is_aligned else part.clone()).view(dtype).view(shape)
    return tensors


@torch.no_grad()
def write(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> tuple[torch.Tensor, list[Metadata]]:
    """Copy these tensors, of any strides, into a new bucket on their device; the bucket and its metadata.

    Raises ValueError for no tensors at all, for a dtype that can't travel, for tensors of several devices.
    """
    tensors = dict(tensors)
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        raise ValueError(f"a bucket holds the tensors of one device, these are on {sorted(map(str, devices))}")
    unknown = [f"{name!r} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in DTYPE_NAMES]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}, which can't travel")
    places = lay_out(TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items())
    flat = torch.empty(places[-1].end, dtype=torch.uint8, device=devices.pop())
    metadata: list[Metadata] = []
    for place in places:
        place.view(flat).copy_(tensors[place.name])
        metadata.append(
            types.SimpleNamespace(
                name=place.name,
                shape=torch.Size(place.shape),
                dtype=TORCH_DTYPES[place.dtype],
                start_idx=place.start,
                end_idx=place.end,
                numel=place.end - place.start,
            )
        )
    return flat, metadata
