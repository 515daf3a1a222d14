"""Spans of publishes, as a tracer provider gets them by OpenTelemetry's API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opentelemetry import trace
from publishers import publisher_of

from core.direct import DirectEngine, RecordingEngine
from weightcast import TensorSource
from weightcast.trainer.spans import PublishSpans

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Span(trace.NonRecordingSpan):
    def __init__(self, name: str, parent: trace.Span, attributes: Any, start_time: int) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.name, self.parent, self.attributes, self.start_time = name, parent, attributes, start_time
        self.end_time: int | None = None
        self.events: list[Any] = []
        self.status = trace.StatusCode.UNSET

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        self.events.append(attributes)

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status.status_code

    def end(self, end_time: int | None = None) -> None:
        assert self.end_time is None
        self.end_time = end_time


class Provider(trace.TracerProvider, trace.Tracer):
    """Keeps all spans in the order in which they were started."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def get_tracer(self, *_: Any, **__: Any) -> trace.Tracer:
        return self

    def start_span(self, name: str, context: Any = None, **options: Any) -> Span:  # type: ignore[override]
        span = Span(name, trace.get_current_span(context), options.get("attributes"), options.get("start_time", 0))
        self.spans.append(span)
        return span

    def start_as_current_span(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def engines() -> Iterator[list[DirectEngine]]:
    engines = [DirectEngine(name, RecordingEngine()) for name in ("first", "second")]
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_span_for_each_stage_below_the_callers(engines: list[DirectEngine], in_background: bool) -> None:
    provider = Provider()
    options: dict[str, Any] = {"on_event": PublishSpans(provider), "on_failure": "report"}
    source = TensorSource({"weight": torch.arange(4.0)})
    with publisher_of(source, transport="memory://", engines=engines, **options) as publisher:
        for version in (4, 5):
            provider.spans.clear()
            engines[1].engine.fail_after = 0 if version == 5 else None
            step, start = provider.start_span("step"), time.time_ns()
            with trace.use_span(step):
                handle = publisher.start(version) if in_background else None
                report = publisher.publish(version) if handle is None else handle.result()
            assert report.ok is (version == 4)
            _, *spans = provider.spans
            assert [span.name for span in spans] == [
                f"weightcast.{stage}" for stage in ("offer", "pack", "receive", "install")
            ]
            assert all(span.parent is step for span in spans)
            ends = [span.end_time for span in spans]
            assert [span.start_time for span in spans[1:]] == ends[:-1]
            # Two clocks were read in turn, so that they may differ by as much as they are apart.
            assert spans[0].start_time >= start - 10**9
            assert [span.attributes["weightcast.version"] for span in spans] == [version] * 4
            assert [span.attributes["weightcast.num_engines"] for span in spans] == [2, 0, 2, 2]
            failed = spans[-1].events if version == 5 else []
            assert [event["weightcast.engine"] for event in failed] == ["second"] * (version == 5)
            errors = [span.status is trace.StatusCode.ERROR for span in spans]
            assert errors == [False, False, False, version == 5]
