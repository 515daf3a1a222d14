"""Turns (manifest, bytes) into tensors and back: arenas, buffers, views, digests, trailers. No other file does.

A bucket's buffer is one uint8 tensor: the payload, then a trailer of TRAILER_BYTES. Invariants: a view is made once
for each buffer and kept; packing a bucket is a few calls however many tensors it holds; a payload is handed out only
after `check_trailer` has accepted it. The formats are those of `docs/wire-format.md`.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import struct
from collections.abc import Sequence

import torch
import xxhash

from weightcast.errors import IntegrityError
from weightcast.format.geometry import Region, align, row_major
from weightcast.format.manifest import ITEMSIZE_BYTES, DigestKind, Manifest, Piece, TensorRecord, WeightVersion

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE_BYTES if hasattr(torch, name)}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

TRAILER = struct.Struct("<8s16sQQQ16s")
TRAILER_BYTES = TRAILER.size
TRAILER_MAGIC = b"wcbuckt1"
DIGEST_BYTES = 16
_SUM_COLUMNS = 4096


def slot_size_bytes(manifest: Manifest) -> int:
    """Bytes of a buffer that can hold any bucket of the manifest with its trailer, aligned."""
    return align(manifest.max_bucket_bytes + TRAILER_BYTES)


def buffer_size_bytes(manifest: Manifest, index: int) -> int:
    """Bytes of bucket `index` with its trailer, aligned."""
    return align(manifest.buckets[index] + TRAILER_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where the buckets of a manifest lie in an arena: bucket k in slot `slots[k]`, from byte `offsets[k]`."""

    slots: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The arena that they need."""
        return max((offset + size for offset, size in zip(self.offsets, self.sizes_bytes, strict=True)), default=0)


def place(manifest: Manifest, *, num_slots: int, staged: bool, adjoining: bool = False) -> ArenaLayout:
    """Staged: every bucket has a slot of its own. Streaming: bucket k goes into slot k % num_slots. Page-aligned.

    `adjoining`, for what is staged: payloads lie end to end, so that a tensor that is cut over several is one piece of
    memory. A trailer is where the next payload will be: it must have been checked before that is read.
    """
    indices = range(len(manifest.buckets))
    sizes = tuple(buffer_size_bytes(manifest, index) for index in indices)
    if staged:
        steps = map(align, manifest.buckets) if adjoining else map(pages, sizes)
        starts = itertools.accumulate(steps, initial=0)
        return ArenaLayout(tuple(indices), tuple(start for start, _ in zip(starts, sizes, strict=False)), sizes)
    slots = tuple(index % num_slots for index in indices)
    stride = pages(slot_size_bytes(manifest))
    return ArenaLayout(slots, tuple(slot * stride for slot in slots), sizes)


def pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Buffers:
    """Slices of an arena, one for each bucket index, made once."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole
        self._slices: dict[int, tuple[int, int, torch.Tensor]] = {}

    def get(self, index: int, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        known = self._slices.get(index)
        if known is None or known[:2] != (offset_bytes, size_bytes):
            known = offset_bytes, size_bytes, self._whole[offset_bytes : offset_bytes + size_bytes]
            self._slices[index] = known
        return known[2]

    def forget_above(self, num_buckets: int) -> None:
        """Drop the slices of indices that a new manifest does not have."""
        self._slices = {index: known for index, known in self._slices.items() if index < num_buckets}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One piece of a bucket: `tensor` is the record's index in the manifest."""

    tensor: int
    record: TensorRecord
    piece: Piece

    @property
    def is_whole(self) -> bool:
        return len(self.record.pieces) == 1


class Layout:
    """The buckets of a manifest as tensors: entries of each bucket in order of offset, and views of any buffer."""

    def __init__(self, manifest: Manifest) -> None:
        unknown = sorted({t.dtype for t in manifest.tensors} - TORCH_DTYPES.keys())
        if unknown:
            raise ValueError(f"this torch {torch.__version__} has no dtype {', '.join(unknown)}: use a newer one")
        self.manifest = manifest
        self.entries: list[list[Entry]] = [[] for _ in manifest.buckets]
        for index, record in enumerate(manifest.tensors):
            for piece in record.pieces:
                self.entries[piece.bucket].append(Entry(index, record, piece))
        for entries in self.entries:
            entries.sort(key=lambda e: e.piece.offset_bytes)
        self._views: list[tuple[torch.Tensor, list[torch.Tensor]] | None] = [None] * len(manifest.buckets)
        self._gaps: dict[int, list[tuple[int, int]]] = {}

    def views(self, index: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view for each entry of bucket `index`, of its region's shape and dtype, into `buffer`.

        The views of the last buffer seen for a bucket are kept, so a transport that recycles its buffers (the same
        tensor objects) pays for them once.
        """
        cached = self._views[index]
        if cached is not None and cached[0] is buffer:
            return cached[1]
        entries, payload = self.entries[index], buffer[: self.manifest.buckets[index]]
        typed = {dtype: payload.view(TORCH_DTYPES[dtype]) for dtype in {entry.record.dtype for entry in entries}}
        views = []
        for entry in entries:
            dtype, sizes = entry.record.dtype, entry.piece.region.sizes
            offset = int(typed[dtype].storage_offset()) + entry.piece.offset_bytes // ITEMSIZE_BYTES[dtype]
            views.append(typed[dtype].as_strided(sizes, row_major(sizes), offset))
        self._views[index] = (buffer, views)
        return views

    def clear_gaps(self, index: int, buffer: torch.Tensor) -> None:
        """Zero what lies between the pieces of bucket `index` and behind the last, as alignment has left it.

        So equal weights make equal buckets, whatever was in the buffer before. On a GPU it is only queued.
        """
        gaps = self._gaps.get(index)
        if gaps is None:
            end, gaps = 0, []
            for entry in self.entries[index]:
                gaps.append((end, entry.piece.offset_bytes))
                itemsize = ITEMSIZE_BYTES[entry.record.dtype]
                end = max(end, entry.piece.offset_bytes + entry.piece.region.numel * itemsize)
            gaps.append((end, self.manifest.buckets[index]))
            gaps = self._gaps[index] = [(start, end) for start, end in gaps if start < end]
        if not gaps:
            return
        if buffer.is_cuda:
            torch._foreach_zero_([buffer[start:end] for start, end in gaps])
            return
        data = buffer.numpy().data
        for start, end in gaps:
            data[start:end] = bytes(end - start)

    def forget_views(self) -> None:
        """Drop every kept view, and with them the references to their buffers."""
        self._views = [None] * len(self._views)


def narrow(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The view of `tensor` that a region describes."""
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def payload_digest(payload: torch.Tensor, kind: DigestKind) -> bytes:
    """The 16-byte digest of a contiguous uint8 payload whose length is a multiple of 8."""
    if kind == "xxh3-128":
        return xxhash.xxh3_128_digest(payload.numpy().data)
    return device_sums(payload).cpu().numpy().tobytes()


def device_sums(payload: torch.Tensor) -> torch.Tensor:
    """`sum-64x2` as two int64 on the payload's device: sum of w[i], and sum of (i + 1) * w[i], modulo 2**64.

    w are the payload's little-endian 64-bit words. Row and column sums of a matrix of words give both in two reads,
    without a temporary of the payload's size. Nothing waits for the device.
    """
    words = payload.view(torch.int64)
    num_full = words.numel() // _SUM_COLUMNS * _SUM_COLUMNS
    sums = _matrix_sums(words[:num_full].view(-1, _SUM_COLUMNS), 0)
    return sums + _matrix_sums(words[num_full:].view(1, -1), num_full)


def _matrix_sums(matrix: torch.Tensor, first: int) -> torch.Tensor:
    num_rows, num_columns = matrix.shape
    if matrix.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=matrix.device)
    by_column, by_row = matrix.sum(dim=0), matrix.sum(dim=1)
    columns = torch.arange(first + 1, first + 1 + num_columns, device=matrix.device)
    rows = torch.arange(num_rows, device=matrix.device) * num_columns
    return torch.stack([by_column.sum(), (by_column * columns).sum() + (by_row * rows).sum()])


def write_trailer(
    buffer: torch.Tensor, num_bytes: int, version: WeightVersion, index: int, kind: DigestKind
) -> bytes | torch.Tensor:
    """Digest the payload and write the trailer behind it; on a GPU both are only queued."""
    if buffer.is_cuda:
        put_trailer(buffer, num_bytes, version, index, bytes(DIGEST_BYTES))
        end = num_bytes + TRAILER_BYTES
        sums = device_sums(buffer[:num_bytes])
        buffer[end - DIGEST_BYTES : end].view(torch.int64).copy_(sums)
        return sums
    digest = payload_digest(buffer[:num_bytes], kind)
    put_trailer(buffer, num_bytes, version, index, digest)
    return digest


def put_trailer(buffer: torch.Tensor, num_bytes: int, version: WeightVersion, index: int, digest: bytes) -> None:
    data = TRAILER.pack(TRAILER_MAGIC, bytes.fromhex(version.run), version.number, index, num_bytes, digest)
    trailer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if buffer.is_cuda:
        trailer = trailer.pin_memory()
    buffer[num_bytes : num_bytes + TRAILER_BYTES].copy_(trailer, non_blocking=True)


def check_trailer(buffer: torch.Tensor, num_bytes: int, version: WeightVersion, index: int, kind: DigestKind) -> bytes:
    """Prove that `buffer` holds bucket `index` of `version`, unharmed; return its digest.

    Raises IntegrityError, which says what was found and what was expected.
    """
    if buffer.numel() < num_bytes + TRAILER_BYTES:
        raise IntegrityError(
            f"bucket {index}: {buffer.numel()} bytes arrived, {num_bytes + TRAILER_BYTES} were expected"
        )
    raw = bytes(buffer[num_bytes : num_bytes + TRAILER_BYTES].cpu().numpy())
    magic, run, number, found_index, length, digest = TRAILER.unpack(raw)
    found = (magic, run.hex(), number, found_index, length)
    expected = (TRAILER_MAGIC, version.run, version.number, index, num_bytes)
    if found != expected:
        said, wanted = (
            f"{magic!r} run {run[:8]} version {number} bucket {index} of {length} bytes"
            for magic, run, number, index, length in (found, expected)
        )
        raise IntegrityError(f"bucket {index}: its trailer says {said}, expected {wanted}")
    actual = payload_digest(buffer[:num_bytes], kind)
    if actual != digest:
        raise IntegrityError(
            f"bucket {index}: the {kind} of its {num_bytes} bytes is {actual.hex()}, its trailer says {digest.hex()}: "
            "bytes were changed on the way; publish again"
        )
    return actual


def root_digest(manifest_digest: str, digests: Sequence[bytes | torch.Tensor]) -> str:
    """The digest of a whole update in hex: xxh3-128 of the manifest's digest and every bucket's, in order."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(manifest_digest) + b"".join(map(as_bytes, digests)))


def as_bytes(digest: bytes | torch.Tensor) -> bytes:
    """A bucket's digest; waits for one that a GPU is still to compute."""
    return digest if isinstance(digest, bytes) else digest.cpu().numpy().tobytes()
