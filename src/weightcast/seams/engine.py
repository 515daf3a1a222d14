"""The seam of engines: an object that holds a served model, in the process of its worker, and takes new weights.

One update, called by the worker:

    Engine.specs()                       when a version is offered
    Engine.load(tensors)                 staged: once, while the engine is paused; streaming: for each bucket
    Engine.commit(version)               every tensor was loaded: serve the version
    Engine.discard()                     any failure

Optional abilities are Protocols of one member, asked with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion


@runtime_checkable
class Engine(Protocol):
    """Serves a model, in the process that holds it. Calls come from one thread at a time."""

    def specs(self) -> Sequence[TensorSpec] | None:
        """Return the tensors that the engine accepts, or None if it cannot know; then `load` must refuse others.

        Returns the same object as long as nothing has changed, so that an offer is checked once.
        """

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors in checkpoint form, whole load groups. They are valid only during the call; don't write to them.

        Called once per install when staged, once per bucket when streaming, never while the engine generates; with no
        tensors if the engine is `Mapped` and has all of them copied. GPU work must be queued on the calling thread's
        stream, or be complete when `load` returns: the caller waits for that stream before it uses the tensors' memory
        again, and before `commit`.
        """

    def commit(self, version: WeightVersion) -> None:
        """Every tensor was loaded: drop caches, serve `version`. Raises IncompleteUpdateError if one is missing."""

    def discard(self) -> None:
        """The update is given up: forget what `load` noted. The weights themselves are restored by an undo, or torn."""


@runtime_checkable
class Casting(Protocol):
    """An engine that was asked to take other dtypes than its own; `offered` and `held` are dtype names."""

    def can_cast(self, offered: str, held: str) -> bool: ...


@runtime_checkable
class SaysDtypes(Protocol):
    """An engine that can say in which dtypes it has tensors of these names and shapes, where `specs` can't list them.

    By record name; names that it does not know, or has no part of, are left out.
    """

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str]: ...


@runtime_checkable
class Validating(Protocol):
    """An engine that can try an offer without touching its model, where `specs` can't say all that it accepts.

    `validate` raises IncompatibleWeightsError, whose problems name every tensor that is unknown, unfit or missing.
    Called in the thread of the offer, once per manifest and object of `specs`.
    """

    def validate(self, manifest: Manifest) -> None: ...


@runtime_checkable
class Undoable(Protocol):
    """An engine that can go back: `snapshot` copies the live weights to host memory and returns what restores them."""

    def snapshot(self) -> Callable[[], None]: ...


@runtime_checkable
class OnDevice(Protocol):
    """An engine that says where its weights are; of any other: host memory.

    Receivers use the first of these devices that is a GPU, and an install waits for the kernels of all of them.
    """

    @property
    def devices(self) -> Collection[torch.device]: ...


@runtime_checkable
class ExposesTensors(Protocol):
    """An engine whose live weights can be read, in checkpoint form, while it is paused or between its steps."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...
