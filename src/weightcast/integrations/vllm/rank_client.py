"""Base of the trainer's clients of vLLM without a server: sends rank calls, and combines every rank's reply.

Invariants: an engine is labelled with its ranks' version before it serves again; it is not resumed while a rank is
torn, ranks have different versions, or their version is unknown. vLLM itself can't refuse requests then; if the engine
is an object of this process, a `Refusal` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from weightcast.control.worker_rpc import (
    Ask,
    Dtypes,
    Init,
    InstallCall,
    Leave,
    Prove,
    Quarantine,
    RankCall,
    Settle,
    UpdateCall,
    numbered,
    replies_to,
)
from weightcast.errors import ClosedError, UnsupportedError, WeightcastError
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldWeights, InitInfo, Offer, PauseMode, UpdateInfo, WeightInfo
from weightcast.integrations.plugin.refusal import Refusal
from weightcast.integrations.plugin.replies import Replies
from weightcast.seams.client import EngineClient, ServesTraffic

logger = logging.getLogger(__name__)


class Status(NamedTuple):
    """State that vLLM reports: its version label, whether its scheduler is paused, and its number of ranks.

    `world_size`: over all data-parallel engines, which a dense model's ranks do not know; None if unknown.
    """

    label: str
    is_paused: bool
    world_size: int | None = None


class Control(Protocol):
    """vLLM's own control methods. Every call has a deadline; errors are PeerError or the engine's own."""

    def call_ranks(self, call: Any) -> list[Any]:
        """Run the method `worker_rpc.METHOD` on every rank; return the replies of the first data-parallel engine."""
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
    """An `EngineClient` over a `Control`, with `TwoPhaseInstall`. `name`: the engine's name in errors.

    `refusal`: for an engine object of this process with which callers generate. `token`: the value of WEIGHTCAST_TOKEN
    in the engine's processes. `pause`: see HttpEngine.
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
        """Return the ranks' combined state; `weight_version` is vLLM's label until the first update by weightcast."""
        status = self._control.status()
        info = self._required(Ask()).info
        if info.torn:
            # Also if no update follows, as after a sleep that has freed the weights.
            self._refuse(info.torn)
        self._world_size = info.world_size if status.world_size is None else status.world_size
        version = status.label if info.weight_version == "default" else info.weight_version
        # Streaming needs the server's routes, adapters its list of models.
        abilities = tuple(ability for ability in info.abilities if ability not in ("streaming", "adapters"))
        return msgspec.structs.replace(
            info, weight_version=version, paused=status.is_paused, world_size=self._world_size, abilities=abilities
        )

    def init(self, info: InitInfo) -> None:
        self._required(Init(info if self._token is None else msgspec.structs.replace(info, token=self._token)))
        self._run = info.run

    def update(self, info: UpdateInfo) -> None:
        """Send an update message. Raises UnsupportedError for a streaming offer, during which others could generate."""
        if isinstance(info, Offer) and info.install == "streaming":
            raise UnsupportedError(
                f'install="streaming" needs weightcast\'s routes in the server, which {self.name} lacks: '
                "publish with install='staged', or serve vLLM with VLLM_PLUGINS=weightcast"
            )
        self._required(UpdateCall(info))

    def finish(self, version: int) -> None:
        """Install on every rank.

        Raises the first error; ranks of other data-parallel engines report over their links.
        """
        if not self._run:
            raise ClosedError(f"no publisher holds {self.name}: call init() first")
        self._required(InstallCall(self._run, version, self._world_size))

    def settle(self, version: int, *, keep: bool) -> None:
        settle = Settle(self._run, version, keep)
        if keep:
            self._required(settle)
        else:
            # A rank that can't roll back reports it over its link, and in its reply to `resume`.
            self._replies(settle)

    def pause(self, run: str) -> None:
        self._control.pause(self._pause_mode)

    def resume(self, run: str) -> None:
        """Label the engine with its ranks' version, and resume it; if it is torn, it stays paused."""
        try:
            replies = self._replies(Ask())
            if not replies.torn:
                if replies.info.weight_version != "default":
                    self._control.set_label(replies.info.weight_version)
                self._control.resume()
        except WeightcastError as exc:
            self._refuse(f"the engine could not be resumed: {exc}")
            raise
        if replies.torn:
            self._refuse(replies.torn)
            logger.warning("%s stays paused until a complete update heals it: %s", self.name, replies.torn)
        elif self._refusal is not None:
            self._refusal.end()

    def quarantine(self, reason: str) -> None:
        """Have the engine refuse requests if it is an object of this process; otherwise they wait in a pause."""
        self._refuse(reason)
        # Before the pause, since every resume asks the ranks first.
        self._required(Quarantine(reason[:4096]))
        self._control.pause("keep")

    def _refuse(self, reason: str) -> None:
        if self._refusal is not None:
            self._refusal.begin(reason)

    def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
        """Return digests of the live tensors (or of `names`); None before the first offer to this engine."""
        if "prove" not in self._required(Ask()).info.abilities:
            return None
        return self._required(Prove(names=tuple(names))).held(with_blocks=bool(names))

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str] | None:
        return self._required(Dtypes(list(specs))).dtypes()

    def shutdown(self) -> None:
        """End the present run's session; the engine goes on serving."""
        self._required(Leave())

    def close(self) -> None:
        """Do nothing, since the engine is the caller's."""

    def _required(self, call: RankCall) -> Replies:
        """Return every rank's reply. Raises the first error among them."""
        replies = self._replies(call)
        replies.raise_first(self.name)
        return replies

    def _replies(self, call: RankCall) -> Replies:
        values = numbered(call)
        return Replies(replies_to(values, self._control.call_ranks(values), self.name), num_engines=1)
