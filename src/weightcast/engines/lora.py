"""LoRA adapters of a module in this process, applied by forward hooks: the module's own tensors stay as they are.

Invariants: a forward pass computes with one version or with none; outside `using` the model computes without; the
result has the bits of PEFT's own layers. A version that a request has begun with stays loaded until the request ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from weightcast.format.adapters import LoraConfig, tensor_name


class _Lora(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class LoraLayers:
    """The `nn.Linear` layers of a model, with their LoRA adapters. Pass it to `ModuleEngine` and `TextGenerator`.

    Memory: each loaded version, on the devices of its layers. Only one thread may use the model at a time.
    """

    max_rank: int | None = None
    capacity: int | None = None
    limits = ""
    is_uniform = False
    ids: Mapping[str, int | str] = MappingProxyType({})

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooked: dict[str, nn.Linear] = {}
        self._loaded: dict[str, dict[str, _Lora]] = {}
        self._labels: Mapping[str, str] = {}
        self._active: Mapping[str, _Lora] = {}
        self._requests = Counter[str]()
        self._lock = threading.Lock()

    def _layers(self) -> dict[str, nn.Linear]:
        return {name: part for name, part in self._model.named_modules() if isinstance(part, nn.Linear)}

    # --- the engine's side ---

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        return {name: (layer.out_features, layer.in_features) for name, layer in self._layers().items()}

    def add(self, label: str, tensors: Mapping[str, torch.Tensor], config: LoraConfig, *, origin: str) -> None:
        layers, loras = self._layers(), dict[str, _Lora]()
        for module in config.target_modules:
            device = layers[module].weight.device
            a, b = (tensors[tensor_name(module, half)].to(device) for half in ("A", "B"))
            loras[module] = _Lora(a, b, config.scaling(module))
        for module in loras:
            if self._hooked.get(module) is not layers[module]:  # not yet, or the model has another layer there by now
                layers[module].register_forward_hook(self._hook(module))
                self._hooked[module] = layers[module]
        self._loaded[label] = loras

    def remove(self, label: str) -> None:
        self._loaded.pop(label, None)

    def name(self, labels: Mapping[str, str]) -> None:
        with self._lock:
            self._labels = dict(labels)

    def in_use(self) -> Collection[str]:
        with self._lock:
            return set(self._requests)

    def _hook(self, module: str) -> Any:
        def add_lora(layer: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor | None:
            lora = self._active.get(module)
            if lora is None:
                return None
            # In the order of PEFT's own layers, for the same bits.
            change = functional.linear(functional.linear(args[0].to(lora.a.dtype), lora.a), lora.b) * lora.scaling
            return (result + change).to(result.dtype)

        return add_lora

    # --- the generator's side ---

    def names(self) -> list[str]:
        """Return the names that a request can have: `policy` for the newest version, `policy@7` for one of them."""
        with self._lock:
            return sorted(self._labels)

    def begin_request(self, name: str) -> str:
        """Return the label of the version that answers a request for `name`, and keep it until `end_request`.

        Raises LookupError for an unknown name.
        """
        with self._lock:
            if name not in self._labels:
                known = ", ".join(sorted(self._labels)) or "none yet"
                raise LookupError(f"there is no adapter {name!r}; published adapters: {known}")
            label = self._labels[name]
            self._requests[label] += 1
            return label

    def end_request(self, label: str) -> None:
        with self._lock:
            self._requests[label] -= 1
            if not self._requests[label]:
                del self._requests[label]

    @contextlib.contextmanager
    def using(self, label: str) -> Iterator[None]:
        """Compute with this version, as `begin_request` has returned it; with "" by the model alone."""
        self._active = self._loaded[label] if label else {}
        try:
            yield
        finally:
            self._active = {}
