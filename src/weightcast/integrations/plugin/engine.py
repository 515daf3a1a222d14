"""All ranks behind another project's server as one engine: the code that does not depend on the project.

Invariants: a call reaches every rank; an install happens in a pause that drops every cache, is kept only if all ranks
have it, and its version is set as the server's label before anything is generated with it; an engine that is torn or
being streamed to stays paused. Installs, pauses, resumes and replies about versions are serialised.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import msgspec

from weightcast.control import worker_rpc as rpc
from weightcast.control.routes import InstallAnswer, ServedEngine
from weightcast.errors import (
    ClosedError,
    ControlError,
    EngineTornError,
    InstallError,
    PeerTimeoutError,
    StaleVersionError,
    Translated,
    UnsupportedError,
    WeightcastError,
)
from weightcast.format.adapters import AdapterVersion
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldWeights, InitInfo, Offer, PauseMode, Seal, UpdateInfo, WeightInfo
from weightcast.host.deadline import LOAD_SECONDS
from weightcast.integrations.plugin.metrics import engine_metrics
from weightcast.integrations.plugin.replies import Replies
from weightcast.integrations.plugin.server_mutex import ServerMutex
from weightcast.serving.worker import observed

T = TypeVar("T")
_PEER = "engine"


class HostAdapters(Protocol):
    """The names of published adapters in the host's server, and which versions have no request any more."""

    def require_room(self, offer: Offer) -> None:
        """Raise RefusedError or UnsupportedError if no request could name the offered version."""

    def idle(self) -> tuple[str, ...]:
        """Return the labels of loaded versions that no request uses or can name."""

    async def update(self, versions: Sequence[AdapterVersion], ids: Mapping[str, int | str]) -> None:
        """Answer requests with these versions. `ids`: by label, those of all loaded versions."""


class PluginEngine(ServedEngine, abc.ABC):
    """The engine behind the server `host` (its name in errors), for one event loop. Errors are WeightcastErrors.

    `mutex`: shared by all API servers of the engine. `adapters`: None if there are several API servers. Every wait for
    the host ends after `deadline_seconds`, except those of an install whose pause has begun, which have the host's own
    limits.
    """

    default_pause: PauseMode = "keep"

    def __init__(
        self, host: str, mutex: ServerMutex, deadline_seconds: float, adapters: HostAdapters | None = None
    ) -> None:
        self._host = host
        self._adapters = adapters
        self._mutex = mutex
        self._deadline_seconds = deadline_seconds
        self._own_label = ""
        """The label that this engine has last given the host."""
        self._installs: set[asyncio.Task[InstallAnswer]] = set()
        self._last_info: WeightInfo | None = None
        """The state that `stale_reason` was last answered from."""

    # --- the host's side: what goes wrong there may be any exception ---

    @abc.abstractmethod
    async def _ask(self, call: rpc.RankCall) -> Replies:
        """Send a call to every rank; return the replies."""

    @abc.abstractmethod
    async def _stop(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        """Stop scheduling, and drop every cache of the present weights, now or in the install. Idempotent.

        `clear_cache`: False allows the host to keep its caches.
        """

    @abc.abstractmethod
    async def _schedule(self) -> None:
        """Schedule again, at a client's request. Idempotent."""

    async def _end_stop(self) -> None:
        """Finish a `_stop` that timed out, if the host needs that before it can schedule again."""
        return

    async def _go_on(self) -> None:
        """Schedule again after an install."""
        await self._schedule()

    @abc.abstractmethod
    async def _is_stopped(self) -> bool: ...

    @abc.abstractmethod
    async def _label(self) -> str:
        """Return the version that the host reports."""

    @abc.abstractmethod
    async def _set_label(self, version: str) -> None: ...

    # --- the control protocol ---

    async def init(self, info: InitInfo) -> None:
        await self.call(rpc.Init(info))

    async def update(self, info: UpdateInfo) -> None:
        """Offer, seal or abort a version. Raises ClosedError for a streaming offer to an engine that is not paused."""
        if isinstance(info, Offer) and info.target:
            if self._adapters is None:
                raise UnsupportedError(
                    f"this {self._host} has several API servers, which can't agree on the version that an adapter's "
                    "name stands for: start it with --api-server-count 1"
                )
            self._adapters.require_room(info)
            await self.call(rpc.Unload(self._adapters.idle()))
        with observed(engine_metrics(), type(info).__name__.lower()):
            if not isinstance(info, Offer) or info.install != "streaming":
                await self.call(rpc.UpdateCall(info))
                return
            async with self._alone():
                if not await self._in_time(self._is_stopped()):
                    raise ClosedError('the engine is generating: send /pause before an offer with install="streaming"')
                # From now on only the ranks know whether the engine may generate.
                self._mutex.in_doubt = True
                await self.call(rpc.UpdateCall(info))

    async def shutdown(self) -> None:
        await self.call(rpc.Leave())

    async def finish(self, number: int, mode: PauseMode, run: str, seal: Seal | None = None) -> InstallAnswer:
        if seal is not None:
            await self.update(seal)
        task = asyncio.create_task(self._timed_install(number, mode, run))
        self._installs.add(task)
        task.add_done_callback(self._installs.discard)
        try:
            return await asyncio.wait_for(asyncio.shield(task), LOAD_SECONDS)
        except TimeoutError as exc:
            raise PeerTimeoutError(
                f"the install of version {number} has not ended within {LOAD_SECONDS:g} s and goes on: see "
                "/weight_info for its result",
                peer=_PEER,
            ) from exc

    async def _timed_install(self, number: int, mode: PauseMode, run: str) -> InstallAnswer:
        with observed(engine_metrics(), "install"):
            return await self.install(number, mode, run)

    async def call(self, call: rpc.RankCall) -> None:
        """Send a call to all ranks. Raises the first error of any rank."""
        (await self._in_time(self._replies(call))).raise_first()

    async def info(self) -> WeightInfo:
        """Return the state of all ranks as one engine's. Waits for an install in progress.

        Before the first update, while torn, and after the host has changed the weights by itself, the version is the
        host's label: the last whole version, or the host's own name for its weights.
        """
        async with self._alone():
            replies, label, paused = await self._in_time(
                asyncio.gather(self._replies(rpc.Ask()), self._label(), self._is_stopped())
            )
            if replies.torn:
                self._mutex.in_doubt = True
            elif replies.info.weight_version == "default" and label == self._own_label:
                await self._in_time(self._publish(replies))
                label = "default"
        info = replies.info
        engine_metrics().serves(info)
        engine_metrics().paused.set(paused)
        return msgspec.structs.replace(
            info,
            weight_version=label if info.torn or info.weight_version == "default" else info.weight_version,
            paused=paused,
            world_size=len(replies.ranks),
            abilities=("install", *info.abilities),
        )

    async def stale_reason(self, max_behind: int) -> str:
        """Return why the engine should get no requests, or "": see `WeightInfo.stale_reason`.

        During an install, which may take longer than a probe waits, it is what it was before.
        """
        if self._last_info is None or not self._installs:
            self._last_info = await self.info()
        return self._last_info.stale_reason(max_behind)

    async def why_torn(self) -> str:
        """Return why the engine must not generate, or "".

        Asks the ranks only if an install is in progress (and waits for it) or has failed, or if the host may have
        changed the weights. Returns "" if the ranks do not answer in time: a request then waits in the paused engine.
        """
        if self._mutex.in_doubt:
            with contextlib.suppress(WeightcastError):
                async with self._alone():
                    # The request that had the mutex until now may have cleared the flag.
                    if self._mutex.in_doubt:
                        replies = await self._in_time(self._replies(rpc.Ask()))
                        if not (replies.torn or replies.is_loading):
                            await self._in_time(self._publish(replies))
                            self._mutex.in_doubt = False
                        return replies.torn
        return ""

    def doubt(self) -> None:
        """Note that the host may change the weights by itself: ask the ranks before it generates again."""
        self._mutex.in_doubt = True

    async def held(self, names: Sequence[str], start: int, limit_bytes: int) -> HeldWeights:
        """Return all ranks' digests of the tensors (or of `names`) from index `start` on. Raises EngineTornError."""
        async with self._alone():
            replies = await self._in_time(self._replies(rpc.Prove(start, limit_bytes, tuple(names))))
        return replies.held(with_blocks=bool(names))

    async def dtypes(self, specs: list[TensorSpec]) -> dict[str, str]:
        """Return the engine's dtypes of these tensors, by record name."""
        async with self._alone():
            return (await self._in_time(self._replies(rpc.Dtypes(specs)))).dtypes()

    async def quarantine(self, reason: str) -> None:
        """Pause, and refuse to serve until a complete update."""
        async with self._alone():
            self._mutex.in_doubt = True
            await self._in_time(self._replies(rpc.Quarantine(reason)))
            await self._pause("keep")

    async def is_paused(self) -> bool:
        return await self._in_time(self._is_stopped())

    async def pause(self, mode: PauseMode, run: str = "", *, clear_cache: bool = True) -> None:
        """Stop generation until `resume`. `clear_cache`: False allows the host to keep its caches."""
        async with self._alone():
            await self._pause(mode, clear_cache=clear_cache)

    async def resume(self, run: str = "") -> None:
        """Generate again. Raises EngineTornError if the weights are not of one whole version."""
        async with self._alone():
            await self._require_untorn(await self._in_time(self._replies(rpc.Ask())))
            await self._in_time(self._schedule())
            # An engine that sleeps stays paused.
            engine_metrics().paused.set(await self._in_time(self._is_stopped()))

    async def _require_untorn(self, replies: Replies) -> None:
        """Label the host with its ranks' version before it generates again. Raises EngineTornError."""
        if replies.torn:
            self._mutex.in_doubt = True
            raise EngineTornError(f"the engine can't generate and stays paused: {replies.torn}")
        if replies.is_loading:
            raise EngineTornError("a streaming update is in progress: the engine stays paused until it has ended")
        if self._mutex.in_doubt:
            await self._in_time(self._publish(replies))
        self._mutex.in_doubt = False

    async def install(self, number: int, mode: PauseMode, run: str = "") -> InstallAnswer:
        """Pause, install the sealed version on all ranks or on none, label and resume; return the resulting version.

        `run`: that of the version, by default the one that holds the engine.

        An engine that was paused before stays paused, unless it was paused because it was torn. Raises ClosedError (no
        run holds the engine), the error of a refusal, with nothing changed, or InstallError; if that is torn, the
        engine stays paused.
        """
        async with self._alone():
            before, was_paused = await self._in_time(asyncio.gather(self._replies(rpc.Ask()), self._is_stopped()))
            holder = before.info.holder
            if not holder:
                raise ClosedError("no publisher holds this engine: send /init_weight_transfer_engine first")
            if run not in ("", holder):
                raise StaleVersionError(
                    f"the update is from run {run}, but run {holder} holds this engine: publish from that run only"
                )
            if before.ranks[0].adapter:
                return await self._install_adapter(before, number)
            goes_on = bool(before.torn) or not was_paused
            self._mutex.in_doubt = True
            try:
                await self._pause(mode)
            except WeightcastError:
                with self._translated():
                    await self._end_stop()
                await self._end_install(before, goes_on)
                raise
            paused_at = time.perf_counter()
            try:
                replies = await self._install_everywhere(before, number)
            except WeightcastError as exc:
                try:
                    after = await self._replies(rpc.Settle(holder, number, keep=False))
                except WeightcastError as lost:
                    unknown = "its ranks may have different versions; publish a complete update to heal it"
                    raise InstallError(f"{exc}; {unknown}: {lost}", torn=True) from lost
                await self._end_install(after, goes_on)
                if not after.torn:
                    raise
                text = str(exc) if isinstance(exc, InstallError) else f"{exc}; {after.torn}"
                raise InstallError(text, torn=True) from exc
            await self._end_install(replies, goes_on)
            seconds = time.perf_counter() - paused_at
            engine_metrics().pause_seconds.observe(seconds)
            return InstallAnswer(replies.info.weight_version, replies.info.run, seconds)

    async def _install_adapter(self, before: Replies, number: int) -> InstallAnswer:
        """Add the sealed version of an adapter on all ranks, between two steps; requests that run keep theirs."""
        holder = before.info.holder
        try:
            replies = await self._install_everywhere(before, number)
        except WeightcastError:
            # No rank has another model than before: only the adapter is taken away again.
            (await self._replies(rpc.Settle(holder, number, keep=False))).raise_first()
            raise
        with self._translated():
            await self._publish(replies)
        return InstallAnswer(str(number), holder, pause_seconds=0.0)

    async def _install_everywhere(self, before: Replies, number: int) -> Replies:
        """Install on all ranks. Several data-parallel engines keep the version only when all have installed it."""
        run, is_one = before.info.holder, before.num_engines == 1
        replies = await self._replies(rpc.InstallCall(run, number, len(before.ranks), keep=is_one))
        replies.raise_first()
        if not is_one:
            replies = await self._replies(rpc.Settle(run, number, keep=True))
            replies.raise_first()
        if replies.torn:
            raise InstallError(f"version {number} was not installed everywhere: {replies.torn}", torn=True)
        return replies

    async def _end_install(self, replies: Replies, goes_on: bool) -> None:
        """Label the engine with its ranks' version, and let it generate unless they are torn."""
        engine_metrics().serves(replies.info)
        if replies.torn:
            return
        with self._translated():
            await self._publish(replies)
            if goes_on:
                await self._go_on()
                engine_metrics().paused.set(False)
        self._mutex.in_doubt = False

    async def _publish(self, replies: Replies) -> None:
        """Give the host its ranks' version as its label, and their adapters.

        Removes a label of ours that is not their version.
        """
        version = replies.info.weight_version
        if version != "default":
            await self._set_label(version)
            self._own_label = version
        elif self._own_label and await self._label() == self._own_label:
            await self._set_label("default")
        if self._adapters is not None:
            await self._adapters.update(replies.info.adapters or (), replies.ranks[0].adapter_ids)

    # --- waiting ---

    async def _pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        try:
            await self._in_time(self._stop(mode, clear_cache=clear_cache))
        except PeerTimeoutError as exc:
            # The host goes on pausing; the next call resumes it.
            raise PeerTimeoutError(f"{exc}: its requests did not end; pause with mode=keep", peer=_PEER) from exc
        engine_metrics().paused.set(True)

    async def _replies(self, call: rpc.RankCall) -> Replies:
        with self._translated():
            return await self._ask(call)

    def _alone(self) -> AbstractAsyncContextManager[None]:
        return self._mutex.turn(self._deadline_seconds)

    async def _in_time(self, awaitable: Awaitable[T]) -> T:
        try:
            with self._translated():
                return await asyncio.wait_for(awaitable, self._deadline_seconds)
        except TimeoutError as exc:
            text = f"{self._host} gave no answer within {self._deadline_seconds:g} s"
            raise PeerTimeoutError(text, peer=_PEER) from exc

    def _translated(self) -> Translated:
        def raise_as_hosts(error: Exception) -> None:
            if not isinstance(error, WeightcastError | TimeoutError):
                raise ControlError(f"{self._host} failed: {type(error).__name__}: {error}", peer=_PEER) from error

        return Translated(Exception, raise_as_hosts)
