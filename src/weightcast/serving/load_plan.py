"""From buckets to calls of an engine's `load`: whole tensors, whole load groups, each under the names the engine knows.

Invariants: a tensor is handed out once and only when every byte of it is there; members of a load group go in one
call. Tensors that lie whole in one piece of memory are views of it; only what was cut, or belongs to a group that spans
buckets, is put together in memory of its own, unless the engine takes regions (`RegionLoader`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from weightcast.errors import IncompatibleWeightsError, IncompleteUpdateError, UnsupportedError, listed
from weightcast.format.bucket import TORCH_DTYPES, Entry, Layout, narrow
from weightcast.format.geometry import is_run, row_major, start_elements
from weightcast.format.manifest import Manifest, TensorRecord, TensorSpec
from weightcast.host import memory as host_memory
from weightcast.seams.engine import Casting, Engine, RegionLoader, Undoable, Validating
from weightcast.seams.transport import Bucket

Named = tuple[str, torch.Tensor]


@dataclasses.dataclass(slots=True)
class _BucketLoad:
    """What one bucket gives: views of whole tensors by `names`, `regions` as parts, `partial` to be put together."""

    names: list[str] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    regions: list[tuple[str, int, Entry]] = dataclasses.field(default_factory=list)
    partial: list[tuple[int, Entry]] = dataclasses.field(default_factory=list)


class LoadPlan:
    """How the buckets of one layout go into one engine. Made once for a manifest and kept."""

    def __init__(self, layout: Layout, engine: Engine, specs: Sequence[TensorSpec] | None) -> None:
        """`specs` is what `engine.specs()` gave; the plan is good as long as it gives the same object."""
        self.layout = layout
        self.engine = engine
        self.specs = specs
        self._targets = _EngineNames(specs)
        takes_regions = isinstance(engine, RegionLoader)
        spanning = _spanning_groups(layout.manifest.tensors)
        self._loads = [_BucketLoad() for _ in layout.entries]
        for load, entries in zip(self._loads, layout.entries, strict=True):
            for position, entry in enumerate(entries):
                names = self._targets.names(entry.record)
                if entry.is_whole and entry.record.group not in spanning:
                    load.names += names
                    load.positions += [position] * len(names)
                elif takes_regions and not entry.record.group:
                    load.regions += [(name, position, entry) for name in names]
                else:
                    load.partial.append((position, entry))
        self._empty = [r for r in layout.manifest.tensors if not r.pieces]
        self._partial = list({e.tensor: e.record for load in self._loads for _, e in load.partial}.values())

    def load_all(self, buckets: Sequence[Bucket]) -> None:
        """Staged: one call of `load` with everything, then the regions of what was cut."""
        self.engine.load(self._everything(buckets))
        for bucket in buckets:
            self._load_regions(bucket)

    def _everything(self, buckets: Sequence[Bucket]) -> Iterator[Named]:
        # All groups are in this one call, so only what was cut is to be joined.
        begun: dict[int, list[tuple[Entry, torch.Tensor]]] = {}
        for bucket in buckets:
            yield from self._direct(bucket)
            views = self.layout.views(bucket.index, bucket.buffer)
            for position, entry in self._loads[bucket.index].partial:
                parts = begun.setdefault(entry.tensor, [])
                parts.append((entry, views[position]))
                if len(parts) == len(entry.record.pieces):
                    yield from self._named([(entry.record, _joined(entry.record, begun.pop(entry.tensor)))])
        yield from self._empties()
        _check_none(parts[0][0].record.name for parts in begun.values())

    def assembly(self) -> Assembly:
        """What `load_bucket` carries from bucket to bucket of one update."""
        return Assembly(self._partial)

    def load_bucket(self, bucket: Bucket, parts: Assembly) -> None:
        """Streaming: load what this bucket completes; `parts` carries what is cut over to the next."""
        direct = list(self._direct(bucket))
        if direct:
            self.engine.load(direct)
        self._load_regions(bucket)
        for tensors in self._complete(bucket, parts):
            self.engine.load(tensors)

    def load_end(self, parts: Assembly) -> None:
        """Streaming, after the last bucket: tensors without elements. Raises IncompleteUpdateError."""
        parts.check_done()
        empties = list(self._empties())
        if empties:
            self.engine.load(empties)

    def _direct(self, bucket: Bucket) -> Iterable[Named]:
        load, views = self._loads[bucket.index], self.layout.views(bucket.index, bucket.buffer)
        return zip(load.names, map(views.__getitem__, load.positions), strict=True)

    def _load_regions(self, bucket: Bucket) -> None:
        regions = self._loads[bucket.index].regions
        if not regions:
            return
        assert isinstance(self.engine, RegionLoader)
        views = self.layout.views(bucket.index, bucket.buffer)
        for name, position, entry in regions:
            self.engine.load_region(name, entry.piece.region, views[position])

    def _complete(self, bucket: Bucket, parts: Assembly) -> Iterator[list[Named]]:
        views = self.layout.views(bucket.index, bucket.buffer)
        for position, entry in self._loads[bucket.index].partial:
            for group in parts.add(entry, views[position]):
                yield list(self._named(group))

    def _named(self, group: Sequence[tuple[TensorRecord, torch.Tensor]]) -> Iterator[Named]:
        return ((name, tensor) for record, tensor in group for name in self._targets.names(record))

    def _empties(self) -> Iterator[Named]:
        for record in self._empty:
            tensor = torch.empty(record.shape, dtype=TORCH_DTYPES[record.dtype])
            for name in self._targets.names(record):
                yield name, tensor


class _EngineNames:
    """Under which names a record is handed out: the engine's own, once for each of its tensors; else all."""

    def __init__(self, specs: Sequence[TensorSpec] | None) -> None:
        self._primary = None if specs is None else {name: spec.name for spec in specs for name in spec.names}

    def names(self, record: TensorSpec) -> list[str]:
        if self._primary is None:
            return list(record.names)
        return list(dict.fromkeys(self._primary[name] for name in record.names if name in self._primary))


class Assembly:
    """Tensors and groups in the making. Memory: the tensors that are begun and not yet handed out."""

    def __init__(self, records: Iterable[TensorRecord]) -> None:
        self._missing: dict[str, int] = {}
        for record in records:
            key = record.load_group
            self._missing[key] = self._missing.get(key, 0) + len(record.pieces)
        self._begun: dict[str, dict[str, tuple[TensorRecord, torch.Tensor]]] = {}

    def add(self, entry: Entry, view: torch.Tensor) -> Iterator[list[tuple[TensorRecord, torch.Tensor]]]:
        """Copy one piece; yield its tensor, or its load group, if that is whole now."""
        record, key = entry.record, entry.record.load_group
        members = self._begun.setdefault(key, {})
        if record.name not in members:
            tensor = torch.empty(record.shape, dtype=TORCH_DTYPES[record.dtype], device=view.device)
            members[record.name] = (record, tensor)
        narrow(members[record.name][1], entry.piece.region).copy_(view)
        self._missing[key] -= 1
        if self._missing[key] == 0:
            del self._begun[key]
            yield list(members.values())

    def check_done(self) -> None:
        """Raises IncompleteUpdateError, naming what is not whole."""
        _check_none(name for members in self._begun.values() for name in members)


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
    for entry, piece in parts:
        narrow(tensor, entry.piece.region).copy_(piece)
    return tensor


def _check_none(unfinished: Iterable[str]) -> None:
    """Raises IncompleteUpdateError, naming them, if there are any."""
    names = sorted(unfinished)
    if names:
        raise IncompleteUpdateError(f"{len(names)} tensors are not whole: {listed(names)}")


def _spanning_groups(records: Iterable[TensorRecord]) -> set[str]:
    """The groups whose pieces lie in more than one bucket."""
    buckets: dict[str, set[int]] = {}
    for record in records:
        if record.group:
            buckets.setdefault(record.group, set()).update(piece.bucket for piece in record.pieces)
    return {group for group, found in buckets.items() if len(found) > 1}


def admit(manifest: Manifest, engine: Engine, specs: Sequence[TensorSpec] | None) -> LoadPlan:
    """How a checked manifest goes into an engine; `specs` is what `engine.specs()` gave.

    Raises IncompatibleWeightsError, whose problems name every tensor that does not fit, or UnsupportedError.
    """
    if specs is not None:
        can_cast = engine.can_cast if isinstance(engine, Casting) else None
        require_fit(compare_specs(manifest.tensors, specs, can_cast=can_cast))
    if isinstance(engine, Validating):
        engine.validate(manifest)
    try:
        return LoadPlan(Layout(manifest), engine, specs)
    except ValueError as exc:
        raise UnsupportedError(str(exc)) from exc


def check_undo(manifest: Manifest, engine: Engine) -> None:
    """Raises UnsupportedError if the engine can't go back, InsufficientMemoryError if the copy would not fit."""
    if not isinstance(engine, Undoable):
        raise UnsupportedError(f"{type(engine).__name__} can't be undone: publish with undo=False")
    host_memory.require(manifest.num_bytes, "the undo copy", "publish with undo=False, or free memory")


def require_fit(problems: Sequence[str]) -> None:
    """Raises IncompatibleWeightsError with these problems, if there are any."""
    if problems:
        raise IncompatibleWeightsError(f"{len(problems)} tensors do not fit this engine: {listed(problems)}", problems)


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
            problems += _compare(spec, target, can_cast)
            if target.name in covered:
                problems.append(f"{spec.name!r} and {covered[target.name]!r} are both the engine's {target.name!r}")
            covered[target.name] = spec.name
    missing = (target for target in targets if target.name not in covered)
    return problems + [f"missing tensor {spec.name!r} {spec.dtype}{list(spec.shape)}" for spec in missing]


def _compare(spec: TensorSpec, target: TensorSpec, can_cast: Callable[[str, str], bool] | None) -> Iterator[str]:
    if spec.shape != target.shape:
        yield f"{spec.name!r} has the shape {list(spec.shape)}, the engine has {list(target.shape)}"
    if spec.dtype != target.dtype and not (can_cast and can_cast(spec.dtype, target.dtype)):
        yield f"{spec.name!r} is {spec.dtype}, the engine has {target.dtype}"
