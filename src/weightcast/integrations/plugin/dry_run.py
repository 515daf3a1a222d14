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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.manifest import TensorSpec
from weightcast.host.memory import collector_paused
from weightcast.serving.install_map import RecordedCopy, StridedBlock, TargetForm

MAX_FAULTS = 64
"""After so many tensors at which the loader failed the rest is not tried: each costs another run."""

Form: TypeAlias = Callable[[nn.Module], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]
"""A layer's parameters and buffers in the form that its loader fills; those without memory are followed."""


@dataclasses.dataclass
class DryRunTarget:
    """A parameter or buffer of the model in checkpoint form. `loaded`: the blocks that were set, and from which names.

    Names that one write has its values from, such as a concatenation, are one entry there. `padded`: blocks that the
    loader filled with a constant. `num_set`: elements of all of them.
    """

    name: str
    form: TargetForm
    is_parameter: bool
    loaded: dict[StridedBlock, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    padded: set[StridedBlock] = dataclasses.field(default_factory=set)
    num_set: int = 0

    def load(self, block: StridedBlock, num_elements: int, names: str) -> None:
        """A block was set from these names."""
        known = self.loaded.get(block, ())
        if not known and block not in self.padded:
            self.num_set += num_elements
        if names not in known:
            self.loaded[block] = (*known, names)

    def pad(self, block: StridedBlock, num_elements: int) -> None:
        """A block was set to a constant."""
        if block not in self.padded and block not in self.loaded:
            self.num_set += num_elements
        self.padded.add(block)

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
        with _without_memory(model, form) as (targets, is_explained):
            probe = _Probe(targets, [spec for spec in specs if spec.name not in faults])
            with probe if sees_all else _copies_seen_by(probe):
                try:
                    loader.load_weights(probe.sources())
                except Exception as exc:
                    fault = f"{type(exc).__name__}: {exc}"
            probe.look_for_writes()
            if not sees_all and (fault or not probe.knows_all or not is_explained()):
                sees_all = True
                continue
        if fault:
            faults[probe.current] = fault
        if not fault or not probe.current or len(faults) == MAX_FAULTS:
            return DryRunOutcome(
                faults=faults,
                targets={target.name: target for target in targets.values()},
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

    Also whether what lies there is computed with in place, which values such as zeros would not show, and nothing else.
    """

    def copied(part: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        probe.written(part, source)
        return part

    def filled(part: torch.Tensor, *value: Any) -> torch.Tensor:
        probe.written(part, None)
        return part

    def computed(part: torch.Tensor, *operands: Any, **options: Any) -> torch.Tensor:
        probe.knows_all = False
        return part

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("copy_", copied, "Meta")
        for name in ("fill_.Scalar", "fill_.Tensor", "zero_"):
            library.impl(name, filled, "Meta")
        for name in _ARITHMETIC:
            library.impl(name, computed, "Meta")
        yield


@contextlib.contextmanager
def _without_memory(model: nn.Module, form: Form) -> Iterator[tuple[dict[int, DryRunTarget], Callable[[], bool]]]:
    """Give each module private tensors in checkpoint form; yields them by their storage's address.

    Also whether what was written to them is all that there is: no parameter is unset, and no module has other tensors.
    """
    saved: list[tuple[nn.Module, dict[str, Any]]] = []
    targets: dict[int, DryRunTarget] = {}
    unset: dict[int, list[DryRunTarget]] = {}  # by the live parameter, which may have several names

    def is_explained() -> bool:
        if any(all(target.num_unset for target in of_one) for of_one in unset.values()):
            return False
        for layer, attributes in saved:
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if tensor is not None and tensor.is_meta and _address(tensor) not in targets:
                    return False
            # One that was deleted shifts the rest: then all of them count as made.
            pairs = itertools.zip_longest(vars(layer).values(), attributes.values())
            for made in [value for value, former in pairs if value is not former]:
                if isinstance(made, torch.Tensor):
                    return False
        return True

    try:
        for prefix, layer in model.named_modules():
            saved.append((layer, dict(layer.__dict__)))
            live = dict(layer._parameters)
            parameters, buffers = form(layer)
            layer.__dict__.update(_parameters=parameters, _buffers=buffers)
            layer.__dict__["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
            for name, tensor in [*parameters.items(), *buffers.items()]:
                if tensor.is_meta:
                    full = f"{prefix}.{name}" if prefix else name
                    held = TargetForm(tuple(tensor.shape), tensor.stride(), tensor.dtype)
                    target = targets[_address(tensor)] = DryRunTarget(full, held, name in parameters)
                    if name in parameters:
                        unset.setdefault(id(live.get(name)), []).append(target)
        yield targets, is_explained
    finally:
        for layer, attributes in saved:
            layer.__dict__.clear()
            layer.__dict__.update(attributes)


def present(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Those of a module's parameters or buffers that are there."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class _Whole(NamedTuple):
    """A tensor that holds the elements of a source's block, all of them and nothing else, in its own order of dims."""

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
        self._read: dict[str, str] = {}
        """Targets that something is computed from, and by which operation."""
        self._origins: dict[int, set[str]] = {}
        self._sources: dict[int, str] = {}
        self._given: list[tuple[str, torch.Tensor]] = []
        self._wholes: dict[int, _Whole] = {}
        # A storage that is freed leaves its address to the next.
        self._alive: list[torch.UntypedStorage] = []

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors without memory, each made when it is asked for."""
        for spec in self._specs:
            self.current = spec.name
            # Not of inference mode: `look_for_writes` needs the count of writes that other tensors have.
            with torch.inference_mode(False):
                tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            self._given.append((spec.name, tensor))
            self._alive.append(tensor.untyped_storage())
            self._sources[_address(tensor)] = spec.name
            yield spec.name, tensor
        self.current = ""

    def look_for_writes(self) -> None:
        """After the loader: what it wrote to sources by operations that were not seen."""
        for name, tensor in self._given:
            if tensor._version:
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
        return found

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

    def written(self, part: torch.Tensor, source: torch.Tensor | None) -> None:
        """A copy of `source` to `part`, or of a constant. Raises RuntimeError for another shape."""
        target = self.targets.get(_address(part))
        if (overwritten := self._sources.get(_address(part))) is not None:
            self._overwrite(overwritten)
        sizes, num_elements = tuple(part.shape), part.numel()
        block = StridedBlock(int(part.storage_offset()), sizes, part.stride())
        if source is None:
            if target is None:
                self._note(part, set())
            elif num_elements:
                target.pad(block, num_elements)
            return
        if source.shape != sizes:
            source = source.expand(sizes)
        address = _address(source)
        name = self._sources.get(address)
        if name is not None and target is not None and num_elements:
            target.load(block, num_elements, name)
            self._use(name, num_elements, target.form.dtype)
            held = StridedBlock(int(source.storage_offset()), sizes, source.stride())
            self.copies.append(RecordedCopy(name, held, target.name, block))
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
            target.pad(block, num_elements)
            return
        target.load(block, num_elements, " with ".join(sorted(names)))
        for each in names:
            self._use(each, num_elements, target.form.dtype)
        whole = self._whole(source)
        if whole is None or not {*whole.dtypes} <= {target.form.dtype}:
            self._opaque |= dict.fromkeys(names - self._opaque.keys(), f"{target.name} is computed from it")
        else:
            self.copies.append(RecordedCopy(whole.name, whole.block, target.name, block))

    def _use(self, name: str, num_elements: int, dtype: torch.dtype) -> None:
        """So many elements of a source were copied into a target of that dtype."""
        former, dtypes = self.used[name]
        self.used[name] = former + num_elements, _with(dtypes, dtype)

    def _names(self, address: int) -> set[str]:
        """The sources that what lies at this address is made of."""
        name, others = self._sources.get(address), self._origins.get(address, set())
        return others if name is None else {name, *others}

    def _whole(self, tensor: torch.Tensor) -> _Whole | None:
        """Which block of which source a tensor's elements are, if they are one; `dtypes` it was cast to."""
        name = self._sources.get(_address(tensor))
        block = StridedBlock(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        if name is not None:
            return _Whole(name, block, tensor.shape, tensor.stride(), ())
        found = self._wholes.get(_address(tensor))
        is_same = found is not None and (found.sizes, found.strides) == (tensor.shape, tensor.stride())
        return found if is_same and not block.offset else None

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


@functools.cache
def _with(dtypes: frozenset[torch.dtype], dtype: torch.dtype) -> frozenset[torch.dtype]:
    """One object for all that are equal: there may be as many as tensors."""
    return dtypes | {dtype}


_aten = torch.ops.aten
_FILLS = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
_ARITHMETIC = ("add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor")
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


def _address(tensor: torch.Tensor) -> int:
    """Of the storage's record, which a tensor without memory has as well."""
    address: int = tensor.untyped_storage()._cdata
    return address
