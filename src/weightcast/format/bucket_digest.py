"""`nh-128`, the digest of a bucket's payload, in torch, for any device.

It is a sum over chunks of 2,048 bytes, which processes, threads and GPU programs can share out in any order: NH (Black,
Halevi, Krawczyk, Krovetz, Rogaway: UMAC, 1999), used twice.

- The payload is filled up with zeros to whole chunks. `w[j][i]` is the 64-bit little-endian word i (0 to 255) of chunk
  j.
- mix(z) is splitmix64: z + 0x9E3779B97F4A7C15, then its output function (z ^= z >> 30, z *= 0xBF58476D1CE4E5B9, z ^= z
  >> 27, z *= 0x94D049BB133111EB, z ^= z >> 31), modulo 2^64. The seeds S are digits of pi: `SEEDS`.
- Keys of words: `K[c][i] = mix(S[c] + i)` for lane c of 0 and 1. Keys of chunks: `A[j] = mix(S[2] + j)`,
  `B[j] = mix(S[3] + j)`.
- Lane c of chunk j: `L[c][j]` is the sum over i, modulo 2^64, of (lo w + lo K) x (hi w + hi K), where w is `w[j][i]`, K
  is `K[c][i]`, and the lower and the upper 32 bits, lo and hi, are added each modulo 2^32.
- `P[j] = (L[0][j] + A[j] mod 2^64) x (L[1][j] + B[j] mod 2^64)`, a number of 128 bits.
- The digest is two little-endian words: the payload's length in bytes plus the sum of the lower halves of all `P[j]`,
  and the sum of their upper halves, each modulo 2^64. The digest of an empty payload is 16 zeros.
"""

from __future__ import annotations

import torch

CHUNK_WORDS = 256
SEEDS = (0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917)
"""Digits of pi, after those that the digest of tensors uses."""
_INCREMENT, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of splitmix64."""
_HALF = (1 << 32) - 1
_PIECE_WORDS = 8192 * CHUNK_WORDS
"""Bytes that are digested at once; torch's temporaries are a few times as large."""


def torch_digest(words: torch.Tensor) -> torch.Tensor:
    """Return the digest of a payload's int64 words, as two int64 on their device. Does not wait for the device."""
    device, number = words.device, 0
    keys = [mixed(seed, torch.arange(CHUNK_WORDS, device=device)) for seed in SEEDS[:2]]
    digest = torch.zeros(2, dtype=torch.int64, device=device)
    digest[0] = 8 * words.numel()
    for piece in torch.split(words, _PIECE_WORDS):
        if piece.numel() % CHUNK_WORDS:
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % CHUNK_WORDS))
        chunks = piece.view(-1, CHUNK_WORDS)
        numbers = torch.arange(number, number := number + len(chunks), device=device)
        x, y = (
            (((chunks + key) & _HALF) * (((chunks >> 32) + (key >> 32)) & _HALF)).sum(dim=1) + mixed(seed, numbers)
            for key, seed in zip(keys, SEEDS[2:], strict=True)
        )
        digest += torch.stack([(x * y).sum(), _high_words(x, y).sum()])
    return digest


def _high_words(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the upper 64 bits of products of unsigned 64-bit words, though torch's shifts are signed."""
    (x0, x1), (y0, y1) = ((each & _HALF, (each >> 32) & _HALF) for each in (x, y))
    inner, outer = x0 * y1, x1 * y0
    carry = ((x0 * y0 >> 32) & _HALF) + (inner & _HALF) + (outer & _HALF)
    return x1 * y1 + ((inner >> 32) & _HALF) + ((outer >> 32) & _HALF) + (carry >> 32)


def mixed(seed: int, indexes: torch.Tensor) -> torch.Tensor:
    """Return splitmix64's output for each seed + index, int64: its increment, then its output function."""
    z = indexes + _signed(seed + _INCREMENT)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(_FACTORS[0])
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(_FACTORS[1])
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - ((value >> 63) << 64)
