"""Turns (manifest, bytes) into tensors and back: arenas, buffers, views, digests, headers. No other file does.

A bucket is a header of HEADER_BYTES and a payload, each a flat uint8 tensor. Invariants: a view is made once for each
payload and kept; packing a bucket is a few calls however many tensors it holds; a payload is handed out only after
`check_bucket` has accepted it. The formats are those of `docs/wire-format.md`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import mmap
import struct
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec
import torch

from weightcast.errors import IntegrityError
from weightcast.format.device_digest import device_digest
from weightcast.format.geometry import Region, row_major
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

DIGEST_BYTES = 16

HEADER_BYTES = 256
"""Equal to the alignment, so that a payload that lies behind its header is aligned."""
_HEADER = struct.Struct("<8sII16sQQ8sQQ16s168s")
_MAGIC = b"wcbucket"
_RESERVED = bytes(168)
_DIGEST = slice(72, 88)

Digest: TypeAlias = bytes | torch.Tensor
"""Of a payload: 16 bytes; on a GPU two int64, which may still be being computed."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BucketBuffer:
    """Memory of one bucket: flat uint8 tensors. The payload lies behind its header, unless an arena keeps them apart.

    `payload` has at least the bytes of the bucket's raw payload.
    """

    header: torch.Tensor
    payload: torch.Tensor

    @classmethod
    def of(cls, memory: torch.Tensor) -> BucketBuffer:
        """A header, and a payload in what is left of a flat uint8 tensor."""
        return cls(memory[:HEADER_BYTES], memory[HEADER_BYTES:])

    def flat(self, num_bytes: int) -> torch.Tensor:
        """The first `num_bytes` of header and payload as one tensor. The payload must lie behind its header."""
        assert self.payload.data_ptr() == self.header.data_ptr() + HEADER_BYTES
        return self.header.as_strided((num_bytes,), (1,))


def slot_size_bytes(manifest: Manifest) -> int:
    """Bytes of memory that can hold any bucket of the manifest, header and payload."""
    return HEADER_BYTES + manifest.max_bucket_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Places of a manifest's buckets in an arena: bucket k is in slot `slots[k]`.

    The header of bucket k begins at byte `headers[k]`, its payload of `sizes_bytes[k]` at `payloads[k]`.
    """

    slots: tuple[int, ...]
    headers: tuple[int, ...]
    payloads: tuple[int, ...]
    sizes_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The arena that they need."""
        return max((start + size for start, size in zip(self.payloads, self.sizes_bytes, strict=True)), default=0)


def arena_layout_of(manifest: Manifest, *, num_slots: int, staged: bool, adjoining: bool = False) -> ArenaLayout:
    """Staged: every bucket has a slot of its own. Streaming: the k-th one goes into slot k % num_slots. Page-aligned.

    The k-th one in the order of the manifest's rounds. A payload lies behind its header. With `adjoining`, for what is
    staged, all headers come first, and the payloads lie end to end behind them, so that a tensor that is cut over
    several is one piece of memory.
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
        """The buffer whose header begins at byte `header`, its payload of `size_bytes` at `payload`."""
        known, where = self._buffers.get(index), (header, payload, size_bytes)
        if known is None or known[0] != where:
            whole = self._memory
            buffer = BucketBuffer(whole[header : header + HEADER_BYTES], whole[payload : payload + size_bytes])
            known = self._buffers[index] = where, buffer
        return known[1]

    def at(self, layout: ArenaLayout, index: int) -> BucketBuffer:
        """The buffer of bucket `index` where a layout places it."""
        return self.get(index, layout.headers[index], layout.payloads[index], layout.sizes_bytes[index])

    def forget_above(self, num_buckets: int) -> None:
        """Drop the buffers of indices that a new manifest does not have."""
        self._buffers = {index: known for index, known in self._buffers.items() if index < num_buckets}


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One piece of a bucket: `tensor` is the record's index in the manifest."""

    tensor: int
    record: TensorRecord
    piece: Piece

    @property
    def is_whole(self) -> bool:
        return len(self.record.pieces) == 1

    @property
    def num_bytes(self) -> int:
        return self.piece.region.numel * ITEMSIZE_BYTES[self.record.dtype]


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

    def views(self, index: int, payload: torch.Tensor) -> list[torch.Tensor]:
        """One view for each entry of bucket `index`, of its region's shape and dtype, into `payload`.

        The views of the last payload seen for a bucket are kept, so a transport that recycles its buffers (the same
        tensor objects) pays for them once.
        """
        cached = self._views[index]
        if cached is not None and cached[0] is payload:
            return cached[1]
        whole, entries, payload = payload, self.entries[index], payload[: self.manifest.buckets[index]]
        typed = {dtype: payload.view(TORCH_DTYPES[dtype]) for dtype in {entry.record.dtype for entry in entries}}
        views = []
        starts = {dtype: int(whole_of_dtype.storage_offset()) for dtype, whole_of_dtype in typed.items()}
        for entry in entries:
            dtype, sizes = entry.record.dtype, entry.piece.region.sizes
            offset = starts[dtype] + entry.piece.offset_bytes // ITEMSIZE_BYTES[dtype]
            views.append(typed[dtype].as_strided(sizes, row_major(sizes), offset))
        self._views[index] = (whole, views)
        return views

    def gaps(self, index: int) -> list[tuple[int, int]]:
        """Return the alignment gaps between the pieces of bucket `index` and behind the last, as (first, end).

        Packers fill gaps with zeros, so that equal weights make equal buckets, whatever was in the buffer before.
        """
        found = self._gaps.get(index)
        if found is None:
            end, found = 0, list[tuple[int, int]]()
            for entry in self.entries[index]:
                found.append((end, entry.piece.offset_bytes))
                end = max(end, entry.piece.offset_bytes + entry.num_bytes)
            found.append((end, self.manifest.buckets[index]))
            found = self._gaps[index] = [(start, stop) for start, stop in found if start < stop]
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
    """A view of `tensor` whose last dim is in two where that of `view` is."""
    return torch.unflatten(tensor, -1, view.shape[-2:]) if view.ndim > tensor.ndim else tensor


def payload_digest(payload: torch.Tensor) -> bytes:
    """The 16-byte digest of a contiguous uint8 payload whose length is a multiple of 8. Waits for a GPU."""
    if payload.is_cuda:
        return device_digest(payload).cpu().numpy().tobytes()
    return added(digest(payload))


def queued_digest(payload: torch.Tensor) -> Digest:
    """Return the digest of a payload; see `payload_digest`. On a GPU it is queued on the current stream."""
    return device_digest(payload) if payload.is_cuda else payload_digest(payload)


# --- codecs ---


class Codec(Protocol):
    """Encodes a payload once it was filled, before its header is written; decodes one that was checked.

    `name`: what headers call it, at most 8 ASCII characters. An encoded payload is never longer than the raw one,
    and its length is a multiple of 8, for the digest.
    """

    name: str

    def encode(self, index: int, payload: torch.Tensor, raw_bytes: int) -> int:
        """Encode the first `raw_bytes` of bucket `index`'s payload in place; return the encoded length in bytes."""

    def decode(self, index: int, payload: torch.Tensor, encoded_bytes: int, raw_bytes: int) -> torch.Tensor:
        """A payload of at least `raw_bytes`, of which `payload` begins with `encoded_bytes`; it may be `payload`."""


class RawCodec:
    """Payloads travel as they are."""

    name = "raw"

    def encode(self, index: int, payload: torch.Tensor, raw_bytes: int) -> int:
        return raw_bytes

    def decode(self, index: int, payload: torch.Tensor, encoded_bytes: int, raw_bytes: int) -> torch.Tensor:
        return payload


RAW = RawCodec()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (RAW,)}
"""Those that a worker can decode, by name."""


# --- headers ---


class BucketHeader(msgspec.Struct, frozen=True):
    """The fields of a header, in order. `raw_bytes`, `encoded_bytes`: of the payload, before and after its codec.

    `digest`: of the encoded payload. `origin`: which of the memories that bytes leave from.
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
    def codec_name(self) -> str:
        return self.codec.rstrip(b"\0").decode("ascii", "backslashreplace")


def write_header(
    header: torch.Tensor,
    version: WeightVersion,
    index: int,
    digest: Digest,
    *,
    raw_bytes: int,
    encoded_bytes: int,
    codec: str,
    origin: int = 0,
) -> None:
    """Write the header of a bucket whose encoded payload has this digest; on a GPU this is only queued."""
    data = _HEADER.pack(
        _MAGIC,
        PROTOCOL,
        origin,
        bytes.fromhex(version.run),
        version.number,
        index,
        codec.encode("ascii"),
        raw_bytes,
        encoded_bytes,
        digest if isinstance(digest, bytes) else b"",
        _RESERVED,
    )
    if header.is_cuda:
        # From memory that is not page-locked: the driver has read so few bytes when the call returns, and pinning them
        # would be refused while another thread captures a graph.
        header.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8), non_blocking=True)
    else:
        header.numpy().data[:] = data
    if isinstance(digest, torch.Tensor):
        header[_DIGEST].view(torch.int64).copy_(digest)


def header_digest(header: torch.Tensor) -> bytes:
    """The digest that a written header names."""
    return bytes(header[_DIGEST].cpu().numpy())


def check_bucket(
    buffer: BucketBuffer,
    num_bytes: int,
    version: WeightVersion,
    index: int,
    origin: int = 0,
    *,
    only_header: bool = False,
) -> BucketHeader:
    """Prove that `buffer` holds bucket `index` of `version`, unharmed; return its header. Waits for a GPU.

    `num_bytes`: of the raw payload, and `origin`, by the plan. `only_header`: another process checks the payload.
    Raises IntegrityError, which names what was found and expected.
    """
    if buffer.header.numel() < HEADER_BYTES:
        raise IntegrityError(
            f"bucket {index}: {buffer.header.numel()} bytes arrived, a header of {HEADER_BYTES} was expected"
        )
    header, digest = buffer.header, None
    if header.is_cuda and buffer.payload.numel() >= num_bytes:
        # With the digest of a raw payload, so that the host waits once.
        header = torch.cat([header[:HEADER_BYTES], device_digest(buffer.payload[:num_bytes]).view(torch.uint8)]).cpu()
        digest = header[HEADER_BYTES:].numpy().tobytes()
    found = BucketHeader(*_HEADER.unpack_from(header.cpu().numpy().data))
    codec = found.codec_name
    encoded_bytes = num_bytes if codec == "raw" else min(found.encoded_bytes // 8 * 8, num_bytes)
    expected = BucketHeader(
        _MAGIC,
        PROTOCOL,
        origin,
        bytes.fromhex(version.run),
        version.number,
        index,
        found.codec if codec in CODECS else b"raw".ljust(8, b"\0"),
        num_bytes,
        encoded_bytes,
        found.digest,
    )
    if found != expected:
        raise IntegrityError(f"bucket {index}: its header says {_differing(found, expected)}")
    if buffer.payload.numel() < encoded_bytes:
        raise IntegrityError(
            f"bucket {index}: {buffer.payload.numel()} bytes arrived behind its header, {encoded_bytes} were expected"
        )
    if only_header:
        return found
    if digest is None or encoded_bytes != num_bytes:
        digest = payload_digest(buffer.payload[:encoded_bytes])
    if digest != found.digest:
        raise IntegrityError(
            f"bucket {index}: the digest of its {encoded_bytes} bytes is {digest.hex()}, its header says "
            f"{found.digest.hex()}: bytes were changed on the way; publish again"
        )
    return found


def decoded(buffer: BucketBuffer, header: BucketHeader) -> torch.Tensor:
    """The raw payload of a bucket that `check_bucket` has accepted; of codec raw it is the buffer's own."""
    codec = CODECS[header.codec_name]
    return codec.decode(header.index, buffer.payload, header.encoded_bytes, header.raw_bytes)


def _differing(found: BucketHeader, expected: BucketHeader) -> str:
    """The fields that differ, as found and as expected. Without the magic no other field means anything."""
    fields = [name for name in found.__struct_fields__ if getattr(found, name) != getattr(expected, name)]
    fields = fields[:1] if fields[0] == "magic" else fields
    said, wanted = (", ".join(_shown(header, field) for field in fields) for header in (found, expected))
    what = f"{said}, expected {wanted}"
    return f"{what}: update one end" if fields[0] in ("magic", "protocol") else what


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
    """The digest of a whole update in hex: BLAKE2b, 128 bits, of the manifest's digest and every bucket's, in order."""
    return hashlib.blake2b(bytes.fromhex(manifest_digest) + b"".join(all_bytes(digests)), digest_size=16).hexdigest()


def all_bytes(digests: Sequence[Digest]) -> list[bytes]:
    """Every digest; waits once for those that a GPU is still to compute."""
    queued = [digest for digest in digests if isinstance(digest, torch.Tensor)]
    if not queued:
        return [digest for digest in digests if isinstance(digest, bytes)]
    rows = iter(torch.stack(queued).cpu().numpy())
    return [digest if isinstance(digest, bytes) else next(rows).tobytes() for digest in digests]


def as_bytes(digest: bytes | torch.Tensor) -> bytes:
    """A bucket's digest; waits for one that a GPU is still to compute."""
    return digest if isinstance(digest, bytes) else digest.cpu().numpy().tobytes()
