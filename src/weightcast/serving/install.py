"""An install as a list: the blocks of buckets that are copied into live memory, and the tensors that a loader gets.

Invariants: a tensor is handed out once and only when every byte of it is there, all of them by the last bucket (a
manifest's pieces tile its tensors); members of a load group go in one call. A tensor that lies whole in one piece of
memory is a view of it. One that was cut is copied piece by piece where the engine's map can do that; else it is put
together: staged while buckets arrive, as a view where its pieces lie end to end in memory; streaming in memory of its
own, with what else belongs to a load group that spans buckets.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from weightcast.errors import InstallError
from weightcast.format.bucket import TORCH_DTYPES, Entry, Layout, narrow
from weightcast.format.geometry import Region, is_run, row_major, start_elements
from weightcast.format.manifest import TensorRecord, TensorSpec
from weightcast.host import device as host_device
from weightcast.host import memory as host_memory
from weightcast.host.copy import PreparedCopies, copy_all
from weightcast.seams.engine import Engine
from weightcast.seams.install_map import InstallMap, Mapped

Named: TypeAlias = tuple[str, torch.Tensor]
Block: TypeAlias = tuple[str, Region | None]
"""A tensor's name, and which piece of it; None: all of it."""


class BlockCopies:
    """Copies of blocks of buckets into live parameters, prepared once for where the map has found these."""

    def __init__(self, install_map: InstallMap, blocks: Sequence[Block], sources: Sequence[torch.Tensor]) -> None:
        """`sources`: the source blocks of all of them, in order, which keep their memory while this is used."""
        self._install_map = install_map
        self._blocks = blocks
        self._sources = sources
        self._prepared: tuple[int, PreparedCopies] | None = None

    def run(self, *, is_bound: bool = False) -> None:
        """Copy. `is_bound`: the map was bound just now. Raises InstallError (torn) for memory that was freed."""
        if not self._blocks:
            return
        try:
            with torch.inference_mode():  # not no_grad: parameters made in inference mode can be written only there
                revision, copies = self._prepared or (-1, None)
                is_known = copies is not None and revision == self._install_map.revision
                if copies is None or not is_known or not copies.are_in_place(targets=not is_bound):
                    targets = [t for name, piece in self._blocks for t in self._install_map.target_blocks(name, piece)]
                    copies = PreparedCopies(targets, self._sources)
                    self._prepared = self._install_map.revision, copies
                copies.run()
        except (RuntimeError, ValueError) as exc:
            raise InstallError(f"copying into the model failed: {exc}", torn=True) from exc


class Part:
    """The copies and loads of some tensors, or pieces of them. `views`: of the bucket that all of them are in, or none.

    `rest`: what `Engine.load` gets. `to_prove`: those of them that are copied once they are proven.
    """

    def __init__(self, install_map: InstallMap | None, copied: frozenset[str], views: list[torch.Tensor]) -> None:
        self.views = views
        self.rest: list[Named] = []
        self.to_prove: list[Named] = []
        self.blocks: list[Block] = []
        self.sources: list[torch.Tensor] = []
        self._install_map = install_map
        self._copied = copied

    def add(self, name: str, tensor: torch.Tensor, piece: Region | None = None) -> None:
        """Add a tensor, or that `piece` of one that is copied piece by piece."""
        if self._install_map is not None:
            if name in self._copied:
                self.blocks.append((name, piece))
                self.sources += self._install_map.source_blocks(name, tensor, piece)
                if name not in self._install_map.also_loaded:
                    return
            elif self._install_map.can_copy(name):
                self.to_prove.append((name, tensor))
        self.rest.append((name, tensor))

    @functools.cached_property
    def copies(self) -> BlockCopies | None:
        """The copies, prepared at their first run; None for an engine without a map."""
        return BlockCopies(self._install_map, self.blocks, self.sources) if self._install_map is not None else None


class Assembly:
    """One update's tensors in the making. Memory: what is put together, until it is handed out or this is cleared.

    `payloads`: staged, by number of the bucket. `to_prove`: names that may be copied once they are proven, with the
    digests of what came.
    """

    def __init__(self, num_pieces: Mapping[str, int], *, is_staged: bool) -> None:
        """`num_pieces`: that are put together, by load group."""
        self.payloads: dict[int, torch.Tensor] = {}
        self.to_prove: dict[str, list[str]] = {}
        self._missing = dict(num_pieces)
        self._is_staged = is_staged
        self._begun: dict[str, dict[str, tuple[TensorRecord, list[tuple[Entry, torch.Tensor]]]]] = {}
        self._whole: list[tuple[TensorRecord, torch.Tensor]] = []

    def add(self, entry: Entry, view: torch.Tensor) -> None:
        """Take a piece: staged its view, which stays valid; streaming a copy of it."""
        record, key = entry.record, entry.record.load_group
        members = self._begun.setdefault(key, {})
        _, pieces = members.setdefault(record.name, (record, []))
        if self._is_staged:
            pieces.append((entry, view))
        else:
            if not pieces:
                whole = torch.empty(record.shape, dtype=TORCH_DTYPES[record.dtype], device=view.device)
                pieces.append((entry, whole))
            narrow(pieces[0][1], entry.piece.region).copy_(view)
        self._missing[key] -= 1
        if self._missing[key] == 0:
            for each, parts in self._begun.pop(key).values():
                self._whole.append((each, _joined(each, parts) if self._is_staged else parts[0][1]))

    def pop_whole(self) -> list[tuple[TensorRecord, torch.Tensor]]:
        """Hand out the tensors of load groups that have become whole."""
        found, self._whole = self._whole, []
        return found

    @property
    def is_empty(self) -> bool:
        return not (self.payloads or self._begun or self._whole)

    def clear(self) -> None:
        """Free everything."""
        self.payloads.clear()
        self._begun.clear()
        self._whole.clear()


class Install:
    """The way of one layout's buckets into an engine: made once for the layout and the engine's map, and kept.

    `copied`: the names of the tensors that are copied, not loaded.
    """

    def __init__(
        self,
        layout: Layout,
        manifest_digest: str,
        engine: Engine,
        specs: Sequence[TensorSpec] | None,
        *,
        uses_map: bool = True,
    ) -> None:
        """`specs` is what `engine.specs()` gave; the install is good as long as it gives the same object."""
        self.layout = layout
        self.manifest_digest = manifest_digest
        self.engine = engine
        self.device = device_of_weights(engine)
        self.specs = specs
        self._map = engine.install_map if uses_map and isinstance(engine, Mapped) else None
        self._revision = 0 if self._map is None else self._map.revision
        self.copied = frozenset[str]() if self._map is None else frozenset(self._map.proven)
        primary = None if specs is None else {name: spec.name for spec in specs for name in spec.names}
        self._names = {record.name: _names(record, primary) for record in layout.manifest.tensors}
        """By record name, under which names it is handed out."""
        self._parts: dict[int, Part] = {}
        self._staged: tuple[list[Part], BlockCopies] | None = None
        self._without_elements = [record for record in layout.manifest.tensors if not record.pieces]
        spanning = _spanning_groups(layout.manifest.tensors)
        # By bucket, entries by their position in it.
        self._whole: list[list[tuple[str, int]]] = [[] for _ in layout.entries]
        self._copied_pieces: list[list[tuple[str, int, Entry]]] = [[] for _ in layout.entries]
        self._joined: list[list[tuple[int, Entry]]] = [[] for _ in layout.entries]
        self._num_joined = collections.Counter[str]()
        origins: dict[str, set[int]] = {}
        for index, entries in enumerate(layout.entries):
            for position, entry in enumerate(entries):
                names = self._names[entry.record.name]
                if entry.is_whole and entry.record.group not in spanning:
                    for name in names:
                        self._whole[index].append((name, position))
                elif all(map(self._is_copied_in_pieces, names)):
                    self._copied_pieces[index] += ((name, position, entry) for name in names)
                else:
                    self._joined[index].append((position, entry))
                    self._num_joined[entry.record.load_group] += 1
                    origins.setdefault(entry.record.name, set()).add(layout.manifest.bucket_origins[index])
        straddling = {name for name, found in origins.items() if len(found) > 1}
        self._num_straddling = len(straddling)
        self.straddling_bytes = sum(r.num_bytes for r in layout.manifest.tensors if r.name in straddling)
        """Memory of its own that a staged update needs for tensors with pieces of several origins."""
        self.has_lent_views = True
        """True if the engine's loader may have written into views of the former version's buckets, which it was given.
        Starts True: nothing is known of what came before this install was made."""

    @property
    def is_current(self) -> bool:
        """False once the engine's model, or what is known of its loader, is another than when this was made."""
        return self._map is None or not (self._map.is_stale or self._map.revision != self._revision)

    @property
    def has_map(self) -> bool:
        """True if the engine's map is used: `Mapped.begin` is called then."""
        return self._map is not None

    def bound(self) -> Install:
        """Look where the live tensors are, right before the first copy; return this install, or a new one."""
        if self._map is None:
            return self
        is_bound = self._map.bind()
        if is_bound and self._map.revision == self._revision:
            return self
        return Install(self.layout, self.manifest_digest, self.engine, self.specs, uses_map=is_bound)

    def forget_views(self) -> None:
        """Drop every kept view of a bucket's memory."""
        self._parts.clear()
        self._staged = None
        self.layout.forget_views()

    def require_memory(self, num_workers: int) -> None:
        """Staged: raises InsufficientMemoryError unless there is room for `straddling_bytes` of each worker here.

        `num_workers`: of all engines of the publish on this host. They are asked before any of them has taken memory.
        """
        if self.straddling_bytes:
            workers = f", in each of {num_workers} workers" if num_workers > 1 else ""
            host_memory.require(
                num_workers * self.straddling_bytes,
                f"putting together {self._num_straddling} tensors of which each trainer host sends a part{workers},",
                'publish with install="streaming", or free memory',
            )

    @functools.cached_property
    def installed_bytes(self) -> int:
        """Bytes that an install copies into place here; a tensor that the engine's loader gets counts whole."""
        found, num_bytes = self._map, 0
        for record in self.layout.manifest.tensors:
            for name in self._names[record.name]:
                is_copied = found is not None and name in self.copied
                num_bytes += found.target_bytes(name) if found is not None and is_copied else record.num_bytes
        return num_bytes

    def assembly(self, *, is_staged: bool) -> Assembly:
        """Return a new assembly, for one update."""
        return Assembly(self._num_joined, is_staged=is_staged)

    def stage(self, index: int, payload: torch.Tensor, assembly: Assembly, *, is_here: bool = True) -> None:
        """Staged: keep a bucket until `load_staged`, with all that can be made of it while the engine generates.

        `is_here`: False if others may still be writing the payload, so that nothing is read of it yet.
        """
        assembly.payloads[index] = payload
        part = self._part(index, payload)
        if is_here and self._joined[index]:
            for position, entry in self._joined[index]:
                assembly.add(entry, part.views[position])
            # The thread that installs has a stream of its own.
            host_device.synchronize_stream(payload.device)

    def load_staged(self, assembly: Assembly) -> None:
        """Staged: load and copy everything."""
        parts = [self._part(index, payload) for index, payload in sorted(assembly.payloads.items())]
        kept = self._staged
        if self._map is not None and (kept is None or kept[0] != parts):
            blocks = [block for part in parts for block in part.blocks]
            self._staged = kept = parts, BlockCopies(self._map, blocks, [s for part in parts for s in part.sources])
        self.has_lent_views = True
        last = self._joined_part(assembly, is_last=True)
        has_rest = any(part.rest for part in (*parts, last))
        self._load([*parts, last], assembly)
        for copies in (kept and kept[1], last.copies):
            if copies is not None:
                copies.run(is_bound=not has_rest)
        self.has_lent_views = has_rest

    def load_bucket(self, index: int, payload: torch.Tensor, assembly: Assembly) -> None:
        """Streaming: load and copy the pieces of this bucket, and the tensors that it completes."""
        part = self._part(index, payload)
        for position, entry in self._joined[index]:
            assembly.add(entry, part.views[position])
        self._load_now([part, self._joined_part(assembly)], assembly, is_called=self._map is not None)

    def load_end(self, assembly: Assembly) -> None:
        """Streaming, after the last bucket: load what is in none, tensors without elements."""
        self._load_now([self._joined_part(assembly, is_last=True)], assembly)

    def _load_now(self, parts: Sequence[Part], assembly: Assembly, *, is_called: bool = False) -> None:
        """`is_called`: the engine's `load` is called also where all is copied, once for each bucket."""
        has_rest = any(part.rest for part in parts)
        self.has_lent_views |= has_rest
        if has_rest or is_called:
            self._load(parts, assembly)
        for part in parts:
            if part.copies is not None:
                part.copies.run()

    def _load(self, parts: Iterable[Part], assembly: Assembly) -> None:
        if self._map is not None:
            for name, tensor in itertools.chain.from_iterable(part.to_prove for part in parts):
                # Before the load: a loader may write into the tensors that it is given.
                blocks = self._map.source_blocks(name, tensor)
                assembly.to_prove[name] = self._map.block_digests(name, blocks)
        self.engine.load([named for part in parts for named in part.rest])

    def prove(self, assembly: Assembly) -> None:
        """After `Engine.commit`: have the map find out what it may copy from now on."""
        if self._map is not None and assembly.to_prove:
            self._map.prove(assembly.to_prove.items())

    def _part(self, index: int, payload: torch.Tensor) -> Part:
        """Return the part of this bucket: tensors that lie whole in it, or are copied in pieces.

        Kept while the bucket is in the same memory.
        """
        views = self.layout.views(index, payload)
        part = self._parts.get(index)
        if part is None or part.views is not views:
            part = self._parts[index] = Part(self._map, self.copied, views)
            for name, position in self._whole[index]:
                part.add(name, views[position])
            for name, position, entry in self._copied_pieces[index]:
                part.add(name, views[position], entry.piece.region)
        return part

    def _joined_part(self, assembly: Assembly, *, is_last: bool = False) -> Part:
        """Return the part of tensors that were put together and, with the last, of those that are in no bucket."""
        part, whole = Part(self._map, self.copied, []), assembly.pop_whole()
        if is_last:
            whole += ((r, torch.empty(r.shape, dtype=TORCH_DTYPES[r.dtype])) for r in self._without_elements)
        for record, tensor in whole:
            for name in self._names[record.name]:
                part.add(name, tensor)
        return part

    def _is_copied_in_pieces(self, name: str) -> bool:
        found = self._map
        return found is not None and (
            name in self.copied and name not in found.also_loaded and found.can_copy_pieces(name)
        )


def _names(record: TensorSpec, primary: Mapping[str, str] | None) -> tuple[str, ...]:
    """Under which names a record is handed out: the engine's own, once for each of its tensors; else all."""
    if primary is None or (not record.aliases and primary.get(record.name) == record.name):
        return record.names
    return tuple(dict.fromkeys(primary[name] for name in record.names if name in primary))


def _joined(record: TensorRecord, parts: Sequence[tuple[Entry, torch.Tensor]]) -> torch.Tensor:
    """All pieces of a tensor as one: a view where they lie in memory as they lie in the tensor, else a copy."""
    parts = sorted(parts, key=lambda part: start_elements(part[0].piece.region, record.shape))
    first = parts[0][1]
    start = first.data_ptr()
    if all(
        piece.is_contiguous()
        and piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and piece.data_ptr() == start + start_elements(entry.piece.region, record.shape) * first.itemsize
        and is_run(entry.piece.region, record.shape)
        for entry, piece in parts
    ):
        return first.as_strided(record.shape, row_major(record.shape), first.storage_offset())
    tensor = torch.empty(record.shape, dtype=first.dtype, device=first.device)
    copy_all([narrow(tensor, entry.piece.region) for entry, _ in parts], [piece for _, piece in parts])
    return tensor


def device_of_weights(engine: Engine) -> torch.device:
    """The first GPU that the engine says it has weights on, else host memory."""
    # Not by isinstance, which reads a property as well before Python 3.12: engines look at their model for it.
    devices: Collection[torch.device] = getattr(engine, "devices", ())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _spanning_groups(records: Iterable[TensorRecord]) -> set[str]:
    """The groups whose pieces lie in more than one bucket."""
    buckets: dict[str, set[int]] = {}
    for record in records:
        if record.group:
            buckets.setdefault(record.group, set()).update(piece.bucket for piece in record.pieces)
    return {group for group, found in buckets.items() if len(found) > 1}
