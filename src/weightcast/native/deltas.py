"""Deltas of payloads in host memory: the words that changed are encoded, decoded, and added to memory.

A word has 1, 2 or 4 bytes, like the words of the digest of tensors: elements of 8 or 16 bytes are several words.
Invariant: all changes of a delta are decoded before the first one is added, so that a damaged delta changes nothing.

The format. Both ends know the number of words and their size from the plan. A difference is the new word minus the old
one, both read as signed integers; NaN and signed zeros are bits like all others. It has one bit more than a word and
never wraps around, so that the digest of a tensor can be updated by it, and an added difference can be subtracted
again. All numbers are little-endian; bits are counted from the lowest bit of each byte.

`table | chunks | zeros up to a multiple of 8 bytes`. A chunk has 2^20 words; the last one has the remaining words. The
table has one row for each chunk:

| bytes | field |
|---|---|
| 0 to 3 | size of the chunk's code in bytes |
| 4 to 6 | number of its words that differ, at most the number of its words and at most 4 for each byte of the code |
| 7 | kind: 0 no word differs (size and number are 0), 1 one code, 2 codes by classes, 3 dense |

**A code** of changes at ascending positions is a header of 64 bits, then a string of bits, padded with zeros to whole
bytes. The header, from its lowest bit: 21 bits, the number of changes; 21 bits, the number of large changes (magnitude
above 1); 5 bits each, the parameters g, r and e (g and r at most 19, e at most 31); 7 zeros.

- For each change: the number of words between it and the change before (or the chunk's start) as a Rice code with
  parameter g, then its sign, 1 if it is negative.
- Then for each large change: the number of changes between it and the large change before as a Rice code with parameter
  r, then its magnitude minus 2 as an exponential Golomb code with parameter e.
- Rice code of n with parameter k: (n >> k) zeros, a one, the k lowest bits of n. If there would be 20 zeros or more: 20
  zeros, a one, n in 20 bits.
- Exponential Golomb code of n with parameter e: let m = (n >> e) + 1 have b + 1 bits; then b zeros, a one, the b lowest
  bits of m, the e lowest bits of n.

**Codes by classes** need the former payload at both ends. The key of one of its words is the 8 bits after the sign bit,
in a word of 1 byte the 7 bits: for bfloat16 that is the exponent. One byte is the number of classes, 1 to 6; then one
byte for each class but the last is its bound, larger than the bound before. A word belongs to the first class whose
bound is larger than its key, or else to the last class. Then follows one code for each class, whose positions count
only words of that class.

**Dense**: the differences of all words modulo 2^8, 2^16 or 2^32, one after the other; then one bit for each word, 1 if
its difference is negative; zeros up to a whole byte.

A writer uses dense if a code would not be shorter, and no delta at all if it would not be shorter than the payload. It
may choose parameters and classes in any way. A reader MUST check the table before it allocates memory, MUST refuse
positions, numbers and sizes that these rules don't allow (including bytes and set bits after an end), and MUST decode
all of a delta before it changes memory. It MUST also know that its payload is the base: a delta that is added twice, or
to another payload, gives weights that no trainer had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch

from weightcast.native import _core
from weightcast.native.tables import Lanes, Rows, require_host_bytes

_CHUNK_WORDS = 1 << 20
_ROW_BYTES = 8

Pieces: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""Rows of (first word, number of words, position of the first one in its tensor, the two lanes of their digest)."""


@dataclasses.dataclass(frozen=True)
class Changes:
    """Ascending positions of the words that changed, and the signed difference of each.

    A difference has one bit more than its word and never wraps around.
    """

    positions: np.ndarray[Any, np.dtype[np.uint32]]
    differences: np.ndarray[Any, np.dtype[np.int64]]
    num_words: int
    word_bytes: int

    def apply(self, payload: torch.Tensor, *, lanes: Lanes | None = None, threads: int = 1) -> ChangedWords:
        """Add the differences to the words of a payload, and return these words.

        `lanes`: those of the payload, which become those of what it has then. Memory: 8 bytes for each change.
        Raises ValueError, with nothing changed, for a payload of another length, or with `lanes` and not a multiple of
        8 bytes.
        """
        _require_words(payload, self.num_words, self.word_bytes)
        former, words = (np.empty(len(self.positions), np.uint32) for _ in range(2))
        _core.delta_apply(
            *(payload.data_ptr(), self.num_words, self.word_bytes, self.positions, self.differences),
            *(np.empty(0, np.uint64) if lanes is None else lanes, former, words, threads),
        )
        return ChangedWords(self.positions, former, words, self.num_words, self.word_bytes)


@dataclasses.dataclass(frozen=True)
class ChangedWords:
    """Ascending positions of the words of a payload that changed; each word's bits as they were and as they are."""

    positions: np.ndarray[Any, np.dtype[np.uint32]]
    former: np.ndarray[Any, np.dtype[np.uint32]]
    words: np.ndarray[Any, np.dtype[np.uint32]]
    num_words: int
    word_bytes: int

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return 3 * self.positions.nbytes

    def can_scatter(self, rows: Rows) -> bool:
        """Return whether `scatter` takes these copies: each reads a word of the payload at most once."""
        return _core.delta_can_scatter(rows, self.num_words, self.word_bytes)

    def scatter(self, rows: Rows, *, former: bool = False, threads: int = 1) -> None:
        """Write the words to where copies of the payload have put the former ones.

        `rows`: of `CopyTable.rows_in` the payload. `former`: write the words as they were. Raises ValueError, before it
        writes any, for a copy that reaches outside of the payload, reads a word twice, or has a part of a word.
        """
        words = self.former if former else self.words
        _core.delta_scatter(rows, self.num_words, self.word_bytes, self.positions, words, threads)


def pieces_of(rows: Iterable[tuple[int, ...]]) -> Pieces:
    """Return an array of such rows."""
    return np.array([*rows], np.uint64).reshape(-1, 5)


def encode(
    base: torch.Tensor,
    payload: torch.Tensor,
    word_bytes: int,
    *,
    by_classes: bool = False,
    advance: bool = False,
    pieces: Pieces | None = None,
    threads: int = 1,
) -> tuple[torch.Tensor | None, int]:
    """Return the delta from `base` to `payload`, or None if it would be no shorter, and the number of changed words.

    `by_classes` gives a shorter delta, but decoding needs the base and reads all of it. `advance` writes the new words
    into the base. The digests of `pieces`, which are in order, become those of the new words. Memory besides the delta:
    for each thread 12 bytes for each change within 2**20 words, or 24 by classes. Raises ValueError for payloads of
    different lengths, MemoryError; then some words of the base and some digests may be new.
    """
    num_words = _num_words(base, payload, word_bytes)
    # The kernel allocates pages of `out` only as far as the delta reaches.
    out = torch.empty(_core.delta_encode_room(num_words, word_bytes), dtype=torch.uint8)
    num_bytes, num_changed = _core.delta_encode(
        *(base.data_ptr(), payload.data_ptr(), num_words, word_bytes, by_classes, advance),
        *(out.data_ptr(), out.nbytes, np.empty(0, np.uint64) if pieces is None else pieces, threads),
    )
    return out[:num_bytes].clone() if num_bytes else None, num_changed


def without_changes(num_words: int) -> torch.Tensor:
    """Return the delta of a payload of `num_words` words of which none has changed."""
    return torch.zeros(-(-num_words // _CHUNK_WORDS) * _ROW_BYTES, dtype=torch.uint8)


def count_changed(base: torch.Tensor, payload: torch.Tensor, word_bytes: int, *, threads: int = 1) -> int:
    """Return the number of words that differ. Raises ValueError for payloads of different lengths, MemoryError."""
    num_words = _num_words(base, payload, word_bytes)
    words = base.data_ptr(), payload.data_ptr(), num_words, word_bytes
    return _core.delta_encode(*words, False, False, 0, 0, np.empty(0, np.uint64), threads)[1]


def decode(
    delta: torch.Tensor, num_words: int, word_bytes: int, *, base: torch.Tensor | None = None, threads: int = 1
) -> Changes:
    """Return the changes of a payload of `num_words` words. A delta by classes needs `base`, the former payload.

    Memory: 12 bytes for each change; a change takes at least two bits of the delta. Raises ValueError if the delta is
    damaged, is of other words, or needs a base. A wrong base gives wrong changes, or that error.
    """
    require_host_bytes(delta)
    if base is not None:
        _require_words(base, num_words, word_bytes)
    found = delta.numpy()
    count = _core.delta_count(found, num_words, word_bytes, base is not None)
    positions, differences = np.empty(count, np.uint32), np.empty(count, np.int64)
    address = 0 if base is None else base.data_ptr()
    _core.delta_decode(found, address, num_words, word_bytes, positions, differences, threads)
    positions.flags.writeable = differences.flags.writeable = False
    return Changes(positions, differences, num_words, word_bytes)


def _num_words(base: torch.Tensor, payload: torch.Tensor, word_bytes: int) -> int:
    if word_bytes not in (1, 2, 4):
        raise ValueError(f"word_bytes is {word_bytes}, expected 1, 2 or 4")
    num_words = payload.nbytes // word_bytes
    _require_words(payload, num_words, word_bytes)
    _require_words(base, num_words, word_bytes)
    return num_words


def _require_words(payload: torch.Tensor, num_words: int, word_bytes: int) -> None:
    require_host_bytes(payload)
    if payload.nbytes != num_words * word_bytes:
        what = f"the payload has {payload.nbytes} bytes"
        raise ValueError(f"{what}, expected {num_words * word_bytes}: {num_words} words of {word_bytes} bytes")
