"""Simulates a broadcast of buckets by gloo's tree, whose only cost is the time on the links of the members' hosts.

A bucket leaves the sender when all members are done with the one `NUM_UNDER_WAY` before it. A member that has a bucket
sends it to all its children at once, and is done with it when they have it. A connection sends one bucket after
another, all connections that leave a host share its link evenly, and between members on one host a bucket takes no
time.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping, Sequence

from weightcast.cli.planned_bytes import gloo_tree
from weightcast.transports.collective.buffers import NUM_UNDER_WAY

_MAX_BUCKETS = 16
"""Buckets that are simulated; each further one adds as much time as the last of these on average."""
_NUM_AVERAGED = 4
_NOTHING = 1e-9


class _Link:
    """The link of a host: buckets that wait for each connection, of which the first one is being sent."""

    def __init__(self, buckets_per_second: float) -> None:
        self._buckets_per_second = buckets_per_second
        self._waiting: dict[tuple[int, int], collections.deque[int]] = {}
        self._left: dict[tuple[int, int], float] = {}
        """Part of the first bucket that is not yet at the other end, for each connection that sends."""
        self._at = 0.0

    def send(self, bucket: int, connection: tuple[int, int], now: float) -> None:
        self._advance(now)
        self._waiting.setdefault(connection, collections.deque()).append(bucket)
        self._left.setdefault(connection, 1.0)

    def remove_sent(self, now: float) -> list[tuple[int, tuple[int, int]]]:
        """Remove the buckets that are at the other end by now; return each with its connection."""
        self._advance(now)
        ended = [connection for connection, left in self._left.items() if left < _NOTHING]
        for connection in ended:
            del self._left[connection]
        found = [(self._waiting[connection].popleft(), connection) for connection in ended]
        self._left.update({connection: 1.0 for connection in ended if self._waiting[connection]})
        return found

    @property
    def ends_at(self) -> float:
        """Time at which the next bucket is at the other end, if none is sent meanwhile."""
        if not self._left:
            return math.inf
        return self._at + min(self._left.values()) * len(self._left) / self._buckets_per_second

    def _advance(self, now: float) -> None:
        for connection in self._left:
            self._left[connection] -= (now - self._at) * self._buckets_per_second / len(self._left)
        self._at = now


class _Broadcasts:
    """The simulation. `ends`: for each bucket, the time at which all members were done with it."""

    def __init__(self, hosts: Sequence[int], links: Mapping[int, _Link], num_buckets: int) -> None:
        self._hosts = hosts
        self._links = links
        self._children: list[list[int]] = [[] for _ in hosts]
        for member, child in gloo_tree(len(hosts)):
            self._children[member].append(child)
        self._unsent = [[len(children) for children in self._children] for _ in range(num_buckets)]
        self._num_busy = [len(hosts)] * num_buckets
        self._events: list[tuple[float, int]] = []
        self._now = 0.0
        self.ends = [math.inf] * num_buckets
        for bucket in range(min(num_buckets, NUM_UNDER_WAY)):
            self._arrive(bucket, 0)
        while self._events:
            self._now, host = heapq.heappop(self._events)
            for bucket, (member, child) in self._links[host].remove_sent(self._now):
                self._leave(bucket, member)
                self._arrive(bucket, child)
            self._expect(host)

    def _arrive(self, bucket: int, member: int) -> None:
        for child in self._children[member]:
            if self._hosts[child] == self._hosts[member]:
                self._arrive(bucket, child)
                self._leave(bucket, member)
            else:
                self._links[self._hosts[member]].send(bucket, (member, child), self._now)
        if self._children[member]:
            self._expect(self._hosts[member])
        else:
            self._done(bucket)

    def _leave(self, bucket: int, member: int) -> None:
        self._unsent[bucket][member] -= 1
        if not self._unsent[bucket][member]:
            self._done(bucket)

    def _done(self, bucket: int) -> None:
        self._num_busy[bucket] -= 1
        if not self._num_busy[bucket]:
            self.ends[bucket] = self._now
            if bucket + NUM_UNDER_WAY < len(self.ends):
                self._arrive(bucket + NUM_UNDER_WAY, 0)

    def _expect(self, host: int) -> None:
        ends_at = self._links[host].ends_at
        if ends_at < math.inf:
            heapq.heappush(self._events, (ends_at, host))


def broadcast_seconds(
    hosts: Sequence[int], bytes_per_second: Mapping[int, float], num_bytes: int, bucket_bytes: int
) -> float:
    """Return the time until all members have `num_bytes`, in buckets of `bucket_bytes` except for the last one.

    `hosts`: of each member, the sender first. `bytes_per_second`: of each host's link.
    """
    if not num_bytes:
        return 0.0
    num_buckets = min(math.ceil(num_bytes / bucket_bytes), _MAX_BUCKETS)
    links = {host: _Link(rate / bucket_bytes) for host, rate in bytes_per_second.items()}
    ends = _Broadcasts(hosts, links, num_buckets).ends
    each = ends[-1] / num_buckets
    if num_buckets > _NUM_AVERAGED:
        each = (ends[-1] - ends[-1 - _NUM_AVERAGED]) / _NUM_AVERAGED
    return ends[-1] + (num_bytes / bucket_bytes - num_buckets) * each
