"""Named tensors from the weights that TorchRL's users pass.

Invariant: names are dotted, like those of a state dict. A model's weights are the tensors of its state dict, without
non-persistent buffers and without extra state, which an engine can't load.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import nn

from weightcast.checkpoint.adapters import Merging, has_adapters, require_merged
from weightcast.checkpoint.live import require_here, require_uncomputed, saved_besides
from weightcast.errors import listed
from weightcast.format.bucket import DTYPE_NAMES

_EXTRA_STATES = ("_extra_state", "__extra_state__")
"""Names of a module's extra state in a state dict, and in a TensorDict."""


def extract(weights: Any, strategy: str = "tensordict", merging: Merging | None = None) -> dict[str, torch.Tensor]:
    """Return the named tensors of a model, or of a TensorDict or dict of extracted weights.

    `strategy`: TorchRL's; only with "state_dict" FSDP1 gathers its parameters. Copied are only adapted layers of a
    model with PEFT adapters, which are merged into the memory of `merging`. Raises TypeError for a leaf other than a
    tensor; ValueError for a doubled name, and for adapters that can't be merged or that came without their model.
    """
    if isinstance(weights, nn.Module):
        weights = _state_dict(weights, strategy, merging or Merging())
    tensors = named_tensors(weights)
    require_merged(tensors)
    return tensors


def named_tensors(weights: TensorDictBase | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the leaves of a (nested) TensorDict or dict under dotted names. Raises what `extract` raises."""
    if not isinstance(weights, Mapping | TensorDictBase):
        raise TypeError(
            f"weights is a {type(weights).__name__}; it must be a module, a TensorDict or a dict of tensors"
        )
    found: dict[str, torch.Tensor] = {}
    _collect(weights, "", found)
    return found


def _collect(weights: Any, prefix: str, found: dict[str, torch.Tensor]) -> None:
    for key, value in weights.items():
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, str) for part in parts):
            where = f"in {prefix!r} " if prefix else "in the weights "
            raise TypeError(f"{key!r} {where}is not the name of a tensor (str): leave it out of the weights")
        name = prefix + ".".join(parts)
        if isinstance(value, torch.Tensor):
            if name in found:
                raise ValueError(f"two tensors have the name {name!r} when keys are joined by dots: rename one")
            found[name] = value
        elif (isinstance(value, Mapping) or is_tensor_collection(value)) and not is_non_tensor(value):
            _collect(value, f"{name}.", found)
        elif not any(part.endswith(_EXTRA_STATES) for part in name.split(".")):
            found_type = type(value.data if isinstance(value, NonTensorData) else value).__name__
            raise TypeError(f"{name!r} is a {found_type}, not a tensor: leave it out of the weights")


def _state_dict(module: nn.Module, strategy: str, merging: Merging) -> dict[str, Any]:
    require_uncomputed(module)
    packed = [name for name in saved_besides(module) if not name.endswith("_extra_state")]
    if packed:
        raise ValueError(
            f"{listed(packed)}: the module's state dict has these beside its parameters and buffers (packed or "
            "quantised weights), and they would be left out: send a module whose weights are plain parameters"
        )
    for name, parameter in module.named_parameters():
        if strategy != "state_dict" or not getattr(parameter, "_fsdp_flattened", False):
            require_here(name, parameter)
    if has_adapters(module):
        return merging.merge(module).state_dict()
    if hasattr(module, "merge_and_unload"):  # it is not of PEFT, but merges its own adapters, in place
        model: Any = copy.deepcopy(module)
        module = model.merge_and_unload()
    return {name: value for name, value in module.state_dict().items() if not name.endswith("_extra_state")}


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as plain strided memory, detached. Raises ValueError for an unsupported tensor.

    A DTensor is gathered, which is a collective call of all its ranks.
    """
    if isinstance(tensor, nn.Parameter):
        require_here(name, tensor)
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{name!r} is {tensor.dtype} of layout {tensor.layout} on {tensor.device}, which weightcast can't send: "
            f"leave it out, or pass it as plain memory of {', '.join(DTYPE_NAMES.values())}"
        )
    tensor = tensor.detach()
    return tensor if type(tensor) in (torch.Tensor, nn.Parameter) else tensor.as_subclass(torch.Tensor)
