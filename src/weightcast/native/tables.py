"""Tables of copies for the native core: made from tensors, checked against their storages, and run any number of times.

Invariant: no row of a table reaches outside of the storages that its tensors had when it was made. A table keeps its
tensors alive. Before a later run the caller checks that no tensor has moved, by `same_places`, which reads thousands
of tensors in one call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from weightcast.native import _core

CHUNK_BYTES = _core.CHUNK_BYTES
"""Chunk size of the digest `nh-128`; parts of a payload are digested in whole chunks."""
MAX_THREADS = _core.MAX_THREADS
_PIECE_BYTES = 1 << 20
"""Largest size of a row, so that threads end at about the same time."""
_COPY_WORDS, _STRIDED_WORDS = 3, 12
_COPIED = -1
"""Source of a row whose bytes are in the payload already."""

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Chunks: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
"""A mark for each chunk of a payload."""
Lanes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""Of each chunk of a payload, [number of chunks, 2]: the payload's digest follows from them alone."""
Sums: TypeAlias = tuple[int, int]
"""The digest's two words over some chunks of a payload or all of them. The sums of parts add up to the whole's."""
_TENSORS_AT_ONCE = 1024
_TYPES = {torch.Tensor, torch.nn.Parameter}

same_members = _core.same_members
populate = _core.populate


def places(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the addresses, dtypes, sizes and strides of tensors, for `same_places`."""
    with torch._C.DisableTorchFunctionSubclass():
        return _core.places(list(tensors))


def same_places(tensors: Sequence[torch.Tensor], former: bytes) -> bool:
    """Return whether `places` of these tensors are the `former` ones, without making them."""
    with torch._C.DisableTorchFunctionSubclass():
        return _core.same_places(list(tensors), former)


def added(*parts: Sums) -> bytes:
    """Return the 16 bytes of a payload's digest, from parts that contain each of its chunks exactly once."""
    sums: bytes = np.array([(0, 0), *parts], "<u8").sum(axis=0, dtype="<u8").tobytes()
    return sums


def digest(payload: torch.Tensor, chunks: Chunks | None = None, *, threads: int = 1) -> Sums:
    """Digest the marked chunks, by default all, of a contiguous payload in host memory."""
    require_host_bytes(payload)
    runs = np.array([[0, _num_chunks(payload.nbytes)]]) if chunks is None else _runs(chunks)
    return _core.digest(payload.data_ptr(), payload.nbytes, runs, threads)


def chunk_lanes(payload: torch.Tensor, *, threads: int = 1) -> Lanes:
    """Return the lanes of each chunk of a contiguous payload in host memory: 16 bytes for 2,048."""
    require_host_bytes(payload)
    lanes = np.empty((_num_chunks(payload.nbytes), 2), np.uint64)
    _core.chunk_lanes(payload.data_ptr(), payload.nbytes, lanes, threads)
    return lanes


def digest_of_lanes(lanes: Lanes, num_bytes: int) -> Sums:
    """Return the digest of a payload of so many bytes, whose lanes these are. Raises ValueError for other lanes."""
    return _core.digest_lanes(lanes, num_bytes)


def unfilled_chunks(spans: Rows, num_bytes: int) -> Chunks:
    """Mark the chunks of a payload that the spans, rows of (first byte, end) in order, don't fill completely."""
    first, last = np.append(0, spans[:, 1]), np.append(spans[:, 0], num_bytes)
    is_hole = first < last
    starts, ends = first[is_hole] // CHUNK_BYTES, -(-last[is_hole] // CHUNK_BYTES)
    steps = np.zeros(_num_chunks(num_bytes) + 1, np.int64)
    np.add.at(steps, starts, 1)
    np.add.at(steps, ends, -1)
    return steps.cumsum()[:-1] > 0


def spans_of(rows: Iterable[tuple[int, int]]) -> Rows:
    """Return rows of (first byte, end), sorted."""
    spans = np.array([*rows], np.int64).reshape(-1, 2)
    return spans[np.argsort(spans[:, 0], kind="stable")]


def digest_words(tensor: torch.Tensor, first: int, steps: Sequence[int], *, threads: int = 1) -> Sums:
    """Return the two lanes of the digest of a tensor in host memory, of any strides, that is not empty.

    `first` is the number of its first element in the global tensor. `steps` are the strides of the global tensor, in
    elements, along each dim. Raises ValueError for a tensor that reaches outside of its storage.
    """
    strides = [tensor.itemsize * stride for stride in tensor.stride()]
    size = tensor.itemsize + sum((count - 1) * stride for count, stride in zip(tensor.shape, strides, strict=True))
    _require_in_storage(tensor, size, "tensor")
    dims = [number for dim in zip(tensor.shape, strides, steps, strict=True) for number in dim]
    return _core.digest_words(tensor.data_ptr(), tensor.itemsize, first, struct.pack(f"{len(dims)}Q", *dims), threads)


def quantise(
    source: torch.Tensor, target: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], *, threads: int = 1
) -> None:
    """Write a matrix of float32 or bfloat16 to `target` in float8_e4m3fn by blocks, and the scale of each to `scales`.

    Columns are contiguous in all three, which are in host memory and don't overlap. The blocks at the edges are
    smaller. Raises ValueError for tensors of other dtypes, shapes or layouts.
    """
    blocks = tuple(-(-size // of_block) for size, of_block in zip(source.shape, block, strict=True))
    row: list[int] = []
    for tensor, dtypes, shape in (
        (source, (torch.bfloat16, torch.float32), source.shape),
        (target, (torch.float8_e4m3fn,), source.shape),
        (scales, (torch.float32,), blocks),
    ):
        is_plain = type(tensor) in _TYPES and tensor.is_cpu and not tensor.is_neg() and min(tensor.stride()) >= 0
        if not is_plain or tensor.dtype not in dtypes or tensor.shape != shape or tensor.stride(1) != 1:
            raise ValueError(
                f"found {tensor.dtype} of {list(tensor.shape)} with the strides {tensor.stride()} on {tensor.device}, "
                f"expected {', '.join(map(str, dtypes))} of {list(shape)} with contiguous columns in host memory"
            )
        size = tensor.itemsize * ((tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1])
        _require_in_storage(tensor, size if tensor.numel() else 0, "matrix")
        row += [tensor.data_ptr(), tensor.stride(0) * tensor.itemsize]
    if source.numel():
        row.insert(2, source.itemsize)
        _core.quantise(np.array([*row, *source.shape, *block], np.uint64), threads)


class CopyTable:
    """Copies between tensors of one shape and dtype in host memory, contiguous or with up to three strided dims.

    `others` are the numbers of the pairs that the caller has to copy with torch: casts, broadcasts, other devices,
    complex numbers, memory that overlaps. `places`: see the function; of the targets.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor | int],
        sources: Sequence[torch.Tensor | int],
        *,
        targets_in: Sequence[torch.Tensor] = (),
        sources_in: Sequence[torch.Tensor] = (),
        is_within_storage: bool = False,
    ) -> None:
        """Make a table. `targets_in`, `sources_in`: payloads that have all targets or all sources, if there are such.
        Only then one of these may be the address of a contiguous tensor of the other one's shape and dtype.
        `is_within_storage`: the caller has checked that no target ends beyond its storage.

        Raises ValueError for a tensor that reaches outside of its storage, or of the payloads.
        """
        if len(targets) != len(sources):
            raise ValueError(f"there are {len(targets)} targets and {len(sources)} sources: give one source for each")
        sides = (targets, targets_in), (sources, sources_in)
        self._tensors = [payloads or side for side, payloads in sides]
        views: list[Sequence[Any]] = [side for side, payloads in sides if not payloads]
        with torch._C.DisableTorchFunctionSubclass():
            plain, strided, kinds, self.places = _core.pairs(list(targets), list(sources), _PIECE_BYTES)
            is_other = np.frombuffer(kinds, np.uint8) > 1
            for tensors in views:
                for part in _parts(tensors):
                    is_other[part] |= [*map(torch.Tensor.is_neg, tensors[part])]
        for tensors in views:
            if not {*map(type, tensors)} <= _TYPES:
                # A tensor subclass may report another device than that of its memory.
                is_other |= [not tensor.is_cpu for tensor in tensors]
        self.others: list[int] = np.flatnonzero(is_other).tolist()
        self.rows, self.pairs = _kept(plain, _COPY_WORDS, is_other)
        """Rows of `copy`, and the number of the pair of each row."""
        self.strided, self.strided_pairs = _kept(strided, _STRIDED_WORDS, is_other)
        counts = self.strided[:, 3::3]
        self.num_bytes = int(self.rows[:, 2].sum() + (self.strided[:, 2] * counts.prod(axis=1)).sum())
        numbers = np.concatenate([self.pairs, self.strided_pairs])
        for side, (tensors, payloads) in enumerate(sides):
            if tensors is targets and is_within_storage:
                continue
            if payloads:
                spans = spans_of((payload.data_ptr(), payload.data_ptr() + payload.nbytes) for payload in payloads)
                starts = np.concatenate([self.rows[:, side], self.strided[:, side]])
                bounds = spans[np.maximum(np.searchsorted(spans[:, 0], starts, side="right") - 1, 0)]
                what = "the payload"
            else:
                what, bounds = "its tensor's storage", _bounds(tensors)[numbers]
            _require_inside(self.rows[:, side], self.rows[:, 2], bounds[: len(self.rows)], what)
            extents = self.strided[:, 2] + ((counts - 1) * self.strided[:, 4 + side :: 3]).sum(axis=1)
            _require_inside(self.strided[:, side], extents, bounds[len(self.rows) :], what)

    def run(self, *, threads: int = 1, cached: bool = False) -> None:
        """Make all copies except `others`. `cached`: the targets will be read again soon."""
        _core.copy(self.rows, threads, cached)
        _core.copy_strided(self.strided, threads, cached)

    def rows_in(self, payload: torch.Tensor) -> Rows:
        """Return all rows as rows of `copy_strided`, with their sources as offsets in the payload that has them all."""
        plain = np.tile(np.array([0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0]), (len(self.rows), 1))
        plain[:, :3] = self.rows
        rows: Rows = np.concatenate([plain, self.strided])
        rows[:, 1] -= payload.data_ptr()
        return rows


class PackTable:
    """Fills payloads of one size from tensors, and digests each in the same pass.

    `others` are the numbers of the pairs that the caller has to copy before each run; see `CopyTable`. `missing` marks
    the chunks that a run does not digest: those that the pairs don't fill completely, and those in targets that are not
    contiguous. The caller digests them once the payload is filled.
    """

    def __init__(
        self,
        payload: torch.Tensor,
        targets: Sequence[torch.Tensor | int],
        sources: Sequence[torch.Tensor],
        gaps: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Make a table for targets that are views of `payload` and don't overlap. A target that is a number stands for
        a contiguous tensor of its source's shape and dtype from that byte on. `gaps` are bytes to fill with zeros.
        If all targets are numbers, the payload may be on the meta device: only its size counts. It is not kept.

        Raises ValueError for a tensor that reaches outside of its storage, or a target outside of the payload.
        """
        if not payload.is_meta:
            require_host_bytes(payload)
        start = payload.data_ptr()
        into = [start + target if isinstance(target, int) else target for target in targets]
        copies = CopyTable(into, sources, targets_in=[payload])
        self._sources, self._num_bytes, self.others = sources, payload.nbytes, copies.others
        rows = [copies.rows - np.array([start, 0, 0])]
        self._strided = copies.strided - np.array([start] + [0] * (_STRIDED_WORDS - 1))
        # Pairs that are copied otherwise are in the payload already when this runs.
        strided = {*copies.strided_pairs.tolist(), *self.others}
        runs = list[tuple[int, int]]()
        for target, source in ((into[number], sources[number]) for number in strided):
            if isinstance(target, int):
                runs.append((target, source.nbytes))
            elif target.is_contiguous():
                runs.append((target.data_ptr(), target.nbytes))
        rows.append(np.array([(at - start, _COPIED, size) for at, size in runs if size], np.int64).reshape(-1, 3))
        rows.append(np.array([(at, 0, end - at) for at, end in gaps], np.int64).reshape(-1, 3))
        found = np.concatenate(rows)
        found = found[np.argsort(found[:, 0], kind="stable")]
        spans = np.stack([found[:, 0], found[:, 0] + found[:, 2]], axis=1)
        if len(found) and (spans[0, 0] < 0 or spans[-1, 1] > payload.nbytes or (spans[:-1, 1] > spans[1:, 0]).any()):
            raise ValueError(f"targets and gaps overlap, or reach outside of the payload of {payload.nbytes} bytes")
        self._rows = np.ascontiguousarray(found)
        self._copied = np.flatnonzero(found[:, 1] == _COPIED)
        self.missing = unfilled_chunks(spans, payload.nbytes)

    def run(self, payload: torch.Tensor, *, threads: int = 1, cached: bool = False) -> Sums:
        """Fill a payload, and digest all chunks but the missing ones. `cached`: it will be read again soon.

        Raises ValueError for one of another size.
        """
        require_host_bytes(payload)
        if payload.nbytes != self._num_bytes:
            raise ValueError(f"the payload has {payload.nbytes} bytes, expected {self._num_bytes}")
        start, rows = payload.data_ptr(), self._rows
        if len(self._strided):
            _core.copy_strided(self._strided + np.array([start] + [0] * (_STRIDED_WORDS - 1)), threads, True)
        if len(self._copied):
            rows = rows.copy()
            rows[self._copied, 1] = start + rows[self._copied, 0]
        return _core.copy_and_digest(start, payload.nbytes, rows, threads, cached)


def _kept(found: bytes, num_words: int, is_other: np.ndarray[Any, Any]) -> tuple[Rows, Rows]:
    rows = np.frombuffer(found, np.int64).reshape(-1, num_words + 1)
    rows = rows[~is_other[rows[:, num_words]]]
    return np.ascontiguousarray(rows[:, :num_words]), rows[:, num_words]


def _bounds(tensors: Sequence[Any]) -> Rows:
    """Return the first address of each tensor's storage, and the first one behind it."""
    bounds = np.empty((len(tensors), 2), np.int64)
    for part in _parts(tensors):
        storages = [*map(torch.Tensor.untyped_storage, tensors[part])]
        bounds[part, 0] = [*map(torch.UntypedStorage.data_ptr, storages)]
        bounds[part, 1] = [*map(torch.UntypedStorage.nbytes, storages)]
    return bounds.cumsum(axis=1)


def _parts(tensors: Sequence[Any]) -> Iterator[slice]:
    """Yield slices that are small enough for calls that hold the GIL for all of their tensors."""
    return (slice(first, first + _TENSORS_AT_ONCE) for first in range(0, len(tensors), _TENSORS_AT_ONCE))


def _require_inside(starts: Rows, sizes: Rows, bounds: Rows, what: str) -> None:
    outside = np.flatnonzero((starts < bounds[:, 0]) | (sizes < 0) | (sizes > bounds[:, 1] - starts))
    if outside.size:
        row = int(outside[0])
        (first, end), start, size = bounds[row].tolist(), int(starts[row]), int(sizes[row])
        raise ValueError(
            f"a copy of {size} bytes at {start:#x} reaches outside of {what}, which has {end - first} bytes at "
            f"{first:#x}: the storage was resized or freed, or the tensor is a view of another one"
        )


def require_host_bytes(payload: torch.Tensor) -> None:
    """Raise ValueError unless a tensor is contiguous uint8 in host memory, within its storage."""
    if payload.device.type != "cpu" or payload.dtype != torch.uint8 or not payload.is_contiguous():
        order = "contiguous" if payload.is_contiguous() else "strided"
        what = f"the payload is {order} {payload.dtype} on {payload.device}"
        raise ValueError(f"{what}, expected contiguous torch.uint8 in host memory")
    _require_in_storage(payload, payload.nbytes, "payload")


def _require_in_storage(tensor: torch.Tensor, size: int, name: str) -> None:
    storage = tensor.untyped_storage()
    first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if size and not first <= tensor.data_ptr() <= tensor.data_ptr() + size <= end:
        raise ValueError(f"a {name} of {size} bytes reaches outside of its storage of {end - first} bytes")


def _num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def _runs(chunks: Chunks) -> Rows:
    """Return the marked chunks as rows of (first, end)."""
    edges = np.flatnonzero(np.diff(chunks.astype(np.int8), prepend=0, append=0))
    return np.ascontiguousarray(edges.reshape(-1, 2))
