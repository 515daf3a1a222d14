"""weightcast's publisher, and a ModuleEngine behind the real control routes; defaults but for transport and install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import weightcast
from peers.ends import End, Update
from weightcast.trainer.options import PublishOptions


@contextlib.contextmanager
def publish(end: End, transport: str, install: str = "staged") -> Iterator[Update]:
    if not end.is_trainer:
        with weightcast.EngineServer(weightcast.ModuleEngine(end.model)) as server:
            end.send(server.url)
            yield lambda step: None  # the server's threads do it
            end.receive()
        return
    with weightcast.Publisher(
        weightcast.ModuleSource(end.model),
        transport=transport.format(folder=end.folder),
        engines=[end.server or end.receive()],
        options=PublishOptions(install=install),  # type: ignore[arg-type]
    ) as publisher:
        yield lambda step: max(result.pause_seconds for result in publisher.publish().engines.values())
    if not end.server:
        end.send()
