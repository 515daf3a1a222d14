"""A live module in checkpoint form: the names and shapes that `save_pretrained` would write, as views, never copies.

For a transformers model the form is that of its checkpoint (see `conversion`); for any other module that of its state
dict without hooks and overrides, and without the prefixes of wrappers (DDP, torch.compile, activation checkpointing,
FSDP).

Invariants: every view is memory that the module computes with; tensors of equal memory and geometry are one record,
with the other names as aliases; the record objects stay the same as long as the module's tensors do, whatever their
values. A sharded tensor has its global shape and no data; `LiveCheckpoint.regions` has this rank's parts.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from weightcast.checkpoint import adapters, conversion, flat_shards, sharding
from weightcast.checkpoint.adapters import MergedModel
from weightcast.checkpoint.flat_shards import FlattenedOf
from weightcast.checkpoint.sharding import Blocks
from weightcast.errors import listed
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorSpec
from weightcast.native.tables import places, same_members, same_places
from weightcast.seams.source import Held, LookedAtRegions

Buffers: TypeAlias = Literal["persistent", "none", "all"]
"""The buffers to include: those of the state dict ("persistent"), "none", or "all"."""

Names: TypeAlias = Callable[[str], str] | Mapping[str, str]
"""Renaming of checkpoint names: a function of the name, or a mapping; names that it lacks are kept."""

OnAdapters: TypeAlias = Literal["merge", "refuse"]
"""Treatment of a model with PEFT adapters: merge them (see `adapters`), or refuse the model with a ValueError."""

CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Dtypes that may be cast to each other. Scaled formats (fp8, fp4) have no meaning without their scales."""


CastTo: TypeAlias = torch.dtype | Literal["engine"]
"""Dtype to cast a source's tensors to: one dtype, or "engine": the dtypes that each engine reports."""


def cast_target(dtype: object) -> str | None:
    """Return the name of a dtype that weights can be cast to; None for "engine", which only engines can resolve.

    Raises ValueError for an unsupported dtype, TypeError for anything but a torch.dtype.
    """
    choices = ", ".join(f"torch.{name}" for name in sorted(CASTABLE)) + " or 'engine'"
    if isinstance(dtype, str) and dtype == "engine":
        return None
    if not isinstance(dtype, torch.dtype):
        name = str(dtype).rpartition(".")[2].rstrip("'>")
        remedy = f"pass torch.{name}" if name in CASTABLE else f"pass one of {choices}"
        raise TypeError(f"dtype is {dtype!r}, which is not a torch.dtype: {remedy}")
    if DTYPE_NAMES.get(dtype) not in CASTABLE:
        raise ValueError(f"dtype is {dtype}; it must be {choices}")
    return DTYPE_NAMES[dtype]


def cast_specs(specs: Iterable[TensorSpec], dtype: str | None) -> tuple[TensorSpec, ...]:
    """Return the specs, with `dtype` in place of castable dtypes; None leaves them unchanged."""
    return tuple(
        msgspec.structs.replace(spec, dtype=dtype) if dtype and spec.dtype in CASTABLE else spec for spec in specs
    )


_WRAPPER_CHILDREN = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPER_CLASSES = frozenset({"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module"})
"""Wrappers whose child `module` is the real one; identified by name, so that no framework is imported."""


def checkpoint_tensors(
    module: nn.Module,
    *,
    buffers: Buffers = "persistent",
    names: Names | None = None,
    blocks: Blocks | None = None,
    merged: MergedModel | None = None,
) -> tuple[tuple[TensorSpec, ...], dict[str, torch.Tensor]]:
    """Return the specs of a module in checkpoint form, and by name a view of the live memory.

    `blocks`: collects sharded parameters, whose views have no data; without it they are an error. `merged`: use its
    modules and tensors in place of the module's. No data is read, so a module on the meta device is accepted. Raises
    ValueError for tensors without such a form: partial sums, tensor subclasses, doubled names, conversions other than
    views, weights that are neither parameters nor buffers.
    """
    if buffers not in ("persistent", "none", "all"):
        raise ValueError(f"buffers is {buffers!r}; it must be 'persistent', 'none' or 'all'")
    if names_left_out := list(saved_besides(module)):
        raise ValueError(
            f"{listed(names_left_out)}: the module's state dict has these beside its parameters and buffers (packed "
            "or quantised weights, extra state), and they would be left out. Pass a module whose weights are plain "
            "parameters; or, if engines need none of these, TensorSource with the other tensors of model.state_dict()"
        )
    model = module if merged is None else merged.base(module)
    while len(inner := [child for name, child in model.named_children() if _is_wrapping(model, name)]) == 1:
        model = inner[0] if merged is None else merged.base(inner[0])
    wrappers = _fsdp1_wrappers(module)
    flattened = flat_shards.flattened(wrappers) if wrappers else {}
    kept, doubles = _split_tied(model, dict(_live_tensors(model, buffers, blocks, flattened, merged)))
    views, doubles = (conversion.checkpoint_views(model, tensors) if tensors else {} for tensors in (kept, doubles))
    if blocks is not None:
        blocks.require_slices(views)
    return _records(views, doubles, names)


def _is_wrapping(module: nn.Module, child_name: str) -> bool:
    if child_name == "module":
        return any(cls.__name__ in _WRAPPER_CLASSES for cls in type(module).__mro__)
    return child_name in _WRAPPER_CHILDREN


def saved_besides(module: nn.Module) -> Iterator[str]:
    """Yield the state dict's names for values other than parameters and buffers: packed weights, extra state.

    Only modules whose classes override torch's saving are searched. Empty values are skipped.
    """
    for prefix, part in module.named_modules():
        kind, plain = type(part), nn.Module
        if (kind._save_to_state_dict, kind.get_extra_state) == (plain._save_to_state_dict, plain.get_extra_state):
            continue
        saved: dict[str, Any] = {}
        dot = f"{prefix}." if prefix else ""
        part._save_to_state_dict(saved, dot, True)
        tensors = part._parameters | part._buffers
        held = [sharding.local_tensor(tensor) for tensor in tensors.values() if tensor is not None]
        for name, value in saved.items():
            if name.removeprefix(dot) in tensors:
                continue
            if isinstance(value, torch.Tensor):
                local = sharding.local_tensor(value)  # perhaps the detached alias of a tensor
                is_known = not value.numel() or any(
                    local.data_ptr() == tensor.data_ptr() and local.shape == tensor.shape for tensor in held
                )
            else:
                is_known = value is None or (isinstance(value, (dict, list, tuple, bytes)) and not value)
            if not is_known:
                yield name


def require_uncomputed(module: nn.Module) -> None:
    """Raise ValueError, with their names, for weights that torch computes from other parameters of the state dict.

    These are parametrizations of `torch.nn.utils.parametrize`, weight norm, spectral norm and pruning.
    """
    computed = []
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        if parametrize.is_parametrized(part):
            computed += [f"{dot}{name}" for name in part.get_submodule("parametrizations")._modules]
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod)):
                computed.append(f"a weight of {prefix!r} ({type(hook).__name__})")
    if computed:
        raise ValueError(
            f"{listed(computed, separator=', ')}: computed from other parameters, which would be sent in place of the "
            "weight. Publish a copy of the model with plain weights (torch.nn.utils.parametrize."
            "remove_parametrizations, remove_weight_norm, remove_spectral_norm, prune.remove); or, for engines whose "
            "model computes them too, TensorSource(model.state_dict())"
        )


def state_dict_hooks(module: nn.Module, *, loading: bool) -> list[str]:
    """Describe the hooks and overrides that may change a module's state dict and are not called by weightcast.

    With `loading`, also those that run when a state dict is loaded. torch's and PEFT's own are skipped.
    """
    found = []
    for name, part in module.named_modules():
        if not any(cls.__name__ in _WRAPPER_CLASSES for cls in type(part).__mro__):
            saving = (*part._state_dict_pre_hooks.values(), *part._state_dict_hooks.values())
            hooks = (*saving, type(part)._save_to_state_dict, type(part).state_dict)
            if loading:
                added = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
                hooks = (*added, type(part)._load_from_state_dict, type(part).load_state_dict)
            for hook in hooks:
                hook = getattr(hook, "hook", hook)  # unwrap torch's wrapper
                hook = getattr(hook, "func", hook)  # unwrap a functools.partial
                if str(getattr(hook, "__module__", "")).partition(".")[0] not in ("torch", "peft"):
                    what = getattr(hook, "__qualname__", type(hook).__qualname__)
                    found.append(f"{what} of {name!r}" if name else what)
    return found


def _fsdp1_wrappers(module: nn.Module) -> list[Any]:
    """Return the FSDP1 wrappers of a module that have flattened parameters."""
    return [part for part in sharding.fsdp_parts(module, "FullyShardedDataParallel") if part._handle is not None]


def _live_tensors(
    module: nn.Module,
    buffers: Buffers,
    blocks: Blocks | None,
    flattened: FlattenedOf,
    merged: MergedModel | None,
    prefix: str = "",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every name of the state dict with its plain tensor, in order; tied tensors under each of their names."""
    module = module if merged is None else merged.base(module)
    flat = flattened.get(module, {})
    for name, entry in flat.items():
        if entry is None:
            continue
        parameter = entry.whole()
        if parameter is not None:
            yield prefix + name, _plain(prefix + name, parameter, blocks)
        elif blocks is not None:
            yield prefix + name, blocks.standin(entry.key, functools.partial(entry.block, prefix + name))
        else:
            raise ValueError(
                f"{prefix + name!r} is flattened by FSDP1 (FullyShardedDataParallel): an engine needs a module with "
                "whole parameters"
            )
    for leaf, parameter in module._parameters.items():
        if parameter is not None and leaf not in flat:
            name = prefix + leaf
            require_here(name, parameter)
            tensor = _plain(name, parameter if merged is None else merged.tensor(parameter), blocks)
            if leaf == "weight" and type(module) in (nn.Linear, nn.Embedding):
                _require_declared(name, module, tensor)
            yield name, tensor
    for leaf, buffer in module._buffers.items():
        wanted = buffers == "all" or (buffers == "persistent" and leaf not in module._non_persistent_buffers_set)
        if buffer is not None and wanted:
            name = prefix + leaf
            _require_shape(name, buffer)
            yield name, _plain(name, buffer if merged is None else merged.tensor(buffer), blocks)
    for name, child in module._modules.items():
        if child is not None:
            inner = prefix if _is_wrapping(module, name) else f"{prefix}{name}."
            yield from _live_tensors(child, buffers, blocks, flattened, merged, inner)


def _require_shape(name: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name!r} has no shape yet: run a forward pass of the lazy module first")


def require_here(name: str, parameter: torch.Tensor) -> None:
    """Raise ValueError for a parameter whose values are elsewhere, or that a wrapper has replaced."""
    _require_shape(name, parameter)
    ds_shape = getattr(parameter, "ds_shape", None)
    if ds_shape is not None and tuple(ds_shape) != tuple(parameter.shape):
        raise ValueError(
            f"{name!r} is partitioned by DeepSpeed ZeRO-3, this module holds {list(parameter.shape)} of "
            f"{list(ds_shape)}: publish on every rank inside "
            "`with deepspeed.zero.GatheredParameters(list(model.parameters())):`, or write your own Source"
        )
    if getattr(parameter, "_fsdp_flattened", False):
        raise ValueError(
            f"{name!r} is flattened by an FSDP1 wrapper outside the given module: pass the outermost "
            "FullyShardedDataParallel to ModuleSource, not its `.module`"
        )
    if parameter.grad_fn is not None:
        raise ValueError(
            f"{name!r} is not a parameter but computed from others ({parameter.grad_fn.name()}), which wrappers like "
            "FSDP1 leave behind during a step: pass the outermost wrapper, and publish between steps"
        )


def _require_declared(name: str, module: nn.Module, weight: torch.Tensor) -> None:
    """Raise ValueError if the weight of one of torch's layers does not have that layer's number of dims."""
    declared = (
        [module.out_features, module.in_features]
        if isinstance(module, nn.Linear)
        else [module.num_embeddings, module.embedding_dim]
    )
    if weight.ndim != 2 or (weight.numel() == 0 and 0 not in declared):
        raise ValueError(
            f"{name!r} has the shape {list(weight.shape)}, its {type(module).__name__} is of {declared}: a framework "
            "keeps it in a form that weightcast does not know; gather it before publishing, or write your own Source"
        )


def _plain(name: str, tensor: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
    """Return the tensor as plain strided memory, detached; for a sharded one a tensor without data.

    Raises ValueError for other tensors.
    """
    local = sharding.local_tensor(tensor)
    is_sharded = local is not tensor and sharding.is_sharded(tensor)
    if is_sharded and blocks is None:
        raise ValueError(
            f"{name!r} is a DTensor with {getattr(tensor, 'placements', '?')}: an engine needs all of it in one place; "
            "call full_tensor() on it, or use a mesh of one device"
        )
    if local.is_nested or not is_memory(local):
        remedy = "convert it into a plain tensor, or write your own Source"
        if type(local) in (torch.Tensor, nn.Parameter) and local.layout == torch.strided and not local.is_nested:
            remedy = "its storage was freed, so load the weights back first"
        raise ValueError(
            f"{name!r} is a {type(local).__name__} of layout {local.layout}, not one block of memory: {remedy}"
        )
    if local.dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{name!r} has dtype {local.dtype}, which weightcast can't send; supported: "
            f"{', '.join(DTYPE_NAMES.values())}"
        )
    if not is_sharded or blocks is None:
        return local.detach()
    return blocks.standin(id(tensor), lambda: sharding.block(name, tensor))


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are in its storage.

    They are not for subclasses that compute them (quantised tensors, for example), nor for a freed storage, which
    frameworks leave behind for gathered parameters.
    """
    if tensor.layout != torch.strided or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    num_elements = tensor.numel()
    last = num_elements - 1
    if not tensor.is_contiguous():
        last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    end = (int(tensor.storage_offset()) + last + 1) * tensor.itemsize
    return num_elements == 0 or tensor.untyped_storage().nbytes() >= end


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key: equal for tensors of equal memory, read in the same way; unique for one without elements."""
    if tensor.numel() == 0:
        return (id(tensor),)
    address = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()
    geometry = tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
    return (tensor.device, address, *geometry, tensor.is_conj(), tensor.is_neg())


def lazy_views(tensors: Iterable[torch.Tensor]) -> list[tuple[bool, bool]]:
    """Return of each tensor whether torch conjugates, and whether it negates, the values in its memory."""
    return [(tensor.is_conj(), tensor.is_neg()) for tensor in tensors]


def memory_keys(tensors: Iterable[torch.Tensor]) -> list[Hashable]:
    """Return a key for each tensor, equal for those of equal memory and geometry.

    Most tensors share their address with no other; then the address is the key.
    """
    held = list(tensors)
    addresses = list(map(torch.Tensor.data_ptr, held))
    shared = {address for address, count in Counter(addresses).items() if count > 1}
    return [memory_key(t) if at in shared else at for t, at in zip(held, addresses, strict=True)]


def _split_tied(
    model: nn.Module, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split into tensors under the name that is saved, and the same memory under its other names.

    Names that are never saved are dropped, unless they alias a saved tensor.
    """
    unsaved = frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())  # by save_pretrained
    first, tied, others = dict[Hashable, str](), dict[str, list[str]](), set[str]()
    for name, key in zip(tensors, memory_keys(tensors.values()), strict=True):
        if (other := first.setdefault(key, name)) is not name:
            tied.setdefault(other, [other]).append(name)
    for members in tied.values():
        if saved := [name for name in members if name not in unsaved]:
            main = saved[0] if len(saved) == 1 else conversion.main_name(model, saved)
            others.update(name for name in members if name != main)
    kept = {name: tensor for name, tensor in tensors.items() if name not in others and name not in unsaved}
    return kept, {name: tensors[name] for name in tensors if name in others}


def _records(
    views: Mapping[str, torch.Tensor], doubles: Mapping[str, torch.Tensor], names: Names | None
) -> tuple[tuple[TensorSpec, ...], dict[str, torch.Tensor]]:
    aliases: dict[str, list[str]] = {}
    if doubles:
        keys = memory_keys([*views.values(), *doubles.values()])
        name_of = dict(zip(keys, views, strict=False))
        for name, key in zip(doubles, keys[len(views) :], strict=True):
            if name not in views and key in name_of:
                aliases.setdefault(name_of[key], []).append(name)
    specs, tensors, seen = [], {}, set[str]()
    for main, view in views.items():
        renamed = members = [main, *aliases.get(main, ())]
        if names is not None:
            renamed = [names.get(m, m) if isinstance(names, Mapping) else names(m) for m in members]
        for name in renamed:
            if not isinstance(name, str):
                raise TypeError(f"names returned {name!r:.80} for one of {members[:4]}; it must return a name (str)")
            if name in seen:
                raise ValueError(f"two tensors have the name {name!r} in checkpoint form: mend `names` or the module")
            seen.add(name)
        specs.append(TensorSpec(renamed[0], DTYPE_NAMES[view.dtype], tuple(view.shape), tuple(renamed[1:])))
        tensors[renamed[0]] = view
    return tuple(specs), tensors


def _require_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        remedy = "pass the model itself"
        if isinstance(module, Mapping):
            remedy += ", or TensorSource(state_dict) in place of ModuleSource"
        raise TypeError(f"{type(module).__name__} is not a torch.nn.Module: {remedy}")


class LiveCheckpoint:
    """The checkpoint form of a module, updated by `refresh`.

    `views` (by name) is a new object only if `refresh` has found other tensors, `specs` only if these have other names,
    shapes or dtypes. `changes` has the tensors of the module that it last found.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        buffers: Buffers = "persistent",
        names: Names | None = None,
        dtype: CastTo | None = None,
        sharded: bool = False,
        on_adapters: OnAdapters | None = None,
    ) -> None:
        """`dtype`: that of the specs of castable tensors. `sharded`: accept sharded modules. `on_adapters`: None treats
        adapters as any other module.
        """
        _require_module(module)
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise TypeError(f"names is {names!r:.80}; it must be a function of a name, or a mapping of names to names")
        if on_adapters not in ("merge", "refuse", None):
            raise ValueError(f"adapters is {on_adapters!r}; it must be 'merge' or 'refuse'")
        self.specs: tuple[TensorSpec, ...] = ()
        self.views: dict[str, torch.Tensor] = {}
        self._module, self._buffers, self._names = module, buffers, names
        self._dtype = None if dtype is None else cast_target(dtype)
        self._sharded = sharded
        self._on_adapters = on_adapters
        self.merging: adapters.Merging | None = None
        """Merges the adapters; its gathers complete those of sharded layers. None for a module without adapters."""
        self._blocks = Blocks()
        self._regions: LookedAtRegions | None = None
        self._keys: object = None
        self._derive()

    def refresh(self, *, merge: bool = False) -> bool:
        """Look for replaced tensors (`param.data = ...`, reassignment, other modules); return whether there were any.

        `merge`: merge the present values of the adapters.
        """
        for module in self._fsdp2_modules:
            module.reshard()  # what a forward pass has left unsharded, since optimizers update only the shards
        is_other = self.changes.has_changed()
        if self._fsdp1_states:
            is_other |= any(wrapper._handle._training_state != was for wrapper, was in self._fsdp1_states.items())
        return ((merge and self.merging is not None) or is_other) and self._derive()

    def devices(self) -> list[torch.device]:
        """Return all devices but meta that have tensors of the module now. It must have the same `changes.members`."""
        found = dict.fromkeys(map(operator.attrgetter("device"), self.changes.tensors))
        return [device for device in found if device.type != "meta"]

    def require_memory(self) -> None:
        """Raise ValueError if a tensor is on the meta device."""
        for name, view in self.views.items():
            if view.is_meta and ((owner := self._blocks.owner(view)) is None or owner.local.is_meta):
                raise ValueError(f"{name!r} is on the meta device and has no values: materialise the module first")

    def regions(self) -> LookedAtRegions:
        """Return this rank's parts of each record: the whole tensor, or the rank's shards, which may be none.

        The same object while `views` is. Raises ValueError if a tensor is on the meta device.
        """
        if self._regions is None:
            self.require_memory()
            shards: dict[str, Sequence[Held]] = {}
            for name, view in self.views.items():
                if view.is_meta and (owner := self._blocks.owner(view)) is not None:
                    shards[name] = sharding.held(owner, view)
            self._regions = _LiveRegions(self.views, shards)
        return self._regions

    def _derive(self) -> bool:
        blocks = Blocks()
        self._fsdp2_modules = sharding.fsdp_parts(self._module, "FSDPModule") if self._sharded else []
        for part in self._fsdp2_modules:
            part.reshard()
        merged = None
        if self._on_adapters is None or not adapters.has_adapters(self._module):
            self.merging = None
        elif self._on_adapters == "refuse":
            adapters.refuse(self._module)
        else:
            self.merging = self.merging or adapters.Merging()
            merged = self.merging.merge(self._module)
        if self._on_adapters is not None:
            require_uncomputed(self._module)
        specs, views = checkpoint_tensors(
            self._module,
            buffers=self._buffers,
            names=self._names,
            blocks=blocks if self._sharded else None,
            merged=merged,
        )
        specs = cast_specs(specs, self._dtype)
        # Tensors don't show FSDP1's training state on a rank that `summon_full_params` gave none.
        self._fsdp1_states = {wrapper: wrapper._handle._training_state for wrapper in _fsdp1_wrappers(self._module)}
        if self._on_adapters is not None:
            adapters.require_merged(name for spec in specs for name in spec.names)
        self.changes = TensorChangeDetector(self._module, with_buffers=self._buffers != "none")
        memory, parts = list[torch.Tensor](), list[tuple[Any, ...]]()
        for number, view in enumerate(views.values()):
            if view.is_meta and (owner := blocks.owner(view)) is not None:
                local = memory_key(owner.local) if owner.local.numel() else ()
                offsets = tuple(region.offsets for region, _ in owner.boxes)
                parts.append((number, local, offsets, view.storage_offset(), view.dtype, view.shape, view.stride()))
            else:
                memory.append(view)
        keys = places(memory), lazy_views(memory), parts
        changed = keys != self._keys or specs != self.specs
        if specs != self.specs:
            self.specs = specs
        if changed:
            self.views, self._blocks, self._regions, self._keys = views, blocks, None, keys
        return changed


class _LiveRegions(LookedAtRegions):
    """Regions that are made when they are asked for: kept, they would make the garbage collector look at the whole heap
    at the first publish of many tensors.
    """

    def __init__(self, views: Mapping[str, torch.Tensor], shards: Mapping[str, Sequence[Held]]) -> None:
        """`shards`: the regions of the views that are sharded."""
        self._views, self._shards = views, shards

    def __getitem__(self, name: str) -> Sequence[Held]:
        if name in self._shards:
            return self._shards[name]
        view = self._views[name]
        return ((whole(view.shape), view),)

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class TensorChangeDetector:
    """Detects, in one pass, that a module's tensors were replaced since this object was created.

    The views of that time keep their memory alive, so an equal address means the same memory.
    """

    def __init__(self, module: nn.Module, *, with_buffers: bool) -> None:
        registers: list[dict[str, Any]] = []
        for part in module.modules():
            registers += [part._parameters, part._modules]
            if with_buffers:
                registers.append(part._buffers)
        self.members = ModuleMembers.of(registers)
        """Compared without reading a tensor."""
        tensors = [value for value in self.members.values if isinstance(value, torch.Tensor)]
        locals_ = list(map(sharding.local_tensor, tensors))
        self._sharded = [(tensor, local) for tensor, local in zip(tensors, locals_, strict=True) if local is not tensor]
        self.tensors = locals_
        """The parameters and buffers; of a sharded one the local part."""
        self._places = places(locals_)
        self._complex = [tensor for tensor in locals_ if tensor.is_complex()]
        self._lazy = lazy_views(self._complex)

    def has_changed(self) -> bool:
        if not same_members(*self.members) or not same_places(self.tensors, self._places):
            return True
        if self._complex and lazy_views(self._complex) != self._lazy:
            return True
        return bool(self._sharded) and any(sharding.local_tensor(t) is not local for t, local in self._sharded)


class ModuleMembers(NamedTuple):
    """The modules' mappings of parameters, buffers and children, with the sizes, names and values that they had.

    `same_members(*members)` returns whether they still have them.
    """

    registers: list[dict[str, Any]]
    sizes: list[int]
    names: list[str]
    values: list[Any]

    @classmethod
    def of(cls, registers: Sequence[dict[str, Any]]) -> ModuleMembers:
        names = list(itertools.chain.from_iterable(registers))
        values = list(itertools.chain.from_iterable(map(dict.values, registers)))
        return cls(list(registers), list(map(len, registers)), names, values)
