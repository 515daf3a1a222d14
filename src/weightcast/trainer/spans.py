"""OpenTelemetry spans of publishes, by the tracer provider of the caller's program."""

from __future__ import annotations

import time

from weightcast.errors import import_of_extra
from weightcast.trainer.options import Phase, PublishEvent

with import_of_extra():
    from opentelemetry import trace

_STAGES: dict[Phase, str] = {"offered": "offer", "packed": "pack", "received": "receive", "installed": "install"}


class PublishSpans:
    """Makes a span of each stage of a publish; pass one to each publisher as `PublishOptions(on_event=...)`.

    The spans are children of the one that is current where `publish`, `start` or `publish_async` is called. Their names
    are weightcast.offer, .pack (and send), .receive (the rest of it) and .install; their attributes the version and the
    number of engines. Each engine that fails in a stage is an event of the span, whose status then is an error.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        """`provider`: by default the program's global one."""
        self._tracer = trace.get_tracer("weightcast", tracer_provider=provider)
        self._start_ns = 0
        self._events: list[PublishEvent] = []
        """Of engines, in the present stage."""

    def __call__(self, event: PublishEvent) -> None:
        now = time.time_ns()
        if event.phase == "offered":  # the first one
            self._start_ns = now - int(event.seconds * 1e9)
        if event.engine is not None:
            self._events.append(event)
            return
        events, self._events = self._events, []
        attributes = {"weightcast.version": event.version, "weightcast.num_engines": len(events)}
        stage = _STAGES[event.phase]
        span = self._tracer.start_span(f"weightcast.{stage}", attributes=attributes, start_time=self._start_ns)
        for each in events:
            if each.error is not None and each.engine is not None:
                said = {"weightcast.engine": each.engine, "error.type": each.error.kind, "message": each.error.message}
                span.add_event("engine failed", said)
        if any(each.error is not None for each in events):
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        span.end(now)
        self._start_ns = now
