"""One Ray cluster on this host for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _ray() -> Iterator[None]:
    import ray

    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    ray.init(
        num_cpus=64,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
