"""Simulates a broadcast of buckets by gloo's tree, whose only cost is the time on the links of the members' hosts.

A bucket leaves the sender when all members have the one `NUM_UNDER_WAY` before it. A member that has a bucket sends it
to all its children at once. A connection sends one bucket after another, all connections that leave a host share its
link evenly, and between members on one host a bucket takes no time.
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
    """The link of a host: connections, each named by its receiver, that share it evenly."""

    def __init__(self, buckets_per_second: float) -> None:
        self._buckets_per_second = buckets_per_second
        self._waiting: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
        """For each connection its buckets, of which the first one is being sent."""
        self._sending: collections.deque[tuple[float, int]] = collections.deque()
        """Connections that send now, with `_progress` at the end of their bucket: who began first ends first."""
        self._progress = 0.0
        """Number of buckets that a connection which has always sent would have sent."""
        self._at = 0.0

    def send(self, bucket: int, receiver: int, now: float) -> None:
        self._advance(now)
        if not self._waiting[receiver]:
            self._sending.append((self._progress + 1, receiver))
        self._waiting[receiver].append(bucket)

    def remove_sent(self, now: float) -> list[tuple[int, int]]:
        """Remove the buckets that are at the other end by now; return each with its receiver."""
        self._advance(now)
        found: list[tuple[int, int]] = []
        while self._sending and self._sending[0][0] - self._progress < _NOTHING:
            receiver = self._sending.popleft()[1]
            found.append((self._waiting[receiver].popleft(), receiver))
        self._sending += [(self._progress + 1, receiver) for _, receiver in found if self._waiting[receiver]]
        return found

    @property
    def ends_at(self) -> float:
        """Time at which the next bucket is at the other end, if none is sent meanwhile."""
        if not self._sending:
            return math.inf
        return self._at + (self._sending[0][0] - self._progress) * len(self._sending) / self._buckets_per_second

    def _advance(self, now: float) -> None:
        if self._sending:
            self._progress += (now - self._at) * self._buckets_per_second / len(self._sending)
        self._at = now


def bucket_ends(hosts: Sequence[int], buckets_per_second: Mapping[int, float], num_buckets: int) -> list[float]:
    """Return for each bucket the time at which all members have it. The arguments are as for `broadcast_seconds`."""
    links = {host: _Link(rate) for host, rate in buckets_per_second.items()}
    children: list[list[int]] = [[] for _ in hosts]
    for member, child in gloo_tree(len(hosts)):
        children[member].append(child)
    num_lacking, ends = [len(hosts)] * num_buckets, [math.inf] * num_buckets
    arrived, now = [(bucket, 0) for bucket in range(min(num_buckets, NUM_UNDER_WAY))], 0.0
    events: list[tuple[float, int]] = []
    while True:
        for bucket, member in arrived:  # which grows meanwhile
            host = hosts[member]
            for child in children[member]:
                if hosts[child] == host:
                    arrived.append((bucket, child))
                else:
                    links[host].send(bucket, child, now)
            heapq.heappush(events, (links[host].ends_at, host))
            num_lacking[bucket] -= 1
            if not num_lacking[bucket]:
                ends[bucket] = now
                if bucket + NUM_UNDER_WAY < num_buckets:
                    arrived.append((bucket + NUM_UNDER_WAY, 0))
        now, host = heapq.heappop(events)
        if now == math.inf:
            return ends
        arrived = links[host].remove_sent(now)
        heapq.heappush(events, (links[host].ends_at, host))


def broadcast_seconds(
    hosts: Sequence[int], bytes_per_second: Mapping[int, float], num_bytes: int, bucket_bytes: int
) -> float:
    """Return the time until all members have `num_bytes`, in buckets of `bucket_bytes` except for the last one.

    `hosts`: of each member, the sender first. `bytes_per_second`: of each host's link.
    """
    if not num_bytes:
        return 0.0
    num_buckets = min(math.ceil(num_bytes / bucket_bytes), _MAX_BUCKETS)
    ends = bucket_ends(hosts, {host: rate / bucket_bytes for host, rate in bytes_per_second.items()}, num_buckets)
    each = ends[-1] / num_buckets
    if num_buckets > _NUM_AVERAGED:
        each = (ends[-1] - ends[-1 - _NUM_AVERAGED]) / _NUM_AVERAGED
    return ends[-1] + (num_bytes / bucket_bytes - num_buckets) * each
