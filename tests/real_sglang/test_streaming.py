"""Versions that stream into a real SGLang bucket by bucket: bit for bit those of a cold start, torn where they fail."""

from __future__ import annotations

import signal

import pytest
from real_engines.process import Halfway
from real_engines.setups import on
from real_vllm.oracle import PROMPT
from real_vllm.trainer import GLOO, IPC, trainer
from warm_python import WarmPython

from real_sglang.faults import Break
from real_sglang.servers import ONE, TWO, Server
from real_sglang.test_transactional_faults import assert_as_before
from weightcast.errors import InstallError
from weightcast.host.deadline import Deadline


@on(ONE, TWO)
@pytest.mark.parametrize("transport", [IPC, GLOO], ids=["ipc", "gloo"])
def test_a_server_serves_what_was_streamed(server: Server, transport: str) -> None:
    with trainer(server.setup, server.url, transport=transport, install="streaming") as it:
        resumed: list[int] = []

        def resume(done: int, total: int) -> None:
            resumed.append(server.post("/continue_generation").status_code)

        for seed in (1, 0, 1):
            report = it.publish(seed, on_progress=resume)
            assert_as_before(server, seed, report.version)
    # Nobody has it generate with parts of two versions.
    assert set(resumed) == {409}
    with trainer(server.setup, server.url) as it:
        assert_as_before(server, 0, it.publish(0).version)


@on(ONE, TWO)
@pytest.mark.parametrize("undo", [True, False], ids=["undone", "torn"])
def test_a_bucket_that_fails(server: Server, undo: bool) -> None:
    with trainer(server.setup, server.url, install="streaming", undo=undo) as it:
        version = it.publish(0).version
        before = server.checksum()
        with server.failing(Break(1, server.setup.tp - 1)):
            error = it.failure(1)
        assert isinstance(error, InstallError), error
        assert "the test's fault" in str(error)
        assert error.torn is not undo
        if undo:
            assert server.checksum() == before
            assert_as_before(server, 0, version)
        else:
            assert server.generate(PROMPT, 4).status_code == 503
            assert server.post("/continue_generation").status_code == 409
            assert server.version() == str(version)
        for seed in (1, 0):
            assert_as_before(server, seed, it.publish(seed).version)


@on(ONE, TWO)
@pytest.mark.parametrize("undo", [True, False], ids=["undone", "torn"])
def test_memory_that_is_released_halfway_ends_the_update(server: Server, undo: bool) -> None:
    """Once it is back, SGLang puts buffers back as they were at the release."""
    with trainer(server.setup, server.url, install="streaming", undo=undo) as it:
        version, release = it.publish(0).version, Halfway(server, "/release_memory_occupation")
        error = it.failure(1, on_progress=release)
        assert "its memory is released" in str(error)
        assert release.replies == [200]
        assert server.post("/resume_memory_occupation").status_code == 200
        if undo:
            assert_as_before(server, 0, version)
            return
        assert server.post("/continue_generation").status_code == 409
        assert_as_before(server, 1, it.publish(1).version)


@on(ONE, TWO)
def test_weights_that_somebody_else_loads_halfway_end_the_update(server: Server) -> None:
    with trainer(server.setup, server.url, install="streaming") as it:
        it.publish(0)
        load = Halfway(server, "/update_weights_from_disk", {"model_path": str(server.folder)})
        assert "SGLang loads weights by itself" in str(it.failure(1, on_progress=load))
        assert load.replies == [200]
        assert server.post("/continue_generation").status_code == 409
        assert_as_before(server, 1, it.publish(1).version)


@on(ONE)
@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_nothing_is_installed_into_released_memory(server: Server, install: str) -> None:
    with trainer(server.setup, server.url, install=install) as it:
        version = it.publish(0).version
        assert server.post("/release_memory_occupation", {"tags": ["weights"]}).status_code == 200
        assert "resume_memory_occupation" in str(it.failure(1))
        assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
        assert_as_before(server, 0, version)
        assert_as_before(server, 1, it.publish(1).version)


_DIES = """
import os, signal, sys
sys.path.insert(0, "tests")
from real_vllm.models import make_model
from weightcast import ModuleSource, Publisher, PublishOptions
def on_progress(done, total):
    if 2 * done >= total:
        os.kill(os.getpid(), signal.SIGKILL)
options = PublishOptions(bucket_size_bytes=1 << 18, install="streaming")
url, family, transport = sys.argv[1:]
Publisher(ModuleSource(make_model(family, 1)), engines=[url], transport=transport, options=options).publish(
    on_progress=on_progress)
"""


@on(ONE, TWO)
@pytest.mark.parametrize("transport", [IPC, GLOO], ids=["ipc", "gloo"])
def test_a_trainer_that_dies_halfway_tears_the_engine_until_a_whole_version_comes(
    server: Server, transport: str, python: WarmPython
) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
    assert python.run(_DIES, server.url, server.setup.family, transport) == -signal.SIGKILL
    for _ in Deadline(30.0).polls(0.05, 0.5):
        if server.get("/weight_info")["torn"]:
            break
    assert server.get("/weight_info")["torn"]
    assert server.generate(PROMPT, 4).status_code == 503
    assert server.post("/continue_generation").status_code == 409
    with trainer(server.setup, server.url, transport=transport, takeover=True) as it:
        assert_as_before(server, 1, it.publish(1).version)
