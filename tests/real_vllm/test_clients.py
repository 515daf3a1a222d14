"""How a publisher finds out what a vLLM server is; the colocated cycle; and the examples, each as a user runs it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from real_vllm.conftest import Checkpoints
from real_vllm.oracle import assert_serves
from real_vllm.servers import ONE, STOCK, TESTS, TWO, Server, Setup, child_environment, on
from real_vllm.trainer import trainer
from weightcast import HttpEngine
from weightcast.errors import ControlError
from weightcast.integrations.vllm.http import StockServer

EXAMPLES = TESTS.parent / "examples"
PROGRAM_SECONDS = 300


def run(program: Path, *arguments: str, environment: Mapping[str, str]) -> str:
    """What it printed. Raises AssertionError if it fails."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@on(ONE, STOCK, TWO)
def test_what_a_server_is_is_asked_and_what_it_can_do(server: Server) -> None:
    with contextlib.closing(HttpEngine(server.url)) as engine:
        client = engine.negotiate()
        info = client.info()
        assert isinstance(client, StockServer) is not server.setup.endpoints
        assert ("install" in info.abilities) is server.setup.endpoints
        assert "undo" in info.abilities
        assert "streaming" not in info.abilities
        assert info.world_size == server.setup.tp
        assert not info.torn


@on(Setup(endpoints=False, backend=None, tp=2))
def test_a_server_without_our_backend_is_named_and_its_ranks_stay_in_step(server: Server) -> None:
    """A method that its workers do not have would fail on each of them, and mix up their later replies."""
    with contextlib.closing(HttpEngine(server.url)) as engine:
        for _ in range(2):
            with pytest.raises(ControlError, match=r"backend none.*pip install weightcast"):
                engine.negotiate()
    with trainer(server.setup) as it:
        assert_serves(server.ask, it.of(0), other=it.of(1))
    assert [server.call("test_pid") for _ in range(3)] == [server.call("test_pid")] * 3


def test_an_engine_that_sleeps_is_updated_between_two_wakes(checkpoint: Checkpoints) -> None:
    run(TESTS / "real_vllm" / "colocated_llm.py", str(checkpoint()), environment=child_environment(ONE))


@pytest.mark.parametrize("name", ["vllm_offline.py", "vllm_async.py"])
def test_an_example_without_a_server(name: str) -> None:
    out = run(EXAMPLES / name, environment=child_environment(ONE))
    expected = {
        "vllm_offline.py": r"version 1: \d+ bytes in .* vLLM answers as the trainer's model does",
        "vllm_async.py": r"(request \d: tokens 0 to (\d+) of version default, tokens \2 to 160 of version 1\n){1,4}",
    }
    assert re.search(expected[name], out), out


@on(ONE, STOCK)
def test_the_example_with_a_server(server: Server, checkpoint: Checkpoints) -> None:
    out = run(EXAMPLES / "vllm_http.py", str(checkpoint()), server.url, environment=child_environment(server.setup))
    assert len(re.findall(r"the server answers as the model", out)) == 3, out


@on(ONE)
def test_trl_trains_a_policy_that_the_server_serves(server: Server, checkpoint: Checkpoints, tmp_path: Path) -> None:
    environment = child_environment(server.setup) | {"TRL_EXPERIMENTAL_SILENCE": "1"}
    before = server.version()
    out = run(EXAMPLES / "trl_async_grpo.py", str(checkpoint()), server.url, str(tmp_path), environment=environment)
    published = re.findall(r"version (\d+): \d+ bytes", out)
    assert len(published) == 7, out
    assert server.version() == published[-1] != before
    divergence = [float(value) for value in re.findall(r"'kl': '([^']+)'", out)]
    assert divergence[0] < 1e-6, "the first step trains on answers of the very weights that it has"
    assert len(divergence) == 6, out
