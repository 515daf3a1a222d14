"""Rollout workers from the trainer's side: all of them are one engine, updated together or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from weightcast.control.client import HttpEngine
from weightcast.errors import WeightcastError
from weightcast.format.messages import InitInfo, UpdateInfo, WeightInfo
from weightcast.seams.client import EngineClient

T = TypeVar("T")


class RolloutWorkers(EngineClient):
    """An `EngineClient` whose workers have a server each. Their framework pauses them.

    `has_finished`: they were asked to install a version, so that a failure may leave some of them with it.
    """

    def __init__(self, endpoints: Sequence[tuple[str, str, str]], *, name: str, timeout_seconds: float) -> None:
        """`endpoints`: each worker's URL, token and host, in the order of their engine ranks."""
        self.name = name
        self.has_finished = False
        self._clients = [HttpEngine(url, token=token, timeout_seconds=timeout_seconds) for url, token, _ in endpoints]
        self._pool = ThreadPoolExecutor(len(self._clients), thread_name_prefix="weightcast-rollout")

    def info(self) -> WeightInfo:
        infos = self._each(HttpEngine.info)
        holders = {info.holder for info in infos}
        return msgspec.structs.replace(
            max(infos, key=lambda info: -1 if info.version is None else info.version),
            holder=holders.pop() if len(holders) == 1 else "",
            instance=infos[0].instance,
        )

    def init(self, info: InitInfo) -> None:
        self._each(lambda client: client.init(info))

    def update(self, info: UpdateInfo) -> None:
        self._each(lambda client: client.update(info))

    def finish(self, version: int) -> None:
        self.has_finished = True
        self._each(lambda client: client.finish(version))

    def shutdown(self) -> None:
        """Have the workers give up what they wait for, as far as they can be reached."""
        with contextlib.suppress(WeightcastError):
            self._each(HttpEngine.shutdown)

    def close(self) -> None:
        """Close the connections; the publisher does not, since this client is not its own. Idempotent."""
        self._pool.shutdown(wait=True)
        for client in self._clients:
            client.close()

    def _each(self, call: Callable[[HttpEngine], T]) -> list[T]:
        """The call's results on every worker. Raises the first error, once all have answered."""
        futures = [self._pool.submit(call, client) for client in self._clients]
        errors = [future.exception() for future in futures]
        first = next(
            (error for error in errors if isinstance(error, WeightcastError)), next(filter(None, errors), None)
        )
        if first is not None:
            try:
                raise first
            finally:
                # An error that its own frame refers to would live on, with all its frames, until a collection.
                del first, errors, futures
        return [future.result() for future in futures]
