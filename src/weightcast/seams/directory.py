"""The seam of directories of engines: the engines that a publisher updates, where these come and go.

    EngineDirectory.engines()        at the beginning of each publish and sync, and after one in which an engine failed

A publisher connects engines that have come, and lets go those that have left. If the call raises, the publisher keeps
the engines that it has, and says so in its report. If there are none, `publish` raises ValueError and lets none go,
unless its transport keeps versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from weightcast.seams.client import EngineClient


@runtime_checkable
class EngineDirectory(Protocol):
    """The engines that are present now. Called by one thread at a time, on the trainer rank that publishes."""

    def engines(self) -> Iterable[str | EngineClient]:
        """Return the engines: each one's URL, which is its name, or a client with a name of its own.

        An engine that was replaced under its URL is recognised. For one that was replaced under a client's name, return
        another client. Include engines that are starting or serve no version yet, since they get their first version by
        this; leave out those that are shutting down. Must end within seconds: a publish waits for it.
        """
        ...
