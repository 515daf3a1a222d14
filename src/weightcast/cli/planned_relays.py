"""Picks relays for a fleet: hosts that read each version from the trainer's store and send it to the engines near them.

The time is that of a model of the links, which follows the code:

- A version is complete in the trainer's store before it is read. A host that copies it (`weightcast pull`, then
  `serve-store`) and a relay (`weightcast follow`) have all of it before they pass it on.
- Those who read from one host at once share its link.
- A relay sends to engines on its own host through shared memory, to those on several hosts by gloo's tree, as
  `simulated_links` has it. Since only two buckets are on the way at once, a broadcast to many engines takes far more
  time than the busiest link alone. With relays, the groups are smaller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from weightcast.cli.planned_bytes import Deployment, Estimate, HostCommand, Relays, estimate, gloo_tree
from weightcast.cli.simulated_links import broadcast_seconds
from weightcast.format.manifest import TensorSpec

TOLERANCE = 1.1
"""The fewest hosts are chosen that need at most so many times the time of the fastest choice."""


class _Reading(NamedTuple):
    """How relays read a version: the number of hosts of each level, the relays last, and the seconds of each."""

    levels: tuple[int, ...]
    seconds: tuple[float, ...]


def plan_relays(
    specs: Sequence[TensorSpec], it: Deployment, without: Estimate, *, num_relays: int | None = None
) -> Relays:
    """Return relays for the engines of a deployment. `without`: its estimate. `num_relays`: by default, choose it.

    Raises ValueError for a deployment that relays don't fit, or if there are more relays than hosts with engines.
    """
    link, source = _rates(it)
    # The smallest part of the fleet that a relay can have: whole engines on hosts of their own.
    workers_per_host = it.num_workers // it.engine_hosts
    workers = math.lcm(workers_per_host, it.workers_per_engine)
    num_parts, hosts_per_part = it.num_workers // workers, workers // workers_per_host
    if num_relays is not None and num_relays > num_parts:
        raise ValueError(f"{num_relays} relays are too many: at most {num_parts}, one for each host with whole engines")

    # A relay has all of a version in memory, however its engines install it.
    reader = {"transport": "file", "install": "staged", "num_engines": 1, "workers_per_engine": 1, "engine_hosts": 1}
    stored = estimate(specs, msgspec.structs.replace(it, **reader))
    read_bytes = sum(stored.origins)
    write_seconds = 0.0 if it.store_gbit is None else max(stored.trainer_host.link_seconds, read_bytes / source)
    sender = Deployment(install=it.install)
    shared, sent = estimate(specs, sender), estimate(specs, msgspec.structs.replace(sender, transport="gloo"))

    def send(num_relays: int) -> tuple[float, int]:
        """Return seconds from a relay with the most engines to these, and the bytes that its host's link sends."""
        num_hosts = math.ceil(num_parts / num_relays) * hosts_per_part
        if num_hosts == 1:
            return 0.0, 0
        own, num_bytes = num_hosts - 1, sum(sent.origins)
        hosts = [own, *(number for number in range(num_hosts) for _ in range(it.num_joined))]
        copies = sum(hosts[member] == own != hosts[child] for member, child in gloo_tree(len(hosts)))
        seconds = broadcast_seconds(hosts, dict.fromkeys(hosts, link), num_bytes, sent.bucket_size_bytes)
        return seconds, copies * num_bytes

    # For each size of the largest part only the smallest number of relays is of use.
    numbers = {math.ceil(num_parts / size) for size in range(1, num_parts + 1)}
    readings = _readings(numbers if num_relays is None else {*numbers, num_relays}, read_bytes, link, source)
    ways = [
        (sum(reading.seconds) + send(reading.levels[-1])[0], reading)
        for reading in readings
        if num_relays in (None, reading.levels[-1])
    ]
    enough = TOLERANCE * min(seconds for seconds, _ in ways)
    seconds, chosen = min((way for way in ways if way[0] <= enough), key=lambda way: (sum(way[1].levels), way[0]))
    send_seconds, sent_bytes = send(chosen.levels[-1])
    least, more = divmod(num_parts, chosen.levels[-1])
    parts = [least + (number < more) for number in range(chosen.levels[-1])]
    is_shared = parts[0] * hosts_per_part == 1
    found = Relays(
        levels=list(chosen.levels),
        engines=[part * workers // it.workers_per_engine for part in parts],
        hosts=[part * hosts_per_part for part in parts],
        transport="ipc" if is_shared else "gloo",
        read_bytes=read_bytes,
        sent_bytes=sent_bytes,
        memory_bytes=stored.engine_host.buckets + (shared if is_shared else sent).trainer_host.buckets,
        write_seconds=write_seconds,
        read_seconds=list(chosen.seconds),
        send_seconds=send_seconds,
        seconds=write_seconds + seconds,
        seconds_without=_seconds_without(it, without, write_seconds, link, source),
        commands=[],
    )
    return msgspec.structs.replace(found, commands=list(_commands(it, found)))


def _rates(it: Deployment) -> tuple[float, float]:
    """Return the bytes per second of a host's link, and of that of the trainer's store."""
    if it.link_gbit is None:
        raise ValueError("relays are chosen by the time that the links need: pass --link-gbit")
    if it.colocated:
        raise ValueError("relays are for engines on other hosts than the trainer's: pass --apart")
    if it.transport not in ("gloo", "file"):
        raise ValueError(
            "relays are compared with a publish over gloo, or with engines that read the store (file), not over "
            f"{it.transport}: pass --transport gloo or file"
        )
    if it.trainer_hosts > 1 and it.store_gbit is None:
        raise ValueError(
            f"{it.trainer_hosts} trainer hosts write into one store, on a network filesystem or in an object store: "
            "pass its --store-gbit"
        )
    return it.link_gbit * 1e9 / 8, (it.store_gbit or it.trainer_gbit or it.link_gbit) * 1e9 / 8


def _readings(numbers: Iterable[int], read_bytes: int, link: float, source: float) -> list[_Reading]:
    """Return the fastest reading for each number of relays. `link`, `source`: bytes per second."""
    found: list[_Reading] = []
    for number in sorted(numbers):
        ways = [_Reading((number,), (max(number * read_bytes / source, read_bytes / link),))]
        ways += [
            _Reading((*levels, number), (*seconds, math.ceil(number / levels[-1]) * read_bytes / link))
            for levels, seconds in found
        ]
        found.append(min(ways, key=lambda way: (sum(way.seconds), sum(way.levels))))
    return found


def _seconds_without(it: Deployment, without: Estimate, write_seconds: float, link: float, source: float) -> float:
    """Return the time of a publish to all engines, or of reads of the store by all hosts that have engines."""
    if it.transport == "file":
        num_bytes = without.engine_host.received
        return write_seconds + max(it.engine_hosts * num_bytes / source, num_bytes / link)
    engines = [number for number in range(it.engine_hosts) for _ in range(it.num_joined)]
    links = {-1: (it.trainer_gbit or 0) * 1e9 / 8 or link, **dict.fromkeys(engines, link)}
    largest = max(without.origins, default=0)
    seconds = broadcast_seconds([-1, *engines], links, largest, without.bucket_size_bytes)
    # Several trainer hosts send at once, and the same engines pass on what comes from each.
    return max(seconds, without.trainer_host.link_seconds, without.engine_host.link_seconds)


def _commands(it: Deployment, found: Relays) -> Iterator[HostCommand]:
    """Yield the commands that set the relays up. Copies are on the first hosts, a relay is on the last one of its."""
    serve = "weightcast serve-store file:///STORE --host 0.0.0.0 --token-file TOKEN"
    url = "'store+http://{}:8200?token_file=TOKEN'"
    sources = ["STORE_URL"]
    if it.store_gbit is None:
        sources = [url.format("trainer")]
        yield HostCommand("trainer", serve)
    digits = len(str(max(it.engine_hosts, it.num_engines)))
    names = [f"host-{number:0{digits}}" for number in range(1, it.engine_hosts + 1)]
    unused = iter(names)
    for level in found.levels[:-1]:
        copying = list(itertools.islice(unused, level))
        for number, name in enumerate(copying):
            source = sources[number * len(sources) // level]
            yield HostCommand(name, f"weightcast pull --follow {source} file:///STORE")
            yield HostCommand(name, serve)
        sources = [url.format(name) for name in copying]
    engines = (f" --engine http://engine-{number:0{digits}}:8000" for number in range(1, it.num_engines + 1))
    for number, last in enumerate(itertools.accumulate(found.hosts)):
        name, source = names[last - 1], sources[number * len(sources) // len(found.hosts)]
        to = f" --transport gloo://{name}:0" if found.transport == "gloo" else ""
        own = "".join(itertools.islice(engines, found.engines[number]))
        yield HostCommand(name, f"weightcast follow {source}{to} --token-file TOKEN{own}")
