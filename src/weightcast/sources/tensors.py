"""Source of the caller's tensors by name, for custom loops, relays and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weightcast.checkpoint.live import CastTo, cast_specs, cast_target, is_memory, lazy_views, memory_keys
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorSpec
from weightcast.native.tables import places, same_places
from weightcast.seams.source import Regions


class TensorSource:
    """A `Source` of whole tensors in checkpoint form, `tensors` by name. Nothing is copied.

    A publish reads the present values of these tensors; call `replace` to publish other tensors. Tensors with equal
    memory and geometry are tied: they are sent once, under the first name, and reach engines under all names.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | None = None,
        dtype: CastTo | None = None,
        *,
        groups: Mapping[str, str] | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`dtype`: half, bfloat16, single and double precision tensors are cast to it while they are packed; others are
        not; "engine": each tensor is cast to the engines' dtype of it. `groups`: by name, the load group of tensors
        that an engine must load in one call. `aliases`: by name, the other names of the same values.

        Raises ValueError for an unsupported dtype, TypeError for arguments of other types.
        """
        self._dtype = None if dtype is None else cast_target(dtype)
        self.casts_to_engines = dtype == "engine"
        self._groups, self._aliases = groups or {}, aliases or {}
        self.tensors: Mapping[str, torch.Tensor] = {}
        """The published tensors; read-only: see `replace`."""
        self._specs: tuple[TensorSpec, ...] = ()
        self._regions: Regions = {}
        self._places: tuple[list[str], bytes, list[tuple[bool, bool]]] | None = None
        self.replace(tensors or {})

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Publish these tensors from now on. If their memory is that of the former ones, nothing is planned again."""
        _require_tensors(tensors)
        have_memory = all(map(is_memory, tensors.values()))
        views = list(tensors.values())
        lie_at = (list(tensors), places(views), lazy_views(views)) if have_memory else None
        formers = list(self.tensors.values())
        if lie_at is not None and lie_at == self._places and same_places(formers, lie_at[1]):
            return  # the former tensors are still there, and keep this memory alive: it is the same memory
        unknown = [f"{name!r} is {t.dtype}" for name, t in tensors.items() if t.dtype not in DTYPE_NAMES]
        if unknown:
            raise ValueError(f"unsupported dtypes: {', '.join(unknown)}; supported: {', '.join(DTYPE_NAMES.values())}")
        tied: dict[Any, list[str]] = {}
        keys = memory_keys(tensors.values()) if have_memory else map(id, tensors.values())
        for name, key in zip(tensors, keys, strict=True):
            tied.setdefault((key, self._groups.get(name, "")), []).append(name)
        held = []
        for (_, group), names in tied.items():
            name, tensor = names[0], tensors[names[0]]
            aliases = [*names[1:], *(alias for known in names for alias in self._aliases.get(known, ()))]
            held.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tuple(aliases), group))
        specs = cast_specs(held, self._dtype)
        # Equal specs keep the present object, so that a publisher keeps its plan.
        self._specs = self._specs if specs == self._specs else specs
        self.tensors = MappingProxyType(dict(tensors))
        self._regions = {spec.name: ((whole(spec.shape), tensors[spec.name]),) for spec in specs}
        self._places = lie_at

    def specs(self) -> Sequence[TensorSpec]:
        """Return the tensors' specs; the same object until `replace` changes names, shapes or dtypes."""
        return self._specs

    def regions(self) -> Regions:
        """Return every tensor as one region."""
        return self._regions


def _require_tensors(tensors: object) -> None:
    """Raise TypeError unless `tensors` is a mapping of names to tensors."""
    if not isinstance(tensors, Mapping):
        remedy = "pass ModuleSource(model) instead" if isinstance(tensors, nn.Module) else "pass a dict"
        raise TypeError(f"tensors is a {type(tensors).__name__}; it must be a mapping of names to tensors: {remedy}")
    for name, value in tensors.items():
        if not (isinstance(name, str) and isinstance(value, torch.Tensor)):
            raise TypeError(f"{name!r} is {type(value).__name__}; each name must be a str, each value a torch.Tensor")
