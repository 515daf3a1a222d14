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
from real_vllm.oracle import assert_serves
from real_vllm.trainer import FILE, GLOO, IPC, Trainer, trainer

from real_sglang.conftest import Checkpoints
from real_sglang.servers import Server, Setup, child_environment
from weightcast.errors import PeerError

SETUP = Setup("qwen2")
"""A family that the other tests leave to `--full`."""


@pytest.fixture(scope="module")
def fleet(checkpoint: Checkpoints) -> Iterator[list[Any]]:
    python_of("vllm")
    folder = checkpoint(SETUP.family)
    servers: list[ServerProcess] = [
        real_vllm.servers.Server(real_vllm.servers.Setup(SETUP.family), folder),
        Server(SETUP, folder),
        ReferenceServer(folder, environment=child_environment(SETUP)),
    ]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
            server.launch()
        for server in servers:
            stack.enter_context(server)
        yield servers


def assert_all_serve(servers: list[Any], it: Trainer, seed: int, version: int) -> None:
    for server in servers:
        assert server.version() == str(version), server
        assert_serves(server.ask, it.of(seed), other=it.of(1 - seed))


@pytest.mark.parametrize("transport", [IPC, GLOO, FILE], ids=["ipc", "gloo", "file"])
def test_one_publish_updates_all(fleet: list[Any], transport: str, tmp_path: Path) -> None:
    with trainer(SETUP, *(server.url for server in fleet), transport=transport.format(tmp_path)) as it:
        for seed in (1, 0, 1):
            report = it.publish(seed)
            assert report.ok
            assert_all_serve(fleet, it, seed, report.version)


def test_one_that_is_killed_in_mid_update_is_named_and_the_others_are_right(fleet: list[Any]) -> None:
    """Last of this file: what was killed stays dead."""
    alive = list(fleet)
    with trainer(SETUP, *(server.url for server in fleet), transport=GLOO, deadline_seconds=30.0) as it:
        it.publish(1)
        for seed, victim in enumerate(fleet[:2]):

            def kill(done: int, total: int, victim: ServerProcess = victim) -> None:
                if done < total:
                    victim.kill()

            begin = time.monotonic()
            error = it.failure(seed, on_progress=kill)
            assert isinstance(error, PeerError), error
            assert victim.url in str(error)
            assert time.monotonic() - begin < 60
            alive.remove(victim)
            assert_all_serve(alive, it, seed, it.publisher.version)
            it.publisher.remove_engine(victim.url)
