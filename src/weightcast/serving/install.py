"""An install as a list: the blocks of buckets that are copied into live memory, and the tensors that the loader gets.

Invariants: a tensor is loaded once, after all its bytes have come, and every tensor by the last bucket (a manifest's
pieces tile its tensors); the members of a load group are loaded in one call. A tensor in one contiguous piece is loaded
as a view of the bucket. A tensor that is cut over several pieces is copied piece by piece if the engine's map can do
that. Otherwise it is joined: staged, while buckets arrive, as a view if its pieces are adjacent in memory; streaming,
in newly allocated memory, together with the other members of a load group that spans buckets.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from weightcast.errors import InstallError
from weightcast.format.bucket import TORCH_DTYPES, Entry, Layout, narrow
from weightcast.format.geometry import Region, is_run, row_major, start_elements
from weightcast.format.manifest import Manifest, TensorRecord, TensorSpec, WeightVersion
from weightcast.host import device as host_device
from weightcast.host.copy import PreparedCopies, copy_all
from weightcast.native.deltas import ChangedWords
from weightcast.seams.engine import Engine
from weightcast.seams.install_map import InstallMap, Mapped

Named: TypeAlias = tuple[str, torch.Tensor]
Block: TypeAlias = str | tuple[str, Region | None]
"""A tensor's name, or its name and a piece of it; None stands for the whole tensor."""


class BlockCopies:
    """Copies of blocks of buckets into live parameters, prepared once for the addresses that the map has found."""

    def __init__(
        self,
        install_map: InstallMap | None,
        blocks: Iterable[Block] = (),
        sources: Iterable[torch.Tensor | int] = (),
        payloads: Sequence[torch.Tensor] = (),
    ) -> None:
        """`sources`: the source blocks of all `blocks`, in order; `payloads`: see `PreparedCopies`. The memory of both
        must stay valid while this is used. Without a map there are no blocks.
        """
        self.blocks = list(blocks)
        self.sources = list(sources)
        self.payloads = payloads
        self._install_map = install_map
        self._prepared: tuple[int, PreparedCopies] | None = None

    def run(self, *, is_bound: bool = False, changed: ChangedWords | None = None, former: bool = False) -> None:
        """Make the copies or, given what changed in their only payload, only copy that.

        `is_bound`: the map was bound just before. `former`: see `PreparedCopies.run_changes`. Raises InstallError
        (torn) for freed memory.
        """
        if not self.blocks:
            return
        try:
            with torch.inference_mode():  # not no_grad: parameters made in inference mode can be written only there
                copies = self.prepared(is_bound=is_bound)
                if changed is None:
                    copies.run()
                else:
                    copies.run_changes(self.payloads[0], changed, former=former)
        except (RuntimeError, ValueError) as exc:
            raise InstallError(f"copying into the model's parameters failed: {exc}", torn=True) from exc

    def prepared(self, *, is_bound: bool = False) -> PreparedCopies:
        """Return the copies, prepared again if a tensor has moved. Called in inference mode."""
        assert self._install_map is not None
        revision, copies = self._prepared or (-1, None)
        is_known = copies is not None and revision == self._install_map.revision
        if copies is None or not is_known or not copies.are_in_place(targets=not is_bound):
            find = self._install_map.target_blocks
            targets = [t for each in self.blocks for t in (find(each) if isinstance(each, str) else find(*each))]
            is_within = is_bound and self._install_map.is_within_storage
            copies = PreparedCopies(targets, self.sources, self.payloads, is_within_storage=is_within)
            self._prepared = self._install_map.revision, copies
        return copies


class Part:
    """The copies and loads of some tensors, or of pieces of them. `payload`: of their bucket, if all are in one.

    `rest`: the tensors for `Engine.load`. `to_prove`: those of them that can be copied once they are proven.
    """

    def __init__(
        self, install_map: InstallMap | None, copied: frozenset[str], payload: torch.Tensor | None = None
    ) -> None:
        self.payload = payload
        self.rest: list[Named] = []
        self.to_prove: list[Named] = []
        # With a payload in host memory, a source may be an address in it.
        self.copies = BlockCopies(install_map, payloads=() if payload is None or not payload.is_cpu else (payload,))
        self._install_map = install_map
        self._copied = copied

    def add(self, name: str, tensor: torch.Tensor, piece: Region | None = None) -> None:
        """Add a tensor or, for one that is copied piece by piece, this `piece` of it."""
        if self._install_map is not None:
            if name in self._copied:
                self.copies.blocks.append((name, piece))
                self.copies.sources += self._install_map.source_blocks(name, tensor, piece)
                if name not in self._install_map.also_loaded:
                    return
            elif self._install_map.can_copy(name):
                self.to_prove.append((name, tensor))
        self.rest.append((name, tensor))

    def add_stored(self, manifest: Manifest, numbers: Sequence[int], others: Collection[str]) -> list[str]:
        """Add those of the tensors that the payload has whole, given by their numbers, that are copied from there to
        one live tensor, except `others`. Return their names.
        """
        if self._install_map is None or self.payload is None or not self.copies.payloads:
            return []
        if others:
            numbers = [number for number in numbers if manifest.names[number] not in others]
        dtypes = [TORCH_DTYPES[form.dtype] for form in manifest.forms]
        names = [manifest.names[number] for number in numbers]
        as_is = self._install_map.are_copied_as_is(names, [dtypes[manifest.form_numbers[n]] for n in numbers])
        if not self._copied.issuperset(names):
            as_is = [is_as_is and name in self._copied for name, is_as_is in zip(names, as_is, strict=True)]
        if not all(as_is):
            names, numbers = [*itertools.compress(names, as_is)], [*itertools.compress(numbers, as_is)]
        start = self.payload.data_ptr()
        self.copies.blocks += names  # not as tuples, which would make the garbage collector look at the whole heap
        self.copies.sources += [start + manifest.offsets_bytes[number] for number in numbers]
        return names


class Assembly:
    """The tensors of one update that are joined from pieces. Memory: these tensors, until they are loaded or cleared.

    `parts`: of the staged buckets, by number. `to_prove`: names that can be copied once they are proven, with the
    digests of the received blocks.
    """

    def __init__(self, num_pieces: Mapping[str, int], *, is_staged: bool) -> None:
        """`num_pieces`: number of pieces to join, by load group."""
        self.parts: dict[int, Part] = {}
        self.whole: list[tuple[TensorRecord, torch.Tensor]] = []
        """Tensors of load groups whose pieces are complete, until they are loaded."""
        self.to_prove: dict[str, list[str]] = {}
        self._missing = dict(num_pieces)
        self._is_staged = is_staged
        self._begun: dict[str, dict[str, tuple[TensorRecord, list[tuple[Entry, torch.Tensor]]]]] = {}

    def add(self, entry: Entry, view: torch.Tensor) -> None:
        """Add a piece. Staged, its view is kept, which stays valid; streaming, the piece is copied."""
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
                self.whole.append((each, _joined(each, parts) if self._is_staged else parts[0][1]))

    def clear(self) -> None:
        """Free everything."""
        self.parts.clear()
        self._begun.clear()
        self.whole.clear()


class Install:
    """The copies and loads that put one layout's buckets into an engine; made once for a layout and map, and kept.

    `copied`: names of the tensors that are copied and not loaded.
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
        """`specs`: from `engine.specs()`; the install is valid while that returns the same object."""
        self.layout = layout
        self.manifest_digest = manifest_digest
        self.engine = engine
        self.specs = specs
        self.install_map = install_map = engine.install_map if uses_map and isinstance(engine, Mapped) else None
        self.device = device_of_weights(engine)
        self._revision = 0 if install_map is None else install_map.revision
        self.copied = frozenset[str]() if install_map is None else frozenset(install_map.proven)
        manifest = layout.manifest
        self._other_names = {name: (name, *others) for name, others in manifest.aliases.items()}
        if specs is not None:
            held = {name: spec.name for spec in specs if spec.aliases for name in spec.aliases}
            if self._other_names:
                held |= {spec.name: spec.name for spec in specs}
            for record in manifest.tensors if held else ():
                found = dict.fromkeys(held[name] for name in record.names if name in held)
                self._other_names[record.name] = tuple(found) or (record.name,)
            self._other_names = {n: names for n, names in self._other_names.items() if names != (n,)}
        """By record name, the names under which a record is loaded: one for each of the engine's tensors, without specs
        all. A record that is missing is loaded under its own name."""
        self.served: WeightVersion | None = None
        """The version that an install by this object has put into the live tensors, where nothing was written since."""
        self._parts: dict[int, Part] = {}
        self._staged: tuple[list[Part], BlockCopies] | None = None
        self._whole = manifest.whole_tensors()
        self._without_elements = [
            (record, torch.empty(record.shape, dtype=TORCH_DTYPES[record.dtype]))
            for record in (manifest.tensors if sum(map(len, self._whole)) < len(manifest.names) else ())
            if not record.pieces
        ]
        spanning = _spanning_groups(manifest.tensors if manifest.groups else ())
        self._cut = {name for name, pieces in manifest.pieces.items() if len(pieces) > 1}
        self._cut |= {name for name, group in manifest.groups.items() if group in spanning}
        """Names of the tensors that no single bucket has, or of whose load group it has only a part."""
        self._copied_pieces: list[list[tuple[str, Entry]]] = [[] for _ in manifest.buckets]
        self._joined: list[list[Entry]] = [[] for _ in manifest.buckets]
        self.num_joined = collections.Counter[str]()
        """By load group, the number of pieces that an `Assembly` joins."""
        origins: dict[str, set[int]] = {}
        for index, entries in enumerate(layout.entries if self._cut else ()):
            for entry in entries:
                if entry.record.name not in self._cut:
                    continue
                names = self._names(entry.record)
                if install_map is not None and all(
                    name in self.copied and name not in install_map.also_loaded and install_map.can_copy_pieces(name)
                    for name in names
                ):
                    self._copied_pieces[index] += ((name, entry) for name in names)
                else:
                    self._joined[index].append(entry)
                    self.num_joined[entry.record.load_group] += 1
                    origins.setdefault(entry.record.name, set()).add(layout.manifest.bucket_origins[index])
        straddling = {name for name, found in origins.items() if len(found) > 1}
        self.num_straddling = len(straddling)
        """Number of tensors with pieces from several origins."""
        records = manifest.tensors if straddling else ()
        self.straddling_bytes = sum(record.num_bytes for record in records if record.name in straddling)
        """Extra memory of a staged update for these."""
        self.has_lent_views = True
        """True if the engine's loader got views of the last version's buckets, and so may have changed these.
        Starts True, since earlier installs are not known."""

    def is_for(self, manifest_digest: str, engine: Engine) -> bool:
        """Return whether this install is of this manifest and engine, and the engine's tensors are still the same.

        Memory that was replaced (`param.data = ...`) is found when the map is bound.
        """
        if self.engine is not engine or self.manifest_digest != manifest_digest or self.specs is not engine.specs():
            return False
        if self.install_map is None or not isinstance(engine, Mapped):
            return True
        is_current = engine.install_map is self.install_map and self.install_map.revision == self._revision
        return is_current and not self.install_map.is_stale

    def is_bound(self) -> bool:
        """Bind the map, if there is one, to the live tensors; return whether this install was made for these."""
        return self.install_map is None or (self.install_map.bind() and self.install_map.revision == self._revision)

    def begin(self) -> None:
        """Begin the engine's install, right before the first tensor is written."""
        if self.install_map is not None and isinstance(self.engine, Mapped):
            self.engine.begin(self.copied)

    def forget_views(self) -> None:
        """Drop every view of buckets."""
        self._parts.clear()
        self._staged = None

    @functools.cached_property
    def installed_bytes(self) -> int:
        """Bytes that this rank installs; a tensor that the engine's loader gets counts with all its bytes."""
        names: Sequence[str] = self.layout.manifest.names
        if self._other_names:
            names = [name for record in self.layout.manifest.tensors for name in self._names(record)]
        copied = names if self.copied.issuperset(names) else [name for name in names if name in self.copied]
        num_bytes = 0 if self.install_map is None else self.install_map.target_bytes(copied)
        if len(copied) < len(names):
            loaded = ((r, name) for r in self.layout.manifest.tensors for name in self._names(r))
            num_bytes += sum(record.num_bytes for record, name in loaded if name not in self.copied)
        return num_bytes

    def stage(self, index: int, payload: torch.Tensor, assembly: Assembly, *, is_here: bool = True) -> None:
        """Staged: keep a bucket until `load_staged`, and prepare its install while the engine generates.

        `is_here`: False if other ranks may still write the payload, so that it can't be read yet.
        """
        assembly.parts[index] = self._part(index, payload)
        if is_here and self._joined[index]:
            for entry in self._joined[index]:
                assembly.add(entry, entry.view(payload))
            # The installing thread uses another stream.
            host_device.synchronize_stream(payload.device)

    def load_staged(
        self, assembly: Assembly, changes: Mapping[int, ChangedWords] | None = None, *, lends: bool = True
    ) -> None:
        """Staged: load and copy everything. `lends`: the loader, which may write to what it gets, gets no copies.

        `changes`: by bucket, if the live tensors have the version before; of these buckets only what changed is copied.
        """
        indices = sorted(assembly.parts)
        parts, joined = [assembly.parts[index] for index in indices], self._joined_parts(assembly, is_last=True)
        # Without `lends` the loader may still have views of a version before, and has written to those.
        self.has_lent_views |= lends
        rest = self._load([*parts, *joined], assembly, lends=lends)
        if lends:
            self.has_lent_views = bool(rest)
        if changes is not None:
            for index, part in zip(indices, parts, strict=True):
                part.copies.run(changed=changes.get(index))
        else:
            kept = self._staged
            if kept is None or kept[0] != parts:
                blocks = (block for part in parts for block in part.copies.blocks)
                sources = (source for part in parts for source in part.copies.sources)
                payloads = [payload for part in parts for payload in part.copies.payloads]
                self._staged = kept = parts, BlockCopies(self.install_map, blocks, sources, payloads)
            kept[1].run(is_bound=not rest)
        for part in joined:
            part.copies.run(is_bound=changes is None and not rest)

    def undo_of(self, assembly: Assembly, changes: Mapping[int, ChangedWords]) -> Callable[[], None] | None:
        """Return a function that undoes `load_staged` of changes, also half-way; None if that does more than copy
        these.
        """
        if not changes.keys() >= assembly.parts.keys() or self.num_joined or self._without_elements:
            return None
        parts = [(part, changes[index]) for index, part in assembly.parts.items()]
        with torch.inference_mode():
            for part, changed in parts:
                if part.rest or not part.copies.prepared().can_restore(part.copies.payloads[0], changed):
                    return None

        def undo() -> None:
            if not self.is_bound():
                raise InstallError("the model's tensors were replaced, so that the words that changed are not there")
            for part, changed in parts:
                part.copies.run(changed=changed, former=True)

        return undo

    def load_bucket(self, assembly: Assembly, index: int, payload: torch.Tensor) -> None:
        """Streaming: load and copy the pieces of this bucket, and the tensors that it completes."""
        part = self._part(index, payload)
        for entry in self._joined[index]:
            assembly.add(entry, entry.view(payload))
        parts = [part, *self._joined_parts(assembly)]
        has_rest = any(part.rest for part in parts)
        self.has_lent_views |= has_rest
        if has_rest or self.install_map is not None:
            self._load(parts, assembly)
        for part in parts:
            part.copies.run()

    def load_end(self, assembly: Assembly) -> None:
        """Streaming, after the last bucket: load the tensors that are in no bucket because they have no elements."""
        if parts := self._joined_parts(assembly, is_last=True):
            self._load(parts, assembly)
            parts[0].copies.run()

    def _load(self, parts: Sequence[Part], assembly: Assembly, *, lends: bool = True) -> list[Named]:
        """Have the engine load what is not copied; return that."""
        # Digested before the load, since a loader may write into the tensors that it gets.
        for part in parts:
            for name, tensor in part.to_prove:
                install_map = self.install_map
                assert install_map is not None
                assembly.to_prove[name] = install_map.block_digests(name, install_map.source_blocks(name, tensor))
        rest = [named for part in parts for named in part.rest]
        self.engine.load(rest if lends else ((name, tensor.clone()) for name, tensor in rest))
        return rest

    def prove(self, assembly: Assembly) -> None:
        """After `Engine.commit`, have the map prove the loaded tensors, which can be copied from then on."""
        assert self.install_map is not None
        self.install_map.prove(assembly.to_prove.items())

    def _part(self, index: int, payload: torch.Tensor) -> Part:
        """Return the part of this bucket: its complete tensors, and pieces that are copied.

        The part is cached while the bucket stays in the same memory.
        """
        part = self._parts.get(index)
        if part is None or part.payload is not payload:
            part = self._parts[index] = Part(self.install_map, self.copied, payload)
            stored = part.add_stored(self.layout.manifest, self._whole[index], self._cut | self._other_names.keys())
            if len(stored) < len(self._whole[index]) or self.layout.manifest.pieces:
                known = self._cut.union(stored)
                for entry in self.layout.entries[index]:
                    if entry.record.name not in known:
                        for name in self._names(entry.record):
                            part.add(name, entry.view(payload))
            for name, entry in self._copied_pieces[index]:
                part.add(name, entry.view(payload), entry.piece.region)
        return part

    def _joined_parts(self, assembly: Assembly, *, is_last: bool = False) -> list[Part]:
        """Return the part of the joined tensors, if there are any; `is_last` adds the tensors that are in no bucket."""
        whole = assembly.whole + (self._without_elements if is_last else [])
        if not whole:
            return []
        assembly.whole, part = [], Part(self.install_map, self.copied)
        for record, tensor in whole:
            for name in self._names(record):
                part.add(name, tensor)
        return [part]

    def _names(self, record: TensorSpec) -> tuple[str, ...]:
        """Return the names under which a record is loaded."""
        return self._other_names.get(record.name, (record.name,))


def _joined(record: TensorRecord, parts: Sequence[tuple[Entry, torch.Tensor]]) -> torch.Tensor:
    """Return the joined tensor: a view if the pieces are adjacent in memory in the tensor's order, else a copy."""
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
    """Return the first GPU among the engine's devices, else the CPU."""
    # Not by isinstance(engine, OnDevice): before Python 3.12 that evaluates the property, which searches the model.
    devices: Collection[torch.device] = getattr(engine, "devices", ())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _spanning_groups(records: Iterable[TensorRecord]) -> set[str]:
    """Return the load groups that have pieces in more than one bucket."""
    buckets: dict[str, set[int]] = {}
    for record in records:
        if record.group:
            buckets.setdefault(record.group, set()).update(piece.bucket for piece in record.pieces)
    return {group for group, found in buckets.items() if len(found) > 1}
