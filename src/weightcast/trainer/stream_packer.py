"""Packing of a `StreamSource`: each tensor is copied into the buckets before the next one is taken from the iterator.

Invariants: the tensors are exactly those of the specs, in their order; a bucket is filled once; no tensor is kept once
the last bucket is filled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weightcast.checkpoint.live import is_memory
from weightcast.errors import IncompatibleWeightsError, UpdateAbortedError
from weightcast.format.bucket import DTYPE_NAMES, Digest, Layout, narrow, queued_digest
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorRecord, WeightVersion
from weightcast.host.copy import copy_all
from weightcast.trainer.finite import require_finite
from weightcast.trainer.packer import Shard

_MIN_TABLE_BYTES = 1 << 20
"""Smallest copy that is made by a pack table; for smaller ones the table costs more than it saves."""


class StreamPacker:
    """Implements `Fill` for one version of a `StreamSource`. It keeps one tensor of the stream at a time."""

    def __init__(
        self, layout: Layout, tensors: Iterator[tuple[str, torch.Tensor]] | None, *, check_finite: bool = False
    ) -> None:
        """`tensors`: None for a version whose stream was read before, of which no bucket can be filled again.

        `check_finite`: check each tensor for NaN and infinity before it is packed.
        """
        self._checks_finite = check_finite
        self._layout = layout
        self._records = iter(layout.manifest.tensors)
        self._tensors = tensors
        self._record: TensorRecord | None = None
        self._tensor = torch.empty(0)
        self._num_filled = 0

    @torch.no_grad()
    def fill(self, index: int, payload: torch.Tensor, version: WeightVersion) -> Digest:
        """Write the payload of bucket `index`, return its digest. After the last bucket the stream must have ended.

        Raises IncompatibleWeightsError for a tensor that differs from the specs, UpdateAbortedError for a bucket that
        was filled before, NotFiniteError, and any exception of the iterator.
        """
        if self._tensors is None or index != self._num_filled:
            raise UpdateAbortedError(
                f"version {version.number} was streamed, each tensor once, and some of it is needed again, for an "
                "engine that was added later or because a peer was lost during the transfer: publish the weights "
                "again, as a new version"
            )
        manifest = self._layout.manifest
        self._layout.clear_gaps(index, payload)
        for entry, view in zip(self._layout.entries[index], self._layout.views(index, payload), strict=True):
            if entry.record is not self._record:
                self._read_up_to(self._tensors, entry.record)
            part = narrow(self._tensor, entry.piece.region)
            if entry.num_bytes < _MIN_TABLE_BYTES:
                view.copy_(part)
            else:
                copy_all([view], [part])
        self._num_filled += 1
        if self._num_filled == len(manifest.buckets):
            self._read_up_to(self._tensors, None)
            self._tensors, self._tensor = None, torch.empty(0)
        return queued_digest(payload[: manifest.buckets[index]])

    def _read_up_to(self, tensors: Iterator[tuple[str, torch.Tensor]], wanted: TensorRecord | None) -> None:
        """Read tensors up to `wanted`, skipping those without elements; None reads to the end of the stream."""
        for record in self._records:
            name, tensor = next(tensors, ("", None))
            if tensor is None:
                raise _other(f"it ended before {record.name!r}")
            found = f"{name!r} {DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}"
            expected = f"{record.name!r} {record.dtype}{list(record.shape)}"
            if found != expected:
                raise _other(f"found {found}, expected {expected}")
            if tensor.is_meta or not is_memory(tensor):
                raise _other(f"found {found} on {tensor.device}, which has no memory or computes its values when read")
            if self._checks_finite:
                require_finite([record], [Shard(0, whole(record.shape), tensor)] if tensor.numel() else [])
            if record is wanted:
                self._record, self._tensor = record, tensor
                return
        if (more := next(tensors, None)) is not None:
            raise _other(f"found {more[0]!r} after the last tensor")

    def forget_views(self) -> None:
        self._layout.forget_views()


def _other(problem: str) -> IncompatibleWeightsError:
    remedy = "yield the same tensors for each version, or publish other tensors from another publisher"
    return IncompatibleWeightsError(f"the stream of weights is not what its specs say: {problem}; {remedy}", (problem,))
