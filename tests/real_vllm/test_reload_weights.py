"""A stock vLLM that knows nothing of weightcast: versions go through a store, and it reloads them as a checkpoint."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from publishers import publisher_of
from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.conftest import Checkpoints
from real_vllm.oracle import LONG_PROMPT, PROMPT
from real_vllm.servers import PLAIN, TESTS, Server, Setup
from real_vllm.trainer import Tensors, Trainer, checkpoint_tensors, trainer
from weightcast import HttpEngine, Publisher, PublishError, SafetensorsSource
from weightcast.errors import IncompatibleWeightsError, InstallError, UnsupportedError, WeightcastError
from weightcast.integrations.stock_directory import FOLDER, StockServer

PLAIN_TWO = Setup(backend=None, endpoints=False, tp=2)
PLAIN_REPLICAS = Setup(backend=None, endpoints=False, dp=2)
PLAIN_TIED = Setup("llama-tied", backend=None, endpoints=False)
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
RESCUE_SECONDS = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """A store's URL. Of the directories for the server the newest alone is left in it."""
    directory = tmp_path / "store"
    yield f"file://{directory}"
    assert len([path for path in (directory / FOLDER).glob("*") if path.name != "empty"]) <= 1


def failure(server: Server, store: str, tensors: dict[str, torch.Tensor], **options: Any) -> Any:
    """Publish what the server will not take; its error."""
    publisher = publisher_of(Tensors(tensors), transport=store, engines=[server.url], **options)
    with contextlib.closing(publisher), pytest.raises(PublishError) as caught:
        publisher.publish()
    (cause,) = caught.value.failures.values()
    return cause


def heal(server: Server, it: Trainer, seed: int = 0) -> None:
    assert it.publish(seed).ok
    assert not server.is_paused()
    assert_serves(server, seed)


@on(PLAIN, full=[PLAIN_TWO, PLAIN_REPLICAS])
def test_alternating_publishes_serve_what_was_published(server: Server, store: str) -> None:
    with contextlib.closing(HttpEngine(server.url)) as engine:
        assert isinstance(engine.connect(), StockServer)
    with trainer(server.setup, server.url, transport=store) as it:
        for seed in (1, 0, 1):
            report = it.publish(seed)
            assert report.ok
            assert report.engines[server.url].pause_seconds > 0
            assert (server.version(), server.is_paused()) == (str(report.version), False)
            assert_serves(server, seed)
            # Of what this leaves in the prefix cache nothing may be used for the next version.
            for is_cached in (False, True):
                assert_serves(server, seed, LONG_PROMPT, is_cached=is_cached)
            assert list(server.generate(PROMPT, 12))[-1].spans == [(str(report.version), 0, 12)]


@on(PLAIN)
def test_a_directory_of_safetensors_is_a_source_like_any_other(
    server: Server, store: str, checkpoint: Checkpoints
) -> None:
    with trainer(server.setup, server.url, transport=store) as it:
        heal(server, it, 0)
    source = SafetensorsSource(checkpoint(seed=1))
    with source, Publisher(source, transport=store, engines=[server.url]) as publisher:
        assert publisher.publish().ok
    assert_serves(server, 1)


@on(PLAIN)
@pytest.mark.parametrize("spoil", ["unknown", "missing", "shape", "dtype"])
def test_what_does_not_fit_is_refused_before_the_server_is_told_anything(
    server: Server, store: str, spoil: str
) -> None:
    with trainer(server.setup, server.url, transport=store) as it:
        heal(server, it, 0)
    label, tensors = server.version(), checkpoint_tensors(it.of(1))
    named = UP_PROJ
    if spoil == "unknown":
        named = "model.layers.9.mlp.up_proj.weight"
        tensors[named] = torch.zeros(256, 128)
    elif spoil == "missing":
        del tensors[named]
    else:
        tensors[named] = torch.zeros(3, 5) if spoil == "shape" else tensors[named].double()
    error = failure(server, store, tensors)
    assert isinstance(error, IncompatibleWeightsError)
    assert [named in problem for problem in error.problems] == [True]
    assert (server.version(), server.is_paused()) == (label, False)
    assert_serves(server, 0)


@on(PLAIN)
@pytest.mark.parametrize("after", [0, 9, 30])
def test_a_reload_that_fails_leaves_the_server_paused_until_a_publish_heals_it(
    server: Server, store: str, after: int
) -> None:
    with trainer(server.setup, server.url, transport=store) as it:
        heal(server, it, 0)
        server.call("test_fail_load", after)
        error = it.failure(1)
        assert isinstance(error, InstallError)
        assert error.torn
        assert "the test's fault" in str(error)
        assert server.is_paused()
        with pytest.raises(httpx.TimeoutException):
            server.complete(PROMPT, 1, seconds=1)
        with contextlib.closing(HttpEngine(server.url)) as engine:
            assert "has no whole version" in engine.connect().info().torn
        heal(server, it, 1)
    server.call("test_fail_load", after)
    with trainer(server.setup, server.url, transport=store) as it:
        assert isinstance(it.failure(0), InstallError)
    with trainer(server.setup, server.url, transport=store) as it:  # who comes later heals it as well
        heal(server, it, 1)


@on(PLAIN, full=[PLAIN_TWO])
def test_what_a_reload_can_not_do_is_refused(server: Server, store: str) -> None:
    with trainer(server.setup, server.url) as it:
        error: WeightcastError = it.failure(1)
        assert isinstance(error, UnsupportedError)
        assert "file:///dir" in str(error)
        assert "pip install PATH_TO_WEIGHTCAST" in str(error)
    for options in ({"undo": True}, {"install": "streaming"}):
        with trainer(server.setup, server.url, transport=store, **options) as it:
            error = it.failure(1)
            assert isinstance(error, UnsupportedError)
    assert not server.is_paused()
    # A method that its workers do not have would fail on each of them, and mix up their later replies.
    assert [server.call("test_pid") for _ in range(3)] == [server.call("test_pid")] * 3
    with trainer(server.setup, server.url, transport=store) as it:
        heal(server, it, 0)


_DIES_IN_ITS_PAUSE = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from real_vllm.models import make_model
from weightcast import HttpEngine, ModuleSource, Publisher

class Dying(HttpEngine):
    def connect(self):
        client = super().connect()
        client.finish = lambda version: os.kill(os.getpid(), signal.SIGKILL)
        return client

with Publisher(ModuleSource(make_model("qwen3", 1)), engines=[Dying(sys.argv[1])], transport=sys.argv[2]) as publisher:
    publisher.publish(version=77)
"""


@on(PLAIN)
def test_a_publisher_that_dies_in_its_pause_leaves_no_server_paused(server: Server, tmp_path: Path) -> None:
    """The guard process does what was left to do: the version was sealed."""
    store = f"file://{tmp_path}/store"
    with trainer(server.setup, server.url, transport=store) as it:
        heal(server, it, 0)
    command = [sys.executable, "-c", _DIES_IN_ITS_PAUSE, server.url, store, str(TESTS)]
    done = subprocess.run(command, timeout=120, check=False)
    assert done.returncode < 0
    end = time.monotonic() + RESCUE_SECONDS
    while server.is_paused() or server.version() != "77":
        assert time.monotonic() < end, "nobody has resumed it"
        server.process_ended(0.1)
    assert_serves(server, 1)
    with trainer(server.setup, server.url, transport=store) as it:
        heal(server, it, 0)
    left = [path.name for path in (tmp_path / "store" / FOLDER).glob("*") if path.name != "empty"]
    assert len(left) == 1, "what the dead publisher left is swept by the next"
    assert not left[0].startswith("77-")


@on(full=[PLAIN_TIED])
def test_what_a_reload_leaves_stale_on_a_cpu_is_refused(server: Server, store: str) -> None:
    """vLLM's fault: after its own reload it answers as neither model."""
    with trainer(server.setup, server.url, transport=store) as it:
        error = it.failure(1)
        assert isinstance(error, UnsupportedError)
        assert "tied to the embeddings" in str(error)
        assert_serves(server, 0)
