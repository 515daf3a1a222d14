"""Base of the trainer's clients of vLLM without a server: sends rank calls, and combines every rank's reply.

Invariants: an engine is labelled with its ranks' version before it serves again; it is not resumed while a rank is
torn, ranks have different versions, or their version is unknown. vLLM itself can't refuse requests then; if the engine
is an object of this process, a `Refusal` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from weightcast.control import worker_rpc as rpc
from weightcast.errors import (
    ClosedError,
    ControlError,
    PeerDiedError,
    PeerTimeoutError,
    UnsupportedError,
    WeightcastError,
)
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldWeights, InitInfo, Offer, PauseMode, UpdateInfo, WeightInfo
from weightcast.integrations.plugin.refusal import Refusal
from weightcast.integrations.plugin.replies import Replies
from weightcast.seams.client import EngineClient, ServesTraffic

logger = logging.getLogger(__name__)


Call: TypeAlias = Callable[..., Any]
"""Calls an engine's method, given its name and arguments. Raises what it raises, TimeoutError after the deadline."""


class RankClient(EngineClient, ServesTraffic):
    """An `EngineClient` with `TwoPhaseInstall` over the methods of an engine. `name`: the engine's name in errors.

    `call`: has a deadline of `timeout_seconds`. `is_async`: the methods are those of an `AsyncLLM`, else of an `LLM`,
    which is paused by a sleep that frees no memory. `world_size`: number of ranks over all data-parallel engines, which
    a dense model's ranks do not know; None if unknown. `refusal`: for an engine object of this process with which
    callers generate. `token`: the value of WEIGHTCAST_TOKEN in the engine's processes. `pause`: see HttpEngine.
    """

    def __init__(
        self,
        name: str,
        call: Call,
        timeout_seconds: float,
        *,
        is_async: bool = False,
        world_size: int | None = None,
        refusal: Refusal | None = None,
        pause: PauseMode = "keep",
        token: str | None = None,
    ) -> None:
        self.name = name
        self._untranslated = call
        self._timeout_seconds = timeout_seconds
        self._is_async = is_async
        self._given_world_size = world_size
        self._refusal = refusal
        self._pause_mode = pause
        self._token = token
        self._run = ""
        self._world_size = 1

    # --- the engine's methods: each call has a deadline, and raises PeerError or an error of the engine's ranks ---

    def _label(self) -> str:
        return str(self._call("get_weight_version"))

    def _set_label(self, version: str) -> None:
        self._call("update_weight_version", version)

    def _stop(self, mode: PauseMode) -> None:
        """Stop scheduling and drop every cache of the present weights. Idempotent."""
        if self._is_async:
            self._call("pause_generation", mode=mode, clear_cache=True)
            return
        self._call("sleep", level=0, mode=mode)
        if not self._call("reset_prefix_cache", reset_running_requests=True, reset_connector=True):
            raise ControlError(
                f"{self.name} did not drop its prefix cache, since requests are running: publish when it is idle",
                peer=self.name,
            )

    def _schedule(self) -> None:
        """Schedule again, unless the engine's memory is asleep. Idempotent."""
        # Not resume_generation: an engine whose KV cache is asleep must not schedule.
        self._call("wake_up", tags=["scheduling"])

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and translate the errors of vLLM, asyncio and Ray."""
        name = self.name
        try:
            return self._untranslated(method, *args, **kwargs)
        except WeightcastError:
            raise
        except TimeoutError as exc:
            text = f"{name}.{method} gave no answer in time: use a larger timeout_seconds ({self._timeout_seconds:g})"
            raise PeerTimeoutError(text, peer=name) from exc
        except Exception as exc:
            if {"EngineDeadError", "RayActorError"} & {kind.__name__ for kind in type(exc).__mro__}:
                raise PeerDiedError(f"{name} has died: {exc}", peer=name) from exc
            raise ControlError(f"{name}.{method} failed: {type(exc).__name__}: {exc}", peer=name) from exc

    # --- the control protocol ---

    def info(self) -> WeightInfo:
        """Return the ranks' combined state; `weight_version` is vLLM's label until the first update by weightcast."""
        label, is_paused = self._label(), self._is_async and self._call("is_paused")
        info = self._required(rpc.Ask()).info
        if info.torn:
            # Also if no update follows, as after a sleep that has freed the weights.
            self._refuse(info.torn)
        self._world_size = self._given_world_size or info.world_size
        version = label if info.weight_version == "default" else info.weight_version
        # Streaming needs the server's routes, adapters its list of models.
        abilities = tuple(ability for ability in info.abilities if ability not in ("streaming", "adapters"))
        return msgspec.structs.replace(
            info, weight_version=version, paused=is_paused, world_size=self._world_size, abilities=abilities
        )

    def init(self, info: InitInfo) -> None:
        self._required(rpc.Init(info if self._token is None else msgspec.structs.replace(info, token=self._token)))
        self._run = info.run

    def update(self, info: UpdateInfo) -> None:
        """Send an update message. Raises UnsupportedError for a streaming offer, during which others could generate."""
        if isinstance(info, Offer) and info.install == "streaming":
            raise UnsupportedError(
                f'install="streaming" needs weightcast\'s routes in the server, which {self.name} lacks: '
                "publish with install='staged', or serve vLLM with VLLM_PLUGINS=weightcast"
            )
        self._required(rpc.UpdateCall(info))

    def finish(self, version: int) -> None:
        """Install on every rank.

        Raises the first error; ranks of other data-parallel engines report over their links.
        """
        if not self._run:
            raise ClosedError(f"no publisher holds {self.name}: call init() first")
        self._required(rpc.InstallCall(self._run, version, self._world_size))

    def settle(self, version: int, *, keep: bool) -> None:
        settle = rpc.Settle(self._run, version, keep)
        if keep:
            self._required(settle)
        else:
            # A rank that can't roll back reports it over its link, and in its reply to `resume`.
            self._replies(settle)

    def pause(self, run: str) -> None:
        self._stop(self._pause_mode)

    def resume(self, run: str) -> None:
        """Label the engine with its ranks' version, and resume it; if it is torn, it stays paused."""
        try:
            replies = self._replies(rpc.Ask())
            if not replies.torn:
                if replies.info.weight_version != "default":
                    self._set_label(replies.info.weight_version)
                self._schedule()
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
        self._required(rpc.Quarantine(reason[:4096]))
        self._stop("keep")

    def _refuse(self, reason: str) -> None:
        if self._refusal is not None:
            self._refusal.begin(reason)

    def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
        """Return digests of the live tensors (or of `names`); None before the first offer to this engine."""
        if "prove" not in self._required(rpc.Ask()).info.abilities:
            return None
        return self._required(rpc.Prove(names=tuple(names))).held(with_blocks=bool(names))

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str] | None:
        return self._required(rpc.Dtypes(list(specs))).dtypes()

    def shutdown(self) -> None:
        """End the present run's session; the engine goes on serving."""
        self._required(rpc.Leave())

    def close(self) -> None:
        """Do nothing, since the engine is the caller's."""

    def _required(self, call: rpc.RankCall) -> Replies:
        """Return every rank's reply. Raises the first error among them."""
        replies = self._replies(call)
        replies.raise_first(self.name)
        return replies

    def _replies(self, call: rpc.RankCall) -> Replies:
        """Call the first data-parallel engine's ranks."""
        values = rpc.numbered(call)
        # By position: engines other than vLLM's may have other argument names, and no defaults.
        answers = self._call("collective_rpc", rpc.METHOD, None, (values,), None)
        if isinstance(answers, list):
            # TorchRL returns a list of replies for each engine.
            answers = [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]
        return Replies(rpc.replies_to(values, answers, self.name), num_engines=1)
