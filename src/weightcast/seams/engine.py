"""The seam of engines: an object with a served model, in its worker's process, that installs new weights.

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
    """An engine with a served model in this process. It is called from one thread at a time."""

    def specs(self) -> Sequence[TensorSpec] | None:
        """Return the tensors that the engine accepts, or None if it does not know them; then `load` must refuse others.

        Return the same object as long as nothing has changed, so that an offer is checked only once. An engine that is
        `Mapped` need not look at its tensors' memory for that: its map's `bind` is called before a manifest is refused,
        and before each install.
        """

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors in checkpoint form, whole load groups. They are valid only during the call; don't write to them.

        Called once per install when staged, once per bucket when streaming, never while the engine generates; with no
        tensors if the engine is `Mapped` and has all of them copied. GPU work must be queued on the calling thread's
        stream, or be complete when `load` returns: the caller waits for that stream before it uses the tensors' memory
        again, and before `commit`.
        """

    def commit(self, version: WeightVersion) -> None:
        """Every tensor was loaded: drop caches, serve `version`. Raises IncompleteUpdateError if one is missing."""

    def discard(self) -> None:
        """Forget the state of an aborted update. The weights themselves are restored by an undo, or torn."""


@runtime_checkable
class Casting(Protocol):
    """An engine that accepts other dtypes than its own. `offered`, `held`: dtype names."""

    def can_cast(self, offered: str, held: str) -> bool: ...


@runtime_checkable
class SaysDtypes(Protocol):
    """An engine that can report its dtypes of given tensors, although `specs` can't list its tensors.

    The result is by name; names that are unknown, or of which the engine has no part, are left out.
    """

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str]: ...


@runtime_checkable
class Validating(Protocol):
    """An engine that can check an offer without changing its model, if `specs` can't describe all that it accepts.

    `validate` raises IncompatibleWeightsError, whose `problems` name every unknown, unfit or missing tensor. It is
    called in the offer's thread, once per manifest and object of `specs`.
    """

    def validate(self, manifest: Manifest) -> None: ...


@runtime_checkable
class Undoable(Protocol):
    """An engine whose install can be undone: `snapshot` copies the live weights to host memory, and returns a function
    that restores them."""

    def snapshot(self) -> Callable[[], None]: ...


@runtime_checkable
class OnDevice(Protocol):
    """An engine that reports the devices of its weights; any other engine's are assumed in host memory.

    Receivers use the first of these devices that is a GPU, and an install waits for the kernels of all of them.
    """

    @property
    def devices(self) -> Collection[torch.device]: ...


@runtime_checkable
class ExposesTensors(Protocol):
    """An engine whose live weights can be read, in checkpoint form, while it is paused or between its steps."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...
