"""Conversion between (manifest, bytes) and tensors: arenas, buffers, views, digests, headers. No other file does it.

A bucket is a header of HEADER_BYTES and a payload, each a flat uint8 tensor. Invariants: views are made once for each
payload and kept; packing a bucket takes a few calls however many tensors it has; a payload is used only after
`check_bucket` has accepted it. The formats are those of `docs/wire-format.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import mmap
import operator
import struct
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import torch

from weightcast.errors import IntegrityError
from weightcast.format.device_digest import device_digest
from weightcast.format.geometry import Region
from weightcast.format.manifest import (
    ITEMSIZE_BYTES,
    PROTOCOL,
    Manifest,
    Piece,
    TensorRecord,
    WeightVersion,
)
from weightcast.native.tables import added, digest

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE_BYTES if hasattr(torch, name)}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

HEADER_BYTES = 256
"""Equal to the alignment, so that a payload that follows its header is aligned."""
_HEADER = struct.Struct("<8sII16sQQ8sQQ16s168s")
_MAGIC = b"wcbucket"
_RESERVED = bytes(168)
_DIGEST = slice(72, 88)

Digest: TypeAlias = bytes | torch.Tensor
"""Digest of a payload: 16 bytes, or on a GPU a tensor of two int64, which may not be computed yet."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BucketBuffer:
    """Memory of one bucket: flat uint8 tensors. The payload follows its header, unless an arena separates them.

    `payload`: at least as long as the bucket's raw payload.
    """

    header: torch.Tensor
    payload: torch.Tensor

    @classmethod
    def of(cls, memory: torch.Tensor) -> BucketBuffer:
        """Return a buffer in a flat uint8 tensor: the header, and the rest as payload."""
        return cls(memory[:HEADER_BYTES], memory[HEADER_BYTES:])

    def flat(self, num_bytes: int) -> torch.Tensor:
        """Return the first `num_bytes` of header and payload as one tensor. The payload must follow its header."""
        assert self.payload.data_ptr() == self.header.data_ptr() + HEADER_BYTES
        return self.header.as_strided((num_bytes,), (1,))


def slot_size_bytes(manifest: Manifest) -> int:
    """Return the size of a slot for any bucket of the manifest, header and payload."""
    return HEADER_BYTES + manifest.max_bucket_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Layout of a manifest's buckets in an arena: bucket k is in slot `slots[k]`.

    The header of bucket k begins at byte `headers[k]`, its payload of `sizes_bytes[k]` at `payloads[k]`.
    """

    slots: tuple[int, ...]
    headers: tuple[int, ...]
    payloads: tuple[int, ...]
    sizes_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the arena."""
        return max(map(operator.add, self.payloads, self.sizes_bytes), default=0)


def arena_layout_of(manifest: Manifest, *, num_slots: int, staged: bool, adjoining: bool = False) -> ArenaLayout:
    """Return a page-aligned layout. Staged: one slot for each bucket.

    Streaming: the k-th bucket uses slot k % num_slots.

    Buckets are counted in send order (`Manifest.rounds`). A payload follows its header. With `adjoining` (staged only)
    all headers come first, and the payloads follow end to end, so that a tensor that is cut over several buckets is
    contiguous.
    """
    sizes, num_buckets = manifest.buckets, len(manifest.buckets)
    slots = tuple(range(num_buckets))
    if not staged:
        numbers = {index: number for number, index in enumerate(manifest.rounds)}
        slots = tuple(numbers[index] % num_slots for index in slots)
    if staged and adjoining:
        ends = itertools.accumulate(sizes, initial=pages(num_buckets * HEADER_BYTES))
        headers = tuple(index * HEADER_BYTES for index in range(num_buckets))
        return ArenaLayout(slots, headers, tuple(itertools.islice(ends, num_buckets)), sizes)
    if staged:
        ends = itertools.accumulate((pages(HEADER_BYTES + size) for size in sizes), initial=0)
        headers = tuple(itertools.islice(ends, num_buckets))
    else:
        stride = pages(slot_size_bytes(manifest))
        headers = tuple(slot * stride for slot in slots)
    return ArenaLayout(slots, headers, tuple(start + HEADER_BYTES for start in headers), sizes)


def pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Buffers:
    """Buffers in an arena, one for each bucket index, made once."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._memory = whole
        self._buffers: dict[int, tuple[tuple[int, int, int], BucketBuffer]] = {}

    def get(self, index: int, header: int, payload: int, size_bytes: int) -> BucketBuffer:
        """Return the buffer whose header begins at byte `header`, its payload of `size_bytes` at `payload`."""
        known, where = self._buffers.get(index), (header, payload, size_bytes)
        if known is None or known[0] != where:
            whole = self._memory
            buffer = BucketBuffer(whole[header : header + HEADER_BYTES], whole[payload : payload + size_bytes])
            known = self._buffers[index] = where, buffer
        return known[1]

    def at(self, layout: ArenaLayout, index: int) -> BucketBuffer:
        """Return the buffer of bucket `index` at its offset in a layout."""
        return self.get(index, layout.headers[index], layout.payloads[index], layout.sizes_bytes[index])

    def forget_above(self, num_buckets: int) -> None:
        """Drop the buffers of indices that a new manifest does not have."""
        if len(self._buffers) > num_buckets:
            self._buffers = {index: known for index, known in self._buffers.items() if index < num_buckets}


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One piece of a bucket: `tensor` is the record's index in the manifest."""

    tensor: int
    record: TensorRecord
    piece: Piece

    @property
    def num_bytes(self) -> int:
        return math.prod(self.piece.region.sizes) * ITEMSIZE_BYTES[self.record.dtype]

    def view(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the view of this piece in the raw payload of its bucket."""
        start = self.piece.offset_bytes
        stored = payload[start : start + self.num_bytes].view(TORCH_DTYPES[self.record.dtype])
        return stored.view(self.piece.region.sizes)


_offset_of = operator.attrgetter("piece.offset_bytes")


class Layout:
    """The buckets of a manifest as tensors: entries of each bucket in order of offset, and views of any buffer."""

    def __init__(self, manifest: Manifest) -> None:
        unknown = sorted({form.dtype for form in manifest.forms} - TORCH_DTYPES.keys())
        if unknown:
            raise ValueError(f"this torch {torch.__version__} has no dtype {', '.join(unknown)}: use a newer one")
        self.manifest = manifest
        self._views: list[tuple[torch.Tensor, list[torch.Tensor]] | None] = [None] * len(manifest.buckets)
        self._gaps: dict[int, list[tuple[int, int]]] = {}

    @functools.cached_property
    def entries(self) -> list[list[Entry]]:
        """The entries of each bucket, in order of offset."""
        found: list[list[Entry]] = [[] for _ in self.manifest.buckets]
        for index, record in enumerate(self.manifest.tensors):
            for piece in record.pieces:
                found[piece.bucket].append(Entry(index, record, piece))
        for entries in found:
            entries.sort(key=_offset_of)
        return found

    def views(self, index: int, payload: torch.Tensor) -> list[torch.Tensor]:
        """One view for each entry of bucket `index`, of its region's shape and dtype, into `payload`.

        The views of the last payload seen for a bucket are kept, so a transport that recycles its buffers (the same
        tensor objects) pays for them once.
        """
        cached = self._views[index]
        if cached is not None and cached[0] is payload:
            return cached[1]
        views = [entry.view(payload) for entry in self.entries[index]]
        self._views[index] = (payload, views)
        return views

    def gaps(self, index: int) -> list[tuple[int, int]]:
        """Return the alignment gaps between the pieces of bucket `index` and behind the last, as (first, end).

        Packers fill gaps with zeros, so that equal weights make equal buckets, whatever was in the buffer before.
        """
        found = self._gaps.get(index)
        if found is None:
            end, found = 0, self._gaps.setdefault(index, [])
            for entry in self.entries[index]:
                start = entry.piece.offset_bytes
                if end < start:
                    found.append((end, start))
                end = start + math.prod(entry.piece.region.sizes) * ITEMSIZE_BYTES[entry.record.dtype]
            if end < self.manifest.buckets[index]:
                found.append((end, self.manifest.buckets[index]))
        return found

    def clear_gaps(self, index: int, buffer: torch.Tensor) -> None:
        """Fill the gaps of bucket `index` with zeros. On a GPU it is only queued."""
        gaps = [buffer[start:end] for start, end in self.gaps(index)]
        if gaps:
            torch._foreach_zero_(gaps)

    def forget_views(self) -> None:
        """Drop every kept view, and with them the references to their payloads."""
        self._views = [None] * len(self._views)


def narrow(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The view of `tensor` that a region describes. `tensor` may have the region's last dim in two (see `Held`)."""
    if tensor.ndim > len(region.sizes):
        (*offsets, start), (*sizes, size), step = region.offsets, region.sizes, tensor.shape[-1]
        assert start % step == size % step == 0, f"{region} cuts through a dim of {step}"
        region = Region((*offsets, start // step, 0), (*sizes, size // step, step))
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def split_like(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` whose last dim is split like that of `view`."""
    return torch.unflatten(tensor, -1, view.shape[-2:]) if view.ndim > tensor.ndim else tensor


def payload_digest(payload: torch.Tensor) -> bytes:
    """Return the 16-byte digest of a contiguous uint8 payload with a multiple of 8 bytes. Waits for a GPU."""
    if payload.is_cuda:
        return device_digest(payload).cpu().numpy().tobytes()
    return added(digest(payload))


def queued_digest(payload: torch.Tensor) -> Digest:
    """Return the digest of a payload; see `payload_digest`. On a GPU it is queued on the current stream."""
    return device_digest(payload) if payload.is_cuda else payload_digest(payload)


# --- headers ---


class BucketHeader(msgspec.Struct, frozen=True):
    """The fields of a header, in order. `codec`: "raw", or "delta" (see `weightcast.native.deltas`).

    `raw_bytes`, `encoded_bytes`: of the payload, before and after its codec. `digest`: that of the encoded payload.
    `origin`: number of the origin.
    """

    magic: bytes
    protocol: int
    origin: int
    run: bytes
    version: int
    index: int
    codec: bytes
    raw_bytes: int
    encoded_bytes: int
    digest: bytes
    reserved: bytes = _RESERVED

    @property
    def is_delta(self) -> bool:
        return self.codec.rstrip(b"\0") == b"delta"


def write_header(
    header: torch.Tensor,
    version: WeightVersion,
    index: int,
    digest: Digest,
    *,
    raw_bytes: int,
    encoded_bytes: int | None = None,
    origin: int = 0,
) -> None:
    """Write the header of a bucket whose payload, as it is sent, has this digest. On a GPU the write is queued.

    `encoded_bytes`: the length of a delta; None for the raw payload.
    """
    data = _HEADER.pack(
        _MAGIC,
        PROTOCOL,
        origin,
        bytes.fromhex(version.run),
        version.number,
        index,
        b"raw" if encoded_bytes is None else b"delta",
        raw_bytes,
        raw_bytes if encoded_bytes is None else encoded_bytes,
        digest if isinstance(digest, bytes) else b"",
        _RESERVED,
    )
    if header.is_cuda:
        # From memory that is not page-locked: the driver copies so few bytes before the call returns, and pinning would
        # fail while another thread captures a graph.
        header.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8), non_blocking=True)
    else:
        header.numpy().data[:] = data
    if isinstance(digest, torch.Tensor):
        header[_DIGEST].view(torch.int64).copy_(digest)


def header_digest(header: torch.Tensor) -> bytes:
    """Return the digest in a written header."""
    return bytes(header[_DIGEST].cpu().numpy())


def check_bucket(
    buffer: BucketBuffer,
    num_bytes: int,
    version: WeightVersion,
    index: int,
    origin: int = 0,
    *,
    encoded_bytes: int | None = None,
    only_header: bool = False,
) -> BucketHeader:
    """Check that `buffer` has bucket `index` of `version`, intact; return its header. Waits for a GPU.

    `num_bytes`, `origin`: size of the raw payload, and origin, by the plan. `encoded_bytes`: the length of a delta;
    None for a raw payload. `only_header`: another process checks the payload.

    Raises IntegrityError with the found and the expected value.
    """
    if buffer.header.numel() < HEADER_BYTES:
        raise IntegrityError(
            f"bucket {index}: received {buffer.header.numel()} bytes, expected a header of {HEADER_BYTES}: publish "
            "again"
        )
    header, digest = buffer.header, None
    if header.is_cuda and buffer.payload.numel() >= num_bytes:
        # Together with the digest of a raw payload, so that the host waits only once.
        header = torch.cat([header[:HEADER_BYTES], device_digest(buffer.payload[:num_bytes]).view(torch.uint8)]).cpu()
        digest = header[HEADER_BYTES:].numpy().tobytes()
    found = BucketHeader(*_HEADER.unpack_from(header.cpu().numpy().data))
    codec = "raw" if encoded_bytes is None else "delta"
    encoded_bytes = num_bytes if encoded_bytes is None else encoded_bytes
    expected = BucketHeader(
        _MAGIC,
        PROTOCOL,
        origin,
        bytes.fromhex(version.run),
        version.number,
        index,
        codec.encode().ljust(8, b"\0"),
        num_bytes,
        encoded_bytes,
        found.digest,
    )
    if found != expected:
        raise IntegrityError(f"bucket {index}: its header says {_differing(found, expected)}")
    if buffer.payload.numel() < encoded_bytes:
        raise IntegrityError(
            f"bucket {index}: received {buffer.payload.numel()} bytes after its header, expected {encoded_bytes}: "
            "publish again"
        )
    if only_header:
        return found
    if digest is None or encoded_bytes != num_bytes:
        digest = payload_digest(buffer.payload[:encoded_bytes])
    if digest != found.digest:
        raise IntegrityError(
            f"bucket {index}: the digest of its {encoded_bytes} bytes is {digest.hex()}, its header says "
            f"{found.digest.hex()}: bytes were changed during the transfer; publish again"
        )
    return found


def delta_length(header: torch.Tensor) -> int | None:
    """Return the encoded length that a header of a delta names; None for any other header. Checks nothing else."""
    found = BucketHeader(*_HEADER.unpack_from(header.numpy().data))
    return found.encoded_bytes if found.is_delta else None


def _differing(found: BucketHeader, expected: BucketHeader) -> str:
    """Describe the fields that differ. With a wrong magic the other fields are meaningless, and not compared."""
    fields = [name for name in found.__struct_fields__ if getattr(found, name) != getattr(expected, name)]
    fields = fields[:1] if fields[0] == "magic" else fields
    said, wanted = (", ".join(_shown(header, field) for field in fields) for header in (found, expected))
    what = f"{said}, expected {wanted}"
    is_other_version = fields[0] in ("magic", "protocol")
    return f"{what}: install the same version of weightcast at both ends" if is_other_version else what


def _shown(header: BucketHeader, field: str) -> str:
    value = getattr(header, field)
    match field:
        case "run":
            return f"run {value.hex()}"
        case "reserved":
            return "reserved bytes that are zero" if value == _RESERVED else "reserved bytes that are not zero"
        case "codec" | "magic":
            return f"{field} {value.rstrip(bytes(1))!r}"
        case _:
            return f"{field.replace('_bytes', ' length')} {value}"


def root_digest(manifest_digest: str, digests: Sequence[Digest]) -> str:
    """Return the root digest of an update in hex: 128-bit BLAKE2b of the manifest's and every bucket's digest, in
    order.
    """
    return hashlib.blake2b(bytes.fromhex(manifest_digest) + b"".join(all_bytes(digests)), digest_size=16).hexdigest()


def all_bytes(digests: Sequence[Digest]) -> list[bytes]:
    """Return every digest as bytes. Waits once for those that a GPU has not computed yet."""
    if set(map(type, digests)) <= {bytes}:
        return list(digests)  # type: ignore[arg-type]
    rows = iter(torch.stack([digest for digest in digests if isinstance(digest, torch.Tensor)]).cpu().numpy())
    return [digest if isinstance(digest, bytes) else next(rows).tobytes() for digest in digests]


def as_bytes(digest: bytes | torch.Tensor) -> bytes:
    """Return a bucket's digest as bytes. Waits for one that a GPU has not computed yet."""
    return digest if isinstance(digest, bytes) else digest.cpu().numpy().tobytes()
