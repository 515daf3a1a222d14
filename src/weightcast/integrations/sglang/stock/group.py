"""A torch.distributed group with the ranks of one stock SGLang server, created as SGLang creates its own; we are rank
0.

Invariants: the group has a new name and its own store; after any error a group is closed and never used again. SGLang
waits in a join for torch's own timeout, and in a broadcast without a deadline: `close` ends the store, and with it at
once every wait for one of its keys; a broadcast that a rank does not take ends by our deadline, and its connections
then. A server's wait for a connection of a killed trainer can't be ended (docs/sglang.md).
"""

from __future__ import annotations

import functools

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from weightcast.errors import PeerDiedError
from weightcast.host.closing import awaited_at_exit, on_failure
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
        """Connect; block until all members have joined, at most for the deadline. Raises PeerError."""
        with on_failure(self.close):
            # A separate client: a wait for a key ends when the store's server ends, not with the client's object.
            client = join_store(self.host, self.port, self._deadline_seconds)
            # The prefixes are those of torch's helper, which SGLang's `init_custom_process_group` calls.
            device = "cpu" if self.backend == "gloo" else "cuda"
            # Without a device, since NCCL members connect at the first broadcast, and rank 0 must not wait earlier.
            self._group = ProcessGroup(
                self.backend,
                PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, client))),
                rank=0,
                size=self.size,
                timeout_seconds=self._deadline_seconds,
                host=self.host if self.backend == "gloo" else "",
                # No limit, as in SGLang: NCCL applies each member's limit after all have agreed on their channels.
                max_ctas=None,
                is_left=lambda: self._served is None,
            )
        if self._served is None:
            self.close()

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send `flat` to every member; block until it was sent, at most for the deadline. Raises PeerError."""
        group = self._group
        if group is None:
            raise PeerDiedError(f"the group {self.name} was closed: publish again")
        with on_failure(self.close):
            if not flat.is_cuda:
                wait(group.broadcast(flat, root=0))
                return
            # The first broadcast connects the members, for which NCCL waits without a deadline.
            begin = functools.partial(group.broadcast, flat, root=0)
            what = f"a broadcast in {self.name}"
            group.wait(in_time(begin, flat.device, self._deadline_seconds, what, self._is_closed), self._is_closed)

    def _is_closed(self) -> bool:
        return self._group is None

    def close(self) -> None:
        """End the store; connections end with a broadcast in progress. Returns at once. Idempotent."""
        self._served = None
        group, self._group = self._group, None
        if group is not None:
            awaited_at_exit(group.close, "weightcast-stock-group")
