"""What every test shares: hypothesis profiles, the choice of GPU tests, a check that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import forking
import hypothesis
import pytest
import torch

pytest.register_assert_rewrite("weightcast.testing")

from weightcast.errors import UnsupportedError  # noqa: E402
from weightcast.format import device_digest  # noqa: E402
from weightcast.host.device_memory import DeviceMemory  # noqa: E402
from weightcast.process_group import serve_store  # noqa: E402
from weightcast.testing.leftovers import nothing_left  # noqa: E402

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=100, database=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all of every matrix, not a diagonal of it")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: off the diagonal of its matrix; run with --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a CUDA device the GPU tests are left out, and counted as deselected, unless `-m` asks for them.

    So is what only `--full` runs.
    """
    left_out = [] if config.getoption("full") else ["full"]
    if not (torch.cuda.is_available() or "gpu" in (config.getoption("markexpr") or "")):
        left_out.append("gpu")
    out = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fails the test if a thread, child process, socket, pipe or shared memory outlives it by over half a minute."""
    forking.start_server()
    with nothing_left():
        yield
        if torch.cuda.is_initialized():
            # Torch's file of counters stays until it is told that nobody counts any more.
            torch.cuda.ipc_collect()


@pytest.fixture(autouse=True, scope="session")
def _cuda_is_up(request: pytest.FixtureRequest) -> None:
    """The first use of CUDA opens descriptors, the first share of its memory maps a file: no leaks of any test."""
    if torch.cuda.is_available() and any(item.get_closest_marker("gpu") for item in request.session.items):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.zeros(1, device="cuda").copy_(torch.zeros(1).pin_memory(), non_blocking=True)
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        torch.cuda.ipc_collect()
        # Triton's compiler, and the driver's own memory with its descriptor.
        device_digest.kernel(torch.device("cuda", 0))
        with contextlib.suppress(UnsupportedError):
            DeviceMemory.allocate(1 << 20, torch.device("cuda", 0), "a trial").close()


@pytest.fixture(autouse=True, scope="session")
def _libuv_is_up() -> None:
    """The first loop of torch's store opens a pipe that stays until the process ends: no leak of any test."""
    serve_store("127.0.0.1", 10.0)
