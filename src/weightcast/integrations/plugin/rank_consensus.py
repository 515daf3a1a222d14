"""Exchange of the outcome of each step among the ranks of one engine, so that all of them answer a call alike.

Invariants: every rank makes the same exchanges in the same order; only typed records are exchanged, never pickles;
every exchange has a deadline, and after one that failed the ranks may be out of step, so no further one is made.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from weightcast.errors import ErrorRecord, PeerError, WeightcastError, to_record
from weightcast.format.manifest import decode

logger = logging.getLogger(__name__)


class Attempt:
    """Context that catches an error of its block. `error`: as a record, which keeps no frames or tensors alive."""

    error: ErrorRecord | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if not isinstance(error, WeightcastError):
            logger.error("a step of an update failed on this rank", exc_info=error)
        self.error = to_record(error)
        return True


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a step on one rank. `serves`: the rank has the version already. `torn`: why it can't serve."""

    error: ErrorRecord | None = None
    serves: bool = False
    torn: str = ""


class RankConsensus:
    """The ranks of an engine, seen from one of them. `groups`: process groups on CPUs, innermost first.

    `first_rank`: number of the engine's first rank, for errors.
    """

    def __init__(self, groups: Sequence[Any], *, first_rank: int = 0, deadline_seconds: float = 60.0) -> None:
        self._groups = [group for group in groups if group.size() > 1]
        self.num_ranks = math.prod(group.size() for group in self._groups)
        """Number of ranks of the engine."""
        self._first_rank = first_rank
        self._deadline_seconds = deadline_seconds
        self._broken = ""

    def exchange(self, outcome: Outcome) -> list[Outcome]:
        """Return every rank's outcome, by rank. Raises what `gather` raises."""
        return [decode(message, Outcome) for message in self.gather(msgspec.json.encode(outcome))]

    def gather(self, message: bytes) -> list[bytes]:
        """Return every rank's message, by rank. Call it on all ranks.

        Raises PeerError if a rank has died or does not call it by the deadline.
        """
        if self._broken:
            raise PeerError(
                f"the ranks of this engine are out of step: {self._broken}; restart the engine", peer="engine"
            )
        known = [message]
        try:
            for group in self._groups:
                # The lengths, then the messages, padded to the longest.
                mine = bytearray(msgspec.json.encode(known))
                lengths = list(map(int, self._all_gather(group, torch.tensor([len(mine)], device="cpu"))))
                padded = torch.frombuffer(mine.ljust(max(lengths)), dtype=torch.uint8)
                rows = zip(self._all_gather(group, padded), lengths, strict=True)
                parts: list[list[bytes]] = [decode(row.numpy().tobytes()[:length], list[bytes]) for row, length in rows]
                known = list(itertools.chain(*parts))
        except Exception as exc:
            self._broken = str(exc)
            logger.exception("an exchange among the ranks of this engine failed")
            raise PeerError(
                f"an exchange among the ranks of this engine failed: {exc}; restart the engine", peer="engine"
            ) from exc
        return known

    def _all_gather(self, group: Any, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        group.allgather([rows], [mine]).wait(datetime.timedelta(seconds=self._deadline_seconds))
        return rows

    def common_error(self, own: ErrorRecord | None) -> ErrorRecord | None:
        """Exchange errors; return the same one on all ranks if any rank has one. Raises what `gather` raises."""
        return self.first_error(self.exchange(Outcome(own)))

    def first_error(self, outcomes: Sequence[Outcome]) -> ErrorRecord | None:
        """Return the first rank's error with all ranks' problems and numbers; torn if any rank is."""
        failed = [(self._first_rank + rank, o.error) for rank, o in enumerate(outcomes) if o.error is not None]
        if not failed:
            return None
        error, torn = failed[0][1], any(error.torn for _, error in failed)
        if len(outcomes) == 1:
            return error
        where = f"{'rank' if len(failed) == 1 else 'ranks'} {', '.join(str(rank) for rank, _ in failed)}"
        problems = tuple(dict.fromkeys(each for _, of_rank in failed for each in of_rank.problems))
        if len(problems) > len(error.problems):
            where += f", {len(problems)} problems in all"
        message = f"{error.message} [engine {where}]"
        return msgspec.structs.replace(error, message=message, problems=problems, torn=torn)
