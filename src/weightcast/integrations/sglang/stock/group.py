"""A torch.distributed group with the ranks of one stock SGLang server, made as SGLang makes its own; we are rank 0.

Invariants: the group has a fresh name and a store of its own; a group in which anything went wrong is closed, never
mended. SGLang waits in a join for as long as torch lets it, and in a broadcast without a deadline: `close` ends the
store, and with it every wait for one of its keys, at once; a broadcast of ours that a rank does not take ends by our
deadline, and the connections then. Nothing ends what waits for a connection of a trainer that was killed (docs).
"""

from __future__ import annotations

import functools

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from weightcast.errors import PeerDiedError
from weightcast.host.closing import awaited_at_exit
from weightcast.process_group import ProcessGroup, Store, in_time, join_store, serve_store, wait


class StockGroup:
    """Rank 0's end of the group `name`, of `size` members. `connect` once every other has been asked to join."""

    def __init__(self, name: str, backend: str, host: str, size: int, deadline_seconds: float) -> None:
        """Serve the store; `port` is where the others find it. Raises PeerError."""
        self.name = name
        self.size = size
        self.backend = backend
        self.host = host
        self._deadline_seconds = deadline_seconds
        self._served: Store | None
        self._served, self.port = serve_store(host, deadline_seconds)
        self._group: ProcessGroup | None = None

    def connect(self) -> None:
        """Blocks until all members are there, at most for the deadline. Raises PeerError."""
        # A client of its own: a wait for a key ends with the store that is served, not with the client's object.
        client = join_store(self.host, self.port, self._deadline_seconds)
        # The prefixes are those of torch's own helper inside SGLang's `init_custom_process_group`.
        device = "cpu" if self.backend == "gloo" else "cuda"
        # No device: with NCCL the members connect at their first broadcast, and rank 0 must not wait for them before.
        self._group = ProcessGroup(
            self.backend,
            PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, client))),
            rank=0,
            size=self.size,
            timeout_seconds=self._deadline_seconds,
            host=self.host if self.backend == "gloo" else "",
            # SGLang sets no limit, and NCCL applies each member's own after all have agreed on their channels.
            max_ctas=None,
            is_left=lambda: self._served is None,
        )
        if self._served is None:
            self.close()

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send `flat` to every member; blocks until it has gone, at most for the deadline. Raises PeerError."""
        group = self._group
        if group is None:
            raise PeerDiedError(f"the group {self.name} was closed")
        if not flat.is_cuda:
            wait(group.broadcast(flat, root=0))
            return
        # The first one connects the members, which NCCL waits for without a deadline.
        begin = functools.partial(group.broadcast, flat, root=0)
        what = f"a broadcast in {self.name}"
        group.wait(in_time(begin, flat.device, self._deadline_seconds, what, self._is_closed), self._is_closed)

    def _is_closed(self) -> bool:
        return self._group is None

    def close(self) -> None:
        """End the store, and have connections end with a broadcast that is under way. Returns at once. Idempotent."""
        self._served = None
        group, self._group = self._group, None
        if group is not None:
            awaited_at_exit(group.close, "weightcast-stock-group")
