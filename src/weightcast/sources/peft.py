"""Source of a PEFT adapter's own tensors, for engines that serve it beside their model: the base is not sent.

peft is never imported here: a process that has a model with adapters has imported it already.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.checkpoint import sharding
from weightcast.checkpoint.live import LiveCheckpoint
from weightcast.errors import listed
from weightcast.format.adapters import LoraConfig
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Regions

_PREFIX = "base_model.model."
_PLAIN = ("use_dora", "lora_bias", "fan_in_fan_out", "layer_replication", "modules_to_save", "alora_invocation_tokens")
"""Options of PEFT's LoraConfig that change the form of an adapter, or the model."""


class PeftAdapterSource:
    """A `Source` of one LoRA adapter of a PEFT model, under the names of PEFT's files. Nothing is copied.

    Publish it with `PublishOptions(target=Adapter("policy"))`. Only the adapter is sent, and engines apply it to their
    own model, so the model here must be the one that they serve. `adapter`: its name in the PEFT model. Sharded
    adapters (FSDP2, tensor-parallel DTensor) are not gathered: see `ModuleSource`. `dtype`: the tensors are cast to it
    while they are packed.

    Raises ValueError, which names the layer, for adapters other than plain LoRA of `nn.Linear` layers, and for a
    scaling that is not alpha / r; here and, if the model changes, in `specs`, `regions` and `lora_config`. Raises
    TypeError for a model without adapters.
    """

    def __init__(self, model: nn.Module, adapter: str = "default", dtype: torch.dtype | None = None) -> None:
        peft_config: object = getattr(model, "peft_config", None)
        if not isinstance(peft_config, Mapping):
            raise TypeError(f"{type(model).__name__} is not a PEFT model: pass what get_peft_model returns")
        if adapter not in peft_config:
            raise ValueError(f"the model has no adapter {adapter!r}; it has {', '.join(map(repr, peft_config))}")
        self._model: Any = model
        self._adapter = adapter
        if isinstance(dtype, str):
            raise TypeError(f"dtype is {dtype!r}; it must be a torch.dtype or None, which keeps the adapter's")
        self._dtype = dtype
        self._layers: dict[str, Any] = {}
        self._parts: dict[str, tuple[nn.Module, nn.Module]] = {}
        self._look()

    @property
    def lora_config(self) -> LoraConfig:
        """Return the adapter's present settings."""
        self._look()
        return self._config

    def specs(self) -> Sequence[TensorSpec]:
        """Return the adapter's specs; the same object until names, shapes or dtypes change."""
        self._look()
        return self._live.specs

    def regions(self) -> Regions:
        """Return this rank's tensors or shards; the same object until the adapter's tensors are replaced."""
        for module in sharding.fsdp_parts(self._model, "FSDPModule"):
            module.reshard()  # optimizers update only the shards
        self._look()
        return self._live.regions()

    def _look(self) -> None:
        """Look for other layers, settings and tensors."""
        self._layers = self._found()
        # Not the layers, which stay when peft deletes an adapter and adds another one of its name.
        parts = {n: (layer.lora_A[self._adapter], layer.lora_B[self._adapter]) for n, layer in self._layers.items()}
        if parts != self._parts:
            self._parts = parts
            self._live = LiveCheckpoint(_tree(parts), buffers="none", dtype=self._dtype, sharded=True)
        self._config = self._read_config()
        self._live.refresh()

    def _found(self) -> dict[str, Any]:
        """Return the layers with this adapter, by the name of the module that they adapt."""
        tuners: Any = sys.modules["peft.tuners.tuners_utils"]
        layers: dict[str, Any] = {}
        for name, layer in self._model.get_base_model().named_modules():
            if not isinstance(layer, tuners.BaseTunerLayer):
                continue
            if not any(self._adapter in getattr(layer, register) for register in layer.adapter_layer_names):
                continue
            lora: Any = sys.modules.get("peft.tuners.lora.layer")
            if lora is None or not isinstance(layer, lora.Linear) or layer.lora_variant.get(self._adapter):
                raise _refused(name, f"{type(layer).__name__} is not plain LoRA of a linear layer")
            if layer.merged_adapters:
                raise _refused(name, "its adapter is merged into the model: call unmerge_adapter() before publish")
            layers[name.replace(".base_layer", "")] = layer
        if not layers:
            raise ValueError(f"no layer of the model has a LoRA adapter {self._adapter!r}")
        return layers

    def _read_config(self) -> LoraConfig:
        config, adapter = self._model.peft_config[self._adapter], self._adapter
        unfit = [name for name in _PLAIN if getattr(config, name, None)]
        if str(getattr(config, "bias", "none")) != "none":
            unfit.append(f"bias={config.bias!r}")
        if unfit:
            raise ValueError(
                f"the adapter {adapter!r} has {listed(unfit, separator=', ')}, which engines can't apply beside their "
                "model: publish the merged model, ModuleSource(model), or train a plain LoRA adapter"
            )
        ranks = {name: int(layer.r[adapter]) for name, layer in self._layers.items()}
        alphas = {name: float(layer.lora_alpha[adapter]) for name, layer in self._layers.items()}
        rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
        found = LoraConfig(
            r=int(rank),
            lora_alpha=float(alpha),
            target_modules=tuple(self._layers),
            use_rslora=bool(config.use_rslora),
            rank_pattern={name: value for name, value in ranks.items() if value != rank},
            alpha_pattern={name: value for name, value in alphas.items() if value != alpha},
        )
        for name, layer in self._layers.items():
            if not math.isclose(layer.scaling[adapter], found.scaling(name), rel_tol=1e-9):
                scaled = f"its scaling is {layer.scaling[adapter]:g}, and alpha / r gives {found.scaling(name):g}"
                raise _refused(name, f"{scaled}: undo scale_layer() or set_scale() before publish")
        return found


def _refused(name: str, what: str) -> ValueError:
    return ValueError(f"{name!r} can't be published as an adapter: {what}; or publish the merged model, ModuleSource")


def _tree(parts: Mapping[str, tuple[nn.Module, nn.Module]]) -> nn.Module:
    """Return a module of nothing but the adapter's own layers, at the places that their names in PEFT's files have."""
    root = nn.Module()
    for name, (lora_a, lora_b) in parts.items():
        part = root
        for step in f"{_PREFIX}{name}".split("."):
            if step not in part._modules:
                part.add_module(step, nn.Module())
            part = part.get_submodule(step)
        part.add_module("lora_A", lora_a)
        part.add_module("lora_B", lora_b)
    return root
