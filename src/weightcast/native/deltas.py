"""Deltas of payloads in host memory: the words that changed, coded, decoded, and added to memory.

A word has 1, 2 or 4 bytes, those of the digest of tensors: elements of 8 or 16 bytes are several words. Invariant: the
changes of a delta are decoded whole before one of them is added, so that a damaged delta changes nothing.

The format. Both ends know the number of words and their size from the plan. A difference is that of the two words' bits
as signed integers, NaN and signed zeros like all others. It has one bit more than a word: nothing wraps around, so that
a digest of tensors can follow it, and what was added can be subtracted. All numbers are little-endian; bits are counted
from the lowest of each byte.

`table | chunks | zeros up to a multiple of 8 bytes`. A chunk has 2^20 words, the last one those that are left. Its
row in the table:

| bytes | field |
|---|---|
| 0 to 3 | size of the chunk's code in bytes |
| 4 to 6 | how many of its words differ, at most as many as it has and 4 for each byte |
| 7 | kind: 0 none differ (size and number are 0), 1 a code, 2 codes by classes, 3 dense |

**A code** of changes at ascending positions is a header of 64 bits, then one string of bits, filled up with zeros to
whole bytes. The header, from its lowest bit: 21 bits the number of changes, 21 of those that are large (by more than
1 either way), 5 each the parameters g, r and e (g and r at most 19, e at most 31), 7 zeros.

- Each change: the number of words between it and the one before (or the chunk's start) as a Rice code with g, then
  its sign, 1 if it is negative.
- Then each large one: the number of changes between it and the large one before as a Rice code with r, then its size
  less 2 as an exponential Golomb code with e.
- Rice code of n with k: (n >> k) zeros, a one, the k lowest bits of n. If that were 20 zeros or more: 20 zeros, a
  one, 20 bits of n.
- Exponential Golomb code of n with e: of (n >> e) + 1, which has b + 1 bits, b zeros, a one, its b lowest bits; then
  the e lowest bits of n.

**Codes by classes** need the payload before, at both ends. The key of one of its words is the 8 bits behind the sign,
in a word of 1 byte the 7 bits: of a bfloat16 its exponent. One byte says how many classes there are, 1 to 6; one byte
for each but the last is the class's bound, above the one before. A word is in the first class whose bound is above
its key, else in the last. Then a code for each class, which counts the words of that class alone.

**Dense**: the differences of all words modulo 2^8, 2^16 or 2^32, one behind the other; then a bit for each word, 1 if
its difference is negative; zeros up to a whole byte.

A writer takes dense where a code is no shorter, and no delta at all where that is no shorter than the payload. How it
chooses parameters and classes is its own affair. A reader MUST check the table before it allocates anything, MUST
refuse positions, numbers and sizes that the rules above don't allow, bytes and set bits behind an end among them, and
MUST decode all of a delta before it changes memory: adding twice, or to another base, gives weights that nobody had.
So it MUST also know that what it holds is the base.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from weightcast.native import _core
from weightcast.native.tables import CopyTable, Rows, Sums, require_host_bytes


@dataclasses.dataclass(frozen=True)
class Changes:
    """Positions of words that changed, ascending, and by how much each did as a signed integer.

    A difference has one bit more than its word, so that nothing wraps around: digests can follow it.
    """

    positions: np.ndarray[Any, np.dtype[np.uint32]]
    differences: np.ndarray[Any, np.dtype[np.int64]]
    num_words: int
    word_bytes: int

    def apply(self, payload: torch.Tensor, *, undo: bool = False, threads: int = 1) -> None:
        """Add the differences to the words of a payload, or subtract them. Raises ValueError for another length."""
        _require_words(payload, self.num_words, self.word_bytes)
        words, changes = (self.num_words, self.word_bytes), (self.positions, self.differences)
        _core.delta_apply(payload.data_ptr(), *words, *changes, undo, threads)

    def digests(self, runs: Rows, num_tensors: int, *, threads: int = 1) -> list[Sums]:
        """Return what the changes add to the two lanes of the digest of each tensor, modulo 2**64.

        `runs`: rows of (first word, number of words, the first one's position in the tensor, number of the tensor), in
        order. Raises ValueError for runs that overlap.
        """
        found = _core.delta_digest(runs, self.num_words, num_tensors, self.positions, self.differences, threads)
        return [(int(low), int(high)) for low, high in np.frombuffer(found, np.uint64).reshape(-1, 2)]


class ScatterTable:
    """Adds changes of a payload where a table of copies would put the payload's words. The payload is not read."""

    def __init__(self, copies: CopyTable, payload: torch.Tensor) -> None:
        """`copies`: from views of `payload`; those that it leaves to torch are left out."""
        require_host_bytes(payload)
        plain = np.tile(np.array([0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0]), (len(copies.rows), 1))
        plain[:, :3] = copies.rows
        self._rows = np.concatenate([plain, copies.strided])
        self._rows[:, 1] -= payload.data_ptr()
        self._copies, self._num_bytes = copies, payload.nbytes

    def run(self, changes: Changes, *, undo: bool = False, threads: int = 1) -> None:
        """Add the differences, or subtract them. Raises ValueError, before it adds any, for a copy that cuts words."""
        if changes.num_words * changes.word_bytes != self._num_bytes:
            raise ValueError(f"changes of {changes.num_words} words are not those of {self._num_bytes} bytes")
        words = changes.num_words, changes.word_bytes
        _core.delta_scatter(self._rows, *words, changes.positions, changes.differences, undo, threads)


def encode(
    base: torch.Tensor,
    payload: torch.Tensor,
    word_bytes: int,
    *,
    by_classes: bool = False,
    advance: bool = False,
    threads: int = 1,
) -> tuple[torch.Tensor | None, int]:
    """Return the delta from one payload to another, None if it is no shorter than that; and how many words changed.

    `by_classes`: shorter, but decoded only with the base at hand, all of which is read then. `advance`: the base has
    the new words afterwards. Memory besides the delta: for each thread 12 bytes for each change of 2**20 words, by
    classes 24. Raises ValueError for payloads of several lengths, MemoryError: some words of the base are then new.
    """
    num_words = _num_words(base, payload, word_bytes)
    # Its pages are used only as far as the delta reaches.
    out = torch.empty(_core.delta_encode_room(num_words, word_bytes), dtype=torch.uint8)
    num_bytes, num_changed = _core.delta_encode(
        *(base.data_ptr(), payload.data_ptr(), num_words, word_bytes, by_classes, advance),
        *(out.data_ptr(), out.nbytes, threads),
    )
    return out[:num_bytes].clone() if num_bytes else None, num_changed


def count_changed(base: torch.Tensor, payload: torch.Tensor, word_bytes: int, *, threads: int = 1) -> int:
    """Return how many words differ. Raises ValueError for payloads of several lengths, MemoryError."""
    num_words = _num_words(base, payload, word_bytes)
    words = base.data_ptr(), payload.data_ptr(), num_words, word_bytes
    return _core.delta_encode(*words, False, False, 0, 0, threads)[1]


def decode(
    delta: torch.Tensor, num_words: int, word_bytes: int, *, base: torch.Tensor | None = None, threads: int = 1
) -> Changes:
    """Return the changes of a payload of so many words. `base`: the payload before, for a delta by classes.

    Memory: 12 bytes for each change, which takes two bits of the delta at least. Raises ValueError if the delta is
    damaged, is of other words, or needs a base; a base that is not the right one gives other changes, or that error.
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
        raise ValueError(f"a word has 1, 2 or 4 bytes, not {word_bytes}")
    num_words = payload.nbytes // word_bytes
    _require_words(payload, num_words, word_bytes)
    _require_words(base, num_words, word_bytes)
    return num_words


def _require_words(payload: torch.Tensor, num_words: int, word_bytes: int) -> None:
    require_host_bytes(payload)
    if payload.nbytes != num_words * word_bytes:
        raise ValueError(f"a payload has {payload.nbytes} bytes, expected {num_words} words of {word_bytes}")
