"""One rank's model as an engine, installed through the loader that it has: what does not depend on whose loader it is.

Invariants: `validate` writes nothing that is live; `load` installs a whole offer in one call; tensors that it is given
are not kept; with the `agree` of several ranks, `snapshot`, `load`, `commit` and what `snapshot` returned raise on all
ranks or on none.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from weightcast.errors import IncompleteUpdateError, InstallError, UnsupportedError, listed
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.integrations.plugin.acceptance import Acceptance, AcceptedOffer

Agree: TypeAlias = Callable[[BaseException | None], None]
"""Called once per step on every rank with its own error or None; raises on every rank if any had one."""

Tensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]


def alone(error: BaseException | None) -> None:
    """The agreement of an engine of one rank."""
    if error is not None:
        raise error


class LoaderEngine(abc.ABC):
    """An `Engine` that is `Validating` and `Undoable`. Its weights can't be read: they are held fused and sliced.

    `acceptance`: None where `unsupported` names features that keep this engine from being updated. Calls come from one
    thread at a time, between two steps of generation.
    """

    def __init__(self, acceptance: Acceptance | None, unsupported: Sequence[str], agree: Agree) -> None:
        self._acceptance = acceptance
        self._unsupported = unsupported
        self._agree = agree
        self._offer: tuple[str, AcceptedOffer] | None = None
        self._missing: list[str] | None = None

    @abc.abstractmethod
    def _install(self, tensors: Tensors, calls: Mapping[str, int]) -> list[str]:
        """Load all tensors; returns when the device is done. Which layers were not filled, in words.

        `calls`: as in `AcceptedOffer`.
        """

    @abc.abstractmethod
    def _copy(self) -> Callable[[], None]:
        """Copy this rank's weights to host memory; what it returns puts them back, wherever an install has failed."""

    def _drop_caches(self) -> None:  # noqa: B027  (nothing to do where the engine's caller drops them)
        """Forget what was computed with the former weights. Raises InstallError."""

    def specs(self) -> None:  # noqa: B027  (it is what it says)
        """What it accepts is no list: `validate` says."""

    def validate(self, manifest: Manifest) -> None:
        """Whether an install of this offer would set all that the start of the engine has set, and nothing else.

        Raises IncompatibleWeightsError, naming every tensor that is unknown, unfit, missing or doubled. What is
        accepted is the next `load`'s; a manifest of the same digest is not tried again. What this proves: `acceptance`.
        """
        if self._acceptance is None:
            raise UnsupportedError(f"weightcast can't update an engine with {', '.join(self._unsupported)}")
        digest = manifest.digest()
        if self._offer is None or self._offer[0] != digest:
            self._offer = digest, self._acceptance.accept(manifest)

    def load(self, tensors: Tensors) -> None:
        """Install all tensors of the offer that was accepted last, in one call; returns when the device is done.

        Raises what the model's loader raises, or InstallError; the weights are then of no version, but the model whole.
        """
        with self._agreed():
            if self._offer is None:
                raise InstallError("nothing was validated: an offer comes before an install")
            accepted = self._offer[1]
            due = set(accepted.names)
            self._missing = ["every tensor"]
            short = self._install(_handed(tensors, accepted, due), accepted.calls)
            self._missing = [*sorted(due), *short]

    def commit(self, version: WeightVersion) -> None:
        """Raises IncompleteUpdateError, naming the tensors that did not come and the layers that were not filled."""
        with self._agreed():
            if self._missing is None:
                raise IncompleteUpdateError(f"version {version.number} was not loaded")
            if self._missing:
                raise IncompleteUpdateError(
                    f"version {version.number} was not loaded whole, missing: {listed(self._missing, most=20)}"
                )
            self._drop_caches()
            self.discard()

    def discard(self) -> None:
        """Forget what `load` noted."""
        self._missing = None

    def snapshot(self) -> Callable[[], None]:
        """Copy this rank's weights to host memory; what it returns puts them back, wherever a `load` has failed.

        Takes the memory of this rank's parameters once more, and the time to copy it.
        """
        with self._agreed():
            restore = self._copy()

        def put_back() -> None:
            with self._agreed():
                restore()
                self.discard()

        return put_back

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """One step of all ranks: what any of them raises, all raise."""
        try:
            yield
        except BaseException as exc:
            self._agree(exc)
            raise
        self._agree(None)


def _handed(tensors: Tensors, accepted: AcceptedOffer, due: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """What the loader is to be given; takes it out of `due`. Tied names must come with equal values."""
    owners = set(accepted.tied.values())
    shared: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        owner = accepted.tied.get(name, name)
        first = shared.setdefault(owner, tensor) if owner in owners else tensor
        if first is not tensor and not (first.dtype == tensor.dtype and torch.equal(first, tensor)):
            raise InstallError(
                f"{name!r} is tied to other weights in this engine, but came with values of its own", torn=True
            )
        if name in due:
            due.remove(name)
            yield name, tensor
