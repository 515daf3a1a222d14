"""verl's manager, workers and test kit with the backend "weightcast"."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineManager

from real_verl.kit import Cluster

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_verls_own_manager_updates_every_rollout(install: str) -> None:
    cluster = Cluster(CheckpointEngineManager, num_trainers=1, num_replicas=2, install=install)
    for step in (1, 2, 5):
        metrics = cluster.update(step)
        assert [(found, updates) for _, found, updates in cluster.states()] == [(step, {1: 1, 2: 2, 5: 3}[step])] * 2
        assert all(replica.is_serving for replica in cluster.replicas)
        assert metrics["weightcast/version"] == step
        assert metrics["weightcast/num_buckets"] > 1
    cluster.close()
