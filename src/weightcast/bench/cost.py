"""What a publish will cost: bytes on each link and memory on each host, counted; seconds by stage, from measured parts.

What is counted comes of the code that publishes: its plan of buckets, its layout of arenas, gloo's tree. The seconds
are of a later publish, of weights in host memory, and add up as the code does: one bucket is packed while others are
sent and checked, on cores that they share and within the slots that there are; a store is read when it was written; an
install follows. Nothing here waits or measures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec

from weightcast.bench.deployment import Deployment
from weightcast.bench.parts import STAGES, Parts, PerByte
from weightcast.format.bucket import HEADER_BYTES, pages, place
from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import MAX_ORIGINS, Manifest, TensorSpec
from weightcast.format.plan import plan
from weightcast.trainer.group.assignment import assign
from weightcast.trainer.packer import HeldRegion
from weightcast.transports.collective.buffers import NUM_SLOTS

_SENDER_SLOTS = 2
_MOST_SIMULATED = 64
_LONGEST_POLL_SECONDS = 0.05
"""Of a reader that waits for a store's next version."""


class HostBytes(msgspec.Struct, frozen=True):
    """Of the host that has most of it. `sent`, `received`: over its link, in one publish.

    `trainer`: memory of the sender's; `staged`: buckets and tensors that engines hold until they install, or the slots
    of a stream; `undo`: their copies of what they serve.
    """

    sent: int = 0
    received: int = 0
    trainer: int = 0
    staged: int = 0
    undo: int = 0


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `weightcast plan`. Bytes are counted, seconds are calculated from the machine's parts.

    origins: bytes that leave from each, headers and padding included. members: of each broadcast group, the sender
    included. parallel: what goes on at the same time during the stage "transfer", each if it were alone; the longest is
    what it waits for, and `bottleneck` the longest of all.
    store_bytes: a version's on the filesystem.
    """

    num_tensors: int
    num_bytes: int
    num_buckets: int
    bucket_size_bytes: int
    origins: list[int]
    members: int
    straddling_bytes: int
    trainer_host: HostBytes
    engine_host: HostBytes
    store_bytes: int
    parallel: dict[str, float]
    seconds: dict[str, float]
    publish_seconds: float
    pause_seconds: float
    bottleneck: str


def estimate(specs: Sequence[TensorSpec], deployment: Deployment, parts: Parts | None = None) -> Estimate:
    """Count the bytes and, where a machine's parts are known, calculate the seconds.

    Raises ValueError, ManifestError for what can't be published.
    """
    it, num_bytes = deployment, sum(spec.num_bytes for spec in specs)
    size = it.bucket_size_for(num_bytes)
    manifest = plan(specs, size, origins=_held(specs, it))
    plans = [manifest.of_origin(number) for number in range(len(manifest.spans))]
    wires = [sum(each.buckets) + HEADER_BYTES * len(each.buckets) for each in plans]
    workers = it.num_workers // it.engine_hosts  # of a host
    # Staged, one worker of an engine on a host joins for all of them there.
    joined = math.ceil(workers / min(it.workers_per_engine, workers)) if it.is_staged else workers
    members = 1 + joined * it.engine_hosts if it.transport in ("gloo", "nccl") else 0
    sent, received = _link_bytes(it, wires, joined, members)
    straddling = 0
    if it.is_staged:
        origins = manifest.bucket_origins
        straddling = sum(
            record.num_bytes
            for record in manifest.tensors
            if (record.group or not it.takes_parts) and len({origins[piece.bucket] for piece in record.pieces}) > 1
        )
    trainer_host = HostBytes(
        sent=sent[0], received=received[0], trainer=max((_sender_memory(it, each) for each in plans), default=0)
    )
    copies = {"memory": 0, "ipc": 0, "gloo": joined, "nccl": joined, "file": workers if len(plans) > 1 else joined}
    received_as = [manifest] if it.transport == "file" else plans
    staged = copies[it.transport] * sum(_receiver_memory(it, each) for each in received_as)
    staged += workers * straddling
    undo = num_bytes * it.num_engines // it.engine_hosts if it.undo else 0
    engine_host = HostBytes(sent=sent[1], received=received[1], staged=staged, undo=undo)
    parallel, seconds, bottleneck = dict[str, float](), dict[str, float](), ""
    if parts is not None:
        timing = _Timing(it, parts, manifest, wires, (trainer_host, engine_host), joined)
        parallel, seconds = timing.parallel, timing.seconds()
        bottleneck = max(seconds, key=seconds.__getitem__)
        if bottleneck == "transfer":
            bottleneck = max(parallel, key=parallel.__getitem__)
    return Estimate(
        num_tensors=len(specs),
        num_bytes=num_bytes,
        num_buckets=len(manifest.buckets),
        bucket_size_bytes=size,
        origins=wires,
        members=members,
        straddling_bytes=straddling,
        trainer_host=trainer_host,
        engine_host=engine_host,
        store_bytes=sum(wires) if it.transport == "file" else 0,
        parallel=parallel,
        seconds=seconds,
        publish_seconds=sum(seconds.values()),
        pause_seconds=sum(seconds.get(stage, 0.0) for stage in STAGES[4 if it.is_staged else 2 :]),
        bottleneck=bottleneck,
    )


def _held(specs: Sequence[TensorSpec], it: Deployment) -> list[dict[str, list[Region]]] | None:
    """What leaves from each origin, as the trainer's ranks agree on it. One rank stands for a host's."""
    num_hosts = it.trainer_hosts
    if num_hosts == 1:
        return None
    if num_hosts > MAX_ORIGINS:
        raise ValueError(f"{num_hosts} trainer hosts are more than the {MAX_ORIGINS} that can send: use fewer hosts")
    held: list[list[HeldRegion]] = [[] for _ in range(num_hosts)]
    total, done = max(sum(spec.num_bytes for spec in specs), 1), 0
    for number, spec in enumerate(specs):
        everything = whole(spec.shape)
        if it.sharding == "pp":
            held[min(done * num_hosts // total, num_hosts - 1)].append(HeldRegion(number, everything))
            done += spec.num_bytes
        elif it.sharding == "fsdp" and spec.shape and spec.num_bytes:
            # As torch.chunk cuts rows, of which a host has those of its ranks end to end.
            rows, others = spec.shape[0], spec.shape[1:]
            step = -(-rows // (num_hosts * it.ranks_per_host)) * it.ranks_per_host
            for host, start in enumerate(range(0, rows, step)):
                region = Region((start, *(0 for _ in others)), (min(step, rows - start), *others))
                held[host].append(HeldRegion(number, region))
        else:
            for each in held:
                each.append(HeldRegion(number, everything))
    brought: list[dict[str, list[Region]]] = [{} for _ in held]
    for found, parts, regions in zip(brought, assign(specs, held, range(num_hosts)), held, strict=True):
        for part, region in parts:
            found.setdefault(specs[regions[part].tensor].name, []).append(region)
    return [found for found in brought if found]


def _sender_memory(it: Deployment, each: Manifest) -> int:
    """Bytes that the sender of an origin keeps for its buckets."""
    if it.transport in ("memory", "ipc"):
        return pages(place(each, num_slots=_SENDER_SLOTS, staged=it.is_staged).size_bytes)
    num_slots = 1 if it.transport == "file" else _SENDER_SLOTS
    return pages(place(each, num_slots=num_slots, staged=False).size_bytes)


def _receiver_memory(it: Deployment, each: Manifest) -> int:
    """Bytes that a worker's receiver of an origin keeps for its buckets; of a store, for all of them."""
    if it.transport == "file":
        return pages(place(each, num_slots=1, staged=it.is_staged, adjoining=True).size_bytes)
    return pages(place(each, num_slots=NUM_SLOTS, staged=it.is_staged).size_bytes)


def _link_bytes(
    it: Deployment, wires: Sequence[int], joined: int, members: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sent and received over the link of the trainer host, and of the engine host, that has most of each."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}

    def travel(source: int, target: int, num_bytes: int) -> None:
        if source != target:
            sent[source] = sent.get(source, 0) + num_bytes
            received[target] = received.get(target, 0) + num_bytes

    first = 0 if it.colocated else it.trainer_hosts
    engine_hosts = range(first, first + it.engine_hosts)
    filesystem = -1
    for origin, wire in enumerate(wires):
        if it.transport == "file":
            travel(origin, filesystem, wire)
            for host in engine_hosts:
                travel(filesystem, host, wire * (1 if len(wires) == 1 else joined))
        hosts = [origin, *(engine_hosts[member // joined] for member in range(members - 1))]
        for member, target in gloo_tree(members) if it.transport == "gloo" else itertools.pairwise(range(members)):
            travel(hosts[member], hosts[target], wire)
    trainer, engines = range(it.trainer_hosts), engine_hosts
    most = [[max(found.get(host, 0) for host in hosts) for hosts in (trainer, engines)] for found in (sent, received)]
    return (most[0][0], most[0][1]), (most[1][0], most[1][1])


def gloo_tree(num_members: int) -> Iterator[tuple[int, int]]:
    """Who sends a broadcast of member 0 to whom: gloo's binomial tree (gloo/broadcast.cc)."""
    for bit in range((num_members - 1).bit_length()):
        yield from ((member, member | 1 << bit) for member in range(1 << bit) if member | 1 << bit < num_members)


class _Work(msgspec.Struct, frozen=True):
    """What a bucket goes through: seconds for one bucket, if nothing else ran; the cores it takes at either end.

    ahead: how many buckets it may be ahead of what comes `behind` it, by name; None: of nothing.
    """

    name: str
    seconds: float
    trainer_cores: float = 0.0
    engine_cores: float = 0.0
    ahead: int | None = None
    behind: str = ""


def _pipeline(works: Sequence[_Work], num_buckets: int, trainer_cores: int, engine_cores: int | None) -> float:
    """Seconds until every bucket has gone through every work, one after the other, each work one bucket at a time.

    Works that go on at the same time share the cores evenly; `engine_cores` None: those of the trainer.
    """
    simulated = min(num_buckets, _MOST_SIMULATED)
    done, left = {work.name: 0 for work in works}, {work.name: work.seconds for work in works}
    now, ends = 0.0, list[float]()
    while len(ends) < simulated:
        active = []
        for former, work in zip((None, *works), works, strict=False):
            has_input = done[work.name] < (simulated if former is None else done[former.name])
            if has_input and (work.ahead is None or done[work.name] - done[work.behind] < work.ahead):
                active.append(work)
        demand = [sum(work.trainer_cores for work in active), sum(work.engine_cores for work in active)]
        if engine_cores is None:
            demand = [sum(demand)] * 2
        speeds = [
            min(1.0, cores / need) if need else 1.0
            for cores, need in zip((trainer_cores, engine_cores or trainer_cores), demand, strict=True)
        ]
        speed = {
            w.name: min(speeds[0] if w.trainer_cores else 1.0, speeds[1] if w.engine_cores else 1.0) for w in active
        }
        step = min(left[work.name] / speed[work.name] for work in active)
        now += step
        for work in active:
            left[work.name] -= step * speed[work.name]
            if left[work.name] <= 1e-12:
                done[work.name] += 1
                left[work.name] = work.seconds
                if work is works[-1]:
                    ends.append(now)
    half = simulated // 2
    each = (ends[-1] - ends[half - 1]) / (simulated - half) if half else 0.0
    return ends[-1] + each * (num_buckets - simulated)


class _Timing:
    """Seconds of one deployment: totals of each work, if nothing else ran, and what comes of them together."""

    def __init__(
        self,
        it: Deployment,
        parts: Parts,
        manifest: Manifest,
        wires: Sequence[int],
        hosts: tuple[HostBytes, HostBytes],
        joined: int,
    ) -> None:
        self._it, self._parts, self._manifest = it, parts, manifest
        self._num_rounds = max(map(len, manifest.spans))
        self._others = it.trainer_hosts * it.ranks_per_host - 1
        self._cores = it.num_cores or parts.num_cores
        self._workers = it.num_workers // it.engine_hosts
        wire, largest = sum(wires), max(wires, default=0)
        trainer_threads, engine_threads = it.ranks_per_host, self._workers
        if it.colocated and it.transport != "file":  # which is read when it was written
            trainer_threads = engine_threads = trainer_threads + engine_threads

        def at(rate: PerByte, num_threads: int) -> float:
            return rate.at(num_threads, self._cores)

        self.parallel: dict[str, float] = {}
        """What goes on at the same time, each by itself."""
        packing, loading = parts.pack, None
        if it.is_cached(max(manifest.buckets, default=0)):
            packing, loading = parts.cached_pack or packing, parts.cached_load
        pack = largest * at(packing, trainer_threads) / it.ranks_per_host
        check = wire * at(loading or parts.check, engine_threads)
        if it.is_staged and it.transport in ("ipc", "file") and len(wires) == 1:
            check /= min(it.workers_per_engine, self._workers)  # ranks of a host share it
        if not it.is_staged and loading is None:
            check += manifest.num_bytes / it.workers_per_engine * at(parts.copy, engine_threads)
        checking = "check" if it.is_staged else "check and load"
        self._works = [self._work("pack", pack, trainer_cores=it.ranks_per_host)]
        per_byte = 8 / (it.link_gbit * 1e9) if it.link_gbit is not None else 0.0
        links = {
            f"{whose}'s link, {way}": getattr(host, way) * per_byte
            for whose, host in zip(("trainer", "engine"), hosts, strict=True)
            for way in ("sent", "received")
        }
        if it.transport == "file":
            write = max(largest * at(parts.write, trainer_threads), links["trainer's link, sent"])
            read = max(wire * at(parts.read, engine_threads), links["engine's link, received"])
            self._works.append(self._work("write", write, trainer_cores=1))
            self._works.append(self._work("read", read, engine_cores=self._workers))
        self.parallel |= {name: seconds for name, seconds in links.items() if seconds}
        if it.transport in ("gloo", "nccl"):
            send, cores = max(links.values()), (0.0, 0.0)
            if it.transport == "gloo":
                num_sends = (joined * it.engine_hosts).bit_length()
                num_passed_on = max(joined - num_sends, 0) if it.colocated else hosts[1].sent / wire
                busy = min(self._cores, trainer_threads + 2)
                send_cpu, receive_cpu = at(parts.send_cpu, busy), at(parts.receive_cpu, busy)
                cpu = largest * send_cpu * num_sends, wire * (receive_cpu * joined + send_cpu * num_passed_on)
                # Beside others it takes longer, as far as it takes more CPU.
                beside = send_cpu - parts.send_cpu.alone + receive_cpu - parts.receive_cpu.alone
                by_host = largest * (parts.raw + beside) * num_sends
                self.parallel["gloo"] = by_host
                send = max(send, by_host)
                cores = (cpu[0] / send, cpu[1] / send) if send else (0.0, 0.0)
            behind = {} if it.is_staged else {"ahead": NUM_SLOTS, "behind": checking}
            self._works[0] = msgspec.structs.replace(self._works[0], ahead=_SENDER_SLOTS, behind="send")
            self._works.append(msgspec.structs.replace(self._work("send", send, *cores), **behind))
        elif it.transport != "file" and not it.is_staged:
            self._works[0] = msgspec.structs.replace(self._works[0], ahead=_SENDER_SLOTS, behind=checking)
        self._works.append(self._work(checking, check, engine_cores=self._workers))
        self.parallel = {
            work.name: work.seconds * self._num_rounds for work in self._works if work.name != "send"
        } | self.parallel
        if self._others and parts.rank["transfer"].bucket:
            self.parallel["ranks' exchanges"] = parts.rank["transfer"].bucket * self._num_rounds * self._others
        if it.transport != "file":
            of_trainer = sum(work.seconds * work.trainer_cores for work in self._works) * self._num_rounds / self._cores
            of_engines = sum(work.seconds * work.engine_cores for work in self._works) * self._num_rounds / self._cores
            if it.colocated:
                self.parallel["cores"] = of_trainer + of_engines
            else:
                self.parallel |= {"trainer's cores": of_trainer, "engine's cores": of_engines}

    def _work(self, name: str, seconds: float, trainer_cores: float = 0.0, engine_cores: float = 0.0) -> _Work:
        return _Work(name, seconds / max(self._num_rounds, 1), trainer_cores, engine_cores)

    def seconds(self) -> dict[str, float]:
        """Of each stage, one after the other."""
        it, parts, works = self._it, self._parts, self._works
        by_stage = parts.stages[f"{it.transport if it.transport in ('gloo', 'file') else 'ipc'} {it.install}"]
        found = dict[str, float]()
        for stage in STAGES:
            costs, rank = by_stage[stage], parts.rank[stage]
            found[stage] = (
                costs.once
                + costs.engine * it.num_engines
                + costs.bucket * self._num_rounds
                + costs.tensor * len(self._manifest.tensors)
                + (rank.once + rank.bucket * self._num_rounds) * self._others
            )
        if self._num_rounds:
            if it.transport == "file":
                # Each end does one thing after the other; a reader waits until the version is whole, and asks for it
                # less and less often.
                written, read = (
                    sum(work.seconds for work in each) * self._num_rounds for each in (works[:2], works[2:])
                )
                crowd = max(1.0, self._workers / self._cores)
                found["transfer"] += written + min(written, _LONGEST_POLL_SECONDS) / 2 + read * crowd
            else:
                engine_cores = None if it.colocated else self._cores
                found["transfer"] += _pipeline(works, self._num_rounds, self._cores, engine_cores)
        if it.is_staged:
            seconds = self._manifest.num_bytes / it.workers_per_engine * parts.install.alone
            found["install"] += seconds * max(1.0, self._workers * parts.num_threads / self._cores)
        return found
