"""The last publishes of a publisher, which it serves as JSON beside its metrics: GET /publishes.

Invariant: the memory is bounded by the number of engines in the fleet, however many publishes there were.
"""

from __future__ import annotations

import collections
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from weightcast.errors import ErrorRecord, PublishReport, StageSeconds

if TYPE_CHECKING:
    from weightcast.trainer.fleet import EngineState

PATH = "/publishes"
MAX_PUBLISHES = 100
_MAX_CHARACTERS = 600


class FinishedPublish(msgspec.Struct, frozen=True):
    """One publish that has ended. `number` counts the publisher's publishes from 1; `ended_at` is Unix time.

    `version`, `seconds`: None for a publish without a report. `num_bytes`: tensor bytes of the version;
    `num_sent_bytes`: of those, what left the trainer, once for all engines. `num_compared`: the number of engines whose
    live weights were compared with what was sent; `num_differing`: of those in which they were not equal. `error`: the
    first engine's failure, or the error that ended the publish.
    """

    number: int
    ended_at: float
    version: int | None = None
    seconds: StageSeconds | None = None
    num_bytes: int = 0
    num_sent_bytes: int = 0
    num_engines: int = 0
    num_failed: int = 0
    num_compared: int = 0
    num_differing: int = 0
    error: ErrorRecord | None = None


class EngineOutcome(msgspec.Struct, frozen=True):
    """An engine's result in the last publish that it was part of.

    `version`: the version of that publish. `error`: why the engine did not take it. For the other fields see
    `EngineResult`.
    """

    version: int
    error: ErrorRecord | None
    pause_seconds: float
    install_seconds: float
    num_compared: int
    num_unproven: int
    differs: bool


class EngineHistory(msgspec.Struct, frozen=True):
    """An engine of the fleet. `serves`: number of the version that it last reported. `last`: None before a publish."""

    serves: int | None
    last: EngineOutcome | None


class Publishes(msgspec.Struct, frozen=True):
    """The reply. `publisher`: a random id of the publisher's life. `engines`: the present fleet, by name."""

    publisher: str
    publishes: list[FinishedPublish]
    engines: dict[str, EngineHistory]


class PublishHistory:
    """Keeps the last publishes, and each engine's result in its last one. Thread-safe."""

    def __init__(self) -> None:
        self._publisher = secrets.token_hex(8)
        self._publishes = collections.deque[FinishedPublish](maxlen=MAX_PUBLISHES)
        self._num_publishes = 0
        self._outcomes: dict[str, EngineOutcome] = {}
        self._lock = threading.Lock()

    def add(self, report: PublishReport, num_sent_bytes: int) -> None:
        """Add a publish that has a report."""
        failures, results = report.failures, report.engines.values()
        outcomes = {
            name: EngineOutcome(
                report.version,
                _cut(result.error),
                result.pause_seconds,
                result.install_seconds,
                result.num_compared,
                len(result.unproven),
                result.differs,
            )
            for name, result in report.engines.items()
        }
        with self._lock:
            self._outcomes.update(outcomes)
            self._append(
                version=report.version,
                seconds=report.seconds,
                num_bytes=report.num_bytes,
                num_sent_bytes=num_sent_bytes,
                num_engines=len(results),
                num_failed=len(failures),
                num_compared=sum(result.differs or result.num_compared > 0 for result in results),
                num_differing=sum(result.differs for result in results),
                error=_cut(next(iter(failures.values()), None)),
            )

    def add_failure(self, error: BaseException) -> None:
        """Add a publish that ended in an error and has no report."""
        with self._lock:
            self._append(error=_cut(ErrorRecord(type(error).__name__, str(error))))

    def _append(self, **fields: object) -> None:
        self._num_publishes += 1
        values = {"number": self._num_publishes, "ended_at": time.time(), **fields}
        self._publishes.append(FinishedPublish(**values))  # type: ignore[arg-type]

    def to_json(self, engines: Sequence[EngineState]) -> bytes:
        """Return the reply for a fleet of these engines. Forgets those that have left it."""
        with self._lock:
            present = {each.name: EngineHistory(each.version, self._outcomes.get(each.name)) for each in engines}
            self._outcomes = {name: each.last for name, each in present.items() if each.last is not None}
            return msgspec.json.encode(Publishes(self._publisher, list(self._publishes), present))


def _cut(error: ErrorRecord | None) -> ErrorRecord | None:
    return None if error is None else ErrorRecord(error.kind, error.message[:_MAX_CHARACTERS], peer=error.peer)
