"""Deltas decoded by their definition in native/deltas.py, in plain Python: the oracle of the native core."""

from __future__ import annotations

CHUNK_WORDS = 1 << 20


class Bits:
    """The bits of a code, the lowest of each byte first."""

    def __init__(self, data: bytes) -> None:
        self.number, self.done = int.from_bytes(data, "little"), 0

    def get(self, count: int) -> int:
        found = self.number >> self.done & ((1 << count) - 1)
        self.done += count
        return found

    def zeros(self) -> int:
        count = 0
        while not self.get(1):
            count += 1
        return count

    def number_of(self, parameter: int) -> int:
        zeros = self.zeros()
        return self.get(20) if zeros == 20 else zeros << parameter | self.get(parameter)


def code(data: bytes) -> tuple[dict[int, int], bytes]:
    """The differences by position, and what is behind the code."""
    header = Bits(data[:8])
    count, num_large, gap_bits, run_bits, order = (header.get(bits) for bits in (21, 21, 5, 5, 5))
    bits, position, changes = Bits(data[8:]), -1, []
    for _ in range(count):
        position += 1 + bits.number_of(gap_bits)
        changes.append((position, -1 if bits.get(1) else 1))
    at = -1
    for _ in range(num_large):
        at += 1 + bits.number_of(run_bits)
        length = bits.zeros()
        upper = (1 << length | bits.get(length)) - 1
        position, sign = changes[at]
        changes[at] = position, sign * ((upper << order | bits.get(order)) + 2)
    return dict(changes), data[8 + -(-bits.done // 8) :]


def decoded(delta: bytes, num_words: int, word_bytes: int, base: bytes) -> dict[int, int]:
    """The differences by position, of all chunks."""
    num_chunks = -(-num_words // CHUNK_WORDS)
    rest, found = delta[8 * num_chunks :], {}
    for chunk in range(num_chunks):
        row = delta[8 * chunk : 8 * chunk + 8]
        size, count, kind = int.from_bytes(row[:4], "little"), int.from_bytes(row[4:7], "little"), row[7]
        data, rest = rest[:size], rest[size:]
        first, last = chunk * CHUNK_WORDS, min(num_words, (chunk + 1) * CHUNK_WORDS)
        words = [int.from_bytes(base[word_bytes * i : word_bytes * (i + 1)], "little") for i in range(first, last)]
        changes: dict[int, int] = {}
        if kind == 1:
            changes, data = code(data)
        if kind == 2:
            bounds, data = data[1 : data[0]], data[data[0] :]
            keys = [word & 0x7F if word_bytes == 1 else word >> (8 * word_bytes - 9) & 0xFF for word in words]
            for c in range(len(bounds) + 1):
                low, high = bounds[c - 1] if c else 0, bounds[c] if c < len(bounds) else 256
                positions = [i for i, key in enumerate(keys) if low <= key < high]
                ranked, data = code(data)
                changes |= {positions[rank]: difference for rank, difference in ranked.items()}
        if kind == 3:
            signs = Bits(data[word_bytes * len(words) :])
            for i in range(len(words)):
                word = int.from_bytes(data[word_bytes * i : word_bytes * (i + 1)], "little")
                if difference := word - (signs.get(1) << 8 * word_bytes):
                    changes[i] = difference
            data = b""
        assert not data
        assert len(changes) == count
        found |= {first + i: difference for i, difference in changes.items()}
    assert not any(rest)
    assert len(rest) < 8
    return found
