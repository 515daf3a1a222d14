"""What a publish did: typed, JSON-ready, one result for each engine."""

from __future__ import annotations

import msgspec

from weightcast.errors import ErrorRecord, PublishError, from_record, printable
from weightcast.format.amounts import count, size


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

    def __str__(self) -> str:
        """The sizes and times, a table of the engines, then each problem of those that failed on a line of its own."""
        seconds = self.seconds
        lines = [f"version {self.version} was not installed anywhere"]
        if not self.engines or any(result.ok for result in self.engines.values()):
            lines = [
                f"version {self.version}: {count(self.num_tensors, 'tensor')}, {size(self.num_bytes)} in "
                f"{count(self.num_buckets, 'bucket')}, {seconds.total:.2f} s",
                f"offer {seconds.offer:.2f} s, pack {seconds.pack:.2f} s, send {seconds.send:.2f} s, "
                f"seal {seconds.seal:.2f} s, longest pause {seconds.pause:.2f} s",
            ]
        rows = [("engine", "result", "pause", "install")] if self.engines else []
        for name, result in self.engines.items():
            outcome = f"serves {self.version}" if result.error is None else result.error.kind
            rows.append((name, outcome, f"{result.pause_seconds:.3f} s", f"{result.install_seconds:.3f} s"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, outcome, pause, install in rows:
            lines.append(f"{name:{widths[0]}}  {outcome:{widths[1]}}  {pause:>{widths[2]}}  {install:>{widths[3]}}")
        for name, result in self.engines.items():
            if result.error is not None:
                lines.append(f"{name}: {result.error.kind}: {result.error.message}")
                lines += (f"  {problem}" for problem in result.error.problems if problem not in result.error.message)
        return "\n".join(map(printable, lines))


def publish_error(report: PublishReport) -> PublishError:
    """The error for a publish that an engine did not take."""
    failures = {name: from_record(r.error) for name, r in report.engines.items() if r.error is not None}
    what = f"{len(failures)} of {count(len(report.engines), 'engine')} did not take version {report.version}"
    causes = "; ".join(f"{name}: {error}" for name, error in failures.items())
    return PublishError(f"{what}: {causes}", failures, report)
