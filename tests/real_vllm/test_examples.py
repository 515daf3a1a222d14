"""The examples for vLLM, each as a user runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from real_engines.setups import on

from real_vllm.conftest import Checkpoints
from real_vllm.programs import run
from real_vllm.servers import ONE, PLAIN, TESTS, Server, child_environment
from real_vllm.trainer import FILE, IPC

EXAMPLES = TESTS.parent / "examples"


EXPECTED = {
    "vllm_offline.py": r"version 1: \d+ bytes in .* vLLM answers as the trainer's model does",
    "vllm_async.py": r"(request \d: tokens 0 to (\d+) of version default, tokens \2 to 160 of version 1\n){1,4}",
}


@pytest.fixture(scope="module")
def outputs() -> Iterator[dict[str, Future[str]]]:
    """What the examples without a server print. They run side by side: most of their time is vLLM's import."""
    with ThreadPoolExecutor(len(EXPECTED)) as pool:
        yield {name: pool.submit(run, EXAMPLES / name, environment=child_environment(ONE)) for name in EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_without_a_server(name: str, outputs: dict[str, Future[str]]) -> None:
    out = outputs[name].result()
    assert re.search(EXPECTED[name], out), out


@on(ONE, PLAIN)
def test_the_example_with_a_server(server: Server, checkpoint: Checkpoints, tmp_path: Path) -> None:
    transport = FILE.format(tmp_path) if server.setup == PLAIN else IPC
    arguments = [str(checkpoint()), server.url, "--transport", transport]
    out = run(EXAMPLES / "vllm_http.py", *arguments, environment=child_environment(server.setup))
    assert len(re.findall(r"the server answers as the model", out)) == 3, out
