"""VllmEngine over real ranks, real links and ipc: one or several API servers in front of the same engine cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from publishers import publisher_of

import weightcast
from integrations.vllm_api_server import ApiServerClient, Cores
from weightcast.control.worker_rpc import Init, Leave, UpdateCall
from weightcast.errors import ClosedError, EngineTornError, InstallError, PeerTimeoutError, PublishError
from weightcast.format.messages import InitInfo, PauseMode, UpdateInfo, WeightInfo
from weightcast.integrations.plugin.server_mutex import ServerMutex
from weightcast.integrations.vllm.engine import VllmEngine
from weightcast.seams.client import EngineClient

pytestmark = pytest.mark.usefixtures("leaves_nothing")

T = TypeVar("T")


class ApiServer(EngineClient):
    """An API server with an event loop of its own; to a publisher it is an engine that pauses by itself."""

    def __init__(self, cores: Cores, turns: ServerMutex, *, deadline_seconds: float = 10.0) -> None:
        self.name = "vllm"
        self.pause: PauseMode = "keep"
        self.paused_seconds = 0.0
        self.client = ApiServerClient(cores)
        self._mutex = turns
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = VllmEngine(self.client, turns, deadline_seconds=deadline_seconds)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def why_torn(self) -> str:
        return self.do(self.engine.why_torn())

    def info(self) -> WeightInfo:
        return self.do(self.engine.info())

    def init(self, info: InitInfo) -> None:
        self.do(self.engine.call(Init(info)))

    def update(self, info: UpdateInfo) -> None:
        self.do(self.engine.call(UpdateCall(info)))

    def finish(self, version: int) -> None:
        self.paused_seconds = self.do(self.engine.install(version, self.pause)).pause_seconds

    async def wake_up(self, *tags: str) -> None:
        """As vLLM's own route does it."""
        async with self.engine.waking(tags):
            await self.client.wake_up(list(tags))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self._mutex.close()


@pytest.fixture(params=[1, 2], ids=["one engine", "two engines"])
def cores(request: pytest.FixtureRequest) -> Cores:
    return Cores(request.param)


@pytest.fixture
def servers(cores: Cores, tmp_path: Path) -> Iterator[list[ApiServer]]:
    """Two API servers of the same cores."""
    made = [ApiServer(cores, ServerMutex.of_several(2, launcher=os.getpid(), folder=str(tmp_path))) for _ in range(2)]
    yield made
    made[0].do(made[0].engine.call(Leave()))
    for server in made:
        server.close()


@contextlib.contextmanager
def publisher(server: ApiServer, value: float, **options: Any) -> Iterator[weightcast.Publisher]:
    module = torch.nn.Linear(8, 8)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    with publisher_of(weightcast.ModuleSource(module), engines=[server], **options, takeover=True) as made:
        yield made


def test_an_install_asks_once_before_its_pause_and_nothing_after_it(cores: Cores, servers: list[ApiServer]) -> None:
    with publisher(servers[0], 3.0) as it:
        finish, counted = servers[0].finish, []

        def count(version: int) -> None:
            cores.log.clear()
            before = cores.num_calls
            finish(version)
            counted.append(cores.num_calls - before)

        servers[0].finish = count  # type: ignore[method-assign]
        report = it.publish()
        settle = [] if len(cores.ranks) == 1 else ["settle"]
        assert cores.log == ["pause keep True", "install", *settle, "label 0", "wake_up scheduling"]
        assert counted == [len(cores.log) + 2], "before it: one question to the ranks and one to the scheduler"
        result = report.engines["vllm"]
        assert 0 < result.install_seconds <= result.pause_seconds < report.seconds.total
    assert (set(cores.values()), cores.label, cores.is_paused) == ({3.0}, "0", False)
    assert [server.why_torn() for server in servers] == ["", ""]


def test_a_probe_during_an_install_is_answered_as_before_it(cores: Cores, servers: list[ApiServer]) -> None:
    engine, found = servers[0].engine, []

    async def finish(version: int) -> None:
        install = asyncio.ensure_future(engine.finish(version, "wait", ""))
        while cores.pausing is None:
            await asyncio.sleep(0)
        found.append(await engine.stale_reason(0))
        cores.pausing.set()
        await install

    with publisher(servers[0], 3.0) as it:
        assert "no publisher's version" in servers[0].do(engine.stale_reason(0))
        it.publish()
        assert servers[0].do(engine.stale_reason(0)) == ""
        cores.is_busy = True
        servers[0].finish = lambda version: servers[0].do(finish(version))  # type: ignore[method-assign]
        assert it.publish().version == 1
        cores.is_busy = False
        assert found == [""]
        assert servers[0].do(engine.stale_reason(0)) == ""


def test_each_server_knows_what_was_torn_through_another_and_heals_it(cores: Cores, servers: list[ApiServer]) -> None:
    with publisher(servers[0], 1.0) as it:
        it.publish()
        cores.engines[-1].is_broken = True
        with pytest.raises(PublishError) as caught:
            it.publish()
        assert isinstance(caught.value.failures["vllm"], InstallError)
    for server in servers:
        assert "publish a complete" in server.why_torn()
        info = server.info()
        assert info.torn
        assert info.weight_version == "0", "what a part of the engines has is no version of the whole"
        with pytest.raises(EngineTornError, match="stays paused"):
            server.do(server.engine.resume())
        for tags in ((), ("scheduling",), ("weights",)):
            with pytest.raises(EngineTornError, match="stays paused"):
                server.do(server.wake_up(*tags))
    assert cores.is_paused
    assert cores.label == "0"
    cores.engines[-1].is_broken = False
    with publisher(servers[1], 2.0) as it:
        version = it.publish().version
    assert (set(cores.values()), cores.label, cores.is_paused) == ({2.0}, str(version), False)
    assert [server.why_torn() for server in servers] == ["", ""]
    assert not servers[0].info().torn


def test_what_was_undone_serves_on_through_every_server(cores: Cores, servers: list[ApiServer]) -> None:
    with publisher(servers[0], 1.0) as it:
        it.publish()
    with publisher(servers[1], 2.0, undo=True) as it:
        cores.engines[-1].is_broken = True
        with pytest.raises(PublishError, match="the loader broke"):
            it.publish()
    assert (set(cores.values()), cores.label, cores.is_paused) == ({1.0}, "0", False)
    assert [server.why_torn() for server in servers] == ["", ""]


@pytest.mark.parametrize("cores", [2], ids=["two engines"], indirect=True)
def test_an_outcome_that_nobody_knows_is_torn_for_every_server(servers: list[ApiServer], cores: Cores) -> None:
    """The answers to the install and to its settling get lost, after the first core alone has heard of either."""
    with publisher(servers[0], 1.0) as it:
        it.publish()
    cores.failing = {"install", "settle"}
    with publisher(servers[0], 2.0) as it, pytest.raises(PublishError, match="its ranks may have different versions"):
        it.publish()
    assert cores.is_paused
    cores.failing = set()
    for server in servers:
        assert server.why_torn()
        with pytest.raises(EngineTornError):
            server.do(server.engine.resume())
    with publisher(servers[1], 3.0) as it:
        assert it.publish().ok
    assert (set(cores.values()), cores.is_paused) == ({3.0}, False)


@pytest.mark.parametrize("cores", [2], ids=["two engines"], indirect=True)
def test_what_waits_for_word_of_the_other_engines_is_torn(servers: list[ApiServer], cores: Cores) -> None:
    with publisher(servers[0], 1.0) as it:
        cores.failing = {"settle"}
        with pytest.raises(PublishError):
            it.publish()
        cores.failing = set()
        assert "not known whether the other data-parallel engines have it" in cores.ranks[1].info().torn
        assert all(server.why_torn() for server in servers)
        assert it.publish().ok
        assert not any(server.why_torn() for server in servers)


def test_a_question_waits_for_the_install_of_another_server(cores: Cores, servers: list[ApiServer]) -> None:
    """It sees neither a pause that is not a person's nor one of two engines with the new version."""
    with publisher(servers[0], 1.0) as it:
        it.publish()
        begun, go_on = threading.Event(), threading.Event()
        load = cores.engines[0].load

        def slow(tensors: Any) -> None:
            begun.set()
            assert go_on.wait(30)
            load(tensors)

        cores.engines[0].load = slow  # type: ignore[method-assign]
        publishing = threading.Thread(target=it.publish)
        publishing.start()
        assert begun.wait(30)
        other = servers[1]
        asked = [
            asyncio.run_coroutine_threadsafe(work, other._loop)
            for work in (
                other.engine.why_torn(),
                other.engine.info(),
                other.engine.pause("keep"),
                other.engine.resume(),
                other.wake_up("scheduling"),
            )
        ]
        assert not any(future.done() for future in asked)
        assert cores.log[-1] == "install"
        go_on.set()
        publishing.join(30)
        why_torn, info, *_ = [future.result(30) for future in asked]
    assert why_torn == ""
    assert (info.weight_version, info.paused, info.torn) == ("1", False, "")
    assert cores.log[-3:] == ["pause keep True", *2 * ["wake_up scheduling"]]


def test_a_persons_pause_outlives_an_install(cores: Cores, servers: list[ApiServer]) -> None:
    servers[1].do(servers[1].engine.pause("keep"))
    with publisher(servers[0], 1.0) as it:
        it.publish()
        assert cores.is_paused
        assert cores.label == "0"
    servers[0].do(servers[0].engine.resume())
    assert not cores.is_paused


@pytest.mark.parametrize("was_paused", [False, True], ids=["", "a person's"])
def test_a_pause_that_takes_too_long_is_given_up(cores: Cores, tmp_path: Path, was_paused: bool) -> None:
    with contextlib.closing(ApiServer(cores, ServerMutex.of_one(), deadline_seconds=2.0)) as server:
        with publisher(server, 1.0) as it:
            it.publish()
        if was_paused:
            server.do(server.engine.pause("keep"))
        cores.is_busy, server.pause = True, "wait"
        with publisher(server, 2.0) as it:
            with pytest.raises(PublishError) as caught:
                it.publish()
            error = caught.value.failures["vllm"]
            assert isinstance(error, PeerTimeoutError)
            assert "pause with mode=keep" in str(error)
            assert (set(cores.values()), cores.label, cores.is_paused) == ({1.0}, "0", was_paused)
            assert server.why_torn() == ""
            server.pause = "keep"
            assert it.publish().ok
        assert (set(cores.values()), cores.is_paused) == ({2.0}, was_paused)
        server.do(server.engine.call(Leave()))


@pytest.mark.parametrize("is_asleep", [True, False])
def test_a_torn_engine_gets_its_weights_back_while_its_cache_sleeps(
    cores: Cores, servers: list[ApiServer], is_asleep: bool
) -> None:
    with publisher(servers[0], 1.0) as it:
        cores.engines[0].is_broken = True
        with pytest.raises(PublishError):
            it.publish()
        cores.engines[0].is_broken = False
        for rank in cores.ranks:
            rank._weights_asleep = lambda: "/wake_up" if is_asleep else ""
        for tags in ((), ("kv_cache",), ("weights", "kv_cache"), ("scheduling",)):
            with pytest.raises(EngineTornError):
                servers[1].do(servers[1].wake_up(*tags))
        with contextlib.nullcontext() if is_asleep else pytest.raises(EngineTornError):
            servers[1].do(servers[1].wake_up("weights"))
        for rank in cores.ranks:
            rank._weights_asleep = lambda: ""
        it.publish()
        servers[1].do(servers[1].wake_up("kv_cache"))


def test_a_worker_that_answers_an_earlier_call_is_found_out(cores: Cores, servers: list[ApiServer]) -> None:
    answer = cores.ranks[-1].answer
    late = [answer({"call": "ask", "serial": "an earlier one's"})]

    def lagging(values: object) -> Any:
        late.append(answer(values))
        return late.pop(0)

    with publisher(servers[0], 1.0) as it:
        it.publish()
        cores.log.clear()
        cores.ranks[-1].answer = lagging  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(PublishError, match="start the server again"):
                it.publish()
        cores.ranks[-1].answer = answer  # type: ignore[method-assign]
    assert "install" not in cores.log


def test_nothing_is_paused_where_nobody_publishes(cores: Cores, servers: list[ApiServer]) -> None:
    with pytest.raises(ClosedError, match="no publisher holds"):
        servers[0].finish(0)
    assert cores.log == []


def test_an_engine_that_is_not_paused_is_not_resumed(servers: list[ApiServer], cores: Cores) -> None:
    """vLLM's engines of experts wait for each other in a resume, and one in a step would not come."""
    for server in servers:
        server.do(server.engine.resume())
    assert cores.log == []


def test_every_server_knows_that_the_run_goes_on_without_the_engine(servers: list[ApiServer], cores: Cores) -> None:
    with publisher(servers[0], 1.0) as made:
        made.publish(1)
        assert [server.info().stale_reason(0) for server in servers] == ["", ""]
        made.remove_engine(servers[0])
        assert all("goes on without this engine" in server.info().stale_reason(1000) for server in servers)
        made.add_engine(servers[0])
        made.publish(2)
        assert [server.info().stale_reason(0) for server in servers] == ["", ""]
    assert [server.info().stale_reason(0) for server in servers] == ["", ""]
