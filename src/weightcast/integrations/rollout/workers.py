"""The trainer's client of all rollout workers, which are one engine: updated together or not at all."""

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
    """An `EngineClient` with one server for each worker. The framework pauses the workers.

    `has_finished`: the workers were asked to install a version, so after a failure some of them may have it.
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
        """End the workers' waits, as far as they can be reached."""
        with contextlib.suppress(WeightcastError):
            self._each(HttpEngine.shutdown)

    def close(self) -> None:
        """Close the connections, which the publisher does not do for a given client. Idempotent."""
        self._pool.shutdown(wait=True)
        for client in self._clients:
            client.close()

    def _each(self, call: Callable[[HttpEngine], T]) -> list[T]:
        """Make a call on every worker; return the results. Raises the first error, once all have answered."""
        futures = [self._pool.submit(call, client) for client in self._clients]
        errors = [future.exception() for future in futures]
        first = next(
            (error for error in errors if isinstance(error, WeightcastError)), next(filter(None, errors), None)
        )
        if first is not None:
            try:
                raise first
            finally:
                # A frame that refers to the error it raises is a cycle, which would keep all its frames alive.
                del first, errors, futures
        return [future.result() for future in futures]
