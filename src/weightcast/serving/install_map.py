"""The copies of an engine's own loader, recorded: block of a checkpoint's tensor to block of a live parameter.

With a map an install is a few batched copies, without the loader. A tensor is installed by the map only after it was
proven in this process: it was first installed through the loader, and the live blocks were equal to the received ones,
bit by bit.

Invariants: blocks of one parameter do not overlap; a module is filled by the map or by the loader, never by both;
tensors whose loading could not be recorded go through the loader, each with a reason (`opaque`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import torch
from torch import nn

from weightcast.checkpoint.live import ModuleMembers
from weightcast.errors import IntegrityError, ManifestError, UnsupportedError, listed, malformed
from weightcast.format.bucket import DTYPE_NAMES, narrow
from weightcast.format.geometry import (
    Region,
    check_disjoint,
    check_tiling,
    common,
    is_inside,
    relative,
    row_major,
    runs_as_blocks,
)
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldBlock, HeldWeights
from weightcast.format.tensor_digest import add, tensor_digest
from weightcast.native.tables import places, same_members, same_places
from weightcast.seams.install_map import InstallMap

logger = logging.getLogger(__name__)


class StridedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block of a storage, or of a contiguous tensor: offset of its first element, sizes, strides, all in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of the tensor's storage that begins `offset` elements after the tensor's first element."""
        if self.sizes == tensor.shape and not self.offset and self.strides == tensor.stride():
            return tensor
        return tensor.as_strided(self.sizes, self.strides, int(tensor.storage_offset()) + self.offset)

    def region(self, shape: Sequence[int], strides: Sequence[int]) -> tuple[Region, tuple[int, ...]] | None:
        """Return the block as a region of a tensor of this shape and strides, and the block's dims in the region's
        order.

        Returns None if the block is not a region.
        """
        dims: dict[int, int] = {}
        for dim, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            if size != 1:
                found = next(
                    (d for d, s in enumerate(strides) if s == stride and shape[d] != 1 and d not in dims), None
                )
                if found is None:
                    return None
                dims[found] = dim
        offsets, rest = [0] * len(shape), self.offset
        for d in sorted((d for d, size in enumerate(shape) if size != 1), key=lambda d: -strides[d]):
            offsets[d], rest = divmod(rest, strides[d])
        region = Region(tuple(offsets), tuple(self.sizes[dims[d]] if d in dims else 1 for d in range(len(shape))))
        if rest or not is_inside(region, shape):
            return None
        ones = (dim for dim in range(len(self.sizes)) if dim not in dims.values())
        return region, (*(dims[d] for d in sorted(dims)), *ones)


class RecordedCopy(msgspec.Struct, frozen=True, gc=False):
    """A copy by the loader: block `source` of the checkpoint's tensor `name` to `block` of the model's `target`."""

    name: str
    source: StridedBlock
    target: str
    block: StridedBlock


class TargetForm(msgspec.Struct, frozen=True, gc=False):
    """Dtype and geometry of a parameter or buffer when it was recorded; if they differ now, the tensor was replaced."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class RegionDigest(msgspec.Struct, frozen=True):
    """A region of a tensor in an engine rank's live memory. `digest`: over position and value (see `tensor_digest`)."""

    region: Region
    digest: str


class HeldTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine rank's part of a tensor: `regions`, empty if the rank has none. `unproven`: why they can't be read.

    `fault`: how a packed copy, with which the rank computes, differs from the parameter.
    """

    spec: TensorSpec
    regions: list[RegionDigest] = []
    unproven: str = ""
    fault: str = ""


class RecordedMap(InstallMap):
    """The recorded copies of one model's loader."""

    def __init__(
        self,
        model: nn.Module,
        catalog: Sequence[TensorSpec],
        copies: Sequence[RecordedCopy],
        targets: Mapping[str, TargetForm],
        opaque: Mapping[str, str],
        *,
        tied: Mapping[str, str] = {},
        packed_copies: Mapping[str, Callable[[], str]] = {},
        quantised: Collection[str] = (),
    ) -> None:
        """`catalog`: the tensors of the offer, equal on all ranks; the loader did not get those that are tied.
        `targets`: the form of every copy's target, by the model's name.

        `opaque`: names that go through the loader, with the reason. `tied`: parameters of the model that are tied to
        others, under their names in a checkpoint, which the engine's loader must get in any case. `packed_copies`:
        parameters of which the engine computes with a packed copy, each with a function that returns how the copy
        differs from the parameter, or "". Such a parameter can be read, but goes through the loader. `quantised`:
        modules of which the engine makes other parameters once they are filled, in the context `quantising`.
        """
        self._catalog = {spec.name: spec for spec in catalog}
        self._model = model
        self._layers = layers_of(model)
        self._is_expired = False
        self._targets = targets
        self.opaque = dict(opaque)
        """The names that go through the loader, each with the reason."""
        self._tied = tied
        self.also_loaded = frozenset(tied.values())
        self._copies: dict[str, list[RecordedCopy]] = {}
        for copy in copies:
            self._copies.setdefault(copy.name, []).append(copy)
        for name, reason in _entangled(copies, targets).items():
            self.opaque.setdefault(name, reason)
        self._module_of: dict[str, str] = {}
        """By tensor, the quantised module that it is copied to, if it is one and tensors are only copied there."""
        self._quantised: dict[str, tuple[dict[str, HeldTensor], dict[str, str]]] = {}
        """By quantised module, the tensors that filled it, and the digests of the parameters that were made of them."""
        self._faults: dict[str, str] = {}
        self._unread = set[str]()
        """Opaque names whose parameters can be read once an install has proven that the loader copies to them."""
        for name, own in self._copies.items():
            modules = {_module(copy.target) for copy in own}
            if not modules.isdisjoint(quantised):
                if len(modules) == 1 and name not in self.opaque:
                    (self._module_of[name],) = modules
                self.opaque.setdefault(name, f"the engine keeps {', '.join(modules)} in another form")
            elif name not in self.opaque and any(copy.target in packed_copies for copy in own):
                self.opaque[name] = "the engine computes with a packed copy that only its loader can make"
                self._unread.add(name)
        self._packed_copies = packed_copies
        self._proven = set[str]()
        self._readable = set[str]()
        super().__init__({})
        self._members = ModuleMembers.of([])
        """The model's modules, and the members of those that have the live tensors."""
        self._places, self._addresses = b"", dict[str, int]()
        """Addresses of the live tensors, as bytes and by name."""
        self._is_looked_up = False
        self._blocks: dict[tuple[str, Region | None], list[torch.Tensor]] = {}
        self._regions: dict[str, list[tuple[Region, tuple[int, ...]]]] = {}
        self._exclude_entangled_modules()

    @property
    def proven(self) -> Collection[str]:
        return self._proven

    def expire(self) -> None:
        """Mark the map as stale: the next install goes through the loader, and the model is recorded again."""
        self._is_expired = True

    @property
    def is_stale(self) -> bool:
        apart = (name for name, owner in self._tied.items() if not is_tied(self._model, name, owner))
        return self._is_expired or layers_of(self._model) != self._layers or any(apart)

    def can_copy(self, name: str) -> bool:
        return name in self._copies and (name not in self.opaque or name in self._unread)

    def modules(self, names: Collection[str]) -> set[str]:
        """Return the names of the modules that these tensors are copied to."""
        return {_module(copy.target) for name in names for copy in self._copies[name]}

    def target_bytes(self, names: Iterable[str]) -> int:
        copies = (copy for name in names for copy in self._copies[name])
        return sum(math.prod(copy.block.sizes) * self._targets[copy.target].dtype.itemsize for copy in copies)

    def can_copy_pieces(self, name: str) -> bool:
        found = self._regions.get(name)
        if found is None:
            shape = self._catalog[name].shape
            regions = [copy.source.region(shape, row_major(tuple(shape))) for copy in self._copies[name]]
            found = self._regions[name] = [] if None in regions else [region for region in regions if region]
        return bool(found)

    def source_blocks(self, name: str, tensor: torch.Tensor, piece: Region | None = None) -> list[torch.Tensor]:
        if piece is None:
            return [copy.source.of(tensor) for copy in self._copies[name]]
        taken = (common(region, piece) for region, _ in self._regions[name])
        return [narrow(tensor, relative(region, piece)) for region in taken if region is not None]

    def are_copied_as_is(self, names: Sequence[str], dtypes: Sequence[torch.dtype]) -> list[bool]:
        return [False] * len(names)  # a parameter may be moved to a GPU

    def target_blocks(self, name: str, piece: Region | None = None) -> list[torch.Tensor]:
        found = self._blocks.get((name, piece))
        if found is None:
            found = [copy.block.of(self._live[copy.target].data) for copy in self._copies[name]]
            if piece is not None:
                whole = zip(found, self._regions[name], strict=True)
                found = [
                    narrow(block.permute(order).reshape(region.sizes), relative(part, region))
                    for block, (region, order) in whole
                    if (part := common(region, piece)) is not None
                ]
            self._blocks[name, piece] = found
        return found

    def bind(self) -> bool:
        """Find every live tensor; see `InstallMap.bind`. Returns False if the model has to be recorded again."""
        if self._is_expired:
            return False
        # An engine may give a parameter other memory.
        is_kept = self._is_looked_up and same_members(*self._members)
        if is_kept and same_places(list(self._live.values()), self._places):
            return True
        modules = dict(self._model.named_modules())
        registers = [module._modules for module in modules.values()]
        live: dict[str, torch.Tensor] = {}
        for name, target in self._mapped_targets.items():
            parent, _, leaf = name.rpartition(".")
            module, tensor = modules.get(parent), None
            if module is not None:
                register = module._parameters if leaf in module._parameters else module._buffers
                tensor = register.get(leaf)
                registers.append(register)
            if tensor is None or tensor.is_meta or _form(tensor) != target:
                logger.warning("%s has changed since the model's loader was recorded, which is recorded again", name)
                self._live, self._is_expired = {}, True
                return False
            live[name] = tensor
        self._members, self._is_looked_up = ModuleMembers.of(registers), True
        addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
        moved = {
            name
            for name, tensor in live.items()
            if self._live.get(name) is not tensor or self._addresses[name] != addresses[name]
        }
        if moved or len(live) != len(self._live):
            self.revision += any(copy.target in moved for name in self._proven for copy in self._copies[name])
            self._live, self._blocks, self._addresses = live, {}, addresses
        self._places = places(list(live.values()))
        return True

    def block_digests(self, name: str, sources: Sequence[torch.Tensor]) -> list[str]:
        dtypes = (self._targets[copy.target].dtype for copy in self._copies[name])
        return [tensor_digest(source.to(dtype)) for source, dtype in zip(sources, dtypes, strict=True)]

    def prove(self, tensors: Iterable[tuple[str, Sequence[str]]]) -> None:
        """After an install through the loader, compare the digests of the received blocks with those of the live ones.

        A tensor whose blocks are equal, bit by bit, is proven (if opaque, it can be read from now on). Any other tensor
        stays with the loader, can't be read, and is named in a warning.
        """
        if not self.bind():
            return
        with torch.inference_mode():
            for name, digests in tensors:
                if name in self._unread:
                    self._unread.discard(name)
                    known, live = self._readable, self._blocks_to_read(name)
                else:
                    known, live = self._proven, self.target_blocks(name)
                if live and [*map(tensor_digest, live)] == list(digests):
                    known.add(name)
                else:
                    self.opaque[name] = "the loader's result differs from a copy's"
                    logger.warning(
                        "%r can't be installed by copies, so it goes through the loader: %s", name, self.opaque[name]
                    )
        self._exclude_entangled_modules()

    @contextlib.contextmanager
    def quantising(self, module: str) -> Iterator[None]:
        """Context in which the engine makes other parameters of a module that its loader has filled.

        From then on the digests of the filled parameters are those of its tensors, if the module has not changed since.
        """
        layer = self._layers[module]
        filled = {
            name: self._read(
                self._catalog[name],
                [copy.block.of(getattr(layer, copy.target.rpartition(".")[2]).data) for copy in self._copies[name]],
                self._copies[name],
            )
            for name, owner in self._module_of.items()
            if owner == module
        }
        yield
        if filled:
            self._quantised[module] = filled, _digests(layer)

    def snapshot(self) -> Callable[[], None]:
        """Return a function for an undo, after which quantised modules are made of the tensors that they are now."""
        former = self._quantised.copy()

        def restore() -> None:
            self._quantised = former.copy()

        return restore

    def held(self, start: int, limit_bytes: int, names: Collection[str] = ()) -> tuple[list[HeldTensor], int]:
        """Return the catalog's tensors (or those in `names`) from index `start` on, with digests of live memory.

        Reads up to `limit_bytes`, but at least one tensor. Also returns the index of the next call, -1 after the last.
        """
        is_bound, found, num_bytes = self.bind(), list[HeldTensor](), 0
        self._faults = {}
        for number, spec in enumerate(itertools.islice(self._catalog.values(), start, None), start):
            tied = [n for n, owner in self._tied.items() if owner == spec.name and n not in self._catalog]
            if names and not {spec.name, *tied} & set(names):
                continue
            num_bytes += spec.num_bytes
            if found and num_bytes > limit_bytes:
                return found, number
            why_not = "" if is_bound else "the model's parameters were replaced since its loader was recorded"
            owner = self._catalog[self._tied.get(spec.name, spec.name)]
            own = HeldTensor(owner, unproven=why_not) if why_not else self._held(owner)
            found.append(own if owner is spec else self._held_tied(own, spec.name))
            found += (self._held_tied(own, name) for name in tied)
        return found, -1

    def _held_tied(self, owner: HeldTensor, name: str) -> HeldTensor:
        """Return the state of a parameter that is tied to `owner`, to be compared under any of the owner's names."""
        spec = msgspec.structs.replace(owner.spec, name=name, aliases=owner.spec.names)
        copies = self._copies.get(owner.spec.name, [])
        if owner.unproven or any(copy.target != owner.spec.name for copy in copies):
            return HeldTensor(spec, unproven=owner.unproven or f"it is tied to {owner.spec.name!r}")
        live, owned = _parameter(self._model, name), _parameter(self._model, owner.spec.name)
        if live is None or owned is None or live.shape != owned.shape:
            return HeldTensor(spec, unproven=f"the model has no {name} of the shape and dtype of {owner.spec.name}")
        fault = self._fault([name])
        if live.data_ptr() == owned.data_ptr():
            return HeldTensor(spec, owner.regions, fault=fault)
        return self._read(spec, [copy.block.of(live.data) for copy in copies], copies, fault)

    def _held(self, spec: TensorSpec) -> HeldTensor:
        name, module = spec.name, self._module_of.get(spec.name)
        if module in self._quantised:
            filled, digests = self._quantised[module]
            if module not in self._faults:
                is_same = _digests(self._layers[module]) == digests
                self._faults[module] = "" if is_same else f"{module} has changed since the engine quantised it"
            return msgspec.structs.replace(filled[name], fault=self._faults[module])
        if module is None and name in self.opaque and name not in self._readable | self._unread:
            return HeldTensor(spec, unproven=self.opaque[name])
        if name not in self._copies:
            return HeldTensor(spec)
        if name not in self._proven | self._readable:
            return HeldTensor(spec, unproven="weightcast has not installed it yet")
        live = self._blocks_to_read(name) if name in self._readable else self.target_blocks(name)
        if not live:
            return HeldTensor(spec, unproven="the model's parameters were replaced since its loader was recorded")
        copies = self._copies[name]
        return self._read(spec, live, copies, self._fault(dict.fromkeys(copy.target for copy in copies)))

    def _blocks_to_read(self, name: str) -> list[torch.Tensor]:
        """Return the live blocks of an opaque tensor; none if a parameter has changed since it was recorded."""
        found = []
        for copy in self._copies[name]:
            live = _parameter(self._model, copy.target)
            if live is None or _form(live) != self._targets[copy.target]:
                return []
            found.append(copy.block.of(live.data))
        return found

    def _fault(self, parameters: Iterable[str]) -> str:
        """Return how the packed copies of these parameters differ from them."""
        faults = [self._packed_copies[name]() for name in parameters if name in self._packed_copies]
        return "; ".join(filter(None, faults))

    @staticmethod
    def _read(
        spec: TensorSpec, live: Sequence[torch.Tensor], copies: Sequence[RecordedCopy], fault: str = ""
    ) -> HeldTensor:
        dtypes = {DTYPE_NAMES[block.dtype] for block in live}
        if len(dtypes) > 1:
            return HeldTensor(spec, unproven=f"the engine has it as {' and '.join(sorted(dtypes))}")
        try:
            parts = [_as_region(copy.source, block, spec.shape) for copy, block in zip(copies, live, strict=True)]
        except ManifestError as exc:
            return HeldTensor(spec, unproven=str(exc))
        regions = [RegionDigest(region, tensor_digest(view, region, spec.shape)) for region, view in parts]
        return HeldTensor(msgspec.structs.replace(spec, dtype=dtypes.pop()), regions, fault=fault)

    def _exclude_entangled_modules(self) -> None:
        """Make every tensor opaque whose module is also filled from an opaque tensor."""
        names: dict[str, set[str]] = {}
        for name, copies in self._copies.items():
            for copy in copies:
                names.setdefault(_module(copy.target), set()).add(name)
        pending = [name for name in self.opaque if name in self._copies]
        while pending:
            name = pending.pop()
            self._proven.discard(name)
            for module in self.modules([name]):
                for other in names[module] - self.opaque.keys():
                    self.opaque[other] = f"{module} is also filled from {name!r}, which goes through the loader"
                    pending.append(other)
        mapped = (copy for name, copies in self._copies.items() if name not in self.opaque for copy in copies)
        self._is_looked_up = False
        self.revision += 1
        self._mapped_targets = {copy.target: self._targets[copy.target] for copy in mapped}


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module under each of its names."""
    return dict(model.named_modules(remove_duplicate=False))


def is_tied(model: nn.Module, name: str, owner: str) -> bool:
    """Return whether two parameter names refer to the same memory."""
    first, second = _parameter(model, name), _parameter(model, owner)
    if first is None or second is None:
        return False
    return first is second or (first.shape == second.shape and first.data_ptr() == second.data_ptr())


def _parameter(model: nn.Module, name: str) -> torch.Tensor | None:
    module, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(module)._parameters.get(leaf)
    except AttributeError:
        return None


def held_weights(
    run: str, weight_version: str, ranks: Mapping[int, Sequence[HeldTensor]], *, with_blocks: bool
) -> HeldWeights:
    """Return an engine's weights, combined from its ranks. A rank lists the whole catalog, and what it has tied."""
    found = HeldWeights(run, weight_version, [], {})
    by_name: dict[str, dict[int, HeldTensor]] = {}
    for rank, of_rank in ranks.items():
        for held in of_rank:
            by_name.setdefault(held.spec.name, {})[rank] = held
    for of_ranks in by_name.values():
        # A rank without a part of the tensor does not know its dtype in the engine.
        spec = next((held.spec for held in of_ranks.values() if held.regions), next(iter(of_ranks.values())).spec)
        found.tensors.append(spec)
        try:
            found.digests[spec.name] = whole_digest(of_ranks)
        except IntegrityError as exc:
            found.differing[spec.name] = str(exc)
        except UnsupportedError as exc:
            found.unproven[spec.name] = str(exc)
        faults = [f"on rank {rank} {held.fault}" for rank, held in of_ranks.items() if held.fault]
        if faults:
            found.differing.setdefault(spec.name, f"{spec.name!r} {listed(faults)}")
        if with_blocks:
            found.blocks[spec.name] = [
                HeldBlock(rank, placed.region, placed.digest)
                for rank, held in of_ranks.items()
                for placed in held.regions
            ]
    return found


def whole_digest(ranks: Mapping[int, HeldTensor]) -> str:
    """Return the digest of a tensor, added up over the engine ranks' regions; replicas are compared, not added.

    Raises IntegrityError, naming the ranks and the block, if replicas differ; UnsupportedError if a part is unknown.
    """
    found: dict[Region, tuple[str, int]] = {}
    spec = next(iter(ranks.values())).spec
    for rank, held in ranks.items():
        if held.unproven:
            raise UnsupportedError(held.unproven)
        for part in held.regions:
            digest, first = found.setdefault(part.region, (part.digest, rank))
            if digest != part.digest:
                place = f"at {list(part.region.offsets)}, sizes {list(part.region.sizes)}"
                ranks_found = f"rank {first} has digest {digest}, rank {rank} has {part.digest}"
                raise IntegrityError(f"replicas of {spec.name!r} differ {place}: {ranks_found}")
    try:
        check_tiling(list(found), spec.shape, spec.name)
    except ManifestError as exc:
        raise UnsupportedError(f"the engine's ranks together do not have all of it: {exc}") from exc
    return functools.reduce(add, (digest for digest, _ in found.values()), "0" * 32)


def _form(tensor: torch.Tensor) -> TargetForm:
    return TargetForm(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _module(target: str) -> str:
    return target.rpartition(".")[0]


def _digests(layer: nn.Module) -> dict[str, str]:
    """Return the digest of each parameter and buffer of a layer, without those of its submodules."""
    tensors = itertools.chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))
    return {name: tensor_digest(tensor) for name, tensor in tensors}


def _as_region(source: StridedBlock, live: torch.Tensor, shape: Sequence[int]) -> tuple[Region, torch.Tensor]:
    """Return the block as a region of a tensor of this shape, and the live elements in the region's dims.

    Raises ManifestError if the block is not a region.
    """
    found = source.region(shape, row_major(tuple(shape)))
    if found is not None:
        region, order = found
        return region, live.permute(order).reshape(region.sizes)
    if source.strides == row_major(source.sizes):
        runs = list(runs_as_blocks(shape, source.offset, source.offset + math.prod(source.sizes)))
        if len(runs) == 1:
            return runs[0], live.reshape(runs[0].sizes)
    raise malformed(
        "shape", f"a block of sizes {list(source.sizes)} is not a region of a tensor of shape {list(shape)}"
    )


def _entangled(copies: Iterable[RecordedCopy], targets: Mapping[str, TargetForm]) -> dict[str, str]:
    """Return, with the reason, the names whose copies overlap in a parameter or are not regions of it."""
    regions: dict[str, list[Region]] = {}
    names: dict[str, set[str]] = {}
    found: dict[str, str] = {}
    for copy in copies:
        target = targets[copy.target]
        names.setdefault(copy.target, set()).add(copy.name)
        region = copy.block.region(target.shape, target.strides)
        if region is None:
            found[copy.name] = f"the loader copies it to elements of {copy.target} that are not a region"
        else:
            regions.setdefault(copy.target, []).append(region[0])
    for name, parts in regions.items():
        try:
            check_disjoint(parts, name)
        except ManifestError as exc:
            found |= dict.fromkeys(names[name], f"the loader writes parts of {name} more than once: {exc}")
    return found
