"""What a publish did: typed, JSON-ready, one result for each engine."""

from __future__ import annotations

import msgspec

from weightcast.errors import ErrorRecord


class StageSeconds(msgspec.Struct):
    """Where a publish spent its time. Stages overlap with the engines' own work, so that they don't add up to theirs.

    `gather`: asking the source for its regions. `offer`: joining engines, with the wait for those that are starting,
    and offering. `pack`: filling buckets and digesting them. `send`: waiting for free slots and for the engines' last
    buckets. `seal`: sealing. `pause`: the longest time any engine was paused. `total`: from call to return.
    """

    gather: float = 0.0
    offer: float = 0.0
    pack: float = 0.0
    send: float = 0.0
    seal: float = 0.0
    pause: float = 0.0
    total: float = 0.0


class EngineResult(msgspec.Struct):
    """One engine's outcome. `ok`: it serves the version. `error`: why not, else None.

    `pause_seconds`: how long the engine was paused: as it says where it pauses by itself (vLLM with weightcast's own
    routes), else from the pause's request until it was resumed, as the publisher saw it. `install_seconds`: what the
    engine itself took to install. `unproven`: with `verify="installed"`, the tensors that could not be read out of the
    engine's live memory, each with the reason. `read_bytes`, `installed_bytes`: of each of the engine's workers, by
    rank: of the buckets what it read and checked, where ranks of one host share that; and of the model what it put into
    place (a tensor that goes through the engine's own loader counts whole).
    """

    ok: bool = False
    error: ErrorRecord | None = None
    pause_seconds: float = 0.0
    install_seconds: float = 0.0
    unproven: dict[str, str] = {}
    read_bytes: list[int] = []
    installed_bytes: list[int] = []


class PublishReport(msgspec.Struct, frozen=True):
    """One version's publish. `num_bytes` counts tensor data once, however many engines took it."""

    run: str
    version: int
    num_bytes: int
    num_tensors: int
    num_buckets: int
    install: str
    seconds: StageSeconds
    engines: dict[str, EngineResult]

    @property
    def ok(self) -> bool:
        """Whether every engine serves the version."""
        return all(result.ok for result in self.engines.values())

    @property
    def gb_per_second(self) -> float:
        """Tensor data over the whole time, in 1e9 bytes a second."""
        return self.num_bytes / self.seconds.total / 1e9 if self.seconds.total else 0.0

    def to_json(self) -> bytes:
        """The report as one JSON object."""
        return msgspec.json.encode(self)
