"""One trainer rank: the regions that it has, those that it packs into which buckets, and the digests of these.

Invariants: if ranks differ, all of them raise the same error; if nothing has changed on any rank, a publish needs only
its first exchange to agree; each element is packed by one rank, straight into a bucket of its origin. Chunks that a
rank fills alone it digests while it packs; the origin's leader digests the others once every rank has reported its part
packed, after which no rank writes to that bucket.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from weightcast.errors import IncompatibleWeightsError, UnsupportedError
from weightcast.format.bucket import Digest
from weightcast.format.geometry import ALIGNMENT_BYTES
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.host.memory import SharedMemory, host_identity
from weightcast.native.tables import Chunks, Sums, added, digest
from weightcast.seams.source import CollectiveSource, Regions, Source
from weightcast.trainer.background import Overlap
from weightcast.trainer.engine_dtypes import cast_by_name
from weightcast.trainer.finite import require_finite
from weightcast.trainer.group import records
from weightcast.trainer.group.assignment import assign_all, leaders_of, require_reach
from weightcast.trainer.group.group import Group
from weightcast.trainer.group.records import NextBucket
from weightcast.trainer.group.whole_tensors import gather_whole
from weightcast.trainer.packer import HeldRegion, Packer, SeenRegions, Shard, ShardSlices, held_shards

_NOTHING = assign_all((), [()], [0], ALIGNMENT_BYTES)


class Rank:
    """One of several ranks that publish together, with its state between publishes. `run`: the publishing rank's."""

    def __init__(self, trainer_group: Any, source: Source, deadline_seconds: float) -> None:
        """`trainer_group`: None stands for torch.distributed's default group."""
        self.group = Group(trainer_group, deadline_seconds)
        self.run = ""
        self._source = source
        self._deadline_seconds = deadline_seconds
        self._regions: SeenRegions | None = None
        self._specs: Sequence[TensorSpec] = ()
        self._digest = ""
        self._shards: list[Shard] = []
        self._parts: list[HeldRegion] = []
        self._has_agreed = False
        """True if nothing has changed on this rank since the ranks last agreed."""
        self._assignment = _NOTHING
        self._leader = 0
        self._span = range(0)
        """The buckets of this rank's origin."""
        self._part = Packer(_NOTHING.layout, ())
        self._contributors: dict[int, ShardSlices] = {}
        """By group rank, the slices that other ranks pack into the origin that this rank leads."""
        self._unfilled: dict[int, list[Chunks]] = {}
        """By bucket, the chunks that each of these other ranks does not fill alone."""
        self._mapped: tuple[str, torch.Tensor] | None = None
        """Location and memory of the origin's buckets, if another rank leads the origin."""
        self._payloads: dict[tuple[int, int], torch.Tensor] = {}
        """Views of the mapped buckets, by number and first byte, kept so that packing can be prepared once."""
        self._sums: Sums = 0, 0
        self._missing: Chunks | None = None
        """For the last bucket in host memory: its chunks that this rank does not fill alone, from `Packer.pack`."""
        self._filled: Digest = b""
        """Digest of the last bucket that was packed on a GPU."""
        self._is_instructing = False
        """True while the other ranks wait for this rank's instructions, in a publish."""

    def close(self) -> None:
        """Disconnect from the other ranks without notifying them, and drop every view of buckets. Idempotent."""
        self.group.close()
        self.forget_views()

    def decline(self, overlap: Overlap) -> bool:
        """On the publishing rank, while another thread publishes: decline the next `start` of the other ranks.

        Returns False if they can't be told: the publish in flight has not begun there, has ended there, or is failing.
        """
        with self.group.uninterrupted(), contextlib.suppress(Exception):
            if self._is_instructing:
                self.group.exchange(records.Declined(overlap))
                return True
        return False

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Have the ranks agree again at the next publish if they lose each other in this block."""
        try:
            yield
        except BaseException as exc:
            self._end_update(f"{type(exc).__name__}: {exc}")
            self.group.give_up()
            raise
        finally:
            if not self.group.is_connected:
                self._has_agreed = False

    def _end_update(self, failure: str = "") -> None:
        """End the update on this rank's sender. `failure`: why the publish has failed; empty if it has not."""

    # --- what it holds ---

    def _read_regions(self, regions: Regions) -> None:
        """Take over the source's regions on this rank. No communication. Raises IncompatibleWeightsError."""
        if self._regions is not None and self._regions.is_of(regions):
            return
        self._regions = None
        specs = self._source.specs()
        if specs is not self._specs:
            self._specs, self._has_agreed = specs, False
            data = msgspec.json.encode([[s.name, s.dtype, s.shape, s.aliases, s.group] for s in specs])
            self._digest = hashlib.sha256(data).hexdigest()
        shards = held_shards(specs, regions)
        parts = [HeldRegion(shard.tensor, shard.region) for shard in shards]
        if parts != self._parts:
            self._parts, self._has_agreed = parts, False
        self._shards, self._regions = shards, SeenRegions(regions)
        if self._has_agreed:
            self._part.rebind(self._own_parts())

    def _own_parts(self) -> list[Shard]:
        """Return the shards that this rank packs."""
        assigned = self._assignment.assigned[self.group.group_rank]
        return [Shard(each.tensor, each.region, self._shards[each.part].view(each.region)) for each in assigned]

    def _device(self) -> torch.device:
        devices = (shard.data.device for shard in self._shards)
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    # --- agree ---

    def _start(self, *, is_changed: bool) -> list[records.Start]:
        """Make the first exchange of a publish. Raises the same error on every rank unless all specs are equal."""
        group, source = self.group, self._source
        num_gathers = source.num_gathers if isinstance(source, CollectiveSource) else 0
        started: list[records.Start] = group.start(records.Start(is_changed, self._digest, num_gathers))
        if any(start.specs != started[0].specs for start in started):
            self._has_agreed = False
            differs = group.is_publishing or self._digest != started[0].specs
            found = group.exchange(records.Specs(list(self._specs)) if differs else records.Nothing())
            other = next(rank for rank, start in enumerate(started) if start.specs != started[0].specs)
            group.error = _difference(found[0].specs, found[other].specs, group.ranks[0], group.ranks[other])
            group.exchange(records.Nothing())
        return started

    def _agree(self, settings: records.Settings) -> list[records.Agreed]:
        """Exchange regions, compute the assignment, prepare this rank's part. Errors are the same on all ranks."""
        group, own = self.group, self.group.group_rank
        self._has_agreed = False
        self.forget_views()
        probe, mappable, agreed = None, records.Mappable(()), records.Agreed("")
        with group.error_at_next_exchange():
            probe = SharedMemory.make(1, "finding out which ranks share memory")
        location = "" if probe is None else probe.location
        held: list[records.Held] = group.exchange(records.Held(self._parts, host_identity(), location))
        with group.error_at_next_exchange():
            near = [rank for rank in range(own) if held[rank].host == held[own].host]
            mappable = records.Mappable(tuple(rank for rank in near if _can_map(held[rank].probe)))
        reach: list[records.Mappable] = group.exchange(mappable)
        del probe
        with group.error_at_next_exchange():
            specs = cast_by_name(self._specs, settings.dtypes)
            leading = leaders_of([each.ranks for each in reach], maps_buckets=settings.maps_buckets)
            parts = [each.parts for each in held]
            self._assignment = assignment = assign_all(specs, parts, leading, settings.bucket_size_bytes)
            require_reach(settings.url, assignment, [each.host for each in held], group.ranks)
            agreed = records.Agreed(assignment.layout.manifest.digest(), self._prepare(settings))
            self.run = settings.run
        found: list[records.Agreed] = group.exchange(agreed)
        if len(digests := {each.manifest_digest for each in found}) > 1:
            raise IncompatibleWeightsError(
                f"the trainer ranks have made {len(digests)} different bucket plans from equal specs: install the same "
                "version of weightcast on every trainer rank"
            )
        origin = assignment.origins[own]
        self._leader, self._span = assignment.leaders[origin], assignment.layout.manifest.spans[origin]
        self._part = Packer(assignment.layout, self._own_parts())
        others = [rank for rank in range(group.size) if assignment.origins[rank] == origin and rank != own]
        self._contributors, self._unfilled = {}, {}
        if own == self._leader:
            self._contributors = {rank: ShardSlices(assignment.layout, assignment.assigned[rank]) for rank in others}
        self._has_agreed = True
        return found

    def _prepare(self, settings: records.Settings) -> str:
        """Make this rank's sender, if it leads an origin; return the sender's address, else an empty string."""
        return ""

    def _complete(self, started: Sequence[records.Start]) -> None:
        """Compute the tensors that need several ranks (see `CollectiveSource`). Errors are the same on all ranks."""
        group, counts = self.group, [start.num_gathers for start in started]
        if not any(counts):
            return
        with group.error_at_next_exchange():
            if len(set(counts)) > 1:
                raise IncompatibleWeightsError(
                    "the trainer ranks do not have the same adapters in sharded layers (number of layers to gather, by "
                    f"trainer rank: {dict(zip(group.ranks, counts, strict=True))}): activate the same adapters on "
                    "every rank"
                )
            assert isinstance(self._source, CollectiveSource)
            self._source.complete(functools.partial(gather_whole, group))
        group.exchange(records.Nothing())

    def _check_finite(self) -> None:
        """Check the shards that this rank packs for NaN and infinity; the next exchange raises NotFiniteError."""
        with self.group.error_at_next_exchange():
            require_finite(self._assignment.layout.manifest.tensors, self._own_parts())

    # --- pack ---

    def _next_bucket(self, payload: torch.Tensor) -> NextBucket:
        """Return the location of the next bucket, for the origin's other ranks.

        Raises UnsupportedError if it is not in a `SharedMemory`.
        """
        memory = SharedMemory.of(payload)
        if memory is None and self._contributors:
            raise UnsupportedError(
                "several trainer ranks of one host need buckets in memory that all of them can map (SharedMemory), but "
                "this transport's sender allocates other memory: publish over ipc://, gloo:// or file://"
            )
        return NextBucket(int(payload.storage_offset()), "" if memory is None else memory.location)

    def _pack(self, bucket: NextBucket | None, number: int, payload: torch.Tensor | None = None) -> None:
        """Write this rank's part of its origin's bucket of round `number`, if the origin has one.

        `payload`: the bucket's memory, if this rank leads the origin; else the leader's memory is mapped. Errors are
        raised at the next exchange.
        """
        if bucket is None:
            return
        with self.group.error_at_next_exchange():
            index, start = self._span[number], bucket.offset_bytes
            if payload is None:
                if self._mapped is None or self._mapped[0] != bucket.memory:
                    self.forget_views()
                    self._mapped = bucket.memory, SharedMemory.open(bucket.memory).map().tensor()
                if (index, start) not in self._payloads:
                    end = start + self._assignment.layout.manifest.buckets[index]
                    self._payloads[index, start] = self._mapped[1][start:end]
                payload = self._payloads[index, start]
            if payload.is_cuda:
                self._filled = self._part.fill(index, payload, WeightVersion(self.run, self.group.version))
            else:
                self._sums, self._missing = self._part.pack(index, payload)

    def _digest_of(self, number: int, payload: torch.Tensor, packed: Sequence[Any]) -> Digest:
        """Return the digest of a bucket of this rank's origin. `packed`: all ranks' statuses after packing it."""
        if payload.is_cuda:
            return self._filled
        assert self._missing is not None
        index = self._span[number]
        if index not in self._unfilled:
            self._unfilled[index] = [slices.unfilled(index) for slices in self._contributors.values()]
        missing = functools.reduce(operator.and_, self._unfilled[index], self._missing)
        sums = [self._sums, *(packed[rank].sums for rank in self._contributors)]
        payload = payload[: self._assignment.layout.manifest.buckets[index]]
        # The ranks that wait for this digest leave their cores idle.
        return added(*sums, digest(payload, missing, threads=1 + len(self._contributors)))

    def forget_views(self) -> None:
        """Drop every view of buckets, and unmap the leader's memory."""
        self._part.forget_views()
        self._payloads.clear()
        self._mapped = None


def _can_map(location: str) -> bool:
    with contextlib.suppress(UnsupportedError):
        SharedMemory.open(location).map()
        return True
    return False


def _difference(
    theirs: Sequence[TensorSpec], ours: Sequence[TensorSpec], their_rank: int, our_rank: int
) -> IncompatibleWeightsError:
    pairs = enumerate(itertools.zip_longest(theirs, ours))
    number, (their, our) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    return IncompatibleWeightsError(
        f"the trainer ranks do not describe the same model: tensor {number} is {their or 'missing'} on trainer rank "
        f"{their_rank} and {our or 'missing'} on trainer rank {our_rank}; have specs() return the tensors of the whole "
        "model, the same on every rank"
    )
