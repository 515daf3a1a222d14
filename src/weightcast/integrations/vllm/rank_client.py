"""vLLM from the trainer's side, however it is reached: rank calls in, every rank's reply out.

Invariants: an engine is labelled with the version that its ranks hold before it serves again; it is not resumed while
a rank is torn, ranks hold different versions, or it is not known what they hold. Stock vLLM has nothing that would
refuse its requests then: where the engine is an object of this process, that does.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET

from weightcast.control.worker_rpc import (
    Ask,
    Init,
    Install,
    Leave,
    RankCall,
    RankReply,
    Settle,
    UpdateCall,
    numbered,
    replies_to,
)
from weightcast.errors import ClosedError, PeerError, WeightcastError, from_record
from weightcast.format.messages import InitInfo, PauseMode, UpdateInfo, WeightInfo
from weightcast.integrations.plugin.refusal import Refusal
from weightcast.seams.client import EngineClient, ServesTraffic

logger = logging.getLogger(__name__)


class Status(NamedTuple):
    """What vLLM says of itself: its version label, whether its scheduler is paused, and how many ranks it has.

    `world_size`: over all data-parallel engines, of which the ranks of a dense model know nothing; None: not known.
    """

    label: str
    is_paused: bool
    world_size: int | None = None


class Control(Protocol):
    """vLLM's own control plane. Every call has a deadline; errors are PeerError or what the engine raised."""

    def call_ranks(self, call: Any) -> list[Any]:
        """Run the method `rank_calls.METHOD` on every rank; the replies (of the first data-parallel engine)."""
        ...

    def status(self) -> Status: ...

    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling and drop every cache of the present weights. Idempotent."""
        ...

    def resume(self) -> None:
        """Schedule again, unless the engine's memory is asleep. Idempotent."""
        ...

    def set_label(self, version: str) -> None: ...


class RankClient(EngineClient, ServesTraffic):
    """An `EngineClient` over a `Control`, with `TwoPhaseInstall`. `name`: as errors call it.

    `refusal`: that of the object of this process by which callers generate. `token` is what the engine's processes have
    as WEIGHTCAST_TOKEN. `pause`: what becomes of requests, see HttpEngine.
    """

    def __init__(
        self,
        name: str,
        control: Control,
        *,
        refusal: Refusal | None = None,
        pause: PauseMode = "keep",
        token: str | None = None,
    ) -> None:
        self.name = name
        self._refusal = refusal
        self._control = control
        self._pause_mode = pause
        self._token = token
        self._run = ""
        self._world_size = 1

    def info(self) -> WeightInfo:
        """What its ranks are together; `weight_version` is vLLM's label until the first update by weightcast."""
        label, is_paused, world_size = self._control.status()
        replies = self._required(Ask())
        infos = [reply.info for reply in replies]
        first = infos[0]
        self._world_size = first.world_size if world_size is None else world_size
        return WeightInfo(
            weight_version=label if first.weight_version == "default" else first.weight_version,
            run=first.run,
            holder=first.holder,
            paused=is_paused,
            torn=_torn(infos),
            world_size=self._world_size,
            # A pause is vLLM's: no lease of a rank's ends it.
            abilities=tuple(a for a in first.abilities if a != "lease" and all(a in info.abilities for info in infos)),
            protocol=first.protocol,
            instance=replies[0].instance or UNSET,
        )

    def init(self, info: InitInfo) -> None:
        self._required(Init(info if self._token is None else msgspec.structs.replace(info, token=self._token)))
        self._run = info.run

    def update(self, info: UpdateInfo) -> None:
        self._required(UpdateCall(info))

    def finish(self, version: int) -> None:
        """Install on every rank. Raises the first error; ranks of other data-parallel engines say theirs on links."""
        if not self._run:
            raise ClosedError(f"no publisher holds {self.name}: call init first")
        self._required(Install(self._run, version, self._world_size))

    def settle(self, version: int, *, keep: bool) -> None:
        settle = Settle(self._run, version, keep)
        if keep:
            self._required(settle)
        else:
            # A rank that can't go back says so on its link, and in the answer that `resume` asks for.
            self._replies(settle)

    def pause(self, run: str) -> None:
        self._control.pause(self._pause_mode)

    def resume(self, run: str) -> None:
        """Label the engine with what it holds, and have it schedule again; it stays paused if it is torn."""
        try:
            infos = [reply.info for reply in self._replies(Ask())]
            torn = _torn(infos)
            if not torn:
                if infos[0].weight_version != "default":
                    self._control.set_label(infos[0].weight_version)
                self._control.resume()
        except WeightcastError as exc:
            self.quarantine(f"it could not be resumed: {exc}")
            raise
        if torn:
            self.quarantine(torn)
            logger.warning("%s stays paused until a complete update heals it: %s", self.name, torn)
        elif self._refusal is not None:
            self._refusal.end()

    def quarantine(self, reason: str) -> None:
        """Have requests refused, where the engine is an object of this process, until it is resumed."""
        if self._refusal is not None:
            self._refusal.begin(reason)

    def shutdown(self) -> None:
        """End whichever run's hold; the engine serves on."""
        self._required(Leave())

    def close(self) -> None:
        """The engine is the caller's: nothing is closed."""

    def _required(self, call: RankCall) -> list[RankReply]:
        """Every rank's reply. Raises the first error among them."""
        replies = self._replies(call)
        error = next((reply.error for reply in replies if reply.error is not None), None)
        if error is None:
            return replies
        raised = from_record(error)
        if isinstance(raised, PeerError):
            raised.peer = self.name
        raise raised

    def _replies(self, call: RankCall) -> list[RankReply]:
        values = numbered(call)
        return replies_to(values, self._control.call_ranks(values), self.name)


def _torn(infos: list[WeightInfo]) -> str:
    """Why the ranks together hold no whole version, or empty."""
    versions = sorted({info.weight_version for info in infos})
    torn = next((info.torn for info in infos if info.torn), "")
    return torn or (f"its ranks hold different versions: {', '.join(versions)}" if len(versions) > 1 else "")
