"""Computes the bytes on each link, the memory on each host, and the time that the links alone need for a publish.

The figures use the publishing code's own bucket plan and arena layout, and gloo's broadcast tree. Weights are assumed
to be in host memory. Nothing is measured.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weightcast import registry
from weightcast.format.bucket import HEADER_BYTES, arena_layout_of, pages
from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import MAX_ORIGINS, MAX_TENSORS, Manifest, TensorSpec
from weightcast.format.messages import InstallMode
from weightcast.format.plan import fitting_bucket_size, largest_bucket_size, plan
from weightcast.trainer.group.assignment import assign
from weightcast.trainer.packer import HeldRegion
from weightcast.transports.collective.buffers import NUM_SLOTS

_SENDER_SLOTS = 2


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer and the engines that it publishes to. Raises ValueError for impossible combinations.

    sharding: the part of the model on a trainer host. "whole": all of every tensor, sharded over its ranks or not
    (HSDP, or tensor parallelism within a host); "fsdp": rows of every tensor; "pp" (also for expert parallelism): whole
    tensors, each on one host. engine_hosts: number of hosts over which all workers are distributed, in order;
    `colocated`: these are the first of the trainer's hosts. link_gbit: bandwidth of each host in each direction, in
    Gbit/s; None: seconds are not computed. trainer_gbit: that of each trainer host, if it is another one. store_gbit:
    that of a store which is not on the trainer's host.
    """

    transport: str = "ipc"
    install: InstallMode = "staged"
    trainer_hosts: int = 1
    ranks_per_host: int = 1
    sharding: str = "whole"
    num_engines: int = 1
    workers_per_engine: int = 1
    engine_hosts: int = 1
    colocated: bool = True
    undo: bool = False
    link_gbit: float | None = None
    trainer_gbit: float | None = None
    store_gbit: float | None = None
    bucket_size_bytes: int | None = None

    def __post_init__(self) -> None:
        is_apart = not self.colocated or self.engine_hosts > 1 or self.trainer_hosts > 1
        if self.transport == "ipc" and is_apart:
            raise ValueError("ipc needs trainer and engines on one host: use --transport gloo, nccl or file")
        if self.trainer_hosts > MAX_ORIGINS:
            raise ValueError(
                f"--trainer-hosts is {self.trainer_hosts}, at most {MAX_ORIGINS} can send: use fewer hosts"
            )
        if self.colocated and self.engine_hosts > self.trainer_hosts:
            raise ValueError(
                f"{self.engine_hosts} engine hosts can't be among {self.trainer_hosts} trainer hosts: pass --apart, or "
                "fewer --engine-hosts"
            )
        if self.colocated and self.trainer_gbit:
            raise ValueError("--trainer-gbit is for a trainer on other hosts than the engines': pass --apart")
        if self.num_workers % self.engine_hosts:
            raise ValueError(
                f"{self.num_workers} workers can't be distributed evenly over {self.engine_hosts} engine hosts: choose "
                "--engine-hosts that divides the number of workers"
            )

    @property
    def num_workers(self) -> int:
        return self.num_engines * self.workers_per_engine

    @property
    def is_staged(self) -> bool:
        return self.install == "staged"

    @property
    def num_joined(self) -> int:
        """Number of workers of each engine host that join a broadcast: staged, one for all of an engine's there."""
        workers = self.num_workers // self.engine_hosts
        return math.ceil(workers / min(self.workers_per_engine, workers)) if self.is_staged else workers


class HostBytes(msgspec.Struct, frozen=True):
    """Figures of the host with the most bytes. `sent`, `received`: bytes over its link in one publish.

    `link_seconds`: time that the link needs for the larger of the two; 0 if its speed was not given. `buckets`: memory
    of the sender's or the receivers' buckets. `undo`: memory of the engines' undo copies.
    """

    sent: int
    received: int
    link_seconds: float
    buckets: int
    undo: int = 0


class HostCommand(msgspec.Struct, frozen=True):
    """A command and the host that runs it."""

    host: str
    command: str


class Relays(msgspec.Struct, frozen=True):
    """Relays between the trainer's store and the engines, and the time that the links need for one version.

    levels: number of hosts that read the version, level by level; the last ones are the relays, those before them copy
    it for the next level. engines: number of engines of each relay. hosts: number of hosts that each relay's engines
    have. transport: from a relay to its engines, "ipc" if they are on one host. read_bytes: read by each host of a
    level. sent_bytes: what the link of a relay's host sends to engines, at most. memory_bytes: host memory of each
    relay. write_seconds: until the store has the version; read_seconds: of each level; send_seconds: from the relays
    to the engines; seconds: of all; seconds_without: of a publish without relays.
    """

    levels: list[int]
    engines: list[int]
    hosts: list[int]
    transport: str
    read_bytes: int
    sent_bytes: int
    memory_bytes: int
    write_seconds: float
    read_seconds: list[float]
    send_seconds: float
    seconds: float
    seconds_without: float
    commands: list[HostCommand]


class Estimate(msgspec.Struct, frozen=True):
    """The JSON output of `weightcast plan`.

    origins: bytes sent from each origin, including headers and padding. members: number of members of each broadcast
    group, including the sender. straddling_bytes: for each worker, bytes of tensors that are joined from several
    origins. Over `file`, the sum of `origins` is the size of a version in the store. relays: only with `--relays`.
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
    relays: Relays | None = None


def estimate(specs: Sequence[TensorSpec], deployment: Deployment) -> Estimate:
    """Compute the figures. Raises ValueError or ManifestError for a model that can't be published."""
    it, num_bytes = deployment, sum(spec.num_bytes for spec in specs)
    is_alone = it.trainer_hosts * it.ranks_per_host == 1
    sizes = registry.transport(f"{it.transport}://").default_bucket_size_bytes
    default = largest_bucket_size(sizes, "cpu", it.install, is_alone=is_alone)
    size = it.bucket_size_bytes or fitting_bucket_size(num_bytes, default)
    manifest = plan(specs, size, origins=_held(specs, it))
    plans = [manifest.of_origin(number) for number in range(len(manifest.spans))]
    wires = [sum(each.buckets) + HEADER_BYTES * len(each.buckets) for each in plans]
    workers, joined = it.num_workers // it.engine_hosts, it.num_joined
    members = 1 + joined * it.engine_hosts if it.transport in ("gloo", "nccl") else 0
    straddling = 0
    if it.is_staged:
        origins = manifest.bucket_origins
        straddling = sum(
            record.num_bytes
            for record in manifest.tensors
            if len({origins[piece.bucket] for piece in record.pieces}) > 1
        )
    copies = {"ipc": 0, "gloo": joined, "nccl": joined, "file": workers if len(plans) > 1 else joined}
    if it.transport == "file":
        of_trainer = max(_memory(each, 1, False) for each in plans)
        received = _memory(manifest, 1, it.is_staged, adjoining=True)
    else:
        of_trainer = max(_memory(each, _SENDER_SLOTS, it.is_staged and it.transport == "ipc") for each in plans)
        received = sum(_memory(each, NUM_SLOTS, it.is_staged) for each in plans)
    of_engines = copies[it.transport] * received + workers * straddling
    rates = it.trainer_gbit or it.link_gbit, it.link_gbit
    links = [
        (sent, received, max(sent, received) * 8 / (gbit * 1e9) if gbit else 0.0)
        for (sent, received), gbit in zip(_link_bytes(it, wires, members), rates, strict=True)
    ]
    undo = num_bytes * it.num_engines // it.engine_hosts if it.undo else 0
    return Estimate(
        num_tensors=len(specs),
        num_bytes=num_bytes,
        num_buckets=len(manifest.buckets),
        bucket_size_bytes=size,
        origins=wires,
        members=members,
        straddling_bytes=straddling,
        trainer_host=HostBytes(*links[0], of_trainer),
        engine_host=HostBytes(*links[1], of_engines, undo),
    )


def _held(specs: Sequence[TensorSpec], it: Deployment) -> list[dict[str, list[Region]]] | None:
    """Return the regions that each origin sends, as the trainer ranks would agree. A host counts as one rank."""
    num_hosts = it.trainer_hosts
    if num_hosts == 1:
        return None
    held: list[list[HeldRegion]] = [[] for _ in range(num_hosts)]
    total, done = max(sum(spec.num_bytes for spec in specs), 1), 0
    for number, spec in enumerate(specs):
        everything = whole(spec.shape)
        if it.sharding == "pp":
            held[min(done * num_hosts // total, num_hosts - 1)].append(HeldRegion(number, everything))
            done += spec.num_bytes
        elif it.sharding == "fsdp" and spec.shape and spec.num_bytes:
            # Rows are divided as by torch.chunk; a host has those of its ranks, which are adjacent.
            rows, others = spec.shape[0], spec.shape[1:]
            step = -(-rows // (num_hosts * it.ranks_per_host)) * it.ranks_per_host
            for host, start in enumerate(range(0, rows, step)):
                region = Region((start, *(0 for _ in others)), (min(step, rows - start), *others))
                held[host].append(HeldRegion(number, region))
        else:
            for each in held:
                each.append(HeldRegion(number, everything))
    brought: list[dict[str, list[Region]]] = [{} for _ in held]
    for found, parts in zip(brought, assign(specs, held, range(num_hosts)), strict=True):
        for part in parts:
            found.setdefault(specs[part.tensor].name, []).append(part.region)
    return [found for found in brought if found]


def _memory(each: Manifest, num_slots: int, staged: bool, adjoining: bool = False) -> int:
    """Return the bytes that one end of an origin keeps for its buckets."""
    return pages(arena_layout_of(each, num_slots=num_slots, staged=staged, adjoining=adjoining).size_bytes)


def _link_bytes(it: Deployment, wires: Sequence[int], members: int) -> list[tuple[int, int]]:
    """Return the bytes sent and received by the trainer host and the engine host that have the most."""
    joined = it.num_joined
    sent, received = collections.Counter[int](), collections.Counter[int]()

    def travel(source: int, target: int, num_bytes: int) -> None:
        if source != target:
            sent[source] += num_bytes
            received[target] += num_bytes

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
    return [
        (max(sent[host] for host in hosts), max(received[host] for host in hosts))
        for hosts in (range(it.trainer_hosts), engine_hosts)
    ]


def gloo_tree(num_members: int) -> Iterator[tuple[int, int]]:
    """Yield (sender, receiver) of a broadcast from member 0 in gloo's binomial tree (gloo/broadcast.cc)."""
    for bit in range((num_members - 1).bit_length()):
        yield from ((member, member | 1 << bit) for member in range(1 << bit) if member | 1 << bit < num_members)


def equal(num_params: int, num_tensors: int, dtype: str) -> Sequence[TensorSpec]:
    """Return specs of equally long flat tensors; the last one has the remainder. Raises ValueError."""
    if num_tensors > MAX_TENSORS:
        raise ValueError(f"--tensors is {num_tensors}; it must be at most {MAX_TENSORS}")
    each = num_params // num_tensors
    if each < 1:
        raise ValueError(f"--params {num_params} can't fill --tensors {num_tensors}: use fewer tensors")
    sizes = [each] * (num_tensors - 1) + [num_params - each * (num_tensors - 1)]
    return tuple(TensorSpec(f"blocks.{number}.weight", dtype, (size,)) for number, size in enumerate(sizes))


def of_config(directory: Path, dtype: str) -> Sequence[TensorSpec]:
    """Return the specs of the model that a directory's config.json describes. Raises ValueError if it has none."""
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json: pass the directory of a model that transformers knows")
    return of_model(AutoConfig.from_pretrained(directory), dtype)


def of_model(config: Any, dtype: str) -> Sequence[TensorSpec]:
    """Return a model's specs in checkpoint form. transformers builds it on the meta device, without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from weightcast.checkpoint.live import checkpoint_tensors

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    return checkpoint_tensors(model)[0]
