"""One rank of an engine: a `Worker` around its model; every call has the same result on all ranks of the engine.

Invariants: a call comes to all ranks, in the same order, between two steps of generation; none waits for the publisher;
an install begins on all ranks or on none, and afterwards all serve the new version, or all the former one, or all are
torn. This code does not keep the host from running a torn model: the engine's client keeps it paused until a complete
update.

During an install each step of the model ends with an all-gather of outcomes. A rank that fails before its first step
reports that in the first of these rounds. After a failed round only the last one follows, which reports each rank's
state.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weightcast.control import worker_rpc as rpc
from weightcast.engines.gate import Gate
from weightcast.errors import (
    ClosedError,
    EngineTornError,
    ErrorRecord,
    InstallError,
    ManifestError,
    RefusedError,
    UnsupportedError,
    UpdateAbortedError,
    from_record,
)
from weightcast.format.manifest import WeightVersion, convert
from weightcast.format.messages import Abort, InitInfo, Offer, UpdateInfo, WeightInfo
from weightcast.integrations.plugin.model import LoaderEngine, unsupported
from weightcast.integrations.plugin.rank_consensus import Attempt, Outcome, RankConsensus
from weightcast.seams.engine import Engine
from weightcast.seams.install_map import Mapped
from weightcast.serving.install_map import HeldTensor, RecordedMap
from weightcast.serving.worker import Worker


class RankWorker:
    """Answers the calls of `control.worker_rpc` for one rank. Call it from one thread, between steps of the model.

    `token`: required in every `Init`, unless empty. `unsupported`: features with which this engine can't be updated.
    `weights_asleep`: returns the request that would wake the weights' memory, empty if it is not asleep.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: RankConsensus,
        *,
        engine_rank: int,
        world_size: int,
        token: str = "",
        unsupported: Sequence[str] = (),
        weights_asleep: Callable[[], str] = lambda: "",
    ) -> None:
        self._ranks = ranks
        self._token = token
        self._unsupported = unsupported
        self._weights_asleep = weights_asleep
        self._gate = Gate()
        self._worker = Worker(
            engine,
            gate=self._gate,
            engine_rank=engine_rank,
            world_size=world_size,
            settles=True,
            agree=self._agree,
        )
        self._is_agreeing = False
        """True while an install is in progress and none of its steps has failed."""
        self._is_one_of_several = False

    def answer(self, values: object) -> Any:
        """Answer a `RankCall`, given as plain JSON values, by a `RankReply` in the same form.

        Never raises for a failed update.
        """
        held: tuple[list[HeldTensor], int] = ([], -1)
        dtypes: dict[str, str] = {}
        with Attempt() as attempt:
            try:
                call = convert(values, rpc.RankCall)
            except msgspec.ValidationError as exc:
                raise ManifestError(f"this is not a valid call of weightcast's ranks: {exc}", fault="type") from exc
            if isinstance(call, rpc.Prove):
                held = self._held(call)
            elif isinstance(call, rpc.Dtypes):
                dtypes = self._worker.dtypes(call.tensors)
            else:
                self.do(call)
        serial = str(values.get("serial", "")) if isinstance(values, dict) else ""
        table = self._worker.adapters
        reply = rpc.RankReply(
            self._worker.engine_rank,
            self.info(),
            attempt.error,
            bool(self._weights_asleep()),
            serial,
            *held,
            self._gate.is_writing,
            dtypes,
            adapter=self._worker.offered_adapter,
            adapter_ids={} if table is None else dict(table.layers.ids),
        )
        return msgspec.to_builtins(reply)

    def info(self) -> WeightInfo:
        """Return the worker's state without its lease, since only the host can pause and resume.

        The rank counts as torn, too, until it knows whether the other engines have installed its version.
        """
        info, unsettled = self._worker.info(), self._worker.unsettled
        torn = info.torn
        if not torn and unsettled is not None and self._is_one_of_several:
            torn = (
                f"version {unsettled.number} is installed here, but it is not known whether the other data-parallel "
                "engines have it; publish a complete update to heal this engine"
            )
        abilities = tuple(a for a in info.abilities if a != "lease")
        return msgspec.structs.replace(info, abilities=abilities, torn=torn)

    def do(self, call: rpc.RankCall) -> None:
        """Carry out a call together with all ranks. An error on any rank is raised on all of them."""
        match call:
            case rpc.Init(info):
                self._init(info)
            case rpc.UpdateCall(info):
                self._update(info)
            case rpc.InstallCall(run, number, world_size, keep):
                self._is_one_of_several = world_size > self._ranks.num_ranks
                version = WeightVersion(run, number)
                self._install(version)
                if keep:
                    # All ranks have just agreed, so no further exchange is needed.
                    self._worker.settle(version, keep=True)
            case rpc.Settle(run, number, keep):
                self._settle(WeightVersion(run, number), keep=keep)
            case rpc.Leave():
                self._worker.shutdown()
            case rpc.Quarantine(reason):
                self._gate.tear(f"{reason}; publish a complete update to heal this engine")
            case rpc.Unload(labels):
                if self._worker.adapters is not None:
                    self._worker.adapters.unload(labels)
            case rpc.Ask() | rpc.Prove() | rpc.Dtypes():
                pass

    # --- what the host does by itself ---

    def interrupt(self, reason: str, *, loses_weights: bool = False, others_load: bool = False) -> None:
        """Abort a streaming update, since the host is about to free the weights' memory, or to write to it.

        `loses_weights`: the rank is torn from then on, until a complete update or `changed`. `others_load`: not a rank
        without a publisher's version, whose weights another client may load. Never raises.
        """
        with Attempt():
            self._worker.abort_streaming(UpdateAbortedError(reason))
        if loses_weights:
            if isinstance(self._worker.engine, LoaderEngine):
                self._worker.engine.weights_lost()
            if not others_load or self._gate.version is not None:
                self._gate.tear(f"{reason}; publish a complete update to heal this engine")

    def changed(self, *, is_whole: bool) -> None:
        """Note that the host has changed the weights by itself, so that they are of no version of ours.

        `is_whole`: the host has loaded all weights, so the engine is not torn any more.
        """
        if is_whole or not self._gate.torn:
            self._gate.set_version(None)
            if self._worker.adapters is not None:
                self._worker.adapters.retire()

    # --- the calls ---

    def _held(self, call: rpc.Prove) -> tuple[list[HeldTensor], int]:
        engine = self._worker.engine
        install_map = engine.install_map if isinstance(engine, Mapped) else None
        if not isinstance(install_map, RecordedMap):
            raise UnsupportedError(
                "no version was offered to this engine yet, so its weights can't be read: publish a version first"
            )
        self._require_awake("you read the weights")
        if self._gate.is_writing:
            raise ClosedError("a streaming update is in progress: read the weights after its install")
        return install_map.held(call.start, call.limit_bytes, call.names)

    def _require_ready(self) -> None:
        """Raise ClosedError if an install can't begin now."""
        self._require_awake("the install")

    def _require_awake(self, what: str) -> None:
        if request := self._weights_asleep():
            raise ClosedError(f"the weights' memory is asleep: send {request} before {what}")

    def _init(self, info: InitInfo) -> None:
        with Attempt() as own:
            if self._token and not hmac.compare_digest(info.token.encode(), self._token.encode()):
                given = "another one" if info.token else "none"
                raise RefusedError(
                    "this engine takes updates only with its token (WEIGHTCAST_TOKEN where it was started), and got "
                    f"{given}: pass the token to the publisher, or to the engine's client"
                )
            if self._unsupported:
                raise unsupported(self._unsupported)
            self._worker.init(info)
        error = self._ranks.common_error(own.error)
        if error is not None and own.error is None:
            self._worker.shutdown()
        _raise_if(error)

    def _update(self, info: UpdateInfo) -> None:
        with Attempt() as own:
            if isinstance(info, Offer) and info.install == "streaming":
                self._require_ready()
            self._worker.update(info)
        error = self._ranks.common_error(own.error)
        if error is not None and own.error is None and isinstance(info, Offer):
            # This rank has accepted the offer, and would wait for buckets that the publisher won't send.
            reason = f"a rank of this engine refused the update: {error.message}"[:4096]
            with Attempt():
                self._worker.update(Abort(info.run, info.version, reason, info.secret))
        _raise_if(error)

    def _settle(self, version: WeightVersion, *, keep: bool) -> None:
        """Keep an installed version, or roll back to the former one; if a rank can't, all ranks are torn."""
        with Attempt() as own:
            self._worker.settle(version, keep=keep)
        if own.error is not None and not keep:
            reason = f"version {version.number} could not be rolled back: {own.error.message}"
            self._gate.tear(f"{reason}; publish a complete update to heal this engine")
        error = self._last_round(own.error)
        if not keep:
            torn, what = self._gate.torn, f"version {version.number} was rolled back: another engine did not install it"
            self._worker.send_failed(version, EngineTornError(torn) if torn else UpdateAbortedError(what))
        _raise_if(error)

    # --- an install, in rounds ---

    def _install(self, version: WeightVersion) -> None:
        """Install `version` on all ranks or on none. Idempotent."""
        serves = self._worker.serves(version)
        with Attempt() as own:
            if not serves:
                self._worker.require_installable(version)
                self._require_ready()
        outcomes = self._ranks.exchange(Outcome(own.error, serves))
        _raise_if(self._ranks.first_error(outcomes))
        if all(outcome.serves for outcome in outcomes):
            return
        if any(outcome.serves for outcome in outcomes):
            reason = "its ranks have two versions"
            self._gate.tear(f"{reason}; publish a complete update to heal this engine")
            raise InstallError(f"this engine can't serve: {reason}", torn=True)
        self._is_agreeing = True
        try:
            with Attempt() as own:
                self._worker.finish(version.number, version.run)
            error = None if self._worker.serves(version) else own.error
            if error is not None and self._is_agreeing:
                # The error came before the first step, in whose round the other ranks wait for this one.
                error = self._agree(error)
        finally:
            self._is_agreeing = False
        _raise_if(self._last_round(error))

    def _agree(self, error: ErrorRecord | None) -> ErrorRecord | None:
        """Make one round of an install; return the first error of all ranks. Outside an install return `error`."""
        if self._is_agreeing:
            error = self._ranks.common_error(error)
            self._is_agreeing = error is None
        return error

    def _last_round(self, error: ErrorRecord | None) -> ErrorRecord | None:
        """Return the first error of any rank, torn if any rank is torn; equal on all ranks."""
        outcomes = self._ranks.exchange(Outcome(error, torn=self._gate.torn))
        torn = next((outcome.torn for outcome in outcomes if outcome.torn), "")
        if torn and not self._gate.torn:
            self._gate.tear(torn)
        first = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        return None if first is None else msgspec.structs.replace(first, torn=bool(torn))


def _raise_if(error: ErrorRecord | None) -> None:
    if error is not None:
        raise from_record(error)
