"""Runs a model's own loader on tensors without memory, to learn what each name of a checkpoint would set, and how.

What is a plain copy is recorded, block by block, for `serving.install_map`; anything else that a name is used for makes
the name opaque.

Invariants: nothing of the tensors without memory is written to what is live; whatever happens, every module has its own
tensors again afterwards. The model can't be used meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightcast.errors import ManifestError, listed
from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.geometry import check_disjoint, common
from weightcast.format.manifest import TensorSpec
from weightcast.host.memory import collector_paused
from weightcast.serving.install_map import RecordedCopy, StridedBlock, TargetForm

logger = logging.getLogger(__name__)

MAX_FAULTS = 64
"""After so many tensors at which the loader failed the rest is not tried: each costs another run."""

Modules: TypeAlias = Sequence[tuple[str, nn.Module]]
"""A model's own and all inside it, by name."""

Form: TypeAlias = Callable[[nn.Module, str], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]
"""The parameters and buffers of a layer, given with its name, in the form that its loader fills; those without memory
are followed.
"""


@dataclasses.dataclass(slots=True)
class DryRunTarget:
    """A parameter or buffer of the model in checkpoint form. `loaded`: the blocks that were set, each from which name.

    Names that one write has its values from, such as a concatenation, are one there. `twice`: of blocks that were set
    from several, all of them. `padded`: blocks that the loader filled with a constant, as keys. `num_set`: elements of
    all of them. Of these there are as many as tensors: none is anything for the garbage collector to look at.
    """

    name: str
    form: TargetForm
    is_parameter: bool
    loaded: dict[StridedBlock, str] = dataclasses.field(default_factory=dict)
    twice: dict[StridedBlock, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    padded: dict[StridedBlock, None] = dataclasses.field(default_factory=dict)
    num_set: int = 0

    def load(self, block: StridedBlock, num_elements: int, names: str) -> None:
        """A block was set from these names."""
        known = self.loaded.get(block)
        if known is None:
            self.loaded[block] = names
            if not self.padded or block not in self.padded:
                self.num_set += num_elements
        elif names not in (all_known := self.twice.get(block, (known,))):
            self.twice[block] = (*all_known, names)

    def pad(self, block: StridedBlock, num_elements: int) -> None:
        """A block was set to a constant."""
        if block not in self.padded and block not in self.loaded:
            self.num_set += num_elements
        self.padded[block] = None

    @property
    def num_unset(self) -> int:
        """Elements that would keep whatever a new parameter holds."""
        return max(0, math.prod(self.form.shape) - self.num_set)


@dataclasses.dataclass
class DryRunOutcome:
    """What the loader did: `faults` by name (the empty one: at the end), the `targets` by the model's names for them.

    `used`: how many elements of each name were copied into targets, and of which dtypes these are. `copies`: those
    copies, in their order; `opaque`: the names that the loader does more with than to copy them, and what. `beside`:
    the live tensors that it would have written in place besides these, such as MLA's absorbed weights. `together`: by
    name, all names that a value is made of with it; the loader has to get these in one call. `calls`: how often the
    loaders of a module were called, by the module's name, where an engine counts that. `overwritten`: the names whose
    tensors the loader writes to; they are opaque.
    """

    faults: dict[str, str]
    targets: dict[str, DryRunTarget]
    used: dict[str, tuple[int, frozenset[torch.dtype]]]
    copies: list[RecordedCopy]
    opaque: dict[str, str]
    beside: list[torch.Tensor] = dataclasses.field(default_factory=list)
    together: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()


@collector_paused()
def dry_run(model: nn.Module, form: Form, specs: Sequence[TensorSpec]) -> DryRunOutcome:
    """Let `model.load_weights` load tensors of these names, shapes and dtypes, in this order, into nothing.

    What it fails at is noted and left out of another run, so that all faults are found. The first run sees copies and
    constants only, which takes little longer than the loader itself; unless these explain all that it has left behind,
    another one looks at every operation.
    """
    loader: Any = model
    faults: dict[str, str] = {}
    sees_all = False
    while True:
        fault = ""
        modules, exchange = list(model.named_modules()), _Exchange()
        with exchange.of(modules, form):
            probe = _Probe(exchange.targets, [spec for spec in specs if spec.name not in faults])
            with probe if sees_all else _copies_seen_by(probe):
                try:
                    loader.load_weights(probe.sources())
                except Exception as exc:
                    fault = f"{type(exc).__name__}: {exc}"
        if not sees_all and (fault or not probe.knows_all or not exchange.is_explained()):
            sees_all = True
            continue
        probe.look_for_writes()
        # Copies of what has no memory are counted as writes, and are none.
        skipped = Counter(map(_address, probe.beside))
        written = [name for name, (t, count) in exchange.live.items() if t._version > count + skipped[_address(t)]]
        if written:
            logger.warning(
                "the loader of %s writes to %s by itself, also when it is tried without weights",
                type(model).__name__,
                listed(written, separator=", "),
            )
            probe.beside += (exchange.live[name][0] for name in written)
        if fault:
            faults[probe.current] = fault
        if not fault or not probe.current or len(faults) == MAX_FAULTS:
            return DryRunOutcome(
                faults=faults,
                targets={target.name: target for target in exchange.targets.values()},
                used=probe.used,
                copies=probe.copies,
                opaque=probe.opaque_names(),
                beside=probe.beside,
                together=probe.together,
                overwritten=frozenset(probe.overwritten),
            )


@contextlib.contextmanager
def _copies_seen_by(probe: _Probe) -> Iterator[None]:
    """Have a probe see what is copied or filled into tensors without memory, in whichever thread.

    Also whether anything without memory is written by another operation: values such as zeros would not show that.
    """
    of_run = [probe]  # torch keeps these functions until others take their place

    def copied(part: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        of_run[0].copied(part, source)
        return part

    def filled(part: torch.Tensor, *value: Any) -> torch.Tensor:
        of_run[0].written(part, None)
        return part

    def computed(arguments: Sequence[str], returned: Sequence[str], *operands: Any, **options: Any) -> Any:
        # What is returned may lack its shape (of `out=`): all of it is left to the run that looks at every operation.
        of_run[0].knows_all = False
        given = dict(zip(arguments, operands, strict=False)) | options
        results = tuple(given[name] for name in returned)
        return results[0] if len(results) == 1 else results or None

    try:
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("copy_", copied, "Meta")
            for name in _FILL_NAMES:
                library.impl(name, filled, "Meta")
            for name, arguments, returned in _other_writes():
                library.impl(name, functools.partial(computed, arguments, returned), "Meta")
            yield
    finally:
        of_run.clear()
        probe.settle()


@dataclasses.dataclass
class _Exchange:
    """Modules that have tensors without memory for a while: the `targets`, by their storage's address."""

    targets: dict[int, DryRunTarget] = dataclasses.field(default_factory=dict)
    live: dict[str, tuple[torch.Tensor, int]] = dataclasses.field(default_factory=dict)
    """The tensors that modules have besides parameters and buffers, and how often each was written to before."""
    _parameters: list[tuple[int, DryRunTarget]] = dataclasses.field(default_factory=list)
    """Each with the live parameter, which may have several names."""
    _left: list[Mapping[str, torch.Tensor | None]] = dataclasses.field(default_factory=list)
    """The parameters and the buffers that modules had in the end."""
    _changed: list[tuple[list[Any], list[Any]]] = dataclasses.field(default_factory=list)
    """Of modules with other attributes in the end: what these were before, and in the end."""
    _alive: list[torch.UntypedStorage] = dataclasses.field(default_factory=list)
    """A storage that the loader drops would leave its address to the next."""
    _tuples: dict[tuple[int, ...], tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Equal shapes and strides are one object: few differ."""

    @contextlib.contextmanager
    def of(self, modules: Modules, form: Form) -> Iterator[None]:
        """Give each module private tensors in checkpoint form, and put back afterwards what it had."""
        exchanged: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes of each module, and what they were
        plain: set[type] = set()  # attributes are of few types, most of them no tensors'
        try:
            # Engines' classes of parameters may answer each call in Python.
            with torch._C.DisableTorchFunctionSubclass():
                for prefix, layer in modules:
                    attributes = layer.__dict__
                    before, (parameters, buffers) = dict(attributes), form(layer, prefix)
                    exchanged.append((attributes, before))
                    if new := {*map(type, before.values())} - plain:
                        plain |= {kind for kind in new if not issubclass(kind, torch.Tensor)}
                        for name, value in before.items():
                            if isinstance(value, torch.Tensor) and not value.is_meta and not value.is_inference():
                                self.live[f"{prefix}.{name}" if prefix else name] = value, value._version
                    made = parameters, buffers, set(layer._non_persistent_buffers_set)
                    attributes.update(zip(_EXCHANGED, made, strict=True))
                    for name, tensor in itertools.chain(parameters.items(), buffers.items()):
                        if tensor.is_meta:
                            target = self._target(f"{prefix}.{name}" if prefix else name, tensor, name in parameters)
                            if target.is_parameter:
                                self._parameters.append((id(before["_parameters"].get(name)), target))
            yield
        finally:
            for attributes, before in exchanged:
                self._left += filter(None, (attributes.get("_parameters"), attributes.get("_buffers")))
                for kind in _EXCHANGED:
                    attributes[kind] = before[kind]
                if [*attributes] != [*before] or not all(map(operator.is_, attributes.values(), before.values())):
                    self._changed.append(([*before.values()], [*attributes.values()]))
                    attributes.clear()
                    attributes.update(before)

    def _target(self, name: str, tensor: torch.Tensor, is_parameter: bool) -> DryRunTarget:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        shape, strides, one_of = tuple(tensor.shape), tensor.stride(), self._tuples.setdefault
        form = TargetForm(one_of(shape, shape), one_of(strides, strides), tensor.dtype)
        target = self.targets[storage._cdata] = DryRunTarget(name, form, is_parameter)
        return target

    def is_explained(self) -> bool:
        """Afterwards: whether what was written to targets is all that the loader has left behind.

        No parameter is unset, and no module has other tensors.
        """
        whole = {live for live, target in self._parameters if not target.num_unset}
        if any(live not in whole for live, _ in self._parameters):
            return False
        # Engines' classes of parameters may answer each call in Python.
        with torch._C.DisableTorchFunctionSubclass():
            left = [tensor for tensors in self._left for tensor in tensors.values() if tensor is not None]
            if not self.targets.keys() >= {_address(tensor) for tensor in left if tensor.is_meta}:
                return False
        for before, after in self._changed:
            # One that was deleted shifts the rest: then all of them count as made.
            pairs = itertools.zip_longest(after, before)
            if any(isinstance(value, torch.Tensor) for value, former in pairs if value is not former):
                return False
        return True


_EXCHANGED = ("_parameters", "_buffers", "_non_persistent_buffers_set")
"""Of a module's attributes."""


def present(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Those of a module's parameters or buffers that are there."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of the same class and attributes, its loader among them."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made = torch.Tensor._make_subclass(type(tensor), empty, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


class _Whole(NamedTuple):
    """A tensor that holds the elements of a source's block, all of them and nothing else, in its own order of dims.

    `dtypes`: that of the source, and those that it was cast to one after the other, the tensor's last.
    """

    name: str
    block: StridedBlock
    sizes: torch.Size
    strides: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows sources by their storage, through views, casts and whatever is computed from them, into targets."""

    def __init__(self, targets: Mapping[int, DryRunTarget], specs: Sequence[TensorSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets = targets
        self._specs = specs
        self.current = ""
        self.knows_all = True
        """Whether it knew where everything that was copied came from."""
        self.used = dict.fromkeys((spec.name for spec in specs), (0, frozenset[torch.dtype]()))
        self.copies: list[RecordedCopy] = []
        self.beside: list[torch.Tensor] = []
        self.together: dict[str, frozenset[str]] = {}
        self.overwritten: set[str] = set()
        self._opaque: dict[str, str] = {}
        self._refilled: dict[str, set[StridedBlock]] = {}
        """By target, what was filled with a constant after something was copied to it."""
        self._read: dict[str, str] = {}
        """Targets that something is computed from, and by which operation."""
        self._origins: dict[int, set[str]] = {}
        self._sources: dict[int, str] = {}
        self._blocks: dict[tuple[int, tuple[int, ...], tuple[int, ...]], StridedBlock] = {}
        self._given: dict[str, torch.Tensor] = {}
        self._wholes: dict[int, _Whole] = {}
        self._plain: list[tuple[Any, ...]] = []
        """Copies that are known to be no more than that, and are still to be noted."""
        # A storage that is freed leaves its address to the next.
        self._alive: list[torch.UntypedStorage] = []

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors without memory, each made when it is asked for."""
        given, alive, sources = self._given, self._alive, self._sources
        for spec in self._specs:
            self.current = name = spec.name
            tensor = _source(spec) if not torch.is_inference_mode_enabled() else _source_outside(spec)
            given[name] = tensor
            storage = tensor.untyped_storage()
            alive.append(storage)
            sources[storage._cdata] = name
            yield name, tensor
        self.current = ""

    def look_for_writes(self) -> None:
        """After the loader: what it wrote to sources by operations that were not seen."""
        for name in itertools.compress(self._given, map(_count_of_writes, self._given.values())):
            self._overwrite(name)

    def _overwrite(self, name: str) -> None:
        """The loader writes to a source: what it copies from it is not what came."""
        self.overwritten.add(name)
        self._opaque.setdefault(name, "the loader writes to it")

    def opaque_names(self) -> dict[str, str]:
        """The names that are not only copied, each with what else is done with it."""
        found = dict(self._opaque)
        for copy in self.copies if self._read else ():
            if copy.target in self._read:
                found.setdefault(copy.name, f"other tensors are made from {copy.target} ({self._read[copy.target]})")
        if self._refilled:
            self._look_for_refilled(found)
        return found

    def _look_for_refilled(self, found: dict[str, str]) -> None:
        """A constant that is written over what was copied: values that equal it would prove the copy."""
        forms = {target.name: target.form for target in self.targets.values() if target.name in self._refilled}
        copies: dict[str, list[RecordedCopy]] = {}
        for copy in self.copies:
            if copy.target in forms:
                copies.setdefault(copy.target, []).append(copy)
        for name, of_target in copies.items():
            form, filled = forms[name], list(self._refilled[name])
            regions = [block.region(form.shape, form.strides) for block in (*filled, *(c.block for c in of_target))]
            with contextlib.suppress(ManifestError):
                if None not in regions:
                    check_disjoint([region for region, _ in filter(None, regions)], name)
                    continue
            for copy, after in zip(of_target, regions[len(filled) :], strict=True):
                if any(a is None or after is None or common(a[0], after[0]) for a in regions[: len(filled)]):
                    found.setdefault(copy.name, f"{name} is filled with a constant where it was copied to")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            if args[1].is_meta and not args[0].is_meta:
                out = args[0]  # live, and stays as it is
                self.beside.append(out)
            else:
                out = func(*args, **(kwargs or {}))
            self.written(args[0], args[1])
            return out
        out = func(*args, **(kwargs or {}))
        if func in _FILLS:
            self.written(args[0], None)
        elif func not in _VIEWS:
            self._inherit(func, [*args, *(kwargs or {}).values()], out)
        return out

    def copied(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """`written`, for copies: what is common is noted later, all at once. A loader may make one for each tensor."""
        target = self.targets.get(part.untyped_storage()._cdata)
        name = self._sources.get(source.untyped_storage()._cdata)
        sizes, num_elements = part.shape, part.numel()
        if (
            target is None
            or name is None
            or source.shape != sizes
            or part.dtype != target.form.dtype
            or not self._is_as_it_came(source, name)
            or not num_elements
        ):
            self.written(part, source)
        else:
            self._plain.append((name, self._block(source), target, self._block(part), num_elements))

    def settle(self) -> None:
        """Note the copies that are still to be noted."""
        plain, self._plain = self._plain, []
        for name, source, target, block, num_elements in plain:
            target.load(block, num_elements, name)
            self._use(name, num_elements, target.form.dtype)
            self.copies.append(RecordedCopy(name, source, target.name, block))

    def written(self, part: torch.Tensor, source: torch.Tensor | None) -> None:
        """A copy of `source` to `part`, or of a constant. Raises RuntimeError for another shape."""
        if self._plain:
            self.settle()
        address = _address(part)
        target = self.targets.get(address)
        if target is None and (overwritten := self._sources.get(address)) is not None:
            self._overwrite(overwritten)
        num_elements, block = part.numel(), self._block(part)
        is_value = target is not None and part.dtype == target.form.dtype
        if target is not None and not is_value:
            num_elements = part.nbytes // target.form.dtype.itemsize  # it is a view of another dtype
        if source is None:
            if target is None:
                self._note(part, set())
            elif num_elements:
                self._pad(target, part, block)
            return
        if source.shape != block.sizes:
            source = source.expand(block.sizes)
        address = _address(source)
        name = self._sources.get(address)
        if name is not None and target is not None and num_elements and is_value and self._is_as_it_came(source, name):
            target.load(block, num_elements, name)
            self._use(name, num_elements, target.form.dtype)
            self.copies.append(RecordedCopy(name, self._block(source), target.name, block))
            return
        names = self._names(address)
        self.knows_all &= bool(names) and target is not None
        if len(names) > 1:
            group = frozenset(names).union(*(self.together.get(each, ()) for each in names))
            self.together |= dict.fromkeys(group, group)
        if target is None:
            self._note(part, names)
            self._opaque |= dict.fromkeys(names - self._opaque.keys(), "it is copied to a tensor that is no parameter")
            return
        if not num_elements:
            return
        if not names:
            if (read := self.targets.get(address)) is not None:
                self._read.setdefault(read.name, f"a copy to {target.name}")
            self._pad(target, part, block)
            return
        target.load(block, num_elements, " with ".join(sorted(names)))
        for each in names:
            self._use(each, num_elements, target.form.dtype)
        whole = self._whole(source)
        if whole is None or not is_value or not {*whole.dtypes[1:]} <= {target.form.dtype}:
            self._opaque |= dict.fromkeys(names - self._opaque.keys(), f"{target.name} is computed from it")
        else:
            self.copies.append(RecordedCopy(whole.name, whole.block, target.name, block))

    def _block(self, tensor: torch.Tensor) -> StridedBlock:
        """Where a tensor lies in its storage. Equal ones are one object: few differ."""
        place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        block = self._blocks.get(place)
        if block is None:
            block = self._blocks[place] = StridedBlock(*place)
        return block

    def _pad(self, target: DryRunTarget, part: torch.Tensor, block: StridedBlock) -> None:
        form = target.form
        target.pad(block, part.nbytes // form.dtype.itemsize)
        if target.loaded:
            # A view of another dtype may be anywhere in it: its block is in other units.
            everything = StridedBlock(0, form.shape, form.strides)
            self._refilled.setdefault(target.name, set()).add(block if part.dtype == form.dtype else everything)

    def _use(self, name: str, num_elements: int, dtype: torch.dtype) -> None:
        """So many elements of a source were copied into a target of that dtype."""
        former, dtypes = self.used[name]
        self.used[name] = _used(former + num_elements, dtypes, dtype)

    def _names(self, address: int) -> set[str]:
        """The sources that what lies at this address is made of."""
        name, others = self._sources.get(address), self._origins.get(address, set())
        return others if name is None else {name, *others}

    def _is_as_it_came(self, tensor: torch.Tensor, name: str) -> bool:
        """Whether a view of a source has its values: not its bits as another dtype, nor negated or conjugated ones."""
        return tensor.dtype == self._given[name].dtype and not tensor.is_neg() and not tensor.is_conj()

    def _whole(self, tensor: torch.Tensor) -> _Whole | None:
        """Which block of which source a tensor's elements are, if they are one, not its bits as another dtype."""
        name = self._sources.get(_address(tensor))
        block = StridedBlock(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        if name is not None:
            found = _Whole(name, block, tensor.shape, tensor.stride(), (self._given[name].dtype,))
            return found if self._is_as_it_came(tensor, name) else None
        whole = self._wholes.get(_address(tensor))
        if whole is None or block.offset or tensor.dtype != whole.dtypes[-1] or tensor.is_neg() or tensor.is_conj():
            return None
        return whole if (whole.sizes, whole.strides) == (tensor.shape, tensor.stride()) else None

    def _inherit(self, func: Any, args: list[Any], out: Any) -> None:
        taken = list(filter(torch.is_tensor, tree_leaves(args)))
        made = [tensor for tensor in filter(torch.is_tensor, tree_leaves(out)) if _address(tensor) not in self.targets]
        addresses = {_address(tensor) for tensor in taken}
        names = set[str]().union(*map(self._names, addresses))
        if all(_address(tensor) in addresses for tensor in made) and not func._schema.is_mutable:
            return  # views
        for address in addresses & self.targets.keys():
            if func not in _FORMS:
                self._read.setdefault(self.targets[address].name, str(func))
        whole = self._whole(taken[0]) if func in _COPIES and taken else None
        for tensor in made:
            if func._schema.is_mutable and (overwritten := self._sources.get(_address(tensor))) is not None:
                self._overwrite(overwritten)
            if names:
                self._note(tensor, names)
        if whole is not None:
            dtypes = whole.dtypes if made[0].dtype == taken[0].dtype else (*whole.dtypes, made[0].dtype)
            self._wholes[_address(made[0])] = whole._replace(
                sizes=made[0].shape, strides=made[0].stride(), dtypes=dtypes
            )
        elif func not in _FORMS:
            self._opaque |= dict.fromkeys(names - self._opaque.keys(), f"other tensors are made from it ({func})")

    def _note(self, tensor: torch.Tensor, names: set[str]) -> None:
        self._alive.append(tensor.untyped_storage())
        origins = self._origins.setdefault(_address(tensor), set())
        origins |= names


@functools.lru_cache(maxsize=1024)
def _used(num_elements: int, dtypes: frozenset[torch.dtype], dtype: torch.dtype) -> tuple[int, frozenset[torch.dtype]]:
    """One object for all that are equal: there may be as many as tensors."""
    return num_elements, dtypes | {dtype}


_META = torch.device("meta")
_count_of_writes = operator.attrgetter("_version")


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As torch has them, also where there are no elements."""
    return torch.empty(shape, device=_META).stride()


def _source(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, _strides(spec.shape), dtype=TORCH_DTYPES[spec.dtype], device=_META)


_source_outside = torch.inference_mode(False)(_source)
"""Outside of inference mode, whose tensors have no count of writes."""


_aten = torch.ops.aten
_FILLS = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
_FILL_NAMES = ("fill_.Scalar", "fill_.Tensor", "zero_")
_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})
_FORMS = frozenset(
    {_aten.empty_like.default, _aten.new_empty.default, _aten.new_zeros.default, _aten.zeros_like.default}
)
"""What takes a tensor's shape and dtype, and none of its values."""
_VIEWS = frozenset(
    {_aten.detach.default, _aten.slice.Tensor, _aten.select.int, _aten.view.default, _aten.t.default}
    | {_aten.transpose.int, _aten.unsqueeze.default, _aten.alias.default, _aten.empty.memory_format}
)
"""The commonest views, and what makes new tensors: nothing is to be noted of them."""


@functools.cache
def _other_writes() -> list[tuple[str, list[str], list[str]]]:
    """All that writes to tensors without memory, but for copies and constants: in place, and by `out=`.

    Each with its arguments, and those of them that it returns.
    """
    writes = []
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("Meta"):
        namespace, _, name = qualified.partition("::")
        if namespace == "aten" and name not in ("copy_", *_FILL_NAMES):
            base, _, overload = name.partition(".")
            schema = getattr(getattr(_aten, base), overload or "default")._schema
            if schema.is_mutable:
                arguments = [argument.name for argument in schema.arguments]
                written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
                writes.append((name, arguments, written if schema.returns else []))
    return writes


def _address(tensor: torch.Tensor) -> int:
    """Of the storage's record, which a tensor without memory has as well."""
    address: int = tensor.untyped_storage()._cdata
    return address
