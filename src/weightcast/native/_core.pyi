"""The extension, in C. Tables are contiguous buffers of rows of unsigned 64-bit words; sizes and strides are in bytes.

Every call but `places`, `pairs` and `same_members` lets go of the GIL, unless it has less than 64 KiB to do. `threads`
counts the calling one, and is a most. `cached`: the targets are read again soon, and are not streamed past the caches.
Addresses are not checked here: `weightcast.native` hands over only tables that it has checked.
"""

from typing import Any, TypeAlias

import numpy as np

Table: TypeAlias = bytes | np.ndarray[Any, Any]

CHUNK_BYTES: int
MAX_THREADS: int
VECTORS: str

def copy(rows: Table, threads: int, cached: bool, /) -> None:
    """Copy rows of (target, source, size)."""

def copy_strided(rows: Table, threads: int, cached: bool, /) -> None:
    """Copy rows of (target, source, run, then three times: count, target stride, source stride)."""

def digest(address: int, size: int, rows: Table, threads: int, /) -> tuple[int, int]:
    """What chunks bring to the digest of a payload, by rows of (first, end); chunk 0 brings its length."""

def copy_and_digest(address: int, size: int, rows: Table, threads: int, cached: bool, /) -> tuple[int, int]:
    """Fill a payload by rows of (offset, source, size), in order; what the chunks bring that they cover whole.

    Source 0: zeros. A source that is its own place: what lies there.
    """

def digest_words(address: int, itemsize: int, first: int, dims: Table, threads: int, /) -> tuple[int, int]:
    """The lanes of the digest of tensors, of elements of 1, 2, 4, 8 or 16 bytes by dims of (count, stride, step).

    `step` is counted, and `first` is numbered, in elements of the global tensor. Raises ValueError.
    """

def populate(address: int, size: int, /) -> bool:
    """Have memory behind these pages; False if the kernel can't. Raises OSError."""

def places(tensors: list[Any], /) -> bytes:
    """Of each tensor its address, dtype, device, number of dims, sizes and strides, for being compared."""

def pairs(targets: list[Any], sources: list[Any], piece_bytes: int, /) -> tuple[bytes, bytes, bytes]:
    """The rows of `copy` and of `copy_strided`, each with its pair's number behind, and how each pair is copied.

    0: as bytes; 1: strided; 2: not here. Rows have at most about `piece_bytes`.
    """

def same_members(dicts: list[dict[str, Any]], sizes: list[int], names: list[str], values: list[Any], /) -> bool:
    """Whether the dicts have so many members each, and these names and very values, in order."""
