"""Tensors that the caller has by name, as a source: for loops of one's own, relays and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from weightcast.checkpoint.live import CastTo, cast_specs, cast_target
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Regions


class TensorSource:
    """A `Source` of whole tensors in checkpoint form, `tensors` by name. Nothing is copied.

    A publish reads their values as they are by then; for other tensors, call `replace`.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        dtype: CastTo | None = None,
        *,
        groups: Mapping[str, str] | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`dtype`: what half, bfloat16, single and double precision tensors are cast to while they are packed; others
        stay; "engine": to the dtype that the engines have each in. `groups`: for names that must reach an engine in
        one call, the name of their group. `aliases`: for a name, the other names that are tied to the same values.
        Raises ValueError for a dtype that can't travel, TypeError for what is no dtype or no mapping of tensors.
        """
        self._dtype = None if dtype is None else cast_target(dtype)
        self.casts_to_engines = dtype == "engine"
        self._groups, self._aliases = groups or {}, aliases or {}
        self.tensors: Mapping[str, torch.Tensor] = {}
        """What is published; read-only: see `replace`."""
        self._specs: tuple[TensorSpec, ...] = ()
        self._regions: Regions = {}
        self.replace(tensors or {})

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Publish these from the next publish on."""
        _require_tensors(tensors)
        unknown = [f"{name!r} is {t.dtype}" for name, t in tensors.items() if t.dtype not in DTYPE_NAMES]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}; known: {', '.join(DTYPE_NAMES.values())}")
        aliases, groups = self._aliases, self._groups
        held = (
            TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape), tuple(aliases.get(n, ())), groups.get(n, ""))
            for n, t in tensors.items()
        )
        specs = cast_specs(held, self._dtype)
        # The same object for the same specs: a publisher then keeps its plan.
        self._specs = self._specs if specs == self._specs else specs
        self.tensors = MappingProxyType(dict(tensors))
        self._regions = {name: ((whole(tensor.shape), tensor),) for name, tensor in tensors.items()}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def _require_tensors(tensors: object) -> None:
    """Raises TypeError unless these are tensors by name."""
    if not isinstance(tensors, Mapping):
        remedy = "pass ModuleSource(model) instead" if isinstance(tensors, nn.Module) else "pass a dict"
        raise TypeError(f"{type(tensors).__name__} is no mapping of names to tensors: {remedy}")
    for name, value in tensors.items():
        if not (isinstance(name, str) and isinstance(value, torch.Tensor)):
            raise TypeError(f"{name!r} is {type(value).__name__}; each name must be a str, each value a torch.Tensor")
