"""The extension in C. Tables are contiguous buffers of rows of unsigned 64-bit words; sizes and strides are in bytes.

Every function except `places`, `same_places`, `pairs`, `same_members` and `delta_count` releases the GIL, unless it has
less than 64 KiB to process. `threads` is the largest number of threads, including the calling one. `cached`: the
targets will be read again soon, so that stores don't bypass the caches. Addresses are not checked here:
`weightcast.native` passes only tables that it has checked.
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
    """Return the sum of the digests of chunks, given by rows of (first, end); chunk 0 adds the payload's length."""

def chunk_lanes(address: int, size: int, lanes: Table, threads: int, /) -> None:
    """Fill a row of two 64-bit words for each chunk of a payload: the chunk's lanes."""

def digest_lanes(lanes: Table, size: int, /) -> tuple[int, int]:
    """Return the digest of a payload of `size` bytes from its chunks' lanes."""

def copy_and_digest(address: int, size: int, rows: Table, threads: int, cached: bool, /) -> tuple[int, int]:
    """Fill a payload by rows of (offset, source, size), in order; return the sum of the digests of the filled chunks.

    A chunk counts if the rows cover all of it. Source 0 fills with zeros. A source that is the row's own target leaves
    the bytes that are there.
    """

def digest_words(address: int, itemsize: int, first: int, dims: Table, threads: int, /) -> tuple[int, int]:
    """Return the two lanes of a tensor's digest, for elements of 1, 2, 4, 8 or 16 bytes by dims (count, stride, step).

    `step` and the number `first` count elements of the global tensor. Raises ValueError.
    """

def quantise(rows: Table, threads: int, /) -> None:
    """Quantise matrices of bfloat16 or float32 to float8_e4m3fn by blocks, with a float32 scale for each block.

    Rows of (source, its row stride, itemsize, target, its row stride, scales, their row stride, number of rows and of
    columns, rows and columns of a block). Raises ValueError.
    """

def populate(address: int, size: int, /) -> bool:
    """Populate pages; return False if the kernel does not support that. Raises OSError."""

def places(tensors: list[Any], /) -> bytes:
    """Return the address, dtype, device, number of dims, sizes and strides of each tensor, as bytes to compare."""

def same_places(tensors: list[Any], former: bytes, /) -> bool:
    """Return true if `places` of these tensors are the `former` ones."""

def pairs(targets: list[Any], sources: list[Any], piece_bytes: int, /) -> tuple[bytes, bytes, bytes, bytes]:
    """Return rows for `copy` and for `copy_strided`, each followed by the number of its pair, a kind per pair, and the
    `places` of the targets.

    One of a pair may be the address of a contiguous tensor of the other one's shape and dtype in host memory. Kinds: 0,
    copied as bytes; 1, copied with strides; 2, not a copy that this module can make. A row has at most about
    `piece_bytes`.
    """

def same_members(dicts: list[dict[str, Any]], sizes: list[int], names: list[str], values: list[Any], /) -> bool:
    """Return true if each dict has this many members, with these names and these very objects, in order."""

def delta_encode(
    base: int,
    words: int,
    num_words: int,
    width: int,
    by_classes: bool,
    advance: bool,
    out: int,
    room: int,
    pieces: Any,
    threads: int,
    /,
) -> tuple[int, int]:
    """Write a delta to `out`; return its size and the number of words that differ.

    The size is 0 if the delta would be no shorter than the words. With `out` 0 the words are only compared. `advance`:
    write the new words into the base. `pieces`: rows of `deltas.Pieces`, whose digests follow. Raises MemoryError; the
    base and the digests may then have some of the new words.
    """

def delta_encode_room(num_words: int, width: int, /) -> int:
    """Return the number of bytes that `delta_encode` needs at `out`."""

def delta_count(delta: Any, num_words: int, width: int, has_base: bool, /) -> int:
    """Return the number of changes in a delta, for the arrays of `delta_decode`. Raises ValueError."""

def delta_decode(
    delta: Any, base: int, num_words: int, width: int, positions: Any, differences: Any, threads: int, /
) -> None:
    """Fill arrays of 32-bit positions and 64-bit differences. `base` is 0 for none. Raises ValueError."""

def delta_apply(
    payload: int,
    num_words: int,
    width: int,
    positions: Any,
    differences: Any,
    lanes: Any,
    former: Any,
    words: Any,
    threads: int,
    /,
) -> None:
    """Add differences to words at positions, and fill `former` and `words` with these words as they were and are.

    `lanes`: of `chunk_lanes`, which become those of the payload as it is; empty for none. Raises ValueError before it
    adds any.
    """

def delta_can_scatter(rows: Table, num_words: int, width: int, /) -> bool:
    """Return whether `delta_scatter` takes these rows."""

def delta_scatter(rows: Table, num_words: int, width: int, positions: Any, words: Any, threads: int, /) -> None:
    """Write the words at these positions of a payload to where rows of `copy_strided` bring them. Raises ValueError.

    The rows' sources are offsets in the payload.
    """
