"""Trainers and rollout workers that die in the middle of an update. After test_backend: it kills what that uses."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("verl")

from real_verl.cluster import group
from real_verl.workers import DEADLINE_SECONDS, Rollout
from weightcast.integrations.verl.manager import WeightcastCheckpointManager

if TYPE_CHECKING:
    from real_verl.cluster import Cluster

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", [None, "gloo://127.0.0.1:0"])
def test_kills_at_random_moments(cluster: Cluster, pytestconfig: pytest.Config, transport: str | None) -> None:
    """Each is an error by the deadline; every replica serves one version afterwards, or is named as torn."""
    num_kills = 20 if pytestconfig.getoption("full") else 2
    moments, num_errors, step = random.Random(num_kills), 0, 1
    cluster.begin(WeightcastCheckpointManager, (1, 1, 1), transport=transport)
    cluster.update(step)
    for number in range(num_kills):
        before, step = step, step + 1
        cluster.trainers.setup(seconds=0.5)
        is_trainer, victim = number % 2 == 0, moments.randrange(3)
        pid = cluster.trainers.state()[0][0] if is_trainer else cluster.states()[victim][0]
        updating = cluster.update_in_background(step)
        time.sleep(moments.uniform(0.0, 0.6))
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        error = updating.exception(timeout=2 * DEADLINE_SECONDS)
        seconds = time.monotonic() - killed_at
        torn = cluster.manager.torn_replicas
        print(f"kill {number}: {'trainer' if is_trainer else f'rollout {victim}'}, {seconds:.1f} s, {error!r:.120}")
        num_errors += error is not None
        for rank, replica in enumerate(cluster.replicas):
            assert replica.is_serving == (replica not in torn)
            if replica not in torn and (is_trainer or rank != victim):
                (_, held, _) = replica.workers[0].state.remote().future().result(DEADLINE_SECONDS)
                assert held in (before, step)
        assert error is not None or not torn
        if is_trainer:
            cluster.renew_trainers()
        else:
            new = group(Rollout, 1, rollout_config=cluster.rollout_config)
            cluster.replicas[victim].workers = new.workers
            cluster.rollouts.workers[victim] = new.workers[0]
        step += 1
        cluster.update(step)
        assert cluster.steps() == [step] * 3
        assert all(replica.is_serving for replica in cluster.replicas)
    print(f"{num_errors} of {num_kills} kills were errors")
    assert num_errors > 0
