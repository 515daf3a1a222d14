"""Checks that an offer fits the model of one rank, by its start-up checkpoint or only by a dry run.

Guarantees of the two checks:

- `ByReference` uses the names, shapes and dtypes of the start-up checkpoint and, from one dry run of it, the set of
  names that this rank's loader uses. An offer must have the same, so that its install sets what the start set. Names
  that the loader would also accept, but that the checkpoint lacks, are refused.
- `ByDryRun` runs the loader on the offer itself. It finds names that the loader refuses or, in an engine of one rank,
  ignores; parameters that would not be set or be set twice; dtypes that differ from the live ones. A tensor that is too
  large is found only in an engine of one rank: one of several ranks loads its part of any tensor.

Neither check can detect two exchanged tensors of one shape, or a transposed square one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from weightcast.checkpoint.live import CASTABLE
from weightcast.errors import UnsupportedError, listed
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import ITEMSIZE_BYTES, Manifest, TensorSpec
from weightcast.integrations.plugin.draft import draft_remedies
from weightcast.integrations.plugin.dry_run import DryRunOutcome
from weightcast.serving.admission import dtype_remedies, misfit_error
from weightcast.serving.install_map import RecordedMap


@dataclasses.dataclass(frozen=True)
class AcceptedOffer:
    """An offer that fits. `names`: the names that the loader must get. `tied`: name to name of equal values.

    `outcome`: of a dry run of it. `install_map`: the recorded copies.
    """

    names: frozenset[str]
    tied: Mapping[str, str]
    outcome: DryRunOutcome
    install_map: RecordedMap


Trial: TypeAlias = Callable[[Sequence[TensorSpec]], DryRunOutcome]
"""A dry run of the model's loader on tensors like these, in this order."""


@dataclasses.dataclass(frozen=True)
class _Held:
    spec: TensorSpec
    dtypes: frozenset[str]
    kept: str
    is_required: bool = False


class ByReference:
    """Compares offers with the start-up checkpoint, of which it makes one dry run on creation."""

    def __init__(self, model: nn.Module, trial: Trial, reference: Sequence[TensorSpec]) -> None:
        self._accepted = accepted = _accepted(model, trial, reference)
        outcome = accepted.outcome
        if outcome.faults:
            raise UnsupportedError(
                f"the loader of {type(model).__name__} fails in a dry run, so weightcast can't update this engine: "
                f"{listed(_faults(outcome))}"
            )
        self._held: dict[str, _Held] = {}
        for spec in reference:
            if spec.name in accepted.names:
                num_used, dtypes = outcome.used[spec.name]
                known = frozenset({spec.dtype, *(DTYPE_NAMES[dtype] for dtype in dtypes)})
                self._held[spec.name] = _Held(spec, known, _kept(spec.dtype, dtypes), is_required=num_used > 0)
        for name, owner in accepted.tied.items():
            self._held[name] = dataclasses.replace(self._held[owner], is_required=False)

    def accept(self, manifest: Manifest) -> AcceptedOffer:
        """Accept an offer, or raise IncompatibleWeightsError with every tensor that does not fit."""
        problems = []
        offered, misfits = set[str](), set[tuple[str, str]]()
        for record in manifest.tensors:
            known = [name for name in record.names if name in self._held]
            if not known:
                problems.append(f"unknown tensor {_shown(record)}")
            for name in known:
                held = self._held[name]
                problems += _differences(name, record, held)
                if record.dtype not in held.dtypes:
                    misfits.add((record.dtype, held.spec.dtype))
            offered.update(known)
        missing = (h.spec for name, h in self._held.items() if h.is_required and name not in offered)
        problems += [f"missing tensor {_shown(spec)}" for spec in missing]
        if problems:
            remedies = dtype_remedies(misfits, {held.spec.dtype for held in self._held.values()})
            offers = (name for record in manifest.tensors for name in record.names)
            raise misfit_error(problems, [*remedies, *draft_remedies(offers, self._held)])
        return dataclasses.replace(self._accepted, names=frozenset(offered - self._accepted.tied.keys()))

    def dtypes(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """Return, by record name, the rank's dtypes of the tensors of which it has a part."""
        known = {spec.name: next((n for n in spec.names if n in self._held), None) for spec in specs}
        return {name: self._held[held].kept for name, held in known.items() if held is not None}


@dataclasses.dataclass(frozen=True)
class ByDryRun:
    """Makes a dry run of each offer. `is_alone`: the engine has one rank."""

    model: nn.Module
    trial: Trial
    is_alone: bool

    def accept(self, manifest: Manifest) -> AcceptedOffer:
        """Make a dry run of the offer, and accept it if the loader would set everything once."""
        offered = {name: TensorSpec(name, r.dtype, r.shape) for r in manifest.tensors for name in r.names}
        accepted = _accepted(self.model, self.trial, list(offered.values()))
        outcome = accepted.outcome
        problems, misfits = _faults(outcome), set[tuple[str, str]]()
        for name, (num_used, dtypes) in outcome.used.items():
            spec, whole = offered[name], math.prod(offered[name].shape)
            if num_used and spec.dtype not in {DTYPE_NAMES[dtype] for dtype in dtypes}:
                problems.append(f"{spec.name!r} is {spec.dtype}, the engine has {', '.join(map(str, dtypes))}")
                misfits |= {(spec.dtype, DTYPE_NAMES[dtype]) for dtype in dtypes}
            if self.is_alone and num_used < whole:
                what = f"only {num_used} of its {whole} elements are" if num_used else "is not"
                problems.append(f"unfit tensor {_shown(spec)}: {what} used by {type(self.model).__name__}")
        for name, owner in accepted.tied.items():
            if name in offered:
                held = _Held(offered[owner], frozenset({offered[owner].dtype}), offered[owner].dtype)
                problems += _differences(name, offered[name], held)
        twins = _tied(self.model, outcome.targets.keys())
        for target in outcome.targets.values():
            for names in target.twice.values():
                problems.append(f"{' and '.join(map(repr, sorted(names)))} are both loaded into {target.name}")
            if target.is_parameter and target.num_unset and target.name not in twins:
                whole = math.prod(target.form.shape)
                problems.append(f"missing tensors: {target.num_unset} of {whole} elements of {target.name} are not set")
        if problems:
            live = {DTYPE_NAMES[dtype] for _, dtypes in outcome.used.values() for dtype in dtypes}
            raise misfit_error(problems, dtype_remedies(misfits, live))
        return accepted

    def dtypes(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """Return the dtypes, found by a dry run on such tensors."""
        tied = _tied(self.model, {name for spec in specs for name in spec.names})
        used = self.trial([TensorSpec(n, s.dtype, s.shape) for s in specs for n in s.names if n not in tied]).used
        kept: dict[str, str] = {}
        for spec in specs:
            owners = (tied.get(name, name) for name in spec.names)
            found = {dtype for owner in owners if owner in used for dtype in used[owner][1]}
            if found:
                kept[spec.name] = _kept(spec.dtype, found)
        return kept


def _kept(dtype: str, live: Collection[torch.dtype]) -> str:
    """Return the dtype in which to send a tensor of `dtype` that a loader copies to parameters of these dtypes.

    It is the widest of the parameters' dtypes, so that values are rounded only once. If a parameter has no plain
    floating-point dtype, it is `dtype`, since the loader computes (quantises, for example) from the checkpoint's
    values.
    """
    names = {DTYPE_NAMES[each] for each in live}
    return max(names, key=lambda name: (ITEMSIZE_BYTES[name], name)) if names and names <= CASTABLE else dtype


Acceptance: TypeAlias = ByReference | ByDryRun
"""Decides which offers a rank's loader can install."""


def _accepted(model: nn.Module, trial: Trial, catalog: Sequence[TensorSpec]) -> AcceptedOffer:
    """Make a dry run of `catalog`, without the tensors that are tied to others of it; return it as accepted."""
    tied = _tied(model, {spec.name for spec in catalog})
    specs = [spec for spec in catalog if spec.name not in tied]
    outcome = trial(specs)
    targets = {copy.target: outcome.targets[copy.target].form for copy in outcome.copies}
    install_map = RecordedMap(
        model,
        catalog,
        outcome.copies,
        targets,
        outcome.opaque,
        tied=tied,
        packed_copies=outcome.packed_copies,
        quantised=outcome.quantised,
    )
    return AcceptedOffer(frozenset(spec.name for spec in specs), tied, outcome, install_map)


def ties(model: nn.Module) -> dict[str, str]:
    """Return the aliases of parameters, also from modules with several names: alias to the parameter's first name."""
    owners: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        if owner != name:
            found[name] = owner
    return found


def _tied(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return, for parameters whose alias in `names` comes before their own name: their name to that alias."""
    return {name: owner for name, owner in ties(model).items() if owner in names}


def _differences(name: str, offered: TensorSpec, held: _Held) -> Iterator[str]:
    if offered.shape != held.spec.shape:
        yield f"{name!r} has the shape {list(offered.shape)}, the engine has {list(held.spec.shape)}"
    if offered.dtype not in held.dtypes:
        yield f"{name!r} is {offered.dtype}, the engine has {' or '.join(sorted(held.dtypes))}"


def _faults(outcome: DryRunOutcome) -> list[str]:
    return [f"{name!r}: {fault}" if name else fault for name, fault in outcome.faults.items()]


def _shown(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)}"
