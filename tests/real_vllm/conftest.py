"""Tests against a real vLLM. They are collected only where vLLM is installed: run them with scripts/test-vllm.

The trainer's side of a test runs in pytest's own process. A server is shared by all tests that name the same setup:
pytest runs those one after another, and every test leaves the server serving.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from real_engines.setups import mark_off_diagonal
from warm_python import WarmPython

from real_vllm.adapters import cold_answers, memory_store  # noqa: F401 - fixtures
from real_vllm.cold import Cold
from real_vllm.models import model_of, save
from real_vllm.offline import Offline, OfflineSetup
from real_vllm.offline import offline as start_offline
from real_vllm.quantised import quantise
from real_vllm.servers import STARTED_BY_COMMAND, Server, Setup

_HAS_VLLM = importlib.util.find_spec("vllm") is not None
_TEST_SECONDS = 600
"""Of one test, with the start of a server on a machine that does other things too."""

if _HAS_VLLM:
    # The trainer's: at the barriers of two each waits for a core that the server has.
    torch.set_num_threads(1)
else:
    collect_ignore_glob = ["test_*.py"]

Checkpoints = Callable[..., Path]


def pytest_itemcollected(item: pytest.Item) -> None:
    mark_off_diagonal(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_engine_in_this_process)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS), append=False)


def _engine_in_this_process(item: pytest.Item) -> str:
    """Last and together: each start of one costs as much as fifty tests on it."""
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.params.get("offline", ""))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(server, Server):
        report.sections.append((f"log of {server}", server.log_tail()))
    return report


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """checkpoint(family="qwen3", seed=0, dtype=torch.float32): a folder that vLLM can be started from.

    The family "qwen3+int8" is qwen3's weights, quantised (see `quantised.KINDS`).
    """
    folder = tmp_path_factory.mktemp("checkpoints")

    def write(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
        target = folder / f"{family}-{seed}-{str(dtype).removeprefix('torch.')}"
        if not target.exists():
            family, _, kind = family.partition("+")
            save(model_of(family, seed, dtype), target)
            if kind:
                quantise(target, kind)
        return target

    return write


@pytest.fixture(scope="session")
def cold(checkpoint: Checkpoints) -> Iterator[Cold]:
    """What updated engines are held against."""
    with contextlib.closing(Cold(checkpoint)) as cold:
        yield cold


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, checkpoint: Checkpoints, cold: Cold) -> Iterator[Server]:
    """The server of the setup that the test names with `on`. It starts from seed 0 of its family."""
    setup: Setup = request.param
    cold.prepare(setup, 1)
    folder = checkpoint(setup.family, 0, setup.dtype)
    with Server(setup, folder, cold=cold, is_forked=setup not in STARTED_BY_COMMAND) as server:
        if not cold.knows(setup, 0):
            cold.note(server, 0)
        yield server


@pytest.fixture(scope="session")
def offline(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Iterator[Offline]:
    """The engine in this process of the setup that the test names with `offline_on`; the test leaves it serving."""
    setup: OfflineSetup = request.param
    with start_offline(setup, checkpoint) as offline:
        yield offline


@pytest.fixture(scope="session")
def python() -> Iterator[WarmPython]:
    """One that has imported what trainers need."""
    models = (f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen3"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with contextlib.closing(
        WarmPython("real_vllm.adapters", "real_vllm.drafts", *models, environment=environment)
    ) as python:
        yield python
