"""Prometheus metrics of a publisher: which version each engine serves, which are behind, and what publishes take.

Invariant: what is asked of the fleet for a scrape is what the publisher knows of it; no engine is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.errors import PublishReport
from weightcast.host.closing import close_in_child
from weightcast.host.deadline import GRACE_SECONDS
from weightcast.trainer.arguments import metrics_address
from weightcast.trainer.fleet import EngineState
from weightcast.trainer.history import PATH, PublishHistory

MetricsTarget: TypeAlias = str | CollectorRegistry
"""HOST:PORT to serve metrics at, or a registry that somebody else serves."""

_STAGES = ("gather", "offer", "pack", "send", "seal", "total")
_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _Request(WSGIRequestHandler):
    """A request for the metrics. Each connection has a thread of the trainer's process, so a silent one is closed."""

    timeout = 2 * GRACE_SECONDS

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError):
            super().handle()

    def log_message(self, *words: object) -> None: ...


class PublisherMetrics(Collector):
    """The metrics of one publisher, served at an address or by a registry of the caller's. Thread-safe."""

    def __init__(self, target: MetricsTarget, engines: Callable[[], Sequence[EngineState]], transport: str) -> None:
        """`target`: HOST:PORT to listen at, or the registry. `engines`: returns the state of each engine.

        `transport`: the label of the bytes. Raises ValueError if `target` is no address, or a registry that has another
        publisher's metrics; OSError if nothing can listen at the address.
        """
        self._engines = engines
        self._transport = transport
        self._newest: int | None = None
        self._paused: set[str] = set()
        """The engines that the pauses have a label for."""
        self._own = own = CollectorRegistry()
        self._seconds = Histogram(
            "weightcast_publish_seconds", "Seconds of a publish, by stage.", ["stage"], registry=own, buckets=_BUCKETS
        )
        self._stall = Histogram(
            "weightcast_trainer_stall_seconds",
            "Seconds that a publish kept the trainer waiting.",
            registry=own,
            buckets=_BUCKETS,
        )
        self._pause = Histogram(
            "weightcast_pause_seconds",
            "Seconds that an install paused an engine.",
            ["engine"],
            registry=own,
            buckets=_BUCKETS,
        )
        self._bytes = Counter(
            "weightcast_bytes",
            "Bytes of tensors that were sent once for all engines, and of buckets that each engine's workers received.",
            ["transport", "direction"],
            registry=own,
        )
        self._density = Gauge(
            "weightcast_delta_density",
            "Share of the words that differed from the former version, in the last publish that made deltas.",
            registry=own,
        )
        self._failures = Counter(
            "weightcast_failures",
            "Engines that did not take a version, and publishes without a report, by the error.",
            ["cause"],
            registry=own,
        )
        self._mismatches = Counter(
            "weightcast_verify_mismatch", "Engines whose live weights were not what was sent.", registry=own
        )
        self._success = Gauge(
            "weightcast_last_success_timestamp_seconds",
            "Unix time at which every engine had taken the last version that all of them took.",
            registry=own,
        )
        self._registry = CollectorRegistry() if isinstance(target, str) else target
        self._server = None
        self._history = PublishHistory()
        if isinstance(target, str):
            host, port = metrics_address(target)
            self._server, self._thread = start_http_server(port, host, self._registry)
            self._server.RequestHandlerClass = _Request
            close_in_child(self._server.socket)
            metrics = make_wsgi_app(self._registry)

            def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
                if environ["PATH_INFO"] == PATH:
                    start_response("200 OK", [("content-type", "application/json")])
                    return [self._history.to_json(self._engines())]
                page: Iterable[bytes] = metrics(environ, start_response)
                return page

            self._server.set_app(answer)
        self._registry.register(self)
        self._is_open = True

    def collect(self) -> Iterator[Metric]:
        """Yield what was counted, the versions that engines serve, and by how many numbers they are behind."""
        yield from self._own.collect()
        serves = GaugeMetricFamily(
            "weightcast_engine_version",
            "Number of the version that an engine serves; -1 while it has none of a publisher.",
            labels=["engine"],
        )
        behind = GaugeMetricFamily(
            "weightcast_engine_behind_versions",
            "The last version's number less that of the version that an engine serves, which is -1 if it has none.",
            labels=["engine"],
        )
        for engine in self._engines():
            version = -1 if engine.version is None else engine.version
            serves.add_metric([engine.name], version)
            if self._newest is not None:
                behind.add_metric([engine.name], self._newest - version)
        yield from (serves, behind)

    def describe(self) -> Iterator[Metric]:
        """Yield the same: a registry reads the names out of it, and refuses those that it has already."""
        return self.collect()

    def add(self, report: PublishReport) -> None:
        """Count a publish that has a report."""
        self._newest = report.version
        for stage in _STAGES:
            self._seconds.labels(stage).observe(getattr(report.seconds, stage))
        self._stall.observe(report.seconds.stall)
        delta = report.delta
        if delta is not None and not delta.reason:
            self._density.set(delta.num_changed / max(1, delta.num_words))
        num_deltas = 0 if delta is None else delta.num_engines
        num_bytes = 0 if delta is None or not num_deltas else delta.num_bytes
        is_full = not num_deltas or num_deltas < len(report.engines)
        num_sent_bytes = num_bytes + is_full * report.num_bytes
        self._bytes.labels(self._transport, "sent").inc(num_sent_bytes)
        self._history.add(report, num_sent_bytes)
        for name, result in report.engines.items():
            self._bytes.labels(self._transport, "received").inc(sum(result.read_bytes))
            if result.error is None:
                self._pause.labels(name).observe(result.pause_seconds)
                self._paused.add(name)
            elif not result.has_left:
                self._failures.labels(result.error.kind).inc()
            self._mismatches.inc(result.differs)
        present = {engine.name for engine in self._engines()}
        if report.ok and report.engines.keys() >= present:  # not of one engine alone, as by `sync`
            self._success.set_to_current_time()
        for name in self._paused - present:
            self._pause.remove(name)
            self._paused.discard(name)

    def add_failure(self, error: BaseException) -> None:
        """Count a publish that ended in an error and has no report."""
        self._failures.labels(type(error).__name__).inc()
        self._history.add_failure(error)

    def close(self) -> None:
        """Stop serving them, or take them out of the caller's registry. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._registry.unregister(self)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
