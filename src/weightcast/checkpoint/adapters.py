"""A model with LoRA adapters of PEFT, seen as its merged base: the result of `merge_and_unload` on a copy.

The merged weight of an adapted layer is a copy of the base's weight plus the delta of each active adapter, which peft
computes. A layer whose adapters are sharded over ranks is merged in `Merging.complete`: the adapters are all-gathered,
and each rank adds the delta to its shards of the base.

Invariants: the live model is only read; tensors without adapters are its live memory; an adapter of another kind raises
a ValueError that names it, unless the trainer has merged it. peft is never imported here: a process that has a model
with adapters has imported it already.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from weightcast.checkpoint import sharding
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.seams.source import Gather

MERGEABLE = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Supported dtypes of base weights. Quantised ones have no meaning without their scales."""

_REMEDY = (
    "call merge_adapter() on the model before publish and unmerge_adapter() after it, or publish merge_and_unload()"
)
_UNLOAD = "publish what merge_and_unload() makes of a copy"
_GATHERED_BYTES = 64 << 20
"""Bytes of sharded adapters that are gathered in one call: whole layers, at least one."""
_LAYERS = frozenset({"Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ParamWrapper"})
"""Classes of peft.tuners.lora.layer whose merge adds to one tensor a delta that depends only on the adapter."""
_SEGMENTS = ("base_layer", "original_module", "modules_to_save")
_PREFIXES = ("lora_", "ia3_l", "hada_w", "lokr_w", "vera_lambda", "trainable_tokens_")


def has_adapters(module: nn.Module) -> bool:
    """Return whether a module or any of its submodules is a PEFT layer."""
    return "peft" in sys.modules and any(map(_is_pefts, module.modules()))


def require_merged(names: Iterable[str]) -> None:
    """Raise ValueError for a name that PEFT gives to a part of an adapted layer."""
    modules = set[str]()
    for name in names:
        module = name.rpartition(".")[0]
        if module in modules:
            continue
        modules.add(module)
        if any(segment in _SEGMENTS or segment.startswith(_PREFIXES) for segment in module.split(".")):
            raise ValueError(
                f"{name!r} is a part of a layer with a PEFT adapter, which engines can't load: publish the model "
                "(ModuleSource(model) merges its adapters), or the state dict of its merge_and_unload()"
            )


def refuse(module: nn.Module) -> NoReturn:
    """Raise ValueError with the name of the first adapted layer of a model that has adapters."""
    name = next(name for name, part in module.named_modules() if _is_pefts(part))
    raise ValueError(f"{name or type(module).__name__!r} has PEFT adapters: merge them, or pass adapters='merge'")


class MergedModel:
    """A model seen as its base with merged adapters: maps the model's modules and tensors to the merged ones.

    Raises ValueError for adapters that can't be merged.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bases: dict[int, nn.Module] = {}
        self._names: dict[int, list[str]] = {}
        """By id of a base tensor, its names, one for each module that has it."""
        self.merged: dict[int, torch.Tensor] = {}
        """Merged tensors, by id of the base tensor."""
        self.layers: list[_Layer] = []
        """The layers with adapters to merge."""
        self._visit(model, "")
        adapted = set[str]()
        for layer in self.layers:
            for name, tensor in layer.tensors.items():
                if other := next((n for n in self._names[_key(tensor)] if n != name or n in adapted), None):
                    raise ValueError(
                        f"{name!r} and {other!r} are one tensor, but their adapters would make different tensors of "
                        "it, which can't be tied in a merged checkpoint: load the model with "
                        "tie_word_embeddings=False, or give neither of them an adapter"
                    )
                adapted.add(name)

    def base(self, module: nn.Module) -> nn.Module:
        """Return the base's module for a module of the model."""
        return self._bases[id(module)]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the merged tensor for a tensor of the base; the tensor itself if no adapter changes it."""
        return self.merged.get(id(tensor), tensor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers, detached, by the names of the base."""

        def collect(module: nn.Module, prefix: str) -> None:
            base = self.base(module)
            for name, tensor in _tensors(base).items():
                if name not in base._non_persistent_buffers_set:
                    found[prefix + name] = self.tensor(tensor).detach()
            for name, child in base._modules.items():
                if child is not None:
                    collect(child, f"{prefix}{name}.")

        found: dict[str, torch.Tensor] = {}
        collect(self._model, "")
        return found

    def _visit(self, module: nn.Module, name: str) -> None:
        if id(module) in self._bases:
            return
        base = self._bases[id(module)] = self._base(module, name)
        if base is not module and id(base) in self._bases:
            return
        self._bases[id(base)] = base
        for key, tensor in _tensors(base).items():
            self._names.setdefault(_key(tensor), []).append(_join(name, key))
        for key, child in base._modules.items():
            if child is not None:
                self._visit(child, _join(name, key))

    def _base(self, module: nn.Module, name: str) -> nn.Module:
        """Return the base's module for this one; note layers with adapters to merge that are found on the way."""
        peft: Any = sys.modules["peft"]
        tuners: Any = sys.modules["peft.tuners.tuners_utils"]
        while _is_pefts(module):
            if isinstance(module, (peft.PeftModel, peft.PeftMixedModel)):
                for key, beside in module.named_children():
                    if key != "base_model" and list(beside.parameters()):
                        raise _refused(name, module, f"with {key!r} beside its layers", _UNLOAD)
                module = module.base_model
            elif isinstance(module, tuners.BaseTuner):
                module = module.model
            elif isinstance(module, peft.utils.ModulesToSaveWrapper):
                active = [adapter for adapter in module.active_adapters if adapter in module.modules_to_save]
                module = module.modules_to_save[active[0]] if active else module.original_module
            elif isinstance(module, peft.tuners.lora.ParamWrapper) or (
                # A layer with its own `unload_and_optionally_merge_module` is not merged by its base alone.
                isinstance(module, tuners.BaseTunerLayer) and not hasattr(module, "unload_and_optionally_merge_module")
            ):
                self._add(module, name)
                module = module.base_layer
            else:
                raise _refused(name, module, "which has no merged form here", _UNLOAD)
        return module

    def _add(self, layer: Any, name: str) -> None:
        """Note the layer's active adapters for the merge. Adapters that the trainer has merged are read in place."""
        kind = _kind(layer)
        is_lora = kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ in _LAYERS
        due = [adapter for adapter in layer.active_adapters if adapter not in layer.merged_adapters]
        if is_lora:
            due = [adapter for adapter in due if adapter in layer.lora_A or adapter in layer.lora_embedding_A]
        if not due:
            return
        if not is_lora or any(adapter in layer.lora_variant for adapter in due):
            raise _refused(name, layer, f"whose adapter {due[0]!r} is not plain LoRA")
        base, is_of_parameter = layer.get_base_layer(), kind.__name__ == "ParamWrapper"
        if _is_pefts(layer.base_layer) and not (is_of_parameter and _kind(layer.base_layer) is kind):
            inner = _kind(layer.base_layer)
            raise _refused(name, layer, f"around a {inner.__name__} of {inner.__module__}")
        if kind.__name__.startswith("Conv") and base.groups > 1:
            raise _refused(name, layer, "with groups, which peft can't merge")
        keys = [layer.parameter_name if is_of_parameter else "weight"]
        if any(layer.lora_bias[adapter] for adapter in due):
            keys.append("bias")
        held, tensors = _tensors(base), dict[str, torch.Tensor]()
        for key in keys:
            if key not in held:
                raise _refused(name, layer, f"whose base module has no parameter {key!r}")
            local = sharding.local_tensor(held[key])
            if type(local) not in (torch.Tensor, nn.Parameter) or DTYPE_NAMES.get(local.dtype) not in MERGEABLE:
                raise _refused(
                    name, layer, f"whose base has a {key!r} that is a {type(local).__name__} of {local.dtype}"
                )
            tensors[_join(name, key)] = held[key]
        name = _join(name, layer.parameter_name) if is_of_parameter else name  # one module has several of these
        adapters = {
            f"{name}.{register}.{key}": tensor
            for register in layer.adapter_layer_names
            for key, tensor in getattr(layer, register).named_parameters()
            if key.partition(".")[0] in due
        }
        for key, tensor in {**tensors, **adapters}.items():
            if tuple(getattr(tensor, "ds_shape", tensor.shape)) != tuple(tensor.shape):
                raise ValueError(f"{key!r} is partitioned by ZeRO-3: publish inside deepspeed.zero.GatheredParameters")
        sharded = {key: tensor for key, tensor in adapters.items() if sharding.is_sharded(tensor)}
        self.layers.append(_Layer(name, layer, due, tensors, sharded))


class Merging:
    """Merges one model's adapters, each time into the same memory.

    Memory, kept as long as this object: a copy of the base tensors that adapters change (of sharded tensors, this
    rank's shards). During a merge also one layer's whole delta, and the adapters of the layers that are gathered
    together.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._batches: list[list[_Layer]] = []

    @property
    def num_gathers(self) -> int:
        """Number of gathers in `complete` for the model that was merged last."""
        return len(self._batches)

    @torch.no_grad()
    def merge(self, model: nn.Module) -> MergedModel:
        """Return the model with the present values of its active adapters merged.

        Adapters that are merged already (`merge_adapter`) are not touched. Disabled ones are merged, as
        `merge_and_unload` does. Layers whose adapters are sharded have values only after `complete`. Raises ValueError.
        """
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()):
            raise ValueError(
                "the model has PEFT adapters and is wrapped by FSDP1, whose flattened weights can't be merged: shard "
                "it with FSDP2 (fully_shard)"
            )
        found, kept = MergedModel(model), self._kept
        self._kept = {}
        with torch.inference_mode(False):
            for layer in found.layers:
                for name, tensor in layer.tensors.items():
                    local = sharding.local_tensor(tensor)
                    fresh = torch.empty_like(local, device="meta")
                    memory = kept.get(name)
                    if memory is None or _geometry(memory) != (*_geometry(fresh)[:-1], local.device):
                        memory = torch.empty_like(local, requires_grad=False)
                    self._kept[name] = memory
                    outcome = sharding.with_local(tensor, memory) if sharding.is_sharded(tensor) else memory
                    layer.targets.append(outcome)
                    found.merged[id(tensor)] = outcome
                if not layer.sharded:
                    layer.merge({})
        self._batches = list(_batches(layer for layer in found.layers if layer.sharded))
        return found

    @torch.no_grad()
    def complete(self, gather: Gather) -> None:
        """Merge the present values of adapters that are sharded. Call it on every rank. Raises ValueError."""
        for batch in self._batches:
            sharded = {name: tensor for layer in batch for name, tensor in layer.sharded.items()}
            wholes = gather([sharding.part(name, tensor) for name, tensor in sharded.items()])
            by_id = {id(tensor): whole for tensor, whole in zip(sharded.values(), wholes, strict=True)}
            with torch.inference_mode(False):
                for layer in batch:
                    layer.merge(by_id)


def _batches(layers: Iterable[_Layer]) -> Iterator[list[_Layer]]:
    batch, num_bytes = list[_Layer](), 0
    for layer in layers:
        size = sum(tensor.numel() * tensor.itemsize for tensor in layer.sharded.values())
        if batch and num_bytes + size > _GATHERED_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(layer)
        num_bytes += size
    if batch:
        yield batch


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """A LoRA layer with adapters to merge.

    `tensors`: by name, the base's tensors that change: the adapted one, then the bias, if its adapters have one.
    `sharded`: tensors of its adapters of which this rank may have only a part. `targets`: memory for merged `tensors`.
    """

    name: str
    layer: Any
    adapters: Sequence[str]
    tensors: Mapping[str, torch.Tensor]
    sharded: Mapping[str, torch.Tensor]
    targets: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def merge(self, wholes: Mapping[int, torch.Tensor]) -> None:
        """Write the result of peft's `merge` of `tensors` to `targets`.

        `wholes`: the gathered tensors, by id of the sharded tensor. Raises ValueError.
        """
        if any(sharding.local_tensor(target).is_meta for target in self.targets):
            return
        for target, tensor in zip(self.targets, self.tensors.values(), strict=True):
            sharding.local_tensor(target).copy_(sharding.local_tensor(tensor))
        whole = _WholeLayer(self.layer, wholes)
        try:
            for adapter in self.adapters:
                delta = type(self.layer).get_delta_weight(whole, adapter)
                if _kind(self.layer).__name__ == "Embedding":
                    delta = delta.to(self.targets[0].dtype)  # for other layers, torch adds in the wider dtype
                sharding.add_whole(self.targets[0], delta)
                if whole.lora_bias[adapter]:
                    sharding.add_whole(self.targets[1], whole.lora_B[adapter].bias * whole.scaling[adapter])
        except Exception as exc:
            kind = type(self.layer).__name__
            raise ValueError(f"peft can't merge the adapter of {self.name!r} ({kind}): {exc!r}; {_UNLOAD}") from exc


class _WholeLayer:
    """A live LoRA layer with gathered adapter weights in place of the sharded ones, for peft's `get_delta_weight`."""

    def __init__(self, layer: Any, wholes: Mapping[int, torch.Tensor]) -> None:
        def whole(tensor: Any) -> Any:
            return None if tensor is None else wholes.get(id(tensor), sharding.local_tensor(tensor))

        def linears(register: Any) -> dict[str, SimpleNamespace]:
            return {n: SimpleNamespace(weight=whole(p.weight), bias=whole(p.bias)) for n, p in register.items()}

        self._layer = layer
        self.lora_A, self.lora_B = linears(layer.lora_A), linears(layer.lora_B)
        self.lora_embedding_A = {name: whole(part) for name, part in layer.lora_embedding_A.items()}
        self.lora_embedding_B = {name: whole(part) for name, part in layer.lora_embedding_B.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _refused(name: str, module: nn.Module, what: str, remedy: str = _REMEDY) -> ValueError:
    kind = _kind(module)
    return ValueError(
        f"{name or 'the model'!r} is a {kind.__name__} of {kind.__module__} {what}, and only LoRA adapters are merged "
        f"here: {remedy}"
    )


def _kind(module: nn.Module) -> type:
    """Return the module's class, or the original one if FSDP2 has replaced it."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, fsdp))


def _is_pefts(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def _key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tied tensors."""
    local = sharding.local_tensor(tensor)
    is_known = not sharding.is_sharded(tensor) and not local.is_meta and local.numel() > 0
    return local.data_ptr() if is_known else id(tensor)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
