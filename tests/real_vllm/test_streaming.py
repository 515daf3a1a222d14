"""Versions that stream into a real vLLM bucket by bucket: bit for bit those of a cold start, torn where they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from publishers import publisher_of
from real_engines.process import Halfway
from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.offline import Offline, offline_on
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.servers import MOE_REPLICAS, ONE, TWO, Server
from real_vllm.test_faults import assert_as_before, assert_does_not_generate
from real_vllm.test_install_map import PLAIN, PLAIN_EXPERTS, PLAIN_TIED, loads_counted
from real_vllm.test_model import DENSE, EXPERTS, TIED, engine_of, weights
from real_vllm.trainer import GLOO, IPC, trainer
from weightcast import LocalEngine, TensorSource
from weightcast.errors import InstallError
from weightcast.host.deadline import Deadline


@offline_on(PLAIN, PLAIN_TIED, PLAIN_EXPERTS, DENSE, EXPERTS, TIED)
def test_buckets_that_cut_tensors_make_what_a_cold_start_has(offline: Offline) -> None:
    tensors = {name: tensor.clone() for name, tensor in weights(offline, 0).items()}
    engine = engine_of(offline)
    largest = max(tensor.nbytes for tensor in tensors.values())
    options: dict[str, Any] = {"install": "streaming", "bucket_size_bytes": largest // 2 // 4096 * 4096}
    with publisher_of(TensorSource(tensors), transport=IPC, engines=[LocalEngine(engine)], **options) as publisher:
        for number, seed in enumerate((1, 0, 1, 0), 1):  # the next test expects seed 0
            for name, tensor in weights(offline, seed).items():
                tensors[name].copy_(tensor)
            with loads_counted(offline) as names:
                report = publisher.publish(number)
            assert report.num_buckets > 3
            assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[seed]
            assert number > 1 or set(names) == tensors.keys()
    # What the first version has proven is copied, piece by piece; the loader gets the rest.
    assert engine.install_map is not None
    assert set(names) == engine.install_map.opaque.keys()
    assert names or offline.setup not in (DENSE, EXPERTS, TIED)


@on(ONE, TWO, full=[MOE_REPLICAS])
@pytest.mark.parametrize("transport", [IPC, GLOO], ids=["ipc", "gloo"])
def test_a_server_serves_what_was_streamed(server: Server, transport: str) -> None:
    with trainer(server.setup, server.url, transport=transport, install="streaming") as it:
        resumed: list[int] = []

        def resume(done: int, total: int) -> None:
            resumed.append(server.post("/resume").status_code)

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
        server.call("test_fail_load", 1, server.setup.tp - 1)
        error = it.failure(1)
        assert isinstance(error, InstallError), error
        assert "the test's fault" in str(error)
        assert error.torn is not undo
        if undo:
            assert_as_before(server, 0, version)
        else:
            assert_does_not_generate(server)
            assert server.post("/resume").status_code == 409
        for seed in (1, 0):
            assert_as_before(server, seed, it.publish(seed).version)


@on(ONE, TWO)
@pytest.mark.parametrize("undo", [True, False], ids=["undone", "torn"])
def test_a_sleep_halfway_ends_the_update(server: Server, undo: bool) -> None:
    """Where the memory goes, what has come into it is lost, or comes back as it was."""
    with trainer(server.setup, server.url, install="streaming", undo=undo) as it:
        version, sleep = it.publish(0).version, Halfway(server, "/sleep?level=1")
        error = it.failure(1, on_progress=sleep)
        assert "put to sleep" in str(error)
        assert sleep.replies == [200]
        assert server.is_paused()
        assert server.post("/resume").status_code == (200 if undo else 409)
        assert server.is_paused(), "an engine that sleeps was set going"
        assert server.post("/wake_up").status_code == (200 if undo else 409)
        if undo:
            assert_as_before(server, 0, version)
            return
        version = it.publish(1).version
        assert server.post("/wake_up").json()["status"] == "awake"
        assert_as_before(server, 1, version)


@on(ONE)
def test_a_reload_halfway_ends_the_update(server: Server) -> None:
    with trainer(server.setup, server.url, install="streaming") as it:
        it.publish(1)
        reload = Halfway(server, "/collective_rpc", {"method": "reload_weights"})
        assert "vLLM reloads the weights by itself" in str(it.failure(1, on_progress=reload))
        assert reload.replies == [200]
        assert not server.is_paused()
        assert_serves(server, 0)
        assert_as_before(server, 1, it.publish(1).version)


@on(ONE, full=[MOE_REPLICAS])
def test_a_server_that_sleeps_is_streamed_to_between_two_wakes(server: Server) -> None:
    with trainer(server.setup, server.url, install="streaming") as it:
        for seed in (1, 0):
            assert server.post("/sleep?level=1").status_code == 200
            assert server.post("/wake_up?tags=weights").json()["status"] == "sleeping"
            version = it.publish(seed).version
            assert server.is_paused(), "the publish has woken an engine without a KV cache"
            assert server.post("/wake_up?tags=kv_cache").json()["status"] == "awake"
            assert_as_before(server, seed, version)


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
    server: Server, transport: str
) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
    command = [sys.executable, "-c", _DIES, server.url, server.setup.family, transport]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    for _ in Deadline(30.0).polls(0.05, 0.5):
        if server.get("/weight_info")["torn"]:
            break
    assert server.get("/weight_info")["torn"]
    assert_does_not_generate(server)
    assert server.post("/resume").status_code == 409
    with trainer(server.setup, server.url, transport=transport, takeover=True) as it:
        assert_as_before(server, 1, it.publish(1).version)
