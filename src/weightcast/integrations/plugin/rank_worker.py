"""One rank of an engine: a `Worker` around its model, whose every call ends alike on all ranks of the engine.

Invariants: a call comes to all ranks, in the same order, between two steps of generation; none waits for the publisher;
an install begins on all ranks or on none, and once it has begun all serve the new version, or all the former one, or
all are torn. Nothing here keeps the host from running a torn model: whoever drives the engine keeps it paused until a
complete update has healed it.

During an install each step of the model ends with an all-gather of outcomes. A rank that fails before its first step
reports in the first of these rounds. After a failed round only the last one takes place: it reports each rank's
state.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

from weightcast.control.worker_rpc import Ask, Init, Install, Leave, RankCall, RankReply, Settle, UpdateCall
from weightcast.engines.gate import Gate
from weightcast.errors import (
    EngineTornError,
    ErrorRecord,
    InstallError,
    ManifestError,
    RefusedError,
    StaleVersionError,
    UnsupportedError,
    UpdateAbortedError,
    from_record,
    to_record,
)
from weightcast.format.manifest import WeightVersion
from weightcast.format.messages import Abort, InitInfo, Offer, UpdateInfo, WeightInfo
from weightcast.integrations.plugin.rank_consensus import Outcome, RankConsensus
from weightcast.seams.engine import Engine
from weightcast.serving.worker import Worker

logger = logging.getLogger(__name__)

Agree: TypeAlias = Callable[[BaseException | None], None]


class RankWorker:
    """Answers `control.rank_calls` for one rank. One thread calls it, never while the model runs a step.

    `make_engine` gets the function by which the engine agrees on its steps with the other ranks' engines. `token`: what
    every `Init` must carry, or empty. `unsupported`: the kinds of serving that keep this engine from being updated.
    `require_ready` raises if an install can't begin now; `weights_asleep`: see `RankReply`.
    """

    def __init__(
        self,
        make_engine: Callable[[Agree], Engine],
        ranks: RankConsensus,
        *,
        engine_rank: int,
        world_size: int,
        token: str = "",
        unsupported: tuple[str, ...] = (),
        require_ready: Callable[[], None] = lambda: None,
        weights_asleep: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine_rank = engine_rank
        self._ranks = ranks
        self._token = token
        self._unsupported = unsupported
        self._require_ready = require_ready
        self._weights_asleep = weights_asleep
        self._gate = Gate()
        self._worker = Worker(
            make_engine(self._agree),
            gate=self._gate,
            engine_rank=engine_rank,
            world_size=world_size,
            installs=("staged",),
            settles=True,
        )
        self._is_installing = False
        self._is_one_of_several = False
        self._failure: ErrorRecord | None = None

    def answer(self, values: object) -> Any:
        """A `RankCall` as plain JSON values, and a `serial` or none; its `RankReply` likewise.

        Never raises for a failed update.
        """
        start = time.perf_counter()
        try:
            error = self.do(msgspec.convert(values, RankCall))
        except msgspec.ValidationError as exc:
            error = to_record(ManifestError(f"this is no call of weightcast's ranks: {exc}", fault="type"))
        serial = str(values.get("serial", "")) if isinstance(values, dict) else ""
        seconds, asleep = time.perf_counter() - start, self._weights_asleep()
        instance = self._worker.instance
        return msgspec.to_builtins(RankReply(self._engine_rank, self.info(), error, seconds, asleep, serial, instance))

    def do(self, call: RankCall) -> ErrorRecord | None:
        """Do what is asked, with all ranks; what went wrong on any of them."""
        try:
            return self._do(call)
        except Exception as exc:
            logger.exception("a weight call failed")
            return to_record(exc)

    def info(self) -> WeightInfo:
        """As the worker's, but for what belongs to a pause: the host's is not this rank's to begin or to end.

        Torn as well is what was installed here while nobody has said whether the other engines have it.
        """
        info = self._worker.info()
        abilities = tuple(a for a in info.abilities if a != "lease")
        torn = info.torn or self._why_unsettled()
        return msgspec.structs.replace(info, abilities=abilities, torn=torn, instance=UNSET)

    def _why_unsettled(self) -> str:
        version = self._worker.unsettled
        if version is None or not self._is_one_of_several:
            return ""
        what = f"version {version.number} is installed here, and it is not known whether it is in the other engines"
        return f"{what}; publish a complete update to heal this engine"

    def finish(self) -> ErrorRecord | None:
        """Install whatever is sealed, and keep it: for a caller who neither names a version nor settles."""
        error = self._install(self._worker.installable)
        version = self._gate.version
        return error if error is not None or version is None else self._settle(version, keep=True)

    # --- the calls ---

    def _do(self, call: RankCall) -> ErrorRecord | None:
        match call:
            case Init(info):
                return self._init(info)
            case UpdateCall(info):
                return self._update(info)
            case Install(run, version, world_size, keep):
                self._is_one_of_several = world_size > self._ranks.num_ranks
                return self._install_named(WeightVersion(run, version), keep=keep)
            case Settle(run, version, keep):
                return self._settle(WeightVersion(run, version), keep=keep)
            case Leave():
                self._worker.shutdown()
            case Ask():
                pass
        return None

    def _init(self, info: InitInfo) -> ErrorRecord | None:
        own = _attempt(lambda: self._hold(info))
        error = self._ranks.first_error(self._ranks.exchange(Outcome(own)))
        if error is not None and own is None:
            self._worker.shutdown()
        return error

    def _hold(self, info: InitInfo) -> None:
        if self._token and not hmac.compare_digest(info.token.encode(), self._token.encode()):
            given = "another one" if info.token else "none"
            raise RefusedError(
                f"this engine takes updates only with its token (WEIGHTCAST_TOKEN where it was started) and was given "
                f"{given}: pass it to the publisher, or to the engine's client"
            )
        if self._unsupported:
            raise UnsupportedError(f"weightcast can't update an engine with {', '.join(self._unsupported)}")
        self._worker.init(info)

    def _update(self, info: UpdateInfo) -> ErrorRecord | None:
        own = _attempt(lambda: self._worker.update(info))
        error = self._ranks.first_error(self._ranks.exchange(Outcome(own)))
        if error is not None and own is None and isinstance(info, Offer):
            # This rank, which took it, would wait for buckets that no publisher sends to this engine.
            reason = f"a rank of this engine refused it: {error.message}"[:4096]
            abort = Abort(info.run, info.version, reason, info.secret)
            _attempt(lambda: self._worker.update(abort))
        return error

    # --- an install, in rounds ---

    def _install(self, find: Callable[[], WeightVersion]) -> ErrorRecord | None:
        """Install the version that `find` gives, or raises for, on all ranks or on none. Idempotent for a version."""
        found: list[WeightVersion] = []
        refused = _attempt(lambda: found.append(self._ready(find())))
        outcomes = self._ranks.exchange(Outcome(refused, serves=bool(found) and self._serves(found[0])))
        error = self._ranks.first_error(outcomes)
        if error is not None or all(outcome.serves for outcome in outcomes):
            return error
        if any(outcome.serves for outcome in outcomes):
            return self._tear("its ranks serve two versions")
        return self._install_in_rounds(found[0])

    def _install_named(self, version: WeightVersion, *, keep: bool) -> ErrorRecord | None:
        error = self._install(lambda: self._required(version))
        if error is None and keep:
            # All ranks are here and agree, so that none needs a round to hear it.
            self._worker.settle(version, keep=True)
        return error

    def _required(self, version: WeightVersion) -> WeightVersion:
        """`version`, if it serves already or can be installed now."""
        if not self._serves(version):
            found = self._worker.installable()
            if found != version:
                raise StaleVersionError(
                    f"version {version.number} of run {version.run} is to be installed, "
                    f"sealed is version {found.number} of run {found.run}"
                )
        return version

    def _ready(self, version: WeightVersion) -> WeightVersion:
        if not self._serves(version):
            self._require_ready()
        return version

    def _install_in_rounds(self, version: WeightVersion) -> ErrorRecord | None:
        self._is_installing, self._failure = True, None
        try:
            error = _attempt(lambda: self._worker.finish(version.number, version.run))
            if error is not None and not self._serves(version):
                error = self._told(error)
        finally:
            self._is_installing = False
        return self._last_round(None if self._serves(version) else error)

    def _told(self, error: ErrorRecord) -> ErrorRecord:
        """An install's error, once all ranks know it: if it came before the first step, the others are in that."""
        if self._failure is not None:
            return error
        cause = from_record(error)
        return _attempt(lambda: self._agree(cause)) or error

    def _settle(self, version: WeightVersion, *, keep: bool) -> ErrorRecord | None:
        """Keep an installed version, or go back to the former one; all ranks are torn if one can't."""
        error = self._last_round(_attempt(lambda: self._worker.settle(version, keep=keep)))
        if not keep:
            torn, what = self._gate.torn, f"version {version.number} was taken back: it was not installed everywhere"
            self._worker.tell_failed(version, EngineTornError(torn) if torn else UpdateAbortedError(what))
        return error

    def _agree(self, error: BaseException | None) -> None:
        """One round of an install: raises on every rank if any had an error. Elsewhere each rank is for itself."""
        if not self._is_installing or self._failure is not None:
            if error is not None:
                raise error
            return
        outcome = Outcome(None if error is None else to_record(error))
        self._failure = self._ranks.first_error(self._ranks.exchange(outcome))
        if self._failure is not None:
            raise from_record(self._failure) from error

    def _last_round(self, error: ErrorRecord | None) -> ErrorRecord | None:
        """What became of the ranks, the same on all: the first error, and torn if one of them is."""
        outcomes = self._ranks.exchange(Outcome(error, torn=self._gate.torn))
        torn = next((outcome.torn for outcome in outcomes if outcome.torn), "")
        if torn and not self._gate.torn:
            self._gate.tear(torn)
        first = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        return None if first is None else msgspec.structs.replace(first, torn=bool(torn))

    def _tear(self, reason: str) -> ErrorRecord:
        self._gate.tear(f"{reason}; publish a complete update to heal this engine")
        return to_record(InstallError(f"this engine can't serve: {reason}", torn=True))

    def _serves(self, version: WeightVersion) -> bool:
        return self._gate.version == version and not self._gate.torn


def _attempt(step: Callable[[], Any]) -> ErrorRecord | None:
    """Run a step; its error as a record, which keeps no frames and thereby no tensors alive."""
    try:
        step()
    except Exception as exc:
        return to_record(exc)
    return None
