"""How the payloads of buckets are encoded between a publisher and its workers. There is only `raw`.

A publisher encodes each bucket after it was filled, in place, and before its header is written: the header names the
codec, both lengths and the digest of the encoded payload. A worker decodes after the header and digest were checked.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """`name`: what headers call it, at most 8 ASCII characters.

    An encoded payload is never longer than the raw one, and its length is a multiple of 8, for the digest.
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
