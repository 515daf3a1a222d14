"""The server's Prometheus metrics, in a registry of their own so that two servers of one process do not mix."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weightcast.engines.gate import Gate

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ServerMetrics:
    """Everything that GET /metrics shows. Gauges are read from their subject at each scrape. Thread-safe."""

    def __init__(self, gate: Gate) -> None:
        self._registry = registry = CollectorRegistry()
        self._seconds = Histogram(
            "weightcast_update_seconds",
            "Seconds that each stage of an update took, failed ones included.",
            ["stage"],
            registry=registry,
            buckets=_SECONDS_BUCKETS,
        )
        self._failures = Counter(
            "weightcast_update_failures", "Stages of updates that failed.", ["stage"], registry=registry
        )
        self._refusals = Counter(
            "weightcast_weight_request_failures", "Errors of weight routes, by class.", ["kind"], registry=registry
        )
        self._completions = Counter(
            "weightcast_completions", "Completions, by how they ended.", ["finish_reason"], registry=registry
        )
        self._tokens = Counter("weightcast_tokens", "Tokens of finished completions.", ["kind"], registry=registry)
        self.gauge(
            "weight_version", "Number of the version that serves; -1 before the first update.", lambda: _number(gate)
        )
        self.gauge("paused", "1 while generation is paused.", lambda: float(gate.is_paused))
        self.gauge("torn", "1 while the engine refuses to serve.", lambda: float(bool(gate.torn)))

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that `read` answers for."""
        Gauge(f"weightcast_{name}", text, registry=self._registry).set_function(read)

    def observe(self, stage: str, seconds: float, ok: bool) -> None:
        """A worker's stage has ended; hand this to `Worker(observe=...)`."""
        self._seconds.labels(stage).observe(seconds)
        if not ok:
            self._failures.labels(stage).inc()

    def request_failed(self, error: BaseException) -> None:
        self._refusals.labels(type(error).__name__).inc()

    def completed(self, finish_reason: str, num_prompt_tokens: int, num_tokens: int) -> None:
        self._completions.labels(finish_reason).inc()
        self._tokens.labels("prompt").inc(num_prompt_tokens)
        self._tokens.labels("generated").inc(num_tokens)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _number(gate: Gate) -> float:
    version = gate.version
    return -1.0 if version is None else float(version.number)
