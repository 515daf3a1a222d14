"""SGLang with its memory saver: what it serves once the weights' memory was released and resumed.

`stand_ins/torch_memory_saver.py` is in the saver's place, which is for GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from real_engines.setups import on
from real_vllm.oracle import PROMPT
from real_vllm.trainer import GLOO, trainer

from real_sglang.faults import Break
from real_sglang.oracle import assert_serves
from real_sglang.servers import Server, Setup
from real_sglang.test_transactional_faults import assert_as_before
from weightcast import HttpEngine
from weightcast.errors import ClosedError

SAVER = Setup(options=("--enable-memory-saver",))
SAVER_TWO = dataclasses.replace(SAVER, tp=2)
UNREADABLE = "send /resume_memory_occupation before you read the weights"
BACKED_UP = Setup(options=("--enable-memory-saver", "--enable-weights-cpu-backup"))


def release(server: Server, *tags: str) -> None:
    assert server.post("/release_memory_occupation", {"tags": tags or None}).status_code == 200


def resume(server: Server, *tags: str) -> None:
    assert server.post("/resume_memory_occupation", {"tags": tags or None}).status_code == 200


def assert_torn(server: Server) -> None:
    assert server.generate(PROMPT, 4).status_code == 503
    assert server.post("/continue_generation").status_code == 409
    reason = server.get("/weight_info")["torn"]
    assert reason == "its memory is released; publish a complete update to heal this engine"


@on(SAVER, SAVER_TWO)
@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_released_weights_are_served_only_after_the_next_publish(server: Server, install: str) -> None:
    """It may come before the KV cache is resumed, as in a loop that trains on the same GPU."""
    with trainer(server.setup, server.url, install=install) as it:
        for seed in (0, 1):
            it.publish(seed)
            before = server.checksum()
            release(server)
            assert "send /resume_memory_occupation before the install" in str(it.failure(1 - seed))
            with contextlib.closing(HttpEngine(server.url)) as engine, pytest.raises(ClosedError, match=UNREADABLE):
                engine.held()
            resume(server, "weights")
            assert server.checksum() != before
            assert_torn(server)
            version = it.publish(1 - seed).version
            resume(server, "kv_cache", "cuda_graph")
            assert_as_before(server, 1 - seed, version)


@on(SAVER)
def test_deltas_are_of_what_was_sent_not_of_what_was_released(server: Server) -> None:
    with trainer(server.setup, server.url, transport=GLOO, delta="always") as it:
        for seed in (0, 1):
            it.publish(seed)
        release(server, "weights")
        resume(server, "weights")
        assert_as_before(server, 0, it.publish(0).version)


@on(SAVER)
def test_an_undo_does_not_bring_released_weights_back(server: Server) -> None:
    with trainer(server.setup, server.url, undo=True) as it:
        it.publish(0)
        release(server, "weights")
        resume(server, "weights")
        with server.failing(Break(1)):
            assert "the test's fault" in str(it.failure(1))
        assert server.generate(PROMPT, 4).status_code == 503
        assert_as_before(server, 1, it.publish(1).version)


@on(SAVER)
def test_a_released_cache_keeps_the_weights(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(1).version
        release(server, "kv_cache")
        resume(server, "kv_cache")
        assert_as_before(server, 1, version)


@on(SAVER)
def test_weights_that_others_load_are_left_to_them(server: Server) -> None:
    """A server that finds weightcast beside it, and that no publisher updates, serves as without it."""
    load = {"model_path": str(server.folder)}
    assert server.post("/update_weights_from_disk", load).status_code == 200
    release(server)
    resume(server)
    assert server.generate(PROMPT, 4).status_code == 200
    assert server.post("/update_weights_from_disk", load).status_code == 200
    assert_serves(server, 0)


@pytest.mark.full
@on(BACKED_UP)
def test_weights_that_are_backed_up_are_served_again(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
        release(server)
        resume(server)
        assert_as_before(server, 0, version)
        assert_as_before(server, 1, it.publish(1).version)
