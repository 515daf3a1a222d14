"""A fleet of a vLLM, an SGLang and a reference server, updated by one `publish()`; vLLM in its own environment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import real_vllm.servers
from real_engines.process import ServerProcess, python_of
from real_engines.reference import ReferenceServer
from real_vllm.oracle import FAR, NUM_TOKENS, PROMPT, Answer, deviation
from real_vllm.trainer import FILE, GLOO, IPC, Trainer, trainer

from real_sglang.conftest import Checkpoints
from real_sglang.oracle import LOOSE, ColdServers, assert_serves
from real_sglang.servers import Server, Setup, child_environment
from weightcast.errors import PeerError

SETUP = Setup("qwen2")
"""A family that the other tests leave to `--full`."""


@pytest.fixture(scope="module")
def fleet(checkpoint: Checkpoints, cold: ColdServers) -> Iterator[list[Any]]:
    python_of("vllm")
    folder = checkpoint(SETUP.family)
    servers: list[ServerProcess] = [
        real_vllm.servers.Server(real_vllm.servers.Setup(SETUP.family), folder),
        Server(SETUP, folder, cold=cold.of),
        ReferenceServer(folder, environment=child_environment(SETUP)),
    ]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            server.launch()
        for server in servers:
            stack.enter_context(server)
        yield servers


@pytest.fixture(scope="module")
def started(fleet: list[Any]) -> dict[str, Answer]:
    """By URL: what each server answers as it was started, with the weights of seed 0."""
    return {server.url: server.ask(PROMPT, NUM_TOKENS) for server in fleet}


def assert_all_serve(servers: list[Any], started: dict[str, Answer], it: Trainer, seed: int, version: int) -> None:
    """Of the others each is held to the bit against its own start from other weights where it is tested alone."""
    for server in servers:
        assert server.version() == str(version), server
        answer = server.ask(PROMPT, NUM_TOKENS)
        assert (answer == started[server.url]) is (seed == 0), server
        assert deviation(it.of(seed), PROMPT, answer).logprob < LOOSE, server
        assert deviation(it.of(1 - seed), PROMPT, answer).logprob > FAR, server
        if isinstance(server, Server):
            assert_serves(server, seed)


@pytest.mark.parametrize("transport", [IPC, GLOO, FILE], ids=["ipc", "gloo", "file"])
def test_one_publish_updates_all(fleet: list[Any], started: dict[str, Answer], transport: str, tmp_path: Path) -> None:
    with trainer(SETUP, *(server.url for server in fleet), transport=transport.format(tmp_path)) as it:
        for seed in (1, 0, 1):
            report = it.publish(seed)
            assert report.ok
            assert_all_serve(fleet, started, it, seed, report.version)


def test_one_that_is_killed_in_mid_update_is_named_and_the_others_are_right(
    fleet: list[Any], started: dict[str, Answer]
) -> None:
    """In mid-delta. Last of this file: what was killed stays dead."""
    alive, urls = list(fleet), [server.url for server in fleet]
    with trainer(SETUP, *urls, transport=GLOO, delta="always", deadline_seconds=30.0) as it:
        it.publish(1)
        for seed, victim in enumerate(fleet[:2]):

            def kill(done: int, total: int, victim: ServerProcess = victim) -> None:
                if done < total:
                    victim.kill()

            it.publish_near(seed)
            begin = time.monotonic()
            error = it.failure(seed, on_progress=kill)
            assert isinstance(error, PeerError), error
            assert victim.url in str(error)
            assert time.monotonic() - begin < 60
            alive.remove(victim)
            assert_all_serve(alive, started, it, seed, it.publisher.version)
            it.publisher.remove_engine(victim.url)
