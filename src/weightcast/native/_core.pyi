"""The extension, in C. Tables are contiguous buffers of rows of unsigned 64-bit words; sizes and strides are in bytes.

Every call but `places`, `pairs`, `same_members` and `delta_count` lets go of the GIL, unless it has less than 64 KiB to
do. `threads` counts the calling one, and is a most. `cached`: the targets are read again soon, and are not streamed
past the caches.
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

    A target is a tensor, or the address of a contiguous one of its source's shape and dtype in host memory.
    0: as bytes; 1: strided; 2: not here. Rows have at most about `piece_bytes`.
    """

def same_members(dicts: list[dict[str, Any]], sizes: list[int], names: list[str], values: list[Any], /) -> bool:
    """Whether the dicts have so many members each, and these names and very values, in order."""

def delta_encode(
    base: int,
    words: int,
    num_words: int,
    width: int,
    by_classes: bool,
    advance: bool,
    out: int,
    room: int,
    threads: int,
    /,
) -> tuple[int, int]:
    """The bytes of the delta at `out`, 0 if the words themselves are as short; and how many words differ.

    `out` 0: words are only compared. `advance`: the base has the new words then. Raises MemoryError: it then has some.
    """

def delta_encode_room(num_words: int, width: int, /) -> int:
    """The bytes that `delta_encode` wants at `out`."""

def delta_count(delta: Any, num_words: int, width: int, has_base: bool, /) -> int:
    """The number of changes for which `delta_decode` wants room. Raises ValueError."""

def delta_decode(
    delta: Any, base: int, num_words: int, width: int, positions: Any, differences: Any, threads: int, /
) -> None:
    """Fill arrays of 32-bit positions and 64-bit differences. `base` 0: none. Raises ValueError."""

def delta_apply(
    target: int, num_words: int, width: int, positions: Any, differences: Any, subtract: bool, threads: int, /
) -> None:
    """Add differences to words at positions. Raises ValueError before it adds any."""

def delta_scatter(
    rows: Table, num_words: int, width: int, positions: Any, differences: Any, subtract: bool, threads: int, /
) -> None:
    """Add differences where rows of `copy_strided`, whose sources are offsets, would copy words. Raises ValueError."""

def delta_digest(
    rows: Table, num_words: int, num_tensors: int, positions: Any, differences: Any, threads: int, /
) -> bytes:
    """What changes add to the two lanes of each tensor's digest, by rows of (first, count, position, tensor).

    A row is a run of words in the payload, and where it begins in the global tensor, in words. Raises ValueError.
    """
