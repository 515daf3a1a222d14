"""LLMEngine, AsyncLLMEngine and RayEngine: which methods they call, in which thread, and when they stop waiting."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from publishers import publisher_of
from server.offline_vllm import OfflineLLM, OnlineLLM, Requests

import weightcast
from weightcast.errors import ControlError, PeerDiedError, PeerTimeoutError, PublishError, UnsupportedError
from weightcast.integrations.vllm import AsyncLLMEngine, LLMEngine, RayEngine
from weightcast.integrations.vllm.clients import detect
from weightcast.seams.client import EngineClient, ServesTraffic, TwoPhaseInstall


@pytest.fixture
def llm(leaves_nothing: None) -> Iterator[OfflineLLM]:
    with contextlib.closing(OfflineLLM()) as llm:
        yield llm


def filled(value: float) -> torch.nn.Module:
    module = torch.nn.Linear(8, 8)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def filled_publisher(value: float, *engines: EngineClient, **options: object) -> weightcast.Publisher:
    return publisher_of(weightcast.ModuleSource(filled(value)), engines=engines, **options)


def value_of(llm: OfflineLLM) -> float:
    return float(llm.module.weight.detach()[0, 0])


INSTALL = ["sleep 0 keep", "reset_prefix_cache", "install", "settle", "ask", "label 0", "wake_up ['scheduling']"]


def test_an_llm_is_updated_in_a_pause_and_labelled_before_it_ends(llm: OfflineLLM) -> None:
    engine = LLMEngine(llm)
    assert isinstance(engine, ServesTraffic)
    assert isinstance(engine, TwoPhaseInstall)
    with filled_publisher(3.0, engine) as publisher:
        assert publisher.publish().ok
    assert (value_of(llm), llm.label, llm.is_scheduling) == (3.0, "0", True)
    assert llm.log[-7:] == INSTALL
    assert llm.threads == {threading.get_ident()}, "an engine in this process computes in the caller's thread"


def test_what_is_no_engine_of_vllms_is_refused_when_its_client_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, words in (
        (LLMEngine, "str is not an LLM of vLLM"),
        (AsyncLLMEngine, "str is not an AsyncLLM of vLLM"),
        (RayEngine, "str is not a handle of a Ray actor"),
    ):
        with pytest.raises(TypeError, match=words):
            kind("MODEL")
    with pytest.raises(ValueError, match="no event loop is running"):
        AsyncLLMEngine(SimpleNamespace(vllm_config=None))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'PATH_TO_WEIGHTCAST\[ray\]'"):
        RayEngine("MODEL")


def test_an_engine_asleep_is_woken_for_weights_updated_and_then_woken_for_its_kv_cache(llm: OfflineLLM) -> None:
    """A publish must not have it schedule while its KV cache is not there."""
    with filled_publisher(3.0, LLMEngine(llm)) as publisher:
        llm.sleep(1)
        llm.wake_up(tags=["weights"])
        llm.log.clear()
        assert publisher.publish().ok
        assert not llm.is_scheduling
        assert llm.wake_up(tags=["kv_cache"])
    assert llm.is_scheduling
    assert llm.log[-8:] == [*INSTALL, "wake_up ['kv_cache']"]
    assert value_of(llm) == 3.0


def test_a_torn_llm_is_not_resumed_until_it_is_healed(llm: OfflineLLM) -> None:
    llm.engine.is_broken = True
    with filled_publisher(3.0, LLMEngine(llm, pause="abort")) as publisher:
        with pytest.raises(PublishError, match="the loader broke"):
            publisher.publish()
        assert not llm.is_scheduling
        assert llm.label == "default"
        llm.engine.is_broken = False
        assert publisher.publish().ok
    assert (value_of(llm), llm.label, llm.is_scheduling) == (3.0, "1", True)
    assert "sleep 0 abort" in llm.log


def test_a_quarantined_llm_is_not_freed_by_an_update_that_fails(llm: OfflineLLM) -> None:
    engine = LLMEngine(llm)
    with filled_publisher(3.0, engine, undo=True) as publisher:
        assert publisher.publish().ok
        engine.quarantine("a bit has changed")
        assert engine.info().torn.startswith("a bit has changed")
        assert not llm.is_scheduling
        llm.engine.is_broken = True
        with pytest.raises(PublishError, match="the loader broke"):
            publisher.publish()
        assert engine.info().torn
        assert not llm.is_scheduling
        llm.engine.is_broken = False
        assert publisher.publish().ok
    assert (engine.info().torn, llm.is_scheduling) == ("", True)


def test_an_engine_process_that_hangs_is_late(leaves_nothing: None) -> None:
    with contextlib.closing(OfflineLLM(is_inside=False)) as llm:
        llm.hangs_at = "ask"
        with pytest.raises(PeerTimeoutError, match=r"first\.collective_rpc gave no answer in time: .* \(0\.2\)"):
            LLMEngine(llm, name="first", timeout_seconds=0.2).info()
        llm.has_hung.set()
        assert threading.get_ident() not in llm.threads


@pytest.mark.parametrize("num_behind", [0, 1])
def test_answers_to_earlier_calls_are_found_out(
    llm: OfflineLLM, monkeypatch: pytest.MonkeyPatch, num_behind: int
) -> None:
    """As vLLM gives them once a call has failed on several workers of an engine."""
    inner, serials = llm.collective_rpc, ["an earlier call's"] * num_behind

    def collective_rpc(method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        serials.append(args[0]["serial"])
        return [reply | {"serial": serials.pop(0)} for reply in inner(method, timeout, args, kwargs)]

    monkeypatch.setattr(llm, "collective_rpc", collective_rpc)
    out_of_step = pytest.raises(PublishError, match=r"out of step: .* start the server again")
    with filled_publisher(3.0, LLMEngine(llm)) as publisher, out_of_step if num_behind else contextlib.nullcontext():
        publisher.publish()
    assert ("install" in llm.log) is not bool(num_behind)


class EngineDeadError(Exception):
    """By this name vLLM says that an engine's process has ended."""


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        (EngineDeadError("gone"), PeerDiedError, "LLM has died: gone"),
        (TimeoutError(), PeerTimeoutError, "no answer in time"),
        (NotImplementedError("no such method"), ControlError, "NotImplementedError: no such method"),
    ],
)
def test_errors_of_vllm_become_ours(
    llm: OfflineLLM, monkeypatch: pytest.MonkeyPatch, raised: Exception, error: type[Exception], text: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(llm, "collective_rpc", fail)
    with pytest.raises(error, match=text):
        LLMEngine(llm).info()


@pytest.mark.parametrize("answers", [None, "done", [[None]]])
def test_an_engine_whose_workers_answer_otherwise_is_named(
    llm: OfflineLLM, monkeypatch: pytest.MonkeyPatch, answers: object
) -> None:
    monkeypatch.setattr(llm, "collective_rpc", lambda *_: answers)
    with pytest.raises(ControlError, match="the ranks of LLM did not answer as weightcast's plugin does"):
        LLMEngine(llm).info()


def test_an_engine_that_is_no_vllm_is_asked_by_position(llm: OfflineLLM) -> None:
    """It may name its arguments as it likes, and have no defaults."""

    class Engine:
        def collective_rpc(self, name: str, seconds: None, values: tuple[object], more: None, /) -> list[Any]:
            return [llm.collective_rpc(name, seconds, values, more)]

        def generate(self) -> None:
            """Nothing is asked of it."""

    (engine,) = detect(Engine())
    assert engine.info().weight_version == "default"


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ("input_processor", "NoneType.assign_request_id"),
        ("engine_core.get_output", "SimpleNamespace.get_output"),
        ("actors", "SimpleNamespace._generate_impl"),
        ("generate", "SimpleNamespace.generate"),
    ],
)
def test_an_engine_that_could_not_be_refused_is_refused_at_once(without: str, named: str) -> None:
    """Whether a version of vLLM or TorchRL has other names, or an engine of one's own generates in another way."""
    found: dict[str, Any] = {"collective_rpc": lambda *args: []}
    if without in ("input_processor", "engine_core.get_output"):
        processor = SimpleNamespace(assign_request_id=print) if without != "input_processor" else None
        core = SimpleNamespace() if without == "engine_core.get_output" else Requests()
        found["llm_engine"] = SimpleNamespace(engine_core=core, input_processor=processor)
    if without == "actors":
        found |= {"actors": [SimpleNamespace(collective_rpc_v1=SimpleNamespace(remote=print))], "generate": print}
    with pytest.raises(UnsupportedError, match=rf"lacks {named}, through which all requests must pass"):
        detect(SimpleNamespace(**found))


def test_two_engines_in_one_process_have_two_names(llm: OfflineLLM) -> None:
    with contextlib.closing(OfflineLLM()) as other:
        with filled_publisher(2.0, LLMEngine(llm, name="first"), LLMEngine(other, name="second")) as publisher:
            assert sorted(publisher.publish().engines) == ["first", "second"]
        assert value_of(llm) == value_of(other) == 2.0


def test_an_async_llm_is_updated_from_a_thread_beside_its_loop(leaves_nothing: None) -> None:
    async def main() -> OfflineLLM:
        llm = OnlineLLM()
        with filled_publisher(4.0, AsyncLLMEngine(llm, pause="wait")) as publisher, contextlib.closing(llm.inner):
            assert (await asyncio.to_thread(publisher.publish)).ok
        return llm.inner

    llm = asyncio.run(main())
    assert (value_of(llm), llm.label, llm.is_scheduling) == (4.0, "0", True)
    assert llm.log[-6:] == ["pause wait True", *INSTALL[2:]]


def test_an_async_llm_says_what_is_wrong_instead_of_waiting_for_its_own_thread(leaves_nothing: None) -> None:
    async def main() -> None:
        llm = OnlineLLM()
        with (
            filled_publisher(4.0, AsyncLLMEngine(llm)) as publisher,
            contextlib.closing(llm.inner),
            pytest.raises(PublishError, match=r"await publisher\.publish_async\(\)"),
        ):
            publisher.publish()

    asyncio.run(main())


def test_an_async_llm_that_does_not_answer_is_late(leaves_nothing: None) -> None:
    async def main() -> None:
        llm = OnlineLLM()
        llm.inner.hangs_at = "ask"
        engine = AsyncLLMEngine(llm, timeout_seconds=0.2)
        with contextlib.closing(llm.inner), pytest.raises(PeerTimeoutError, match=r"AsyncLLM\.collective_rpc"):
            await asyncio.to_thread(engine.info)

    asyncio.run(main())


@pytest.mark.cluster
def test_a_ray_actor_of_either_kind_is_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    # Or Ray takes the host's address in place of 127.0.0.1, writes a token to the home directory, and calls home.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    class Offline(OfflineLLM):
        def value(self) -> float:
            return value_of(self)

    class Online(OnlineLLM):
        def __init__(self) -> None:
            pass

        async def start(self) -> None:
            super().__init__()

        async def value(self) -> float:
            return value_of(self.inner)

    class Stranger:
        def sleep(self) -> None: ...

    with tempfile.TemporaryDirectory(prefix="wc", dir="/tmp") as folder:
        path = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}}
        ray.init(num_cpus=3, include_dashboard=False, _temp_dir=folder, log_to_driver=False, runtime_env=path)
        try:
            offline, online = (ray.remote(num_cpus=1)(kind).remote() for kind in (Offline, Online))
            ray.get(online.start.remote(), timeout=60)
            engines = [RayEngine(offline), RayEngine(online, name="online")]
            with filled_publisher(5.0, *engines) as publisher:
                assert publisher.publish().ok
                assert ray.get([offline.value.remote(), online.value.remote()], timeout=60) == [5.0, 5.0]
                ray.kill(online)
                with pytest.raises(PublishError) as caught:
                    publisher.publish()
                assert isinstance(caught.value.failures["online"], PeerDiedError)
            with pytest.raises(ValueError, match="no collective_rpc"):
                RayEngine(ray.remote(num_cpus=0)(Stranger).remote())
        finally:
            ray.shutdown()
