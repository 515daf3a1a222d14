"""One rank's model of a running vLLM as an engine: tries an offer, installs through vLLM's own loader, goes back.

Invariants: `validate` writes nothing that is live; `load` is one whole layerwise reload, after which no layer is left
on the meta device, also when it fails; tensors that it is given are not kept; with the `agree` of several ranks,
`snapshot`, `load`, `commit` and what `snapshot` returned raise on all ranks or on none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from weightcast.errors import IncompleteUpdateError, InstallError, UnsupportedError
from weightcast.integrations.vllm import internals, reload, undo
from weightcast.integrations.vllm.acceptance import Acceptance, Accepted, acceptance
from weightcast.integrations.vllm.reference import reference
from weightcast.manifest import Manifest, WeightVersion

Agree: TypeAlias = Callable[[BaseException | None], None]
"""Called once per step on every rank with its own error or None; raises on every rank if any had one."""

_MAX_NAMED = 20


def alone(error: BaseException | None) -> None:
    """The agreement of an engine of one rank."""
    if error is not None:
        raise error


class VllmModel:
    """An `Engine` that is `Validating` and `Undoable`. Its weights can't be read: vLLM holds them fused and packed.

    Made in vLLM's worker, once its model is loaded: raises UnsupportedError if this vLLM lacks what is leant on, or if
    the model's loader can't be tried. Calls come from one thread at a time, between two steps of generation. With a
    feature that is `internals.unsupported`, every offer is refused.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device, *, agree: Agree = alone) -> None:
        internals.require()
        self._unsupported = internals.unsupported(vllm_config)
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._agree = agree
        self._acceptance: Acceptance | None = None
        if not self._unsupported:
            reload.require_work_rounds(model)
            self._acceptance = acceptance(model, vllm_config, reference(vllm_config))
        self._offer: tuple[str, Accepted] | None = None
        self._missing: list[str] | None = None

    def specs(self) -> None:
        """What it accepts is no list: `validate` says."""

    def validate(self, manifest: Manifest) -> None:
        """Whether an install of this offer would set all that the start of this vLLM has set, and nothing else.

        Raises IncompatibleWeightsError, naming every tensor that is unknown, unfit, missing or doubled. What is
        accepted is the next `load`'s; a manifest of the same digest is not tried again. What this proves: `acceptance`.
        """
        if self._acceptance is None:
            raise UnsupportedError(f"weightcast can't update an engine with {', '.join(self._unsupported)}")
        digest = manifest.digest()
        if self._offer is None or self._offer[0] != digest:
            self._offer = digest, self._acceptance.accept(manifest)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Install all tensors of the offer that was accepted last, in one call; returns when the device is done.

        Raises what vLLM's loader raises, or InstallError; the weights are then of no version, but the model whole.
        """
        with self._agreed():
            if self._offer is None:
                raise InstallError("nothing was validated: an offer comes before an install")
            accepted = self._offer[1]
            due = set(accepted.names)
            self._missing = ["the whole of it"]
            short = reload.reload(self._model, self._vllm_config, _handed(tensors, accepted, due), accepted.layers)
            self._missing = [*sorted(due), *short]
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def commit(self, version: WeightVersion) -> None:
        """Raises IncompleteUpdateError, naming the tensors that did not come and the layers that were not filled."""
        with self._agreed():
            if self._missing is None:
                raise IncompleteUpdateError(f"version {version.number} was not loaded")
            if self._missing:
                raise IncompleteUpdateError(f"version {version.number} was not loaded whole: {_named(self._missing)}")
            self.discard()

    def discard(self) -> None:
        """Forget what `load` noted."""
        self._missing = None

    def snapshot(self) -> Callable[[], None]:
        """Copy this rank's weights to host memory; what it returns puts them back, wherever a `load` has failed.

        Takes the memory of this rank's parameters once more, and the time to copy it.
        """
        restore: Callable[[], None] | None = None
        with self._agreed():
            restore = undo.snapshot(self._model)

        def put_back() -> None:
            with self._agreed():
                restore()
                self.discard()

        return put_back

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """One step of all ranks: what any of them raises, all raise."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as exc:
            error = exc
        self._agree(error)
        if error is not None:
            raise error


def _handed(
    tensors: Iterable[tuple[str, torch.Tensor]], accepted: Accepted, due: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the loader is to be given; takes it out of `due`. Tied names must come with equal values."""
    owners = set(accepted.tied.values())
    shared: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        owner = accepted.tied.get(name, name)
        if owner in owners and not _equal(shared.setdefault(owner, tensor), tensor):
            raise InstallError(f"{name!r} is tied to other weights in vLLM, but came with values of its own", torn=True)
        if name in due:
            due.remove(name)
            yield name, tensor


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))


def _named(missing: Sequence[str]) -> str:
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return ", ".join(missing[:_MAX_NAMED]) + more
