"""The dtypes of the engines' weights, for a source with dtype="engine", which is cast to them.

Invariants: every engine has reported its dtypes before a version is offered to it; all engines of one publisher have
the same dtypes, and an engine that differs fails, by name, before any byte moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from weightcast.checkpoint.live import CASTABLE
from weightcast.errors import IncompatibleWeightsError, listed
from weightcast.format.manifest import TensorSpec
from weightcast.trainer.fleet import Fleet, FleetMember


class EngineDtypes:
    """The dtypes that a publisher's engines have reported, kept from publish to publish."""

    def __init__(self) -> None:
        self.by_name: Mapping[str, str] = {}
        """The dtypes to cast to, by record name, where they differ from the source's."""
        self._cast: tuple[Sequence[TensorSpec], Mapping[str, str], Sequence[TensorSpec]] = ((), {}, ())

    def ask(self, fleet: Fleet, *, is_again: bool) -> Sequence[TensorSpec]:
        """Ask the engines that have not been asked since they connected; mark those that differ as failed.

        Returns the specs that `cast` was given last, with the engines' dtypes. `is_again`: the version was sent to
        other engines before, so its dtypes are fixed. Raises ValueError for a fleet without engines.
        """
        specs = self._cast[0]
        if not fleet.members:
            raise ValueError(
                "the source has dtype='engine', which casts to the engines' dtypes, but this publisher has no engine "
                "to ask (a store has none): give the source a dtype such as dtype=torch.bfloat16, or no dtype"
            )
        fleet.each(FleetMember.ask_dtypes, fleet.members, specs)
        first: FleetMember | None = None
        found = {spec.name: self.by_name.get(spec.name, spec.dtype) for spec in specs} if is_again else {}
        # Engines that serve this publisher's last version come first, so that a newcomer can't change their dtypes.
        for member in sorted(fleet.healthy(), key=lambda member: not member.is_joined):
            differing = [n for n, dtype in member.dtypes.items() if n in found and _both(dtype, found[n])]
            if differing:
                whose = "the version to install" if first is None else first.name
                problems = [f"{n!r} is {member.dtypes[n]} in {member.name}, {found[n]} in {whose}" for n in differing]
                member.fail(
                    IncompatibleWeightsError(
                        f"{listed(problems)}: with dtype='engine' all engines of a publisher must have the same "
                        f"dtypes; start {member.name} with the same dtype, or publish to it from another publisher",
                        problems,
                    )
                )
                continue
            first = first or member
            found.update({n: dtype for n, dtype in member.dtypes.items() if n not in found})
        if found:
            casts = {spec.name: found.get(spec.name, spec.dtype) for spec in specs if spec.dtype in CASTABLE}
            own = {spec.name: spec.dtype for spec in specs}
            by_name = {n: dtype for n, dtype in casts.items() if dtype in CASTABLE and dtype != own[n]}
            self.by_name = self.by_name if by_name == self.by_name else by_name
        return self.cast(specs)

    def cast(self, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """Return the specs with the engines' dtypes. Equal inputs give the same object."""
        if self._cast[0] is not specs or self._cast[1] is not self.by_name:
            self._cast = specs, self.by_name, cast_by_name(specs, self.by_name)
        return self._cast[2]


def cast_by_name(specs: Sequence[TensorSpec], dtypes: Mapping[str, str]) -> Sequence[TensorSpec]:
    """Return the specs with these dtypes in place of their own; `specs` itself if there are none."""
    if not dtypes:
        return specs
    return tuple(msgspec.structs.replace(spec, dtype=dtypes.get(spec.name, spec.dtype)) for spec in specs)


def _both(dtype: str, other: str) -> bool:
    """Return whether two dtypes differ where a cast would have made them equal."""
    return dtype != other and dtype in CASTABLE and other in CASTABLE
