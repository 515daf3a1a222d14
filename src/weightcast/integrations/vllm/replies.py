"""What vLLM's own routes answer, as far as it is read."""

from __future__ import annotations

from typing import Any

import msgspec


class WeightInfoReply(msgspec.Struct):
    """GET /weight_info."""

    weight_version: str


class WorldSizeReply(msgspec.Struct):
    """GET /get_world_size."""

    world_size: int


class RankResults(msgspec.Struct):
    """POST /collective_rpc: what the method returned, rank by rank."""

    results: list[Any]
