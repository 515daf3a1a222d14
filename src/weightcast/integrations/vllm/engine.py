"""All ranks of all engine cores behind one vLLM API server, as one engine.

Invariants: a call reaches every rank of every data-parallel engine core; an install happens in a pause that drops every
cache, is kept only if all have it, and is labelled before anything is generated with it; what is torn stays paused. One
install, pause, resume or answer about versions at a time, so that none sees another half-way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import msgspec

from weightcast.control.messages import PauseMode, WeightInfo
from weightcast.control.rank_calls import METHOD, Ask, Install, RankCall, RankReply, Settle
from weightcast.errors import (
    ClosedError,
    ControlError,
    EngineTornError,
    InstallError,
    PeerTimeoutError,
    WeightcastError,
    from_record,
)

T = TypeVar("T")
_PEER = "engine"


class VllmEngine:
    """The engine behind `client`, vLLM's EngineClient. For one event loop. Errors are WeightcastErrors.

    Every wait for vLLM ends after `deadline_seconds`, but for that of a begun install, which ends with vLLM's.
    """

    def __init__(self, client: Any, *, deadline_seconds: float = 60.0) -> None:
        self._client = client
        self._deadline_seconds = deadline_seconds
        self._lock = asyncio.Lock()
        self._torn = ""

    @property
    def torn(self) -> str:
        """Why the engine must not generate, or empty, as of the last call."""
        return self._torn

    def world_size(self, *, with_data_parallel: bool) -> int:
        parallel = self._client.vllm_config.parallel_config
        return int(parallel.world_size_across_dp if with_data_parallel else parallel.world_size)

    async def call(self, call: RankCall) -> None:
        """Raises the first error of any rank."""
        _raise_first(await self._in_time(self._replies(call)))

    async def info(self) -> WeightInfo:
        """What all ranks are together; before an update the label is vLLM's. Waits for an install under way."""
        async with self._alone():
            return await self._info()

    async def is_paused(self) -> bool:
        return bool(await self._in_time(self._client.is_paused()))

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        """Stop generation until `resume`."""
        async with self._alone():
            await self._pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Generate again. Raises EngineTornError if the weights are of no whole version."""
        async with self._alone():
            torn = (await self._info()).torn
            if torn:
                raise EngineTornError(f"the engine can't generate, and stays paused: {torn}")
            await self._in_time(self._client.resume_generation())

    async def install(self, number: int, mode: PauseMode) -> WeightInfo:
        """Pause, install the sealed version on all ranks or on none, label and resume; what the engine is then.

        An engine that was paused before stays so, unless it was for being torn. Raises ClosedError (nobody holds it),
        what refused the install, with everything as before, or InstallError; if that is torn the engine stays paused.
        """
        async with self._alone():
            before = await self._info()
            if not before.holder:
                raise ClosedError("no publisher holds this engine: call /init_weight_transfer_engine first")
            async with self._standing_still(mode, before):
                await self._install_everywhere(before.holder, number)
                await self._in_time(self._client.update_weight_version(str(number)))
            return await self._info()

    # --- an install ---

    @contextlib.asynccontextmanager
    async def _standing_still(self, mode: PauseMode, before: WeightInfo) -> AsyncIterator[None]:
        try:
            await self._pause(mode, clear_cache=True)
            yield
        finally:
            if not self._torn and (before.torn or not before.paused):
                # Unlike a resume, this leaves an engine alone whose KV cache is still asleep.
                await self._in_time(self._client.wake_up(tags=["scheduling"]))

    async def _install_everywhere(self, run: str, number: int) -> None:
        try:
            _raise_first(await self._replies(Install(run, number)))
        except WeightcastError as exc:
            await self._settle(Settle(run, number, keep=False))
            raise self._failed(exc) from exc
        _raise_first(await self._settle(Settle(run, number, keep=True)))

    async def _settle(self, settle: Settle) -> list[RankReply]:
        try:
            return await self._replies(settle)
        except WeightcastError as exc:
            self._torn = f"whether all ranks hold one version is not known, publish a complete one to heal it: {exc}"
            raise

    def _failed(self, error: WeightcastError) -> WeightcastError:
        """The error of an install, which knows now whether all could go back."""
        if not self._torn:
            return error
        return InstallError(str(error) if isinstance(error, InstallError) else f"{error}; {self._torn}", torn=True)

    # --- vLLM's side ---

    async def _info(self) -> WeightInfo:
        infos = [reply.info for reply in await self._in_time(self._replies(Ask()))]
        first = infos[0]
        label, paused = await self._in_time(asyncio.gather(self._client.get_weight_version(), self._client.is_paused()))
        return WeightInfo(
            weight_version=label if first.weight_version == "default" else first.weight_version,
            run=first.run,
            holder=first.holder if all(info.holder == first.holder for info in infos) else "",
            paused=paused,
            torn=self._torn,
            world_size=len(infos),
            abilities=("install", *(a for a in first.abilities if all(a in info.abilities for info in infos))),
            protocol=first.protocol,
        )

    async def _pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        try:
            await self._in_time(self._client.pause_generation(mode=mode, clear_cache=clear_cache))
        except PeerTimeoutError as exc:
            # vLLM goes on pausing: what comes after this resumes it.
            raise PeerTimeoutError(f"{exc}: its requests did not end; pause in the mode 'keep'", peer=_PEER) from exc

    async def _replies(self, call: RankCall) -> list[RankReply]:
        """Every rank's reply. Sees to it that a torn engine is known as such."""
        values = msgspec.to_builtins(call)
        core = self._client.engine_core
        with _translated():
            # Never with a timeout of vLLM's, which would leave a reply behind for the next step to read.
            answers = await core.call_utility_all_async("collective_rpc", METHOD, None, (values,), None)
            replies = msgspec.convert([reply for answer in answers for reply in answer], list[RankReply])
        self._torn = _torn([reply.info for reply in replies])
        return replies

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        await self._in_time(self._lock.acquire())
        try:
            yield
        finally:
            self._lock.release()

    async def _in_time(self, awaitable: Awaitable[T]) -> T:
        try:
            with _translated():
                return await asyncio.wait_for(awaitable, self._deadline_seconds)
        except TimeoutError as exc:
            raise PeerTimeoutError(f"vLLM gave no answer within {self._deadline_seconds:g} s", peer=_PEER) from exc


@contextlib.contextmanager
def _translated() -> Any:
    try:
        yield
    except (WeightcastError, TimeoutError):
        raise
    except Exception as exc:
        raise ControlError(f"vLLM's engine failed: {type(exc).__name__}: {exc}", peer=_PEER) from exc


def _raise_first(replies: Sequence[RankReply]) -> None:
    error = next((reply.error for reply in replies if reply.error is not None), None)
    if error is not None:
        raise from_record(error)


def _torn(infos: Sequence[WeightInfo]) -> str:
    """Why the ranks together hold no whole version, or empty."""
    versions = sorted({f"{info.weight_version} of run {info.run or 'none'}" for info in infos})
    torn = next((info.torn for info in infos if info.torn), "")
    return torn or (f"its ranks hold different versions: {', '.join(versions)}" if len(versions) > 1 else "")
