"""The seam of adapters: sources of an adapter's tensors, and engines whose model computes with adapters.

One update of an adapter, called by the worker:

    ServesAdapters.adapters              when the worker is made
    AdapterLayers.shapes(), .max_rank    when a version is offered
    AdapterLayers.add(label, ...)        at the install: loaded, but no request can name it yet
    AdapterLayers.name(labels)           from now on requests are answered by these versions
    AdapterLayers.remove(label)          a version that has no name and no request any more; or as the undo of `add`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch

from weightcast.format.adapters import LoraConfig


@runtime_checkable
class AdapterSource(Protocol):
    """A source of an adapter's own tensors, under PEFT's names (see `format.adapters`)."""

    @property
    def lora_config(self) -> LoraConfig:
        """Return the adapter's present settings, equal on all trainer ranks."""


class AdapterLimits(Protocol):
    """The adapters that an engine can load.

    `max_rank`: the largest supported rank; None for any. `capacity`: how many versions can be loaded at once; None for
    any. `limits`: how an engine with larger ones is started. `is_uniform`: all layers must have one rank and one alpha.
    """

    max_rank: int | None
    capacity: int | None
    limits: str
    is_uniform: bool

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Return by module name the outputs and inputs of each layer that an adapter can change."""


class AdapterLayers(AdapterLimits, Protocol):
    """The layers of an engine's model that compute with LoRA adapters. Called from one thread at a time.

    `ids`: by label, the ids of loaded versions in the host's requests, equal on all ranks; empty if there are none.
    """

    ids: Mapping[str, int | str]

    def add(self, label: str, tensors: Mapping[str, torch.Tensor], config: LoraConfig, *, origin: str) -> None:
        """Load a version, whose tensors have been checked and are the callee's from now on. Changes no answer.

        `origin`: differs for versions of one label from different runs. Raises any exception, with nothing loaded.
        """

    def remove(self, label: str) -> None:
        """Unload a version. Idempotent."""

    def name(self, labels: Mapping[str, str]) -> None:
        """Answer requests that name a key of `labels` with the version of that label, and no others."""

    def in_use(self) -> Collection[str]:
        """Return the labels of versions that must stay loaded for requests."""


@runtime_checkable
class ServesAdapters(Protocol):
    """An engine that can serve adapters; `adapters` is None if it was started without."""

    @property
    def adapters(self) -> AdapterLayers | None: ...


class RequestAdapters(Protocol):
    """The adapters of a model, from the side of a generator in the same process. Thread-safe, but for `using`."""

    def names(self) -> list[str]:
        """Return the names that a request can have."""

    def begin_request(self, name: str) -> str:
        """Return the label of the version that answers a request for `name`, which stays loaded until `end_request`.

        Raises LookupError for an unknown name.
        """

    def end_request(self, label: str) -> None: ...

    def using(self, label: str) -> AbstractContextManager[None]:
        """Return a context in which the model computes with this version; "" stands for the model alone."""
