"""Tables of copies for the native core, made from tensors, checked against their storages, and run as often as wanted.

Invariant: no row of a table reaches outside of the storages that its tensors had when it was made. The tensors are
kept, and their storages must keep their memory: compare `places`, of which one call looks at thousands of tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from weightcast.native import _core

CHUNK_BYTES = _core.CHUNK_BYTES
"""Of the digest `nh-128`: who digests a part of a payload takes whole chunks of it."""
MAX_THREADS = _core.MAX_THREADS
_PIECE_BYTES = 1 << 20
"""Of a row, so that threads end together."""
_COPY_WORDS, _STRIDED_WORDS = 3, 12

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Chunks: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
"""A mark for each chunk of a payload."""
Sums: TypeAlias = tuple[int, int]
"""Of some chunks of a payload, or of all: the digest's two words. Those of parts add up."""
_TYPES = {torch.Tensor, torch.nn.Parameter}

same_members = _core.same_members
populate = _core.populate


def places(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return where tensors lie, their dtypes, sizes and strides, as bytes to be compared with a later call's."""
    with torch._C.DisableTorchFunctionSubclass():
        return _core.places(list(tensors))


def added(*parts: Sums) -> bytes:
    """The 16 bytes of the digest of a payload, all of whose chunks are in these parts, each once."""
    return b"".join((sum(words) % (1 << 64)).to_bytes(8, "little") for words in zip((0, 0), *parts, strict=True))


def digest(payload: torch.Tensor, chunks: Chunks | None = None, *, threads: int = 1) -> Sums:
    """Digest the chunks that are marked, by default all, of a contiguous payload in host memory."""
    require_host_bytes(payload)
    runs = np.array([[0, _num_chunks(payload.nbytes)]]) if chunks is None else _runs(chunks)
    return _core.digest(payload.data_ptr(), payload.nbytes, runs, threads)


def unfilled_chunks(spans: Rows, num_bytes: int) -> Chunks:
    """Mark the chunks of a payload that spans, rows of (first byte, end) in order, don't fill whole."""
    first, last = np.append(0, spans[:, 1]), np.append(spans[:, 0], num_bytes)
    is_hole = first < last
    starts, ends = first[is_hole] // CHUNK_BYTES, -(-last[is_hole] // CHUNK_BYTES)
    steps = np.zeros(_num_chunks(num_bytes) + 1, np.int64)
    np.add.at(steps, starts, 1)
    np.add.at(steps, ends, -1)
    return steps.cumsum()[:-1] > 0


def spans_of(rows: Iterable[tuple[int, int]]) -> Rows:
    """Rows of (first byte, end), in order."""
    spans = np.array([*rows], np.int64).reshape(-1, 2)
    return spans[np.argsort(spans[:, 0], kind="stable")]


def digest_words(tensor: torch.Tensor, first: int, steps: Sequence[int], *, threads: int = 1) -> Sums:
    """Return the two lanes of the digest of tensors, of a tensor of any strides in host memory that is not empty.

    `first`: the number of its first element in the global tensor. `steps`: how many elements further on each dim's next
    one is there. Raises ValueError for a tensor that reaches outside of its storage.
    """
    strides = [tensor.itemsize * stride for stride in tensor.stride()]
    size = tensor.itemsize + sum((count - 1) * stride for count, stride in zip(tensor.shape, strides, strict=True))
    _require_in_storage(tensor, size, "tensor")
    dims = [number for dim in zip(tensor.shape, strides, steps, strict=True) for number in dim]
    return _core.digest_words(tensor.data_ptr(), tensor.itemsize, first, struct.pack(f"{len(dims)}Q", *dims), threads)


class CopyTable:
    """Copies between tensors of one shape and dtype in host memory, contiguous or of up to three dims of strides.

    `others`: the numbers of the pairs that are no such copies (casts, broadcasts, other devices, complex numbers,
    memory that overlaps): they are torch's.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor | int],
        sources: Sequence[torch.Tensor],
        *,
        within: torch.Tensor | None = None,
    ) -> None:
        """`within`: what all targets are in. Only then a target may be the address of a contiguous one of its source's
        shape and dtype.

        Raises ValueError for a tensor that reaches outside of its storage.
        """
        if len(targets) != len(sources):
            raise ValueError(f"{len(sources)} tensors are to be copied to {len(targets)}: give one for each")
        self._tensors = targets if within is None else within, sources
        views: list[Sequence[Any]] = [sources] if within is not None else [targets, sources]
        with torch._C.DisableTorchFunctionSubclass():
            plain, strided, kinds = _core.pairs(list(targets), list(sources), _PIECE_BYTES)
            is_other = np.frombuffer(kinds, np.uint8) > 1
            for tensors in views:
                is_other |= np.fromiter(map(torch.Tensor.is_neg, tensors), bool, len(tensors))
        for tensors in views:
            if not {*map(type, tensors)} <= _TYPES:
                # A class of its own may say that it is elsewhere.
                is_other |= [not tensor.is_cpu for tensor in tensors]
        self.others: list[int] = np.flatnonzero(is_other).tolist()
        self.rows, self.pairs = _kept(plain, _COPY_WORDS, is_other)
        """Rows of `copy`, and the number of each one's pair."""
        self.strided, self.strided_pairs = _kept(strided, _STRIDED_WORDS, is_other)
        counts = self.strided[:, 3::3]
        self.num_bytes = int(self.rows[:, 2].sum() + (self.strided[:, 2] * counts.prod(axis=1)).sum())
        numbers = np.concatenate([self.pairs, self.strided_pairs])
        for side in range(2):
            if side == 0 and within is not None:
                what, start = "the payload", within.data_ptr()
                bounds = np.tile([start, start + within.nbytes], (len(numbers), 1))
            else:
                what, bounds = "its tensor's storage", _bounds(sources if side else targets)[numbers]
            _require_inside(self.rows[:, side], self.rows[:, 2], bounds[: len(self.rows)], what)
            extents = self.strided[:, 2] + ((counts - 1) * self.strided[:, 4 + side :: 3]).sum(axis=1)
            _require_inside(self.strided[:, side], extents, bounds[len(self.rows) :], what)

    def run(self, *, threads: int = 1, cached: bool = False) -> None:
        """Copy, the others left out. `cached`: the targets are read again at once."""
        _core.copy(self.rows, threads, cached)
        _core.copy_strided(self.strided, threads, cached)


class PackTable:
    """Fills a payload from tensors in one pass in which it is digested.

    `others`: the numbers of the pairs that are to be copied before each run, as those of `CopyTable`. `missing`: the
    chunks that these pairs do not fill whole, or that lie in targets whose bytes don't follow one another. They are to
    be digested once everything is there.
    """

    def __init__(
        self,
        payload: torch.Tensor,
        targets: Sequence[torch.Tensor | int],
        sources: Sequence[torch.Tensor],
        gaps: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`targets`: views of `payload`, all that is digested, that don't overlap; a number is the first byte of a
        contiguous one of its source's shape and dtype. `gaps`: bytes that become zeros.

        Raises ValueError for a tensor that reaches outside of its storage, or a target outside of the payload.
        """
        require_host_bytes(payload)
        start = payload.data_ptr()
        into = [start + target if isinstance(target, int) else target for target in targets]
        self._payload, self._copies = payload, CopyTable(into, sources, within=payload)
        self.others = self._copies.others
        rows = [self._copies.rows - np.array([start, 0, 0])]
        # What is copied otherwise lies there when this runs.
        strided = {*self._copies.strided_pairs.tolist(), *self.others}
        runs = list[tuple[int, int]]()
        for target, source in ((into[number], sources[number]) for number in strided):
            if isinstance(target, int):
                runs.append((target, source.nbytes))
            elif target.is_contiguous():
                runs.append((target.data_ptr(), target.nbytes))
        rows.append(np.array([(at - start, at, size) for at, size in runs if size], np.int64).reshape(-1, 3))
        rows.append(np.array([(at, 0, end - at) for at, end in gaps], np.int64).reshape(-1, 3))
        found = np.concatenate(rows)
        found = found[np.argsort(found[:, 0], kind="stable")]
        spans = np.stack([found[:, 0], found[:, 0] + found[:, 2]], axis=1)
        if len(found) and (spans[0, 0] < 0 or spans[-1, 1] > payload.nbytes or (spans[:-1, 1] > spans[1:, 0]).any()):
            raise ValueError(f"targets and gaps overlap, or end outside of the payload of {payload.nbytes} bytes")
        self._rows = np.ascontiguousarray(found)
        self.missing = unfilled_chunks(spans, payload.nbytes)

    def run(self, *, threads: int = 1, cached: bool = False) -> Sums:
        """Fill the payload, and digest all chunks but the missing ones. `cached`: it is read again at once."""
        _core.copy_strided(self._copies.strided, threads, True)
        payload = self._payload
        return _core.copy_and_digest(payload.data_ptr(), payload.nbytes, self._rows, threads, cached)


def _kept(found: bytes, num_words: int, is_other: np.ndarray[Any, Any]) -> tuple[Rows, Rows]:
    rows = np.frombuffer(found, np.int64).reshape(-1, num_words + 1)
    rows = rows[~is_other[rows[:, num_words]]]
    return np.ascontiguousarray(rows[:, :num_words]), rows[:, num_words]


def _bounds(tensors: Sequence[Any]) -> Rows:
    """The first address of each tensor's storage, and the first one behind it."""
    storages = [*map(torch.Tensor.untyped_storage, tensors)]
    starts = np.fromiter(map(torch.UntypedStorage.data_ptr, storages), np.int64, len(storages))
    return np.stack([starts, starts + [*map(torch.UntypedStorage.nbytes, storages)]], axis=1)


def _require_inside(starts: Rows, sizes: Rows, bounds: Rows, what: str) -> None:
    outside = np.flatnonzero((starts < bounds[:, 0]) | (sizes < 0) | (sizes > bounds[:, 1] - starts))
    if outside.size:
        row = int(outside[0])
        (first, end), start, size = bounds[row].tolist(), int(starts[row]), int(sizes[row])
        raise ValueError(
            f"a copy of {size} bytes at {start:#x} reaches outside of {what}, which is {end - first} bytes at "
            f"{first:#x}: its tensor's storage was resized or freed, or it is a view of something else"
        )


def require_host_bytes(payload: torch.Tensor) -> None:
    """Raise ValueError for a tensor that is not contiguous bytes in host memory, within its storage."""
    if payload.device.type != "cpu" or payload.dtype != torch.uint8 or not payload.is_contiguous():
        raise ValueError(f"a payload is contiguous uint8 in host memory, found {payload.dtype} on {payload.device}")
    _require_in_storage(payload, payload.nbytes, "payload")


def _require_in_storage(tensor: torch.Tensor, size: int, name: str) -> None:
    storage = tensor.untyped_storage()
    first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if size and not first <= tensor.data_ptr() <= tensor.data_ptr() + size <= end:
        raise ValueError(f"a {name} of {size} bytes reaches outside of its storage of {end - first} bytes")


def _num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def _runs(chunks: Chunks) -> Rows:
    """Rows of (first, end) of the marked chunks."""
    edges = np.flatnonzero(np.diff(chunks.astype(np.int8), prepend=0, append=0))
    return np.ascontiguousarray(edges.reshape(-1, 2))
