"""One rank's model as an engine that installs through the model's own loader: the code shared by all such engines.

Invariants: `validate` writes no live tensor; a load begins with its first tensors and ends with its last ones, or with
`discard`; received tensors are not kept.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from weightcast.errors import IncompleteUpdateError, InstallError, UnsupportedError, listed
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.host import copy as host_copy
from weightcast.host import device as host_device
from weightcast.host.closing import on_failure
from weightcast.integrations.plugin.acceptance import Acceptance, AcceptedOffer, ties
from weightcast.integrations.plugin.draft import ModelWithDraft
from weightcast.integrations.plugin.dry_run import DryRunOutcome
from weightcast.serving.install_map import RecordedMap, is_tied, layers_of

Tensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]


def unsupported(features: Sequence[str]) -> UnsupportedError:
    """Return the error for an engine with features with which weightcast can't update it."""
    return UnsupportedError(f"weightcast can't update an engine with {'; '.join(features)}: start it without", features)


@dataclasses.dataclass
class _Load:
    """A load in progress. `due`: names still to come. `first`: of tied names that come separately, the first tensor.

    `copied`: names that the worker copies. `waiting`: tensors that the loader must get in one call with others that are
    still to come.
    """

    due: set[str]
    copied: Collection[str]
    first: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    waiting: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class LoaderEngine(abc.ABC):
    """An `Engine` that is `Validating`, `Undoable`, `Mapped` and `OnDevice`. Created once the model is loaded.

    `host`: the engine's kind, for errors. `may_move`: it computes with layers that have changed places where they are
    now; otherwise it may compute with the former layer. `unsupported`: features with which this engine can't be
    updated; without any its loader has a dry run. `is_alone`: the engine has one rank. Call it from one thread at a
    time, between two steps of generation.
    """

    device: torch.device
    host: ClassVar[str]
    may_move: ClassVar[bool] = False

    def __init__(self, model: nn.Module, unsupported: Sequence[str], *, is_alone: bool) -> None:
        self._model = model
        self._is_alone = is_alone
        self._layers = layers_of(model)
        self._started_with = weakref.WeakValueDictionary(self._layers)
        self._acceptance = None if unsupported else self._make_acceptance()
        self.unsupported = unsupported
        self._ties = ties(model)
        self._offer: tuple[str, AcceptedOffer] | None = None
        self._apart: set[str] = set()
        """Names to which other names of the same offer are tied."""
        self._load: _Load | None = None
        self._copied_at = 0
        """The revision of the install map that this update uses."""

    @abc.abstractmethod
    def _header(self) -> Sequence[TensorSpec] | None:
        """Return the tensors of the checkpoint that the model was started from; None if they can't be read."""

    @abc.abstractmethod
    def _dry_run(self, model: nn.Module, specs: Sequence[TensorSpec]) -> DryRunOutcome:
        """Make a dry run of a model's loader on tensors like these, in this order."""

    @abc.abstractmethod
    def _begin_load(self, calls: Mapping[str, int]) -> None:
        """Prepare the model for its loader. `calls`: see `DryRunOutcome`; only layers that the loader fills."""

    def _load_some(self, tensors: Tensors) -> None:
        """Have the model's loader take these tensors."""
        loader: Any = self._model
        loader.load_weights(tensors)

    def _finish_load(self) -> list[str]:
        """Finish a load after all tensors have come. Return the layers that were not filled."""
        self._end_load()
        return []

    def _prepare_dry_run(self) -> None:  # noqa: B027  (nothing to do where the loader runs as it is)
        """Prepare for a dry run of a model whose layers are those of the start. Raises UnsupportedError."""

    def _end_load(self) -> None:  # noqa: B027  (nothing to do where no load can be left half-way)
        """End an unfinished load, before the undo copy is made and after it was restored. Idempotent."""

    def _drop_caches(self) -> None:  # noqa: B027  (nothing to do where the engine's caller drops them)
        """Drop caches that were computed with the former weights. Raises InstallError."""

    def _make_acceptance(self) -> Acceptance:
        """Make a dry run of the loader. Raises UnsupportedError if a layer with tensors was replaced meanwhile."""
        known = set(self._started_with.values())
        strange = [
            name
            for name, layer in layers_of(self._model).items()
            if (layer not in known if self.may_move else self._started_with.get(name) is not layer)
            and any(tensor is not None for tensor in (*layer._parameters.values(), *layer._buffers.values()))
        ]
        if strange:
            raise UnsupportedError(
                f"{listed(strange)} took another layer's place since {self.host} has loaded the model, and {self.host} "
                "may compute with the former layer, or not know how the new one's weights are loaded: put the former "
                f"layer back, or restart {self.host}"
            )
        self._prepare_dry_run()
        specs = self._header()
        if specs is not None and isinstance(self._model, ModelWithDraft):
            specs = [*specs, *self._model.own]
        return Acceptance(self._model, self._dry_run, specs, is_alone=self._is_alone)

    @property
    def devices(self) -> list[torch.device]:
        return [self.device]

    def specs(self) -> None:  # noqa: B027  (it is what it says)
        """Return None: `validate` decides about an offer."""

    def validate(self, manifest: Manifest) -> None:
        """Check that an install of this offer would set exactly the weights that the engine's start has set.

        Raises IncompatibleWeightsError with every tensor that is unknown, unfit, missing or doubled. The next `load`
        must be of the accepted offer; a manifest with the same digest is not checked again. See `acceptance` for the
        limits of the check. If layers were replaced since the last dry run, another one is made, and UnsupportedError
        is raised if the loader would not set all weights that the engine uses.
        """
        if self._acceptance is None:
            raise unsupported(self.unsupported)
        apart = [name for name, owner in self._ties.items() if not is_tied(self._model, name, owner)]
        if apart:
            what = ", ".join(f"{name!r} was {self._ties[name]!r}" for name in apart[:8])
            raise UnsupportedError(
                f"when this engine was started {what}, and is another tensor now, which the loader of "
                f"{type(self._model).__name__} does not set: tie them again, or restart the engine"
            )
        digest, layers = manifest.digest(), layers_of(self._model)
        if layers != self._layers or (self._offer is not None and self._offer[1].install_map.is_stale):
            # Layers or parameters were replaced since the last dry run.
            self._offer, self._acceptance, self._layers = None, self._make_acceptance(), layers
        if self._offer is None or self._offer[0] != digest:
            accepted = self._acceptance.accept(manifest)
            owners = Counter(owner for r in manifest.tensors for owner in {accepted.tied.get(n, n) for n in r.names})
            self._apart = {owner for owner in accepted.tied.values() if owners[owner] > 1}
            self._offer = digest, accepted

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str]:
        """Return this rank's dtypes of these tensors, for those of which its loader uses a part."""
        if self._acceptance is None:
            raise unsupported(self.unsupported)
        return self._acceptance.dtypes(specs)

    @property
    def install_map(self) -> RecordedMap | None:
        return None if self._offer is None else self._offer[1].install_map

    def weights_lost(self) -> None:
        """Note that the live memory lost its content: the next install goes through the loader, which sets padding."""
        if self._offer is not None and any(target.padded for target in self._offer[1].outcome.targets.values()):
            self._offer[1].install_map.expire()

    def begin(self, copied: Collection[str]) -> None:
        """Begin the install of the last accepted offer. The worker copies the tensors named in `copied`."""
        if self._offer is None:
            raise InstallError("no offer was validated: offer a version before its install")
        accepted = self._offer[1]
        if layers_of(self._model) != self._layers:
            raise InstallError("layers of the model were replaced since the offer: publish again")
        self.discard()
        self._load = _Load(set(accepted.names).difference(copied), copied)
        self._copied_at = accepted.install_map.revision
        calls = accepted.outcome.calls
        filled = accepted.install_map.modules(copied) if calls else ()
        with torch.no_grad(), on_failure(self.discard):
            self._begin_load({m: number for m, number in calls.items() if m not in filled})

    def load(self, tensors: Tensors) -> None:
        """Have the loader load tensors of the last accepted offer; others may follow in later calls.

        Copies are kept only of tied tensors that come separately, and of tensors that the loader must get in one call
        with later ones. Raises what the model's loader raises, or InstallError; the weights are then torn, but the
        model's structure is intact.
        """
        if self._load is None:
            self.begin(())
        load = self._load
        assert load is not None
        assert self._offer is not None
        kept = [(load.first, set(load.first)), (load.waiting, set(load.waiting))]
        with torch.no_grad(), on_failure(self.discard):
            handed = self._handed(tensors, self._offer[1], load)
            first = next(handed, None)
            if first is not None:
                self._load_some(itertools.chain([first], handed))
        if load.due:
            for held, former in kept:
                held.update({name: held[name].clone() for name in held.keys() - former})

    def _handed(self, tensors: Tensors, accepted: AcceptedOffer, load: _Load) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors for the loader, and remove all received names from `load.due`. Copied tensors are skipped.

        Raises InstallError if tied names come with different values.
        """
        for name, tensor in tensors:
            owner = accepted.tied.get(name, name)
            first = load.first.setdefault(owner, tensor) if owner in self._apart else tensor
            if first is not tensor and not (first.dtype == tensor.dtype and torch.equal(first, tensor)):
                raise InstallError(
                    f"{name!r} is tied to other weights in this engine, but came with different values: tie them in "
                    "the trainer too",
                    torn=True,
                )
            if name in load.due:
                # Cloned if the loader writes to it, since others may read the same bucket.
                load.waiting[name] = tensor.clone() if name in accepted.outcome.overwritten else tensor
                group = accepted.outcome.together.get(name, {name})
                if group <= load.waiting.keys():
                    load.due -= group
                    yield from [(each, load.waiting.pop(each)) for each in list(load.waiting) if each in group]

    def commit(self, version: WeightVersion) -> None:
        """Finish the load and wait for the device, after which every parameter has the new values.

        Raises IncompleteUpdateError with the missing tensors and the layers that were not filled; InstallError (torn)
        if parameters that were copied to were replaced meanwhile (also by `param.data = ...`).
        """
        load, found = self._load, self.install_map
        if load is None:
            raise IncompleteUpdateError(f"version {version.number} was not loaded: publish again")
        with torch.no_grad(), on_failure(self.discard):
            missing = [*sorted(load.due), *self._finish_load()]
            host_device.synchronize(self.device)
            if missing:
                raise IncompleteUpdateError(
                    f"version {version.number} was not loaded completely, missing: {listed(missing, most=20)}; publish "
                    "all tensors"
                )
        if load.copied and not (found and found.bind() and found.revision == self._copied_at):
            raise InstallError("the model's parameters were replaced during the update: publish again", torn=True)
        self._drop_caches()
        self._load = None

    def discard(self) -> None:
        """End a load in progress and forget it; the weights are then torn."""
        if self._load is not None:
            self._load = None
            self._end_load()

    def snapshot(self) -> Callable[[], None]:
        """Copy this rank's weights to host memory; return a function that restores them after a failed `load`.

        Host memory: that of the weights that an install overwrites on this rank. Weights that an engine has packed for
        its kernels are not copied: the old packed weights stay in memory beside the new ones until the copy is dropped.
        Storage addresses are kept, so that captured graphs stay valid.
        """
        assert self._offer is not None, "an undo copy is made for the install of an accepted offer"
        self._end_load()
        outcome, install_map = self._offer[1].outcome, self._offer[1].install_map
        restore, restore_map = undo_copy(self._model, self._written(outcome), outcome.beside), install_map.snapshot()

        def put_back() -> None:
            restore()
            restore_map()
            self._end_load()
            self.discard()

        return put_back

    def _written(self, outcome: DryRunOutcome) -> Collection[str]:
        """Return the names of the modules that an install writes to, by the dry run of it."""
        return outcome.modules


_PACKERS = ("quant_method", "impl", "scheme", "kernel", "fp8_linear")
"""Attributes by which a module, and these objects in turn, delegate the packing of weights, which they may keep."""
_OWN_CONTAINERS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
"""Types of a module's attributes that are copied; of others the reference is kept."""


def undo_copy(
    model: nn.Module, written: Collection[str] | None = None, beside: Iterable[torch.Tensor] = ()
) -> Callable[[], None]:
    """Copy a model's weights; return a function that restores them, also in the middle of a load, and repeatedly.

    `written`: names of the modules whose parameters and buffers may change; None: all. `beside`: other tensors that may
    change.
    """
    saved: list[tuple[Any, dict[str, Any]]] = []
    subjects: list[Any] = list(model.modules())
    for subject in subjects:
        saved.append((subject, _copied(vars(subject))))
        for name in _PACKERS:
            packer = vars(subject).get(name)
            # A class has a read-only mapping.
            if not isinstance(packer, nn.Module) and isinstance(getattr(packer, "__dict__", None), dict):
                subjects.append(packer)
    unique = {id(tensor): tensor for tensor in beside}
    for name, layer in model.named_modules():
        if written is None or name in written:
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                unique[id(tensor)] = tensor
    live = list(unique.values())
    values = [tensor.data for tensor in live]
    with torch.inference_mode():
        copies = [torch.empty(value.shape, dtype=value.dtype, device="cpu") for value in values]
        host_copy.copy_all(copies, values)

    def restore() -> None:
        for subject, attributes in saved:
            subject.__dict__.clear()
            subject.__dict__.update(_copied(attributes))
        for tensor, value in zip(live, values, strict=True):
            tensor.data = value
        with torch.inference_mode():
            host_copy.copy_all(values, copies)

    return restore


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(value) if name in _OWN_CONTAINERS else value for name, value in attributes.items()}
