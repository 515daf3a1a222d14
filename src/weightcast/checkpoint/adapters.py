"""A model with PEFT adapters as the model that they make of its base: what `merge_and_unload` gives on a copy.

peft's own layers merge themselves, in a twin of the model: modules of its own on the way to an adapter, and tensors of
its own for what merging writes. Invariants: everything else in the twin is the model's live memory, which merging does
not change; what peft can't merge, or what a merge would change elsewhere too, is a ValueError that names it. peft is
never imported here: a model that has adapters has brought it.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weightcast.checkpoint import sharding
from weightcast.format.bucket import DTYPE_NAMES

MERGEABLE = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Dtypes of base weights: quantised ones mean nothing without their scales."""

_CANT = "can't be merged here"
_REMEDY = (
    "call merge_adapter() on the model before publish and unmerge_adapter() after it, or publish merge_and_unload()"
)
_SEGMENTS = ("base_layer", "original_module", "modules_to_save")
_PREFIXES = ("lora_", "ia3_l", "hada_w", "lokr_w", "vera_lambda", "trainable_tokens_")


def has_adapters(module: nn.Module) -> bool:
    """Whether any part of it is one of peft's."""
    return "peft" in sys.modules and any(map(_is_pefts, module.modules()))


def require_merged(names: Iterable[str]) -> None:
    """Raises ValueError if a name is one that PEFT gives to a part of an adapted layer."""
    for name in names:
        segments = name.split(".")
        if any(segment in _SEGMENTS or segment.startswith(_PREFIXES) for segment in segments[:-1]):
            raise ValueError(
                f"{name!r} is a part of a layer with a PEFT adapter, which no engine can load by itself: publish the "
                "model (ModuleSource(model) merges its adapters), or the state dict of its merge_and_unload()"
            )


def require_none(module: nn.Module) -> None:
    """Raises ValueError, naming the first one, if the model has adapters."""
    if has_adapters(module):
        name = next(name for name, part in module.named_modules() if _is_pefts(part))
        raise ValueError(f"{name or type(module).__name__!r} has PEFT adapters: merge them, or use adapters='merge'")


class Merging:
    """Merges one model's adapters, again and again, into the same memory.

    Memory: the base tensors of the layers whose adapters are to be merged, and for the time of a merge what peft needs
    for one layer. Kept until this object goes; what is merged already, or has no adapter, takes none.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def merged(self, model: nn.Module) -> nn.Module:
        """The model's base with its active adapters merged as they are now, by the names of the base.

        Adapters that are merged already (`merge_adapter`) are left as they are. Disabled ones are merged, as
        `merge_and_unload` does. Raises ValueError.
        """
        with warnings.catch_warnings(), torch.inference_mode(False):
            # peft's advice on merging for good; what is wrong here is an error.
            warnings.simplefilter("ignore")
            return _Twin(self._kept, model).base()


class _Twin:
    """One merge. `kept`: memory for what merging writes, by the name of what it was made for."""

    def __init__(self, kept: dict[str, torch.Tensor], model: nn.Module) -> None:
        self._tuners: Any = sys.modules["peft.tuners.tuners_utils"]
        self._kept, self._used = kept, set[str]()
        self._adapted: dict[int, bool] = {}
        self._twins: dict[int, nn.Module] = {}
        self._unloaded: dict[int, nn.Module] = {}
        self._copies: dict[int, _Copy] = {}
        self._live = {_storage(parameter) for parameter in model.parameters()}
        self._model = model

    def base(self) -> nn.Module:
        """The twin, its adapters merged and gone."""
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in self._model.modules()):
            raise ValueError(f"the model is wrapped by FSDP1, which keeps no weights that {_CANT}: {_REMEDY}")
        root = self._twin(self._model, "", copied=False, inside=False)
        self._own = {id(twin) for twin in self._twins.values()}
        root = self._unload(root, "")
        for name, part in root.named_modules():
            if _is_pefts(part):
                raise ValueError(
                    f"{name or 'the model'!r} is a {type(part).__name__} of peft, which {_CANT}: {_REMEDY}"
                )
        self._keep_ties(root)
        for name in self._kept.keys() - self._used:
            del self._kept[name]
        return root

    # --- the twin of a part ---

    def _twin(self, module: nn.Module, name: str, *, copied: bool, inside: bool) -> nn.Module:
        """A part with the same tensors, but for those to be `copied`. `inside`: it belongs to an adapted layer."""
        if id(module) in self._twins:
            return self._twins[id(module)]
        if not inside and not self._is_adapted(module):
            return module
        twin = self._twins[id(module)] = object.__new__(type(module))
        is_layer = self._is_layer(module)
        inside = inside or is_layer
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and copied:
                value = value.clone()
            twin.__dict__[key] = copy.copy(value) if type(value) in (dict, list, set) else value
        for register in ("_parameters", "_buffers"):
            twin.__dict__[register] = {
                key: self._tensor(tensor, _join(name, key), copied=copied) if tensor is not None and inside else tensor
                for key, tensor in getattr(module, register).items()
            }
        children = twin.__dict__["_modules"] = dict(module._modules)
        for key, child in module._modules.items():
            if child is not None:
                # What lies below `base_layer` is of the base; all else in an adapted layer is of its adapters.
                written = (copied or bool(_due(module))) and key == "base_layer" if is_layer else copied
                children[key] = self._twin(child, _join(name, key), copied=written, inside=inside)
        return twin

    def _is_layer(self, module: nn.Module | None) -> bool:
        return isinstance(module, self._tuners.BaseTunerLayer)

    def _is_adapted(self, module: nn.Module) -> bool:
        if id(module) not in self._adapted:
            inner = [self._is_adapted(child) for child in module.children()]
            self._adapted[id(module)] = _is_pefts(module) or any(inner)
        return self._adapted[id(module)]

    def _tensor(self, tensor: torch.Tensor, name: str, *, copied: bool) -> torch.Tensor:
        """A tensor object of the twin's own: peft assigns to `data`, of adapters too."""
        if sharding.is_sharded(tensor):
            if copied:
                raise ValueError(f"{name!r} is sharded, and the shards of a product are no products: {_REMEDY}")
            return tensor
        local = sharding.local_tensor(tensor)
        if tuple(getattr(local, "ds_shape", local.shape)) != tuple(local.shape):
            raise ValueError(f"{name!r} is partitioned by ZeRO-3: publish inside deepspeed.zero.GatheredParameters")
        if not isinstance(tensor, nn.Parameter):
            return self._memory(name, local).copy_(local) if copied else local.detach()
        if not copied:
            return nn.Parameter(local.detach(), requires_grad=False)
        if type(local) not in (torch.Tensor, nn.Parameter) or DTYPE_NAMES.get(local.dtype) not in MERGEABLE:
            raise ValueError(f"{name!r} is a {type(local).__name__} of {local.dtype}, which {_CANT}: {_REMEDY}")
        memory = self._memory(name, local)
        memory.copy_(local)
        twin = nn.Parameter(memory, requires_grad=False)
        self._copies[id(twin)] = _Copy(name, local, memory, twin)
        return twin

    def _memory(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Memory kept from the last merge, if it still fits."""
        self._used.add(name)
        fresh = torch.empty_like(like, device="meta")
        kept = self._kept.get(name)
        if kept is None or _geometry(kept) != (*_geometry(fresh)[:-1], like.device):
            kept = self._kept[name] = torch.empty_like(like)
        return kept

    # --- without adapters ---

    def _unload(self, module: nn.Module, name: str) -> nn.Module:
        if id(module) in self._unloaded:
            return self._unloaded[id(module)]
        without = module
        if any(cls.__name__ in ("PeftModel", "PeftMixedModel") for cls in type(module).__mro__):
            without = self._unwrapped(module, name, "base_model")
        elif isinstance(module, self._tuners.BaseTuner):
            without = self._unwrapped(module, name, "model")
        elif self._is_layer(module) or hasattr(type(module), "unload_and_optionally_merge_module"):
            without = self._merged(module, name)
        elif id(module) in self._own:
            for key, child in module._modules.items():
                if child is not None:
                    module._modules[key] = self._unload(child, _join(name, key))
        self._unloaded[id(module)] = without
        return without

    def _unwrapped(self, module: Any, name: str, key: str) -> nn.Module:
        """What a model of peft's wraps."""
        inner = module._modules.get(key)
        beside = [k for k, child in module._modules.items() if k != key and child is not None]
        if key == "model" or not any(True for k in beside for _ in module._modules[k].parameters()):
            beside = []
        if inner is None or beside:
            what = f"with {', '.join(map(repr, beside))} beside its layers" if beside else "without a model of its own"
            raise ValueError(f"{name or 'the model'!r} is a {type(module).__name__} {what}, which {_CANT}: {_REMEDY}")
        if key == "model":
            try:
                module._check_merge_allowed()
            except Exception as exc:
                raise ValueError(f"peft can't merge the adapters of a {type(module).__name__}: {exc}") from exc
        return self._unload(inner, name)

    def _merged(self, layer: Any, name: str) -> nn.Module:
        """The base of an adapted layer, by the steps of peft's `merge_and_unload`."""
        chain = [layer]
        while self._is_layer(chain[-1]._modules.get("base_layer")):
            chain.append(chain[-1].base_layer)
        due = {id(part): _due(part) for part in layer.modules() if self._is_layer(part)}
        try:
            if hasattr(layer, "unload_and_optionally_merge_module"):
                base: nn.Module = layer.unload_and_optionally_merge_module(
                    merge=any(due.values()), safe_merge=False, adapter_names=None
                )
            else:
                for part in (*chain[1:], chain[0]):
                    if due[id(part)]:
                        part.merge()
                base = layer.get_base_layer()
        except Exception as exc:
            raise ValueError(f"{name!r} ({type(layer).__name__}): peft can't merge its adapter: {exc}") from exc
        left = [adapter for part in chain for adapter in set(due.get(id(part), ())) - set(part.merged_adapters)]
        if left:
            raise ValueError(
                f"{name!r} is a {type(layer).__name__} that did not merge its adapter {left[0]!r}: {_REMEDY}"
            )
        self._settle(base, name)
        return base

    def _settle(self, base: nn.Module, name: str) -> None:
        """Have what merging has put elsewhere lie in memory that is kept."""
        kept = {tensor.data_ptr() for tensor in self._kept.values()}
        for key, parameter in base.named_parameters():
            if parameter.is_meta or not parameter.numel() or parameter.data_ptr() in kept:
                continue
            if _storage(parameter) in self._live:
                continue
            made = self._copies.get(id(parameter))
            if made is not None and _geometry(made.memory) == _geometry(parameter):
                memory = made.memory
            else:
                memory = self._memory(f"{_join(name, key)} (merged)", parameter)
            memory.copy_(parameter)
            parameter.data = memory

    def _keep_ties(self, root: nn.Module) -> None:
        """Tensors that were one stay one. Raises ValueError if merging has made them different."""
        firsts: dict[int, _Copy] = {}
        found = dict(root.named_parameters())
        left = {id(parameter) for parameter in found.values()}
        copies = [made for made in self._copies.values() if id(made.twin) in left and not made.twin.is_meta]
        for made in copies:
            first = firsts.setdefault(made.live.data_ptr(), made)
            if first is not made:
                if not torch.equal(first.twin, made.twin):
                    raise _tied(first.name, made.name)
                made.twin.data = first.twin.data
        for name, parameter in found.items():
            if sharding.as_dtensor(parameter) is None and parameter.data_ptr() in firsts and parameter.numel():
                raise _tied(firsts[parameter.data_ptr()].name, name)


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor of the twin that merging may write: of which live one, and the memory that was made for it."""

    name: str
    live: torch.Tensor
    memory: torch.Tensor
    twin: nn.Parameter


def _tied(adapted: str, other: str) -> ValueError:
    return ValueError(
        f"{adapted!r} and {other!r} are one tensor, but their adapters make different ones of it: a merged checkpoint "
        "can't be tied. Load the model with tie_word_embeddings=False, or give neither an adapter"
    )


def _due(layer: Any) -> list[str]:
    """The adapters that are active and not merged."""
    named = (getattr(layer, name, None) for name in (*layer.adapter_layer_names, *layer.other_param_names))
    registers: list[Any] = [register for register in named if hasattr(register, "keys")]
    here = {adapter for register in registers for adapter in register}
    return [a for a in layer.active_adapters if a not in layer.merged_adapters and (a in here or not registers)]


def _storage(tensor: torch.Tensor) -> int:
    return sharding.local_tensor(tensor).untyped_storage().data_ptr()


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_pefts(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
