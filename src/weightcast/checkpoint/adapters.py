"""A model with PEFT adapters as the model that they make of its base: what `merge_and_unload` gives on a copy.

peft's own layers merge themselves, in a twin of the model: modules of its own on the way to an adapter, and tensors of
its own for what merging writes. A layer whose tensors are sharded over ranks merges in `Merging.complete`, where its
adapters are gathered whole; of the outcome each rank keeps its own shards. Invariants: everything else in the twin is
the model's live memory, which merging does not change; what peft can't merge, or what a merge would change elsewhere
too, is a ValueError that names it. peft is never imported here: a model that has adapters has brought it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.checkpoint import sharding
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.seams.source import Gather

MERGEABLE = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Dtypes of base weights: quantised ones mean nothing without their scales."""

_CANT = "can't be merged here"
_REMEDY = (
    "call merge_adapter() on the model before publish and unmerge_adapter() after it, or publish merge_and_unload()"
)
_GATHERED_BYTES = 64 << 20
"""How much of sharded layers is gathered in one call: whole layers, at least one."""
_ADDING = frozenset({"Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ParamWrapper"})
"""Of peft.tuners.lora.layer: merging adds to each element of the base a value that depends on the adapter alone."""
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

    Memory: the base tensors of the layers whose adapters are to be merged (of sharded ones this rank's shards), and for
    the time of a merge what peft needs for one layer, which for a sharded layer is whole, with the adapters of as many
    layers as are gathered at once. Kept until this object goes; what is merged already, or has no adapter, takes none.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._batches: list[list[_ShardedLayer]] = []

    @property
    def num_gathers(self) -> int:
        """How often `complete` gathers for the model that was merged last."""
        return len(self._batches)

    @torch.no_grad()
    def merged(self, model: nn.Module) -> nn.Module:
        """The model's base with its active adapters merged as they are now, by the names of the base.

        Adapters that are merged already (`merge_adapter`) are left as they are. Disabled ones are merged, as
        `merge_and_unload` does. Where layers are sharded, their weights have values only after `complete`. Raises
        ValueError.
        """
        with _merging():
            twin = _Twin(self._kept, model)
            base = twin.base()
            self._batches = list(_batches(twin.sharded))
        return base

    @torch.no_grad()
    def complete(self, gather: Gather) -> None:
        """Merge the sharded layers, as their adapters are now. Every rank calls it. Raises ValueError."""
        written = dict[int, str]()
        for batch in self._batches:
            tensors = [(layer, tensor) for layer in batch for tensor in layer.gathered.values()]
            names = [f"{layer.name}.{name}" for layer in batch for name in layer.gathered]
            with _merging():
                parts = [sharding.part(name, tensor) for name, (_, tensor) in zip(names, tensors, strict=True)]
            wholes = {id(t): whole for (_, t), whole in zip(tensors, gather(parts), strict=True)}
            for layer in batch:
                with _merging():
                    layer.merge(wholes, written)


@contextlib.contextmanager
def _merging() -> Iterator[None]:
    with warnings.catch_warnings(), torch.inference_mode(False):
        # peft's advice on merging for good; what is wrong here is an error.
        warnings.simplefilter("ignore")
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class _ShardedLayer:
    """An adapted layer that is merged once its tensors were gathered.

    `live`: the layer; `base`: its base in the twin, where tensors of these ids, `kept`, are not live ones. `gathered`:
    its sharded tensors that a merge reads whole; `own`: those of which it reads, and writes, each element for itself.
    """

    name: str
    live: nn.Module
    base: nn.Module
    kept: Collection[int]
    gathered: Mapping[str, torch.Tensor]
    own: Sequence[torch.Tensor]

    def merge(self, wholes: Mapping[int, torch.Tensor], written: dict[int, str]) -> None:
        """`wholes`: of what was `gathered`, by the id of the sharded tensor. `written`: by which layer."""
        wholes = {**wholes, **{id(tensor): sharding.in_whole(tensor) for tensor in self.own}}
        merged = _Twin({}, self.live, wholes).layer(self.live, self.name)
        found = {**dict(merged.named_parameters()), **dict(merged.named_buffers())}
        for name, target in (*self.base.named_parameters(), *self.base.named_buffers()):
            if id(target) not in self.kept:
                continue
            outcome = found.get(name)
            if outcome is None or (outcome.shape, outcome.dtype) != (target.shape, target.dtype):
                what = "nothing" if outcome is None else f"{outcome.dtype}{list(outcome.shape)}"
                raise ValueError(
                    f"peft's merge made {what} of {self.name!r}'s {name!r}, which is {target.dtype}"
                    f"{list(target.shape)}: a sharded layer of this kind {_CANT}: {_REMEDY}"
                )
            if written.setdefault(id(target), self.name) == self.name:
                sharding.copy_part(target, outcome)
            elif not sharding.is_part(target, outcome):
                raise _tied(written[id(target)], self.name)


def _batches(layers: Iterable[_ShardedLayer]) -> Iterator[list[_ShardedLayer]]:
    batch, num_bytes = list[_ShardedLayer](), 0
    for layer in layers:
        size = sum(tensor.numel() * tensor.itemsize for tensor in layer.gathered.values())
        if batch and num_bytes + size > _GATHERED_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(layer)
        num_bytes += size
    if batch:
        yield batch


class _Twin:
    """One merge. `kept`: memory for what merging writes, by the name of what it was made for.

    `wholes`: what stands for sharded tensors, by their ids.
    """

    def __init__(
        self, kept: dict[str, torch.Tensor], model: nn.Module, wholes: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self._tuners: Any = sys.modules["peft.tuners.tuners_utils"]
        self._kept, self._used = kept, set[str]()
        self._adapted: dict[int, bool] = {}
        self._twins: dict[int, nn.Module] = {}
        self._unloaded: dict[int, nn.Module] = {}
        self._copies: dict[int, _Copy] = {}
        self._live = {_storage(parameter) for parameter in model.parameters()}
        self._model = model
        self._wholes = wholes or {}
        self._originals: dict[int, nn.Module] = {}
        """By the twin of a module."""
        self._copied: set[int] = set()
        """Live tensors, sharded ones too, whose place in the twin merging may write to."""
        self._made: set[int] = set()
        """The ids of tensors in memory that is kept."""
        self.sharded: list[_ShardedLayer] = []
        """Layers that are still to be merged."""

    def layer(self, live: nn.Module, name: str) -> nn.Module:
        """The base of one adapted layer, its adapters merged."""
        return self._merge(self._twin(live, "", copied=False, inside=False), name)

    def base(self) -> nn.Module:
        """The twin, its adapters merged and gone."""
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in self._model.modules()):
            raise ValueError(
                f"the model is wrapped by FSDP1, whose flattened weights {_CANT}: shard it by FSDP2 (fully_shard)"
            )
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
        self._originals[id(twin)] = module
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
        is_parameter = isinstance(tensor, nn.Parameter)
        if copied:
            self._copied.add(id(tensor))
        if id(tensor) in self._wholes:
            whole = self._wholes[id(tensor)]
            return nn.Parameter(whole, requires_grad=False) if is_parameter else whole
        is_sharded = sharding.is_sharded(tensor)
        if is_sharded and not (copied and is_parameter):
            return tensor
        local = sharding.local_tensor(tensor)
        if tuple(getattr(local, "ds_shape", local.shape)) != tuple(local.shape):
            raise ValueError(f"{name!r} is partitioned by ZeRO-3: publish inside deepspeed.zero.GatheredParameters")
        if not is_parameter:
            if not copied:
                return local.detach()
            buffer = self._memory(name, local).copy_(local).view(local.shape)
            self._made.add(id(buffer))
            return buffer
        if not copied:
            return nn.Parameter(local.detach(), requires_grad=False)
        if type(local) not in (torch.Tensor, nn.Parameter) or DTYPE_NAMES.get(local.dtype) not in MERGEABLE:
            raise ValueError(f"{name!r} is a {type(local).__name__} of {local.dtype}, which {_CANT}: {_REMEDY}")
        memory = self._memory(name, local)
        twin = nn.Parameter(
            sharding.with_local(tensor, memory) if is_sharded else memory.copy_(local), requires_grad=False
        )
        self._copies[id(twin)] = _Copy(name, tensor if is_sharded else local, memory, twin)
        self._made.add(id(twin))
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

    def _merged(self, layer: nn.Module, name: str) -> nn.Module:
        """The base of an adapted layer, in memory that is kept; where it is sharded, still to be merged."""
        due = {adapter for part in layer.modules() if self._is_layer(part) for adapter in _due(part)}
        if not due or not any(map(sharding.is_sharded, (*layer.parameters(), *layer.buffers()))):
            base = self._merge(layer, name)
            self._settle(base, name)
            return base
        base, live = self._merge(layer, name, merges=False), self._originals[id(layer)]
        adds = all(not self._is_layer(part) or _adds(part) for part in layer.modules())
        gathered, own = dict[str, torch.Tensor](), list[torch.Tensor]()
        for key, tensor in (*live.named_parameters(), *live.named_buffers()):
            is_copied = id(tensor) in self._copied
            if sharding.is_sharded(tensor) and is_copied and adds:
                own.append(tensor)
            elif sharding.is_sharded(tensor) and (is_copied or due.intersection(key.split("."))):
                gathered[key] = tensor
        self.sharded.append(_ShardedLayer(name, live, base, self._made, gathered, own))
        return base

    def _merge(self, layer: Any, name: str, *, merges: bool = True) -> nn.Module:
        """The base of an adapted layer, by the steps of peft's `merge_and_unload`; without `merges` as it is."""
        chain = [layer]
        while self._is_layer(chain[-1]._modules.get("base_layer")):
            chain.append(chain[-1].base_layer)
        due = {id(part): _due(part) if merges else [] for part in layer.modules() if self._is_layer(part)}
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
        return base

    def _settle(self, base: nn.Module, name: str) -> None:
        """Have what merging has put elsewhere lie in memory that is kept."""
        kept = {tensor.data_ptr() for tensor in self._kept.values()}
        for key, parameter in base.named_parameters():
            if parameter.is_meta or not parameter.numel() or sharding.is_sharded(parameter):
                continue
            if parameter.data_ptr() in kept or _storage(parameter) in self._live:
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
        sharded: dict[int, _Copy] = {}
        for made in copies:
            if sharding.is_sharded(made.live) and sharded.setdefault(id(made.live), made) is not made:
                # `complete` finds out whether their merges are equal.
                for part in root.modules():
                    part._parameters.update(
                        {k: sharded[id(made.live)].twin for k, p in part._parameters.items() if p is made.twin}
                    )
        for name, parameter in found.items():
            if id(parameter) in sharded:
                raise _tied(sharded[id(parameter)].name, name)
        for made in copies:
            if sharding.is_sharded(made.live):
                continue
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


def _adds(layer: nn.Module) -> bool:
    """Whether merging it adds to each element of its base a value that depends on its adapters alone."""
    # FSDP2 makes a class of its own of a layer's.
    kind = next(cls for cls in type(layer).__mro__ if not cls.__module__.startswith("torch."))
    is_known = kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ in _ADDING
    variants = getattr(layer, "lora_variant", None)  # DoRA and the like
    return is_known and variants is not None and not any(adapter in variants for adapter in _due(layer))


def _storage(tensor: torch.Tensor) -> int:
    return sharding.local_tensor(tensor).untyped_storage().data_ptr()


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_pefts(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
