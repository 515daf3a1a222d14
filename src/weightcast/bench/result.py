"""What a bench run says: one record, whose fields never change meaning (later ones are added).

Every median is over the timed runs; what comes before them (the first publish, which makes the arena and the
connections) is reported by itself. "Engine" figures are of the engine with the highest, except CPU time, which is added
up over the engines.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import msgspec


class Ends(msgspec.Struct, frozen=True):
    """A figure at both ends. Where one process holds both (`memory`), `publisher` is that process and `engine` 0."""

    publisher: float
    engine: float


class Bytes(msgspec.Struct, frozen=True):
    """Peak resident bytes beyond those before the publisher was made, warm-up included.

    A process's figure holds its private memory and every shared page that it has mapped and touched: the arena, which
    is one and the same memory, stands at both ends, as it does in the bound (slots x bucket + ...) that each is held
    to. `BenchResult.host_extra_bytes` counts it once.
    """

    publisher: int
    engine: int


class Run(msgspec.Struct, frozen=True):
    """One timed publish. `memcpy_seconds` was measured right before it, `seconds` are the publisher's stages."""

    publish_seconds: float
    pause_seconds: float
    install_seconds: float
    memcpy_seconds: float
    cpu_seconds: Ends
    seconds: dict[str, float]


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `weightcast bench --json`.

    transport, shapes, install, num_engines: what was asked for. num_tensors, num_bytes: what one publish carries.
    memcpy_gb_per_s: 1e9 bytes a second of one memcpy (one thread) of num_bytes, from one warm buffer to another.
    all_threads_copy_gb_per_s: the same by torch's `copy_` with all its threads, once.
    publish_seconds: from the call of `publish` until every engine serves the version; median.
    memcpy_ratio: publish_seconds / memcpy_seconds, the median of both.
    pause_seconds: how long the engine that stood still for longest stood still; median.
    cpu_us_per_tensor: CPU time of the publisher (with its guard process) and all engines in a publish / num_tensors.
    extra_bytes: see Bytes. host_extra_bytes: the same for the host: private memory of all, and the arena once.
    per_tensor_seconds: one round trip for each tensor, see `per_tensor`; None where it was not asked for.
    per_tensor_speedup: per_tensor_seconds / publish_seconds.
    bucket_size_bytes: the payload that a bucket of these publishes may hold, whether asked for or chosen.
    verified: whether, after the last run, every engine held bit for bit what the publisher has.
    """

    transport: str
    shapes: str
    install: str
    num_engines: int
    num_tensors: int
    num_bytes: int
    memcpy_gb_per_s: float
    publish_seconds: float
    memcpy_ratio: float
    pause_seconds: float
    cpu_us_per_tensor: float
    extra_bytes: Bytes
    per_tensor_seconds: float | None
    per_tensor_speedup: float | None

    layers: int | None
    scale: int
    verified: bool
    host_extra_bytes: int
    cpu_seconds: Ends
    memcpy_seconds: float
    all_threads_copy_gb_per_s: float
    first_publish_seconds: float
    bucket_size_bytes: int
    num_buckets: int
    largest_tensor_bytes: int
    torch_threads: int
    num_cpus: int
    torch_version: str
    runs: list[Run]

    @property
    def gb_per_second(self) -> float:
        """Published bytes (1e9) a second, to one engine."""
        return self.num_bytes / self.publish_seconds / 1e9

    def encode(self) -> bytes:
        """The JSON, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def median(runs: Iterable[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(figure(run) for run in runs)
