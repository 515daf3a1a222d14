"""The servers of one update that are still in it, called all at once; whoever fails is out, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from weightcast.errors import WeightcastError, from_record, to_record

if TYPE_CHECKING:
    from weightcast.integrations.sglang.stock import StockServer

MAX_PARALLEL = 64
"""So many servers are called at once."""


class Servers:
    """`living` are in the update; `failures` says why others are not, by name."""

    def __init__(self, servers: Iterable[StockServer], pool: ThreadPoolExecutor) -> None:
        self.living = list(servers)
        self.failures: dict[str, WeightcastError] = {}
        self._pool = pool

    def each(self, call: Callable[[StockServer], object]) -> None:
        """Call each that lives, and wait; whoever fails is dropped."""
        calls = [(self._pool.submit(call, server), server) for server in self.living]
        for future, server in calls:
            error = future.exception()
            if error is not None:
                self.drop(server, error)

    def drop(self, server: StockServer, error: BaseException) -> None:
        """Leave it out, for this reason: a copy, whose traceback keeps nothing."""
        self.failures.setdefault(server.name, from_record(to_record(error)))
        self.living = [other for other in self.living if other is not server]
