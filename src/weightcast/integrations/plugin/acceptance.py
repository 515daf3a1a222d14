"""Checks that an offer fits the model of one rank, by its start-up checkpoint or only by a dry run.

Guarantees of the check:

- By reference, it uses the names, shapes and dtypes of the start-up checkpoint and, from one dry run of it, the set of
  names that this rank's loader uses. An offer must have the same, so that its install sets what the start set. Names
  that the loader would also accept, but that the checkpoint lacks, are refused.
- Without a reference, it runs the loader on the offer itself. It finds names that the loader refuses or, in an engine
  of one rank, ignores; parameters that would not be set or be set twice; dtypes that differ from the live ones. A
  tensor that is too large is found only in an engine of one rank: one of several ranks loads its part of any tensor.

No check can detect two exchanged tensors of one shape, or a transposed square one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

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
class _Held:
    """A tensor that the rank's loader takes. `dtypes`: those in which it may be offered.

    `live`: those of the parameters that it is copied to. `is_required`: an offer must have it.
    """

    spec: TensorSpec
    dtypes: frozenset[str]
    live: frozenset[str]
    is_required: bool

    @property
    def kept(self) -> str:
        """The dtype in which to send it: the widest live one, so that values are rounded only once.

        If a parameter has no plain floating-point dtype, it is the checkpoint's, since the loader computes (quantises,
        for example) from the checkpoint's values.
        """
        is_plain = self.live and self.live <= CASTABLE
        return max(self.live, key=lambda name: (ITEMSIZE_BYTES[name], name)) if is_plain else self.spec.dtype


@dataclasses.dataclass(frozen=True)
class AcceptedOffer:
    """An offer that fits. `names`: the names that the loader must get. `tied`: name to name of equal values.

    `outcome`: of a dry run of it. `install_map`: the recorded copies. `held`: by name, also the tied ones.
    """

    names: frozenset[str]
    tied: Mapping[str, str]
    outcome: DryRunOutcome
    install_map: RecordedMap
    held: Mapping[str, _Held]


class Acceptance:
    """Decides which offers a rank's loader can install: by one dry run of `reference` or, without it, of each offer.

    `dry_run`: runs a model's loader on tensors like these, in this order. `reference`: the tensors of the start-up
    checkpoint; None if they are not known. `is_alone`: the engine has one rank. Raises UnsupportedError if the loader
    fails on the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        dry_run: Callable[[nn.Module, Sequence[TensorSpec]], DryRunOutcome],
        reference: Sequence[TensorSpec] | None,
        *,
        is_alone: bool,
    ) -> None:
        self._model = model
        self._dry_run = dry_run
        self._is_alone = is_alone
        self._reference = None if reference is None else self._tried(reference, is_reference=True)
        if self._reference is not None and self._reference.outcome.faults:
            raise UnsupportedError(
                f"the loader of {type(model).__name__} fails in a dry run, so weightcast can't update this engine: "
                f"{listed(_faults(self._reference.outcome))}"
            )

    def accept(self, manifest: Manifest) -> AcceptedOffer:
        """Accept an offer, or raise IncompatibleWeightsError with every tensor that does not fit."""
        offers = {name: record for record in manifest.tensors for name in record.names}
        accepted, problems = self._reference, list[str]()
        if accepted is None:
            accepted = self._tried([TensorSpec(name, spec.dtype, spec.shape) for name, spec in offers.items()])
            problems = self._incomplete(accepted)
        elif unknown := [spec for spec in manifest.tensors if accepted.held.keys().isdisjoint(spec.names)]:
            problems = [f"unknown tensor {_shown(spec)}" for spec in unknown]
        # Without a reference a spec's dtype is only the offer's.
        wanted = {name: held.spec.dtype if self._reference else held.kept for name, held in accepted.held.items()}
        misfits = set[tuple[str, str]]()
        for name, offered in offers.items():
            held = accepted.held.get(name)
            if held is None:
                continue
            if offered.shape != held.spec.shape:
                problems.append(f"{name!r} has the shape {list(offered.shape)}, the engine has {list(held.spec.shape)}")
            if offered.dtype not in held.dtypes:
                problems.append(f"{name!r} is {offered.dtype}, the engine has {' or '.join(sorted(held.dtypes))}")
                if wanted[name] in held.dtypes:
                    misfits.add((offered.dtype, wanted[name]))
        missing = [held.spec for name, held in accepted.held.items() if held.is_required and name not in offers]
        problems += [f"missing tensor {_shown(spec)}" for spec in missing]
        if problems:
            remedies = dtype_remedies(misfits, set(wanted.values()))
            raise misfit_error(problems, [*remedies, *draft_remedies(offers, accepted.held)])
        return dataclasses.replace(accepted, names=frozenset(offers.keys() & accepted.names))

    def dtypes(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """Return, by record name, the rank's dtypes of the tensors that it knows."""
        tried = self._reference or self._tried([TensorSpec(n, s.dtype, s.shape) for s in specs for n in s.names])
        # Without a reference the dtype of a tensor that the rank does not use is only the source's.
        found = {name: held.kept for name, held in tried.held.items() if held.live or self._reference}
        names = {spec.name: next((name for name in spec.names if name in found), None) for spec in specs}
        return {name: found[known] for name, known in names.items() if known is not None}

    def _tried(self, catalog: Sequence[TensorSpec], *, is_reference: bool = False) -> AcceptedOffer:
        """Make a dry run of `catalog`, without the tensors that are tied to others of it; return it as accepted."""
        tied = _tied(self._model, {spec.name for spec in catalog})
        specs = [spec for spec in catalog if spec.name not in tied]
        outcome = self._dry_run(self._model, specs)
        held: dict[str, _Held] = {}
        for spec in specs:
            if spec.name in outcome.used:  # it has no fault
                num_used, used_dtypes = outcome.used[spec.name]
                live = frozenset(DTYPE_NAMES[dtype] for dtype in used_dtypes)
                dtypes = live | {spec.dtype} if is_reference or not live else live
                held[spec.name] = _Held(spec, dtypes, live, is_required=num_used > 0)
        for name, owner in tied.items():
            if owner in held:
                held[name] = dataclasses.replace(held[owner], is_required=False)
        install_map = RecordedMap(
            self._model,
            catalog,
            outcome.copies,
            {copy.target: outcome.targets[copy.target].form for copy in outcome.copies},
            outcome.opaque,
            tied=tied,
            packed_copies=outcome.packed_copies,
            quantised=outcome.quantised,
        )
        return AcceptedOffer(frozenset(spec.name for spec in specs), tied, outcome, install_map, held)

    def _incomplete(self, tried: AcceptedOffer) -> list[str]:
        """Return what the loader can't load, would not use, and would leave unset or set twice."""
        outcome = tried.outcome
        problems = _faults(outcome)
        for name, (num_used, _) in outcome.used.items() if self._is_alone else ():
            spec = tried.held[name].spec
            whole = math.prod(spec.shape)
            if num_used < whole:
                what = f"only {num_used} of its {whole} elements are" if num_used else "is not"
                problems.append(f"unfit tensor {_shown(spec)}: {what} used by {type(self._model).__name__}")
        twins = _tied(self._model, outcome.targets.keys())
        for target in outcome.targets.values():
            for names in target.twice.values():
                problems.append(f"{' and '.join(map(repr, sorted(names)))} are both loaded into {target.name}")
            if target.is_parameter and target.num_unset and target.name not in twins:
                whole = math.prod(target.form.shape)
                problems.append(f"missing tensors: {target.num_unset} of {whole} elements of {target.name} are not set")
        return problems


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


def _faults(outcome: DryRunOutcome) -> list[str]:
    return [f"{name!r}: {fault}" if name else fault for name, fault in outcome.faults.items()]


def _shown(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)}"
