"""Runs a model's own loader on tensors without memory, to learn what each name of a checkpoint would set.

Invariants: nothing that is live is written (a tensor without memory can't be copied into one that has some); whatever
happens, every module has its own tensors again afterwards. The model can't be used meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.manifest import TensorSpec

MAX_FAULTS = 64
"""After so many tensors at which the loader failed the rest is not tried: each costs another run."""

Form: TypeAlias = Callable[[nn.Module], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]
"""A layer's parameters and buffers in the form that its loader fills; those without memory are followed."""

Block: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: where it begins in its storage, its sizes, its strides."""


@dataclasses.dataclass
class DryRunTarget:
    """A parameter or buffer of the model in checkpoint form. `loaded`: the blocks that were set, and from which names.

    `padded`: blocks that the loader filled with a constant.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    loaded: dict[Block, set[str]] = dataclasses.field(default_factory=dict)
    padded: set[Block] = dataclasses.field(default_factory=set)

    @property
    def num_unset(self) -> int:
        """Elements that would keep whatever a new parameter holds."""
        set_sizes = (math.prod(sizes) for _, sizes, _ in self.padded | self.loaded.keys())
        return max(0, math.prod(self.shape) - sum(set_sizes))


@dataclasses.dataclass
class DryRunOutcome:
    """What the loader did: `faults` by name (the empty one: at the end), the `targets` by the model's names for them.

    `used`: how many elements of each name were copied into targets, and of which dtypes these are. `calls`: how often
    the loaders of a module were called, by the module's name, where an engine counts that.
    """

    faults: dict[str, str]
    targets: dict[str, DryRunTarget]
    used: dict[str, tuple[int, set[torch.dtype]]]
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)


def dry_run(model: nn.Module, form: Form, specs: Sequence[TensorSpec]) -> DryRunOutcome:
    """Let `model.load_weights` load tensors of these names, shapes and dtypes, in this order, into nothing.

    What it fails at is noted and left out of another run, so that all faults are found.
    """
    loader: Any = model
    faults: dict[str, str] = {}
    while True:
        fault = ""
        with _without_memory(model, form) as targets, _Probe(targets) as probe:
            try:
                loader.load_weights(probe.sources([spec for spec in specs if spec.name not in faults]))
            except Exception as exc:
                fault = f"{type(exc).__name__}: {exc}"
        if fault:
            faults[probe.current] = fault
        if not fault or not probe.current or len(faults) == MAX_FAULTS:
            return DryRunOutcome(faults, {target.name: target for target in targets.values()}, probe.used)


@contextlib.contextmanager
def _without_memory(model: nn.Module, form: Form) -> Iterator[dict[int, DryRunTarget]]:
    """Give each module private tensors in checkpoint form; yields them by their storage's address."""
    saved: list[tuple[nn.Module, dict[str, Any]]] = []
    targets: dict[int, DryRunTarget] = {}
    try:
        for prefix, layer in model.named_modules():
            saved.append((layer, dict(layer.__dict__)))
            parameters, buffers = form(layer)
            layer.__dict__.update(_parameters=parameters, _buffers=buffers)
            layer.__dict__["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
            for name, tensor in [*parameters.items(), *buffers.items()]:
                if tensor.is_meta:
                    full = f"{prefix}.{name}" if prefix else name
                    targets[_address(tensor)] = DryRunTarget(
                        full, tuple(tensor.shape), tensor.dtype, name in parameters
                    )
        yield targets
    finally:
        for layer, attributes in saved:
            layer.__dict__.clear()
            layer.__dict__.update(attributes)


def present(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Those of a module's parameters or buffers that are there."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows sources by their storage, through views, casts and whatever is computed from them, into targets."""

    def __init__(self, targets: Mapping[int, DryRunTarget]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets = targets
        self.current = ""
        self.used: dict[str, tuple[int, set[torch.dtype]]] = {}
        self._origins: dict[int, set[str]] = {}
        # A storage that is freed leaves its address to the next.
        self._alive: list[torch.UntypedStorage] = []

    def sources(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            self.current = spec.name
            self.used[spec.name] = (0, set())
            tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            self._note(tensor, {spec.name})
            yield spec.name, tensor
        self.current = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._written(args[0], self._origins.get(_address(args[1]), set()))
        elif func in _FILLS:
            self._written(args[0], set())
        else:
            self._inherit([*args, *(kwargs or {}).values()], out)
        return out

    def _written(self, part: torch.Tensor, names: set[str]) -> None:
        target = self.targets.get(_address(part))
        block = int(part.storage_offset()), tuple(part.shape), tuple(part.stride())
        if target is None:
            self._note(part, names)
        elif names:
            target.loaded.setdefault(block, set()).update(names)
            for name in names:
                num_elements, dtypes = self.used[name]
                self.used[name] = num_elements + part.numel(), dtypes | {target.dtype}
        else:
            target.padded.add(block)

    def _inherit(self, args: list[Any], out: Any) -> None:
        names: set[str] = set()
        for tensor in filter(torch.is_tensor, tree_leaves(args)):
            names |= self._origins.get(_address(tensor), set())
        for tensor in filter(torch.is_tensor, tree_leaves(out)):
            if names and _address(tensor) not in self.targets:
                self._note(tensor, names)

    def _note(self, tensor: torch.Tensor, names: set[str]) -> None:
        self._alive.append(tensor.untyped_storage())
        origins = self._origins.setdefault(_address(tensor), set())
        origins |= names


_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


def _address(tensor: torch.Tensor) -> int:
    """Of the storage's record, which a tensor without memory has as well."""
    return int(tensor.untyped_storage()._cdata)
