"""Dry run of a model's own loader on tensors without memory, to learn what each name of a checkpoint sets, and how.

Plain copies are recorded, block by block, for `serving.install_map`; a name that the loader uses in any other way is
opaque.

Invariants: no live tensor is written from tensors without memory; afterwards, also if the loader fails or is
interrupted, every module has its own tensors and attributes again, and nothing in the process has changed. The model
can't be used meanwhile; other threads may use torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import operator
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from weightcast.errors import listed
from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.geometry import Region, common
from weightcast.format.manifest import TensorSpec
from weightcast.serving.install_map import RecordedCopy, StridedBlock, TargetForm

logger = logging.getLogger(__name__)

MAX_FAULTS = 64
"""Number of failing tensors after which the dry run ends, since each of them costs another run."""

Form: TypeAlias = Callable[[nn.Module, str], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]
"""Returns the parameters and buffers of a layer (given with its name) in the form that its loader fills; those without
memory are tracked.
"""


@dataclasses.dataclass(slots=True)
class DryRunTarget:
    """A parameter or buffer of the model in checkpoint form. `loaded`: the blocks that were set, each from which name.

    Names that one write has its values from, such as a concatenation, are one there. `twice`: of blocks that were set
    from several, all of them. `padded`: blocks that the loader filled with a constant, as keys. `num_set`: elements of
    all of them.
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
    """Result of a dry run: `faults` by name (the empty name: at the end), `targets` by the model's names for them.

    `used`: how many elements of each name were copied into targets, and of which dtypes these are. `copies`: those
    copies, in their order; `opaque`: the names that the loader does more with than to copy them, and what. `beside`:
    the live tensors that it would have written in place besides these, such as MLA's absorbed weights. `together`: by
    name, all names that a value is made of with it; the loader has to get these in one call. `calls`: how often the
    loaders of a module were called, by the module's name, where an engine counts that. `overwritten`: the names whose
    tensors the loader writes to; they are opaque. `packed_copies`, `quantised`: see `RecordedMap`.
    """

    used: dict[str, tuple[int, frozenset[torch.dtype]]]
    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    targets: dict[str, DryRunTarget] = dataclasses.field(default_factory=dict)
    copies: list[RecordedCopy] = dataclasses.field(default_factory=list)
    opaque: dict[str, str] = dataclasses.field(default_factory=dict)
    beside: list[torch.Tensor] = dataclasses.field(default_factory=list)
    together: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    overwritten: set[str] = dataclasses.field(default_factory=set)
    packed_copies: Mapping[str, Callable[[], str]] = dataclasses.field(default_factory=dict)
    quantised: frozenset[str] = frozenset()

    @property
    def modules(self) -> set[str]:
        """Return the names of the modules of whose parameters and buffers the loader sets any."""
        return {name.rpartition(".")[0] for name, each in self.targets.items() if each.loaded or each.padded}


def dry_run(model: nn.Module, form: Form, specs: Sequence[TensorSpec]) -> DryRunOutcome:
    """Have `model.load_weights` load tensors of these names, shapes and dtypes, in this order, without any memory.

    Failing tensors are recorded and skipped in the next run, so that one dry run reports every fault.
    """
    loader: Any = model
    faults: dict[str, str] = {}
    while True:
        fault = ""
        probe = _Probe([spec for spec in specs if spec.name not in faults])
        with _recording_tensors(model, form, probe):
            try:
                loader.load_weights(probe.sources())
            except Exception as exc:
                fault = f"{type(exc).__name__}: {exc}"
        if fault:
            faults[probe.current] = fault
        if not fault or not probe.current or len(faults) == MAX_FAULTS:
            if written := probe.written_by_itself():
                logger.warning(
                    "the loader of %s writes to %s even in a dry run without weights",
                    type(model).__name__,
                    listed(written, separator=", "),
                )
            probe.add_opaque_names()
            probe.outcome.faults.update(faults)
            return probe.outcome


@contextlib.contextmanager
def _recording_tensors(model: nn.Module, form: Form, probe: _Probe) -> Iterator[None]:
    """Replace each module's tensors by ones in checkpoint form that `probe` tracks; restore everything afterwards.

    Parameters and buffers are replaced in the dictionaries of `nn.Module`: a loader may replace them, too, and
    `nn.Module` has no method that replaces a parameter and keeps its hooks and its order.
    """
    former: list[tuple[dict[str, Any], dict[str, Any]]] = []
    filled: list[tuple[Any, Any]] = []
    empty: list[Any] = []
    try:
        for prefix, layer in list(model.named_modules()):
            # A module may delegate the loading of its weights.
            for subject in (layer, vars(layer).get("quant_method"), vars(layer).get("impl")):
                if not isinstance(attributes := getattr(subject, "__dict__", None), dict):
                    continue
                former.append((attributes, attributes.copy()))
                for name, held in attributes.items():
                    if type(held) in _CONTAINERS:
                        if not held:
                            empty.append(held)
                        elif name not in ("_parameters", "_buffers"):
                            filled.append((held, held.copy()))
                    elif isinstance(held, torch.Tensor) and subject is layer:
                        probe.watch(f"{prefix}.{name}" if prefix else name, held)
            parameters, buffers = form(layer, prefix)
            for tensors in (parameters, buffers):
                for name, tensor in tensors.items():
                    if tensor.is_meta:
                        full_name = f"{prefix}.{name}" if prefix else name
                        tensors[name] = probe.target(full_name, tensor, is_parameter=tensors is parameters)
            vars(layer).update(_parameters=parameters, _buffers=buffers)
        yield
    finally:
        for attributes, before in former:
            attributes.update(before)
            if len(attributes) != len(before):
                for name in attributes.keys() - before.keys():
                    del attributes[name]
        for held in empty:
            if held:
                held.clear()
        for held, content in filled:
            # An attribute that has its contents already is not changed.
            if len(held) != len(content) or not all(map(operator.is_, _contents(held), _contents(content))):
                held.clear()
                (held.extend if isinstance(held, list) else held.update)(content)


_CONTAINERS = frozenset({dict, OrderedDict, list, set})
"""Attributes of a module whose contents are restored as well: its submodules, and counters of loaders."""


def _contents(held: Any) -> Iterable[Any]:
    return itertools.chain(held, held.values()) if isinstance(held, dict) else held


def present(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Return the parameters or buffers that are not None."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory, of the same class and with the same attributes, such as its loader."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return _as_class(empty, type(tensor), tensor)


def _as_class(empty: torch.Tensor, kind: type[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this class with the memory of `empty` and the attributes of `like`."""
    made = empty.as_subclass(kind).requires_grad_(like.requires_grad)
    made.__dict__.update(like.__dict__)
    return made


class _Whole(NamedTuple):
    """A tensor, at `place` in its memory, whose elements are exactly those of one block of a source.

    `casts`: the dtypes to which they were cast.
    """

    name: str
    block: StridedBlock
    place: StridedBlock
    dtype: torch.dtype
    casts: frozenset[torch.dtype] = frozenset()


class _Recorded(torch.Tensor):
    """A tensor without memory that reports to its probe each operation on it and on tensors made from it.

    It works in any thread. A dispatch mode would also see operations on other tensors, but only in its own thread, and
    torch compiles nothing in the process while a mode is active. Each probe has a subclass.
    """

    probe: ClassVar[_Probe]
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            with cls.probe.lock:
                return cls.probe.run(func, types, args, kwargs or {})
        # torch's own class runs an operation without asking its tensors again.
        out = _run(func, types, args, kwargs or {})
        if not isinstance(out, torch.Tensor):
            return cls.probe.followed(out)
        if out.untyped_storage() is not args[0].untyped_storage():
            with cls.probe.lock:  # the operation copied, as `reshape` may
                cls.probe.inherit(func, args, out)
        return out.as_subclass(cls.probe.recorded)


_run = torch.Tensor.__torch_dispatch__


def _derived(name: str, *bases: type[torch.Tensor], **attributes: Any) -> type[torch.Tensor]:
    return cast(type[torch.Tensor], type(bases[-1])(name, bases, attributes))  # type: ignore[misc]


class _Probe:
    """Tracks sources by their storage, through views, casts and computations, into targets. Thread-safe.

    While a reference to a tensor's storage is kept, as it is here, torch returns the same Python object for it.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._targets: dict[torch.UntypedStorage, DryRunTarget] = {}
        self.current = ""
        self.outcome = DryRunOutcome(dict.fromkeys((spec.name for spec in specs), (0, frozenset[torch.dtype]())))
        self.lock = threading.RLock()
        self._specs = specs
        self._refilled: dict[str, set[StridedBlock]] = {}
        """By target, the blocks that were filled with a constant after something was copied there."""
        self._read: dict[str, str] = {}
        """Targets from which other tensors are computed, and the operation."""
        self._sources: dict[torch.UntypedStorage, TensorSpec] = {}
        self._origins: dict[torch.UntypedStorage, frozenset[str]] = {}
        """By storage, the names of the sources from which its content was made."""
        self._wholes: dict[torch.UntypedStorage, _Whole] = {}
        self._blocks: dict[StridedBlock, StridedBlock] = {}
        self._unseen = _NO_NAMES
        """Sources that were copied to tensors that are not recorded, and so can't be tracked further."""
        self._live: dict[str, tuple[torch.Tensor, int]] = {}
        """Tensors of modules other than parameters and buffers, with their version counters before the run."""
        self.recorded = _derived("Recorded", _Recorded, probe=self)
        self._kinds: dict[type[torch.Tensor], type[torch.Tensor]] = {}
        """Recording subclass for each class of a target, since engines check a parameter's class."""

    def sources(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors without memory, each created on request."""
        for spec in self._specs:
            self.current = name = spec.name
            tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            storage = tensor.untyped_storage()
            self._sources[storage], self._origins[storage] = spec, frozenset((name,))
            yield name, tensor.as_subclass(self.recorded)
        self.current = ""

    def target(self, name: str, tensor: torch.Tensor, *, is_parameter: bool) -> torch.Tensor:
        """Return a recording tensor of the same class for a tensor without memory, and track what is written to it."""
        form = TargetForm(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        self._targets[tensor.untyped_storage()] = target = DryRunTarget(name, form, is_parameter)
        self.outcome.targets[name] = target
        kind = type(tensor)
        if kind not in self._kinds:
            self._kinds[kind] = _derived(kind.__name__, self.recorded, kind)
        return _as_class(tensor, self._kinds[kind], tensor)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Note the version counter of a module's tensor that is no parameter or buffer."""
        if not tensor.is_meta and not tensor.is_inference():
            self._live[name] = tensor, tensor._version

    def written_by_itself(self) -> list[str]:
        """Return the live tensors that the loader wrote to other than by copies of sources; adds them to `beside`."""
        # Copies from tensors without memory increase the counters, but are not made.
        skipped = Counter(tensor.untyped_storage() for tensor in self.outcome.beside)
        names = [name for name, (t, count) in self._live.items() if t._version > count + skipped[t.untyped_storage()]]
        self.outcome.beside.extend(self._live[name][0] for name in names)
        return names

    def followed(self, out: Any) -> Any:
        """Return an operation's output with its tensors as recorded tensors."""
        if isinstance(out, torch.Tensor):
            return out if isinstance(out, _Recorded) else out.as_subclass(self.recorded)
        return type(out)(map(self.followed, out)) if isinstance(out, (tuple, list)) else out

    def run(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation other than a view, and record its effect. Copies and constants are recorded, not run."""
        if func is _COPY or func in _FILLS:
            part = args[0]
            if not part.is_meta:
                self.outcome.beside.append(part)  # a live tensor, which is not written
            if func not in _CONSTANTS:
                self._copied(part, args[1])
            elif (target := self._targets.get(part.untyped_storage())) is None:
                self._overwritten(part)
            elif part.numel():
                self._pad(target, part)
            return part
        out = _run(func, types, args, kwargs)
        self.inherit(func, (*args, *kwargs.values()), out)
        return out if func._schema.is_mutable else self.followed(out)

    def add_opaque_names(self) -> None:
        """Find copies from targets, and copied blocks that are then filled with a constant.

        The latter would prove a copy of equal values.
        """
        refilled = {name: [self._region(name, block) for block in blocks] for name, blocks in self._refilled.items()}
        for copy in self.outcome.copies if self._read or refilled else ():
            name = copy.target
            if name in self._read:
                self._mark_opaque({copy.name}, f"other tensors are made from {name} ({self._read[name]})")
            if name in refilled:
                own = self._region(name, copy.block)
                if own is None or any(filled is None or common(filled, own) for filled in refilled[name]):
                    self._mark_opaque({copy.name}, f"{name} is filled with a constant where it was copied to")

    def _region(self, target: str, block: StridedBlock) -> Region | None:
        form = self.outcome.targets[target].form
        found = block.region(form.shape, form.strides)
        return None if found is None else found[0]

    def _mark_opaque(self, names: Set[str], why: str) -> None:
        self.outcome.opaque.update(dict.fromkeys(names - self.outcome.opaque.keys(), why))

    def _copied(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Record that `source` was copied to `part`. Raises RuntimeError for another shape."""
        target, block = self._targets.get(part.untyped_storage()), self._block(part)
        if source.shape != block.sizes:
            source = source.expand(block.sizes)
        names = self._origins.get(source.untyped_storage(), _NO_NAMES)
        if not names and self._unseen and not isinstance(source, _Recorded):
            # It may have been made from any of these, or be a constant.
            names = self._unseen
            if target is not None:
                self._pad(target, part)
        if len(names) > 1:
            group = frozenset(names).union(*(self.outcome.together.get(each, ()) for each in names))
            self.outcome.together.update(dict.fromkeys(group, group))
        if target is None:
            self._overwritten(part)
            self._note(part, names)
            self._mark_opaque(names, "it is copied to a tensor outside the parameters")
            return
        dtype = target.form.dtype
        is_of_dtype = part.dtype == dtype
        num_elements = part.numel() if is_of_dtype else part.nbytes // dtype.itemsize
        if not num_elements:
            return
        if not names:
            if (read := self._targets.get(source.untyped_storage())) is not None:
                self._read.setdefault(read.name, f"a copy to {target.name}")
            self._pad(target, part)
            return
        target.load(block, num_elements, " with ".join(sorted(names) if len(names) > 1 else names))
        for name in names:
            used, dtypes = self.outcome.used[name]
            self.outcome.used[name] = used + num_elements, dtypes if dtype in dtypes else dtypes | {dtype}
        whole = self._whole(source)
        if whole is not None and is_of_dtype and whole.casts <= {dtype}:
            self.outcome.copies.append(RecordedCopy(whole.name, whole.block, target.name, block))
        else:
            self._mark_opaque(names, f"{target.name} is computed from it")

    def _block(self, tensor: torch.Tensor) -> StridedBlock:
        """Return a tensor's block in its storage. Equal blocks are one object, to save memory."""
        block = StridedBlock(int(tensor.storage_offset()), tensor.shape, tensor.stride())
        return self._blocks.setdefault(block, block)

    def _pad(self, target: DryRunTarget, part: torch.Tensor) -> None:
        form, block = target.form, self._block(part)
        target.pad(block, part.nbytes // form.dtype.itemsize)
        if target.loaded:
            # The block of a view with another dtype is in other units: assume that it covers everything.
            everything = StridedBlock(0, form.shape, form.strides)
            self._refilled.setdefault(target.name, set()).add(block if part.dtype == form.dtype else everything)

    def _whole(self, tensor: torch.Tensor) -> _Whole | None:
        """Return the source and block that a tensor's elements are, if they are one and not reinterpreted bits."""
        if tensor.is_neg() or tensor.is_conj():
            return None
        storage, block = tensor.untyped_storage(), self._block(tensor)
        source, whole = self._sources.get(storage), self._wholes.get(storage)
        if source is not None and tensor.dtype == TORCH_DTYPES[source.dtype]:
            return _Whole(source.name, block, block, tensor.dtype)
        return whole if whole is not None and (block, tensor.dtype) == (whole.place, whole.dtype) else None

    def inherit(self, func: Any, args: Iterable[Any], out: Any) -> None:
        """Note the sources from which an operation's results were made."""
        taken = list(filter(torch.is_tensor, _leaves(args)))
        storages = {tensor.untyped_storage() for tensor in taken}
        made = [t for t in _leaves((out,)) if isinstance(t, torch.Tensor) and t.untyped_storage() not in self._targets]
        names = _NO_NAMES.union(*(self._origins.get(storage, _NO_NAMES) for storage in storages))
        is_mutable = func._schema.is_mutable
        if not is_mutable and all(tensor.untyped_storage() in storages for tensor in made):
            return  # the results are views
        if func not in _FORMS:
            for storage in storages & self._targets.keys():
                self._read.setdefault(self._targets[storage].name, str(func))
        whole = self._whole(taken[0]) if func in _COPIES and taken else None
        for tensor in made:
            if is_mutable:
                self._overwritten(tensor)
            if names:
                self._note(tensor, names)
        if whole is not None:
            casts = whole.casts if made[0].dtype == whole.dtype else whole.casts | {made[0].dtype}
            place = self._block(made[0])
            self._wholes[made[0].untyped_storage()] = whole._replace(place=place, dtype=made[0].dtype, casts=casts)
        elif func not in _FORMS:
            self._mark_opaque(names, f"other tensors are made from it ({func})")

    def _overwritten(self, tensor: torch.Tensor) -> None:
        """Record a write to a tensor. If it is a source, copies from it do not have the received values."""
        if (source := self._sources.get(tensor.untyped_storage())) is not None:
            self.outcome.overwritten.add(source.name)
            self._mark_opaque({source.name}, "the loader writes to it")

    def _note(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        if not isinstance(tensor, _Recorded):
            self._unseen |= names
        storage = tensor.untyped_storage()
        self._origins[storage] = self._origins.get(storage, _NO_NAMES) | names


_NO_NAMES = frozenset[str]()
_aten = torch.ops.aten
_COPY = _aten.copy_.default
_CONSTANTS = frozenset({_aten.fill_.Scalar, _aten.zero_.default})
_FILLS = _CONSTANTS | {_aten.fill_.Tensor}
_COPIES = frozenset(
    {_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default}
    | {_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.to.other}
)
_FORMS = frozenset(
    {_aten.empty_like.default, _aten.new_empty.default, _aten.new_zeros.default, _aten.zeros_like.default}
)
"""Operations that use a tensor's shape and dtype, and none of its values."""


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield an operation's arguments or results, including those in lists and tuples."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value
