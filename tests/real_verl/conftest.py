"""One Ray cluster on this host for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from real_verl.cluster import Cluster


@pytest.fixture(scope="session")
def _ray() -> Iterator[None]:
    import ray

    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    ray.init(
        num_cpus=1000,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20,
        # By default Ray's workers run at a lower priority than whatever else the machine does.
        _system_config={"worker_niceness": 0},
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def cluster(_ray: None) -> Iterator[Cluster]:
    """Two trainer ranks and three rollout workers, which tests share: `begin` gives them new engines."""
    from real_verl.cluster import Cluster

    cluster = Cluster(num_trainers=2, num_rollouts=3)
    yield cluster
    cluster.close()
