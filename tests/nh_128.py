"""The digest of buckets, as weightcast.format.bucket_digest defines it, in plain Python: the oracle of all other forms.

The chance that it misses a damage is below 2^-62 (2^-64 + 2^-63), for any damage that was not made with the keys in
hand, over keys that are random:

- A lane of a chunk that was damaged changes by a given amount, 0 among them, with a chance of at most 2^-32. Let the
  first halves of a word differ, c and c' with their key, and fix all keys but that of its other half, k. Of all 2^32 k
  at most one gives c (k + m mod 2^32) - c' (k + m' mod 2^32) a given value modulo 2^64. The values for two k differ by
  c x - c' x'. Either x and x' are equal, so that it is (c - c') x and neither 0 nor 2^64 in size, or x' = x - 2^32 (or
  the other way round), so that it is c x + c' (2^32 - x), which is above 0 and below 2^64. The lanes' keys are
  independent of each other: 2^-64 for both. Damage within 32 bits of a word can't leave both lanes as they were, since
  no word has equal keys in both.
- A chunk whose lanes differ changes its 128-bit product by a given amount with a chance of at most 2^-64, by the same
  argument with halves of 64 bits; the two sums, between which nothing is carried, with at most 2^-63. Its keys are no
  other chunk's: more damage in other chunks, also the same damage in equal chunks, does not raise that chance.
- Payloads of different lengths that are equal once filled up differ by their lengths alone; others differ in a chunk.
"""

from __future__ import annotations

_WORD, _HALF = (1 << 64) - 1, (1 << 32) - 1
_PI = (0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917)


def mix(z: int) -> int:
    """splitmix64: its increment, then its output function."""
    z = (z + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


KEYS = [[mix(seed + i) for i in range(256)] for seed in _PI[:2]]
"""Of each lane, of each word of a chunk."""


def product(word: int, key: int) -> int:
    """The product of a word's halves, to each of which the key's is added modulo 2^32."""
    return (((word & _HALF) + (key & _HALF)) & _HALF) * (((word >> 32) + (key >> 32)) & _HALF)


def chunk_key(lane: int, number: int) -> int:
    """The key of a lane of chunk `number`."""
    return mix(_PI[2 + lane] + number)


def chunk_product(lanes: list[int], number: int) -> int:
    """The 128-bit number that chunk `number` brings to the digest."""
    return ((lanes[0] + chunk_key(0, number)) & _WORD) * ((lanes[1] + chunk_key(1, number)) & _WORD)


def nh_128(data: bytes) -> bytes:
    """The 16 bytes of a payload's digest."""
    sums = [len(data), 0]
    for number, start in enumerate(range(0, len(data), 2048)):
        chunk = data[start : start + 2048].ljust(2048, b"\0")
        words = [int.from_bytes(chunk[i : i + 8], "little") for i in range(0, 2048, 8)]
        lanes = [sum(map(product, words, keys)) & _WORD for keys in KEYS]
        found = chunk_product(lanes, number)
        sums = [sums[0] + (found & _WORD), sums[1] + (found >> 64)]
    return b"".join((s & _WORD).to_bytes(8, "little") for s in sums)
