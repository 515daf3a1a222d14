"""The server's Prometheus metrics, in a separate registry, so that two servers of one process do not mix theirs."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from weightcast.engines.gate import Gate

_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class InstallMetrics:
    """The metrics of updates, which every server of an engine has. It implements `StageMetrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        seconds = "Seconds of each stage of an update, failed stages included."
        self.stage_seconds = Histogram(
            "weightcast_update_seconds", seconds, ["stage"], registry=registry, buckets=_BUCKETS
        )
        self.stage_failures = self._counter("update_failures", "Stages of updates that failed.", "stage")
        paused = "Seconds that an install paused the engine."
        self.pause_seconds = Histogram("weightcast_pause_seconds", paused, registry=registry, buckets=_BUCKETS)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"weightcast_{name}", text, [label], registry=self._registry)


class ServerMetrics(InstallMetrics):
    """The metrics of GET /metrics. Gauges are read at each scrape. Thread-safe."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(CollectorRegistry())
        self._errors = self._counter("weight_request_failures", "Errors of weight routes, by class.", "kind")
        self._completions = self._counter("completions", "Completions, by how they ended.", "finish_reason")
        self._tokens = self._counter("tokens", "Tokens of finished completions.", "kind")
        self.gauge(
            "engine_version",
            "Number of the version that serves; -1 before the first update.",
            lambda: -1.0 if (version := gate.version) is None else float(version.number),
        )
        self.gauge("paused", "1 while generation is paused.", lambda: float(gate.is_paused))
        self.gauge("torn", "1 while the engine refuses to serve.", lambda: float(bool(gate.torn)))

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is `read()`."""
        Gauge(f"weightcast_{name}", text, registry=self._registry).set_function(read)

    def request_failed(self, error: BaseException) -> None:
        """Count an error reply of a weight route."""
        self._errors.labels(type(error).__name__).inc()

    def completed(self, finish_reason: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Count a finished completion."""
        self._completions.labels(finish_reason).inc()
        self._tokens.labels("prompt").inc(num_prompt_tokens)
        self._tokens.labels("generated").inc(num_tokens)

    async def show(self, request: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
