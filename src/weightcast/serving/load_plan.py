"""From buckets to calls of an engine's `load`: whole tensors, whole load groups, each under the names the engine knows.

Invariants: a tensor is handed out once and only when every byte of it is there, all of them by the last bucket (a
manifest's pieces tile its tensors); members of a load group go in one call. Tensors that lie whole in one piece of
memory are views of it; only what was cut is put together in memory of its own, and when streaming also what belongs to
a group that spans buckets, unless it is copied piece by piece (see `InstallMap`). Staged, that is done while buckets
arrive, and while the engine is paused only for what other ranks read to memory that is shared.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from weightcast.checkpoint.live import CASTABLE, InstallMap
from weightcast.errors import IncompatibleWeightsError, InstallError, UnsupportedError, listed
from weightcast.format.bucket import TORCH_DTYPES, Entry, Layout, narrow
from weightcast.format.geometry import Region, is_run, row_major, start_elements
from weightcast.format.manifest import Manifest, TensorRecord, TensorSpec
from weightcast.host import device as host_device
from weightcast.host import memory as host_memory
from weightcast.host.copy import PreparedCopies, copy_all
from weightcast.seams.engine import Casting, Engine, OnDevice, Undoable, Validating
from weightcast.seams.transport import Share
from weightcast.serving.install_map import Mapped

Named = tuple[str, torch.Tensor]


@dataclasses.dataclass(slots=True)
class _BucketLoad:
    """What one bucket gives: views of whole tensors by `names`, and `partial` to be put together.

    `ends`: what is in `partial` here and in no bucket of a higher number.
    """

    names: list[str] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    partial: list[tuple[int, Entry]] = dataclasses.field(default_factory=list)
    ends: list[TensorRecord] = dataclasses.field(default_factory=list)


class BlockCopies:
    """Blocks of buckets on their way into live parameters, where the map has found these when the install began.

    A model whose parameters are exchanged during an install is noticed when it is committed.
    """

    def __init__(
        self, install_map: InstallMap, pieces: Sequence[tuple[str, Region | None]], sources: Sequence[torch.Tensor]
    ) -> None:
        self._install_map = install_map
        self._pieces = pieces
        self._sources = sources
        self._prepared: tuple[object, PreparedCopies] | None = None

    def run(self, *, is_bound: bool = False) -> None:
        """Copy. `is_bound`: the map has been bound since anything else ran. Raises InstallError for a changed model."""
        if not self._pieces:
            return
        live, copies = self._prepared or (None, None)
        is_known = copies is not None and live is self._install_map.live
        if copies is None or not is_known or not copies.are_in_place(targets=not is_bound):
            if not is_bound and not self._install_map.bind():
                raise InstallError("the model's parameters have changed their form during the install: publish again")
            targets = [block for name, piece in self._pieces for block in self._install_map.blocks(name, piece)]
            copies = PreparedCopies(targets, self._sources)
            self._prepared = self._install_map.live, copies
        with torch.inference_mode():
            copies.run()


@dataclasses.dataclass(slots=True)
class _MappedLoad:
    """What a load by a map does with these `views`, of one bucket or of all, whichever version they hold.

    `rest`: what the engine's loader gets, of which `to_prove` can be copied once it is proven. `names`: of what is
    copied. `pieces`: of tensors that are copied piece by piece. `num_proofs`: of the map, when this was made.
    """

    views: Sequence[list[torch.Tensor]]
    num_proofs: int
    rest: list[Named]
    to_prove: list[Named]
    names: Mapping[str, None]
    copies: BlockCopies
    pieces: Sequence[Entry] = ()

    def is_of(self, views: Sequence[list[torch.Tensor]], install_map: InstallMap) -> bool:
        """Whether it was made for these very views."""
        return (
            self.num_proofs == install_map.num_proofs
            and len(self.views) == len(views)
            and all(map(operator.is_, self.views, views))
        )


class StagedBuckets:
    """What a staged update has received. Memory, besides the transport's buckets: the tensors that were put together.

    `payloads`: by number of the bucket. `joined`: tensors that were cut, by name: put together, or as views of buckets
    that lie end to end.
    """

    def __init__(self) -> None:
        self.payloads: dict[int, torch.Tensor] = {}
        self.joined: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Free everything."""
        self.payloads.clear()
        self.joined.clear()


class LoadPlan:
    """How the buckets of one layout go into one engine. Made once for a manifest and kept."""

    def __init__(
        self, layout: Layout, manifest_digest: str, engine: Engine, specs: Sequence[TensorSpec] | None
    ) -> None:
        """`specs` is what `engine.specs()` gave; the plan is good as long as it gives the same object."""
        self.layout = layout
        self.manifest_digest = manifest_digest
        self.engine = engine
        self.device = device_of_weights(engine)
        self.specs = specs
        self._primary = None if specs is None else {name: spec.name for spec in specs for name in spec.names}
        spanning = _spanning_groups(layout.manifest.tensors)
        self._loads = [_BucketLoad() for _ in layout.entries]
        self._install_map = engine.install_map if isinstance(engine, Mapped) else None
        self._kept_install: _MappedLoad | None = None
        self._kept_loads: dict[int, _MappedLoad] = {}  # streaming, by bucket
        self._copied: tuple[int, frozenset[str]] | None = None  # what is proven, and the number of proofs
        self._installed_bytes: tuple[int, int] | None = None  # and the number of proofs that it holds for
        self._cuts: dict[tuple[str, Region | None], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._without_elements = [record for record in layout.manifest.tensors if not record.pieces]
        self._num_partial = collections.Counter[str]()  # pieces to be put together, by load group
        self._pieces: dict[str, list[tuple[int, int, Entry]]] = {}  # the same by tensor: bucket, position, entry
        for index, (load, entries) in enumerate(zip(self._loads, layout.entries, strict=True)):
            for position, entry in enumerate(entries):
                names = self._names(entry.record)
                if entry.is_whole and entry.record.group not in spanning:
                    load.names += names
                    load.positions += [position] * len(names)
                else:
                    load.partial.append((position, entry))
                    self._num_partial[entry.record.load_group] += 1
                    self._pieces.setdefault(entry.record.name, []).append((index, position, entry))
        origins = layout.manifest.bucket_origins
        self._straddling: set[str] = set()
        self.straddling_bytes = 0
        """Memory of its own that a staged update needs for tensors with pieces of several origins."""
        for name, pieces in self._pieces.items():
            index, _, entry = pieces[-1]
            self._loads[index].ends.append(entry.record)
            is_put_together = not all(map(self._is_copied_in_pieces, self._names(entry.record)))
            if is_put_together and len({origins[bucket] for bucket, _, _ in pieces}) > 1:
                self._straddling.add(name)
                self.straddling_bytes += entry.record.num_bytes

        self.has_lent_views = True
        """Whether the engine may have written into views of the former version's buckets: it was not only copied from
        them. Nothing is known of what came before this plan."""

    @property
    def is_current(self) -> bool:
        """False once the engine's model was found to be another one than when the plan was made."""
        return self._install_map is None or not self._install_map.is_stale

    def forget_views(self) -> None:
        """Drop every kept view of a bucket's memory."""
        self._kept_install = None
        self._kept_loads.clear()
        self._cuts.clear()
        self.layout.forget_views()

    def require_memory(self, num_workers: int) -> None:
        """Staged: raises InsufficientMemoryError unless there is room for `straddling_bytes` of each worker here.

        `num_workers`: of all engines of the publish on this host. They are asked before any of them has taken memory.
        """
        if self.straddling_bytes:
            workers = f", in each of {num_workers} workers" if num_workers > 1 else ""
            host_memory.require(
                num_workers * self.straddling_bytes,
                f"putting together {len(self._straddling)} tensors of which each trainer host sends a part{workers},",
                'publish with install="streaming", or free memory',
            )

    def stage(self, index: int, payload: torch.Tensor, staged: StagedBuckets, share: Share | None = None) -> None:
        """Staged: keep a bucket until `load_all`, and put together what is cut, as far as it has come.

        `share`: of which buckets alone the payload is sure to be here.
        """
        staged.payloads[index] = payload
        # Made now, and kept, so that they need not be made while the engine is paused.
        views = self.layout.views(index, payload)
        install = self._kept_install
        is_known = install is not None and index < len(install.views) and install.views[index] is views
        if self._install_map is not None and not is_known:
            for name, view in self._whole(index, views):
                if self._install_map.has(name):
                    self._cut(self._install_map, name, view, None)
            for position, entry in self._loads[index].partial:
                for name in self._names(entry.record):
                    if self._is_copied_in_pieces(name):
                        self._cut(self._install_map, name, views[position], entry.piece.region)
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for position, entry in self._loads[index].partial:
            record = entry.record
            if record.name in self._straddling:
                if record.name not in staged.joined:
                    whole = torch.empty(record.shape, dtype=TORCH_DTYPES[record.dtype], device=payload.device)
                    staged.joined[record.name] = whole
                targets.append(narrow(staged.joined[record.name], entry.piece.region))
                sources.append(views[position])
        copy_all(targets, sources)
        for record in self._loads[index].ends:
            # Of one origin, whose buckets come in the order of their numbers: this was the last piece.
            is_here = share is None or all(bucket in share.buckets for bucket, _, _ in self._pieces[record.name])
            is_copied = all(map(self._is_copied_in_pieces, self._names(record)))
            if is_here and not is_copied and record.name not in self._straddling:
                staged.joined[record.name] = self._joined_of(record, staged)
        if self._loads[index].partial:
            # The thread that installs has a stream of its own.
            host_device.synchronize_stream(payload.device)

    def load_all(self, staged: StagedBuckets) -> None:
        """Staged: one call of `load` with everything, or with what an install map does not copy."""
        payloads = sorted(staged.payloads.items())
        self.has_lent_views = True
        if self._install_map is None or not self._install_map.bind():
            complete = (self._ended(index, payload, staged) for index, payload in payloads)
            self.engine.load(itertools.chain(*complete, self._empty()))
            return
        views = [self.layout.views(index, payload) for index, payload in payloads]
        install = self._kept_install
        if install is None or not install.is_of(views, self._install_map):
            install = self._mapped_install(self._install_map, views, staged)
        self.has_lent_views = bool(install.rest)
        to_prove = _came(self._install_map, install.to_prove)
        self._load_mapped(install, install.names, is_last=True, is_bound=not install.rest)
        if to_prove:
            self._install_map.prove(to_prove.items())

    def _load_mapped(self, load: _MappedLoad, names: Collection[str], *, is_last: bool, is_bound: bool = False) -> None:
        assert isinstance(self.engine, Mapped)
        run = functools.partial(load.copies.run, is_bound=is_bound)
        self.engine.load_mapped(load.rest, names, run, is_last=is_last)

    def _mapped_install(
        self, install_map: InstallMap, views: Sequence[list[torch.Tensor]], staged: StagedBuckets
    ) -> _MappedLoad:
        """What is to be done. Kept while the views are, unless tensors were put together in memory of their own."""
        parts = _MappedParts(install_map, install_map.proven)
        are_views = True
        for index, of_bucket in enumerate(views):
            for name, tensor in self._whole(index, of_bucket):
                kept = self._cuts.get((name, None))
                parts.take(name, tensor, kept[1] if kept and kept[0] is tensor else None)
            for record in self._loads[index].ends:
                names = self._names(record)
                if record.name in staged.joined or not all(map(self._is_copied_in_pieces, names)):
                    are_views, tensor = False, self._joined_of(record, staged)
                    for name in names:
                        parts.take(name, tensor)
                    continue
                for name in names:
                    for bucket, position, entry in self._pieces[record.name]:
                        cut = self._cut(install_map, name, views[bucket][position], entry.piece.region)
                        parts.take_piece(name, entry.piece.region, cut)
        for name, tensor in self._empty():
            parts.take(name, tensor)
        install = parts.load(views)
        self._kept_install = install if are_views else None
        return install

    def _is_copied_in_pieces(self, name: str) -> bool:
        found = self._install_map
        return found is not None and name in found.proven and name not in found.shared and found.takes_pieces(name)

    def _cut(
        self, install_map: InstallMap, name: str, view: torch.Tensor, piece: Region | None
    ) -> Sequence[torch.Tensor]:
        """The blocks of a view of a bucket that the engine takes, kept as long as the view is."""
        kept = self._cuts.get((name, piece))
        if kept is None or kept[0] is not view:
            kept = self._cuts[name, piece] = view, install_map.cut(name, view, piece)
        return kept[1]

    def installed_bytes(self) -> int:
        """Bytes that an install copies into place here; a tensor that the engine's loader gets counts whole."""
        found, num_bytes = self._install_map, 0
        num_proofs = 0 if found is None else found.num_proofs
        if self._installed_bytes is not None and self._installed_bytes[0] == num_proofs:
            return self._installed_bytes[1]
        for record in self.layout.manifest.tensors:
            for name in self._names(record):
                is_copied = found is not None and name in found.proven
                num_bytes += found.num_bytes(name) if found is not None and is_copied else record.num_bytes
        self._installed_bytes = num_proofs, num_bytes
        return num_bytes

    def assembly(self) -> Assembly:
        """What `load_bucket` carries from bucket to bucket of one update. Made before its first bucket is loaded."""
        install_map = self._install_map
        if install_map is None or not install_map.bind():
            return Assembly(self._num_partial, frozenset())
        if self._copied is None or self._copied[0] != install_map.num_proofs:
            self._copied = install_map.num_proofs, frozenset(install_map.proven)
        return Assembly(self._num_partial, self._copied[1])

    def load_bucket(self, index: int, payload: torch.Tensor, assembly: Assembly) -> None:
        """Streaming: load what this bucket completes; `assembly` carries what is cut over to the next."""
        views, install_map = self.layout.views(index, payload), self._install_map
        if install_map is None:
            named = list(self._whole(index, views))
            for position, entry in self._loads[index].partial:
                named += self._named(assembly.add(entry, views[position]))
            self.has_lent_views |= bool(named)
            if named:
                self.engine.load(named)
            return
        load = self._kept_loads.get(index)
        if load is None or not load.is_of([views], install_map) or not assembly.copied:
            load = self._mapped_load(index, views, install_map, assembly)
        else:
            for entry in load.pieces:
                assembly.add(entry, None)
        self._load_streamed(load, install_map, assembly, is_last=False)

    def _mapped_load(
        self, index: int, views: list[torch.Tensor], install_map: InstallMap, assembly: Assembly
    ) -> _MappedLoad:
        """What is to be done with a bucket. Kept while the views are, unless tensors are put together in it."""
        parts, pieces, are_views = _MappedParts(install_map, assembly.copied), list[Entry](), True
        for name, tensor in self._whole(index, views):
            parts.take(name, tensor)
        for position, entry in self._loads[index].partial:
            names, region = self._names(entry.record), entry.piece.region
            is_copied = all(name in assembly.copied and self._is_copied_in_pieces(name) for name in names)
            if is_copied:
                pieces.append(entry)
                for name in names:
                    parts.take_piece(name, region, install_map.cut(name, views[position], region))
            for name, tensor in self._named(assembly.add(entry, None if is_copied else views[position])):
                are_views = False
                parts.take(name, tensor)
        load = parts.load([views], pieces)
        if are_views and len(pieces) == len(self._loads[index].partial):
            self._kept_loads[index] = load
        return load

    def load_end(self, assembly: Assembly) -> None:
        """Streaming, after the last bucket: tensors without elements, and what an engine does with all of them."""
        if self._install_map is None:
            if self._without_elements:
                self.engine.load(list(self._empty()))
            return
        parts = _MappedParts(self._install_map, assembly.copied)
        for name, tensor in self._empty():
            parts.take(name, tensor)
        self._load_streamed(parts.load([]), self._install_map, assembly, is_last=True)
        if assembly.to_prove:
            self._install_map.prove(assembly.to_prove.items())

    def _load_streamed(self, load: _MappedLoad, install_map: InstallMap, assembly: Assembly, *, is_last: bool) -> None:
        self.has_lent_views |= bool(load.rest)
        assembly.to_prove |= _came(install_map, load.to_prove)
        self._load_mapped(load, assembly.copied, is_last=is_last)

    def _whole(self, index: int, views: Sequence[torch.Tensor]) -> Iterator[Named]:
        """The tensors that are views of this bucket."""
        load = self._loads[index]
        return zip(load.names, map(views.__getitem__, load.positions), strict=True)

    def _ended(self, index: int, payload: torch.Tensor, staged: StagedBuckets) -> Iterator[Named]:
        """Staged: every tensor of which this is the last bucket by number."""
        yield from self._whole(index, self.layout.views(index, payload))
        yield from self._named((record, self._joined_of(record, staged)) for record in self._loads[index].ends)

    def _joined_of(self, record: TensorRecord, staged: StagedBuckets) -> torch.Tensor:
        """Staged: a tensor that was cut, as one."""
        tensor = staged.joined.get(record.name)
        if tensor is not None:
            return tensor
        return _joined(
            record,
            [
                (entry, self.layout.views(bucket, staged.payloads[bucket])[position])
                for bucket, position, entry in self._pieces[record.name]
            ],
        )

    def _empty(self) -> Iterator[Named]:
        """Tensors without elements, which are in no bucket."""
        return self._named((r, torch.empty(r.shape, dtype=TORCH_DTYPES[r.dtype])) for r in self._without_elements)

    def _named(self, complete: Iterable[tuple[TensorRecord, torch.Tensor]]) -> Iterator[Named]:
        return ((name, tensor) for record, tensor in complete for name in self._names(record))

    def _names(self, record: TensorSpec) -> list[str]:
        """Under which names a record is handed out: the engine's own, once for each of its tensors; else all."""
        if self._primary is None:
            return list(record.names)
        return list(dict.fromkeys(self._primary[name] for name in record.names if name in self._primary))


class _MappedParts:
    """What a load of tensors consists of, with a map: blocks that are copied, and what the loader gets."""

    def __init__(self, install_map: InstallMap, proven: Collection[str]) -> None:
        """`proven`: the names that this install copies."""
        self.install_map = install_map
        self.rest: list[Named] = []
        self.copied: list[tuple[str, Region | None]] = []
        self.sources: list[torch.Tensor] = []
        self.to_prove: list[Named] = []
        self._proven = proven

    def take(self, name: str, tensor: torch.Tensor, cut: Sequence[torch.Tensor] | None = None) -> None:
        """A whole tensor; `cut`: its blocks, where they are known."""
        if name in self._proven:
            self.copied.append((name, None))
            self.sources += self.install_map.cut(name, tensor) if cut is None else cut
        elif self.install_map.has(name):
            self.to_prove.append((name, tensor))
        if name not in self._proven or name in self.install_map.shared:
            self.rest.append((name, tensor))

    def take_piece(self, name: str, region: Region, cut: Sequence[torch.Tensor]) -> None:
        """A piece of a tensor that is copied piece by piece."""
        self.copied.append((name, region))
        self.sources += cut

    def load(self, views: Sequence[list[torch.Tensor]], pieces: Sequence[Entry] = ()) -> _MappedLoad:
        names = dict.fromkeys(name for name, _ in self.copied)
        copies = BlockCopies(self.install_map, self.copied, self.sources)
        return _MappedLoad(views, self.install_map.num_proofs, self.rest, self.to_prove, names, copies, pieces)


class Assembly:
    """Streaming: tensors and load groups in the making. Memory: the tensors that are begun and not yet handed out.

    `copied`: the names that are copied by an install map, piece by piece where they are cut. `to_prove`: names that it
    may copy once they are proven, with the digests of what came.
    """

    def __init__(self, num_pieces: Mapping[str, int], copied: Collection[str]) -> None:
        """`num_pieces`: of each load group."""
        self.copied = copied
        self.to_prove: dict[str, list[str]] = {}
        self._missing = dict(num_pieces)
        self._begun: dict[str, dict[str, tuple[TensorRecord, torch.Tensor]]] = {}

    def add(self, entry: Entry, view: torch.Tensor | None) -> Iterable[tuple[TensorRecord, torch.Tensor]]:
        """Take one piece, or note one that is copied; its tensor, or those of its load group, if that is whole now."""
        record, key = entry.record, entry.record.load_group
        members = self._begun.setdefault(key, {})
        if view is not None:
            if record.name not in members:
                whole = torch.empty(record.shape, dtype=TORCH_DTYPES[record.dtype], device=view.device)
                members[record.name] = record, whole
            narrow(members[record.name][1], entry.piece.region).copy_(view)
        self._missing[key] -= 1
        return self._begun.pop(key).values() if self._missing[key] == 0 else ()


def _came(install_map: InstallMap, to_prove: Iterable[Named]) -> dict[str, list[str]]:
    """The digests of what is to be proven, as it came: a loader may write into the tensors that it is given."""
    return {name: install_map.digests(name, install_map.cut(name, tensor)) for name, tensor in to_prove}


def _joined(record: TensorRecord, parts: Sequence[tuple[Entry, torch.Tensor]]) -> torch.Tensor:
    """All pieces of a tensor as one: a view where they lie in memory as they lie in the tensor, else a copy."""
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
    devices = engine.devices if isinstance(engine, OnDevice) else ()
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _spanning_groups(records: Iterable[TensorRecord]) -> set[str]:
    """The groups whose pieces lie in more than one bucket."""
    buckets: dict[str, set[int]] = {}
    for record in records:
        if record.group:
            buckets.setdefault(record.group, set()).update(piece.bucket for piece in record.pieces)
    return {group for group, found in buckets.items() if len(found) > 1}


def admit(manifest: Manifest, digest: str, engine: Engine, specs: Sequence[TensorSpec] | None) -> LoadPlan:
    """How a checked manifest of this digest goes into an engine; `specs` is what `engine.specs()` gave.

    Raises IncompatibleWeightsError, whose problems name every tensor that does not fit, or UnsupportedError.
    """
    if specs is not None:
        can_cast = engine.can_cast if isinstance(engine, Casting) else None
        require_fit(manifest.tensors, specs, can_cast=can_cast)
    if isinstance(engine, Validating):
        engine.validate(manifest)
    try:
        return LoadPlan(Layout(manifest), digest, engine, specs)
    except ValueError as exc:
        raise UnsupportedError(str(exc)) from exc


def check_undo(manifest: Manifest, engine: Engine) -> None:
    """Raises UnsupportedError if the engine can't go back, InsufficientMemoryError if the copy would not fit."""
    if not isinstance(engine, Undoable):
        raise UnsupportedError(f"{type(engine).__name__} can't be undone: publish with undo=False")
    host_memory.require(manifest.num_bytes, "the undo copy", "publish with undo=False, or free memory")


def require_engine(engine: object) -> None:
    """Raises TypeError unless it is an engine."""
    if not all(hasattr(engine, name) for name in ("specs", "load", "commit", "discard")):
        remedy = "pass ModuleEngine(model), or an object with specs(), load(), commit() and discard()"
        raise TypeError(f"{type(engine).__name__} is no engine: {remedy}")


def require_fit(
    offered: Sequence[TensorSpec],
    held: Sequence[TensorSpec],
    *,
    can_cast: Callable[[str, str], bool] | None = None,
) -> None:
    """Raises IncompatibleWeightsError unless `offered` is a complete update for an engine that holds `held`."""
    problems = compare_specs(offered, held, can_cast=can_cast)
    if not problems:
        return
    by_name = {name: target for target in held for name in target.names}
    pairs = {(spec.dtype, by_name[name].dtype) for spec in offered for name in spec.names if name in by_name}
    misfits = {(ours, theirs) for ours, theirs in pairs if ours != theirs and not (can_cast and can_cast(ours, theirs))}
    found = {name for spec in offered for name in spec.names}
    unknown = {spec.name for spec in offered if by_name.keys().isdisjoint(spec.names)}
    missing = {spec.name for spec in held if found.isdisjoint(spec.names)}
    remedies = [*dtype_remedies(misfits, {spec.dtype for spec in held}), *_prefix_remedies(unknown, missing)]
    raise misfit_error(problems, remedies)


def misfit_error(problems: Sequence[str], remedies: Sequence[str] = ()) -> IncompatibleWeightsError:
    """What an engine refuses an offer with."""
    tensors = "tensor does" if len(problems) == 1 else "tensors do"
    remedy = f". Remedy: {'; '.join(remedies)}" if remedies else ""
    return IncompatibleWeightsError(
        f"{len(problems)} {tensors} not fit this engine: {listed(problems)}{remedy}", problems
    )


def dtype_remedies(misfits: Collection[tuple[str, str]], held: Collection[str]) -> list[str]:
    """How a source could send other dtypes. `misfits`: offered and the engine's; `held`: all that the engine has."""
    wanted = {theirs for _, theirs in misfits}
    if len(wanted) != 1 or not {dtype for pair in misfits for dtype in pair} <= CASTABLE:
        return []
    (dtype,) = wanted
    if not CASTABLE.intersection(held) <= wanted:
        return ["have each tensor cast to what the engine has: dtype='engine' of the source, `--dtype engine`"]
    return [f"cast on the way: ModuleSource(model, dtype=torch.{dtype}), from the shell `weightcast publish --dtype`"]


def _prefix_remedies(unknown: Collection[str], missing: Collection[str]) -> list[str]:
    """What to do where names differ by a prefix: all that one side lacks are of the other side, but for the prefix."""
    for longer, shorter, remedy in (
        (unknown, missing, "publish the module that has the names without it, or leave it out with names="),
        (missing, unknown, "publish the module around it, or add it with names="),
    ):
        name = min(shorter, default="")
        for prefix in sorted(other.removesuffix(name) for other in longer if name and other.endswith(f".{name}")):
            if {prefix + each for each in shorter} <= set(longer):
                whose = "trainer" if longer is unknown else "engine"
                return [f"the {whose}'s names begin with {prefix!r}: {remedy} of ModuleSource"]
    return []


def compare_specs(
    offered: Iterable[TensorSpec],
    held: Iterable[TensorSpec],
    *,
    can_cast: Callable[[str, str], bool] | None = None,
) -> list[str]:
    """Every reason why `offered` is not a complete update for an engine that holds `held`; empty if it is one.

    Names may differ by aliases: a record is known if the engine has one of its names, and covers all of them. Dtypes
    may differ only where `can_cast(offered, held)` says so.
    """
    targets = tuple(held)
    by_name = {name: target for target in targets for name in target.names}
    covered: dict[str, str] = {}
    problems: list[str] = []
    for spec in offered:
        known = {by_name[name].name: by_name[name] for name in spec.names if name in by_name}
        if not known:
            problems.append(f"unknown tensor {spec.name!r} {spec.dtype}{list(spec.shape)}")
        for target in known.values():
            if spec.shape != target.shape:
                found = f"has the shape {list(spec.shape)}, the engine has {list(target.shape)}"
                problems.append(f"{spec.name!r} {found}")
            if spec.dtype != target.dtype and not (can_cast and can_cast(spec.dtype, target.dtype)):
                problems.append(f"{spec.name!r} is {spec.dtype}, the engine has {target.dtype}")
            if target.name in covered:
                both = f"{spec.name!r} and {covered[target.name]!r} are both the engine's {target.name!r}"
                problems.append(f"{both}, which ties them: tie them in the trainer too, or untie them in the engine")
            covered[target.name] = spec.name
    missing = (target for target in targets if target.name not in covered)
    return problems + [f"missing tensor {spec.name!r} {spec.dtype}{list(spec.shape)}" for spec in missing]
