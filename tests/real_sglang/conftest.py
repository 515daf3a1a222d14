"""Tests against a real SGLang. They are collected only where SGLang is installed: run them with scripts/test-sglang.

The trainer's side of a test runs in pytest's own process. A server is shared by all tests that name the same setup:
pytest runs those one after another, and every test leaves the server serving.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from real_engines.setups import mark_off_diagonal
from real_vllm.adapters import memory_store  # noqa: F401 - a fixture
from real_vllm.models import model_of, save
from warm_python import WarmPython

from real_sglang.adapters import cold_with  # noqa: F401 - a fixture
from real_sglang.oracle import ColdServers
from real_sglang.servers import ONE, STARTED_BY_COMMAND, Server, Setup, child_environment

_HAS_SGLANG = importlib.util.find_spec("sglang") is not None
_TEST_SECONDS = 600
"""Of one test, with the start of a server on a machine that does other things too."""

if _HAS_SGLANG:
    # Before anything that looks for torchvision, as transformers does.
    importlib.import_module("real_sglang.stand_ins.sitecustomize")
    # The trainer's: at the barriers of two each waits for a core that the server has.
    torch.set_num_threads(1)
else:
    collect_ignore_glob = ["test_*.py"]

Checkpoints = Callable[..., Path]


def pytest_itemcollected(item: pytest.Item) -> None:
    mark_off_diagonal(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(server, Server):
        report.sections.append((f"log of {server}", server.log_tail()))
    return report


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoint(family="qwen3", seed=0, dtype=torch.float32): a folder that SGLang can be started from."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def write(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
        target = folder / f"{family}-{seed}-{str(dtype).removeprefix('torch.')}"
        return target if target.exists() else save(model_of(family, seed, dtype), target)

    return write


@pytest.fixture(scope="session")
def cold(checkpoint: Checkpoints) -> Iterator[ColdServers]:
    with contextlib.closing(ColdServers(checkpoint)) as cold:
        yield cold


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, checkpoint: Checkpoints, cold: ColdServers) -> Iterator[Server]:
    """The server of the setup that the test names with `on`. It starts from seed 0 of its family."""
    setup: Setup = request.param
    folder = checkpoint(setup.family, 0, setup.dtype)
    with Server(setup, folder, cold=cold.of, is_forked=setup not in STARTED_BY_COMMAND) as server:
        yield server


@pytest.fixture(scope="session")
def python() -> Iterator[WarmPython]:
    """One that has imported what trainers need."""
    modules = (
        "real_vllm.trainer",
        "real_vllm.adapters",
        "real_vllm.drafts",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
        "weightcast.integrations.sglang.stock.server",
    )
    with contextlib.closing(WarmPython(*modules, environment=child_environment(ONE))) as python:
        yield python
