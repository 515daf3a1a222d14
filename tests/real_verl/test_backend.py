"""verl's manager, workers and test kit with the backend "weightcast"."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("verl")

import ray
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.config import RolloutConfig

from real_verl.cluster import KitRollout, group, verls_kit
from real_verl.workers import DEADLINE_SECONDS, SHAPES, config
from weightcast.errors import IncompatibleWeightsError, InstallError, PeerError, UpdateAbortedError, WeightcastError
from weightcast.integrations.verl.manager import WeightcastCheckpointManager

if TYPE_CHECKING:
    from real_verl.cluster import Cluster

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


GLOO = "gloo://127.0.0.1:0"
"""Workers on one host take ipc:// by themselves."""


@pytest.mark.parametrize("transport", [None, GLOO])
@pytest.mark.parametrize(("replicas", "install"), [((1,), "streaming"), ((1, 1, 1), "staged"), ((2, 1), "staged")])
def test_verls_own_manager_updates_every_rollout(
    cluster: Cluster, replicas: tuple[int, ...], install: str, transport: str | None
) -> None:
    cluster.begin(CheckpointEngineManager, replicas, install=install, transport=transport)
    for number, step in enumerate((1, 2, 5), start=1):
        metrics = cluster.update(step)
        assert [(found, updates) for _, found, updates in cluster.states()] == [(step, number)] * sum(replicas)
        assert all(replica.is_serving for replica in cluster.replicas)
        assert metrics["weightcast/version"] == step
        assert metrics["weightcast/num_buckets"] > 1


def test_verls_own_test_kit(cluster: Cluster, tmp_path: Path) -> None:
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=500,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    model.bfloat16().save_pretrained(tmp_path)
    cluster.begin(CheckpointEngineManager, ())
    cluster.trainers.setup(path=str(tmp_path))
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config())
    rollout = group(KitRollout, 1, rollout_config=rollout_config, model_config=SimpleNamespace(path=str(tmp_path)))
    replica = verls_kit.MockReplica(replica_rank=0, config=rollout_config, model_config=SimpleNamespace())
    replica.workers = rollout.workers
    manager = CheckpointEngineManager(config(), cluster.trainers, [replica])
    for _ in range(3):
        manager.update_weights()
        rollout.check_weights()
    ray.kill(rollout.workers[0])


def test_our_manager_updates_and_goes_back_to_an_earlier_step(cluster: Cluster) -> None:
    cluster.begin(WeightcastCheckpointManager, (2, 1))
    for step in (4, 5, 3, 4):
        assert cluster.update(step)["weightcast/version"] == step
        assert cluster.steps() == [step] * 3
        assert all(replica.is_serving for replica in cluster.replicas)


@pytest.mark.parametrize("is_first", [True, False])
def test_an_exporter_that_fails_leaves_every_rollout_as_it_was(cluster: Cluster, is_first: bool) -> None:
    cluster.begin(WeightcastCheckpointManager, (2, 1))
    held = None
    if not is_first:
        held = cluster.update(1)["weightcast/version"]
    name = list(SHAPES)[-5]
    cluster.trainers.setup(fails_at=name)
    with pytest.raises((RuntimeError, WeightcastError), match=f"the exporter failed at {name}|aborted the update"):
        cluster.update(2)
    assert [(step, updates) for _, step, updates in cluster.states()] == [(held, int(not is_first))] * 3
    assert all(replica.is_serving for replica in cluster.replicas)
    cluster.trainers.setup()
    cluster.update(2)
    assert cluster.steps() == [2] * 3


def test_a_rollout_that_fails_in_its_load_stays_paused_until_an_update_heals_it(cluster: Cluster) -> None:
    cluster.begin(WeightcastCheckpointManager, (1, 1, 1))
    cluster.update(1)
    cluster.rollouts.workers[1].setup.remote(fails_at="layers.7.w")
    with pytest.raises(InstallError, match="replicas 1 may have parts of two versions"):
        cluster.update(2)
    assert [replica.is_serving for replica in cluster.replicas] == [True, False, True]
    assert cluster.manager.torn_replicas == [cluster.replicas[1]]
    # An update that fails before any rollout is touched heals nothing.
    cluster.trainers.setup(fails_at="layers.3.w")
    with pytest.raises((RuntimeError, WeightcastError)):
        cluster.update(3)
    assert [replica.is_serving for replica in cluster.replicas] == [True, False, True]
    cluster.trainers.setup()
    cluster.rollouts.setup()
    cluster.update(4)
    assert cluster.steps() == [4] * 3
    assert all(replica.is_serving for replica in cluster.replicas)


@pytest.mark.parametrize("call", ["abort_all_requests", "release_kv_cache"])
@pytest.mark.parametrize("stalls", [True, False])
def test_a_replica_that_does_not_pause_is_an_error_and_all_resume(cluster: Cluster, call: str, stalls: bool) -> None:
    async def fail() -> None:
        if stalls:
            await asyncio.Event().wait()
        raise OSError("no answer from its server")

    cluster.begin(WeightcastCheckpointManager, (1, 1, 1), deadline_seconds=1.0)
    setattr(cluster.replicas[1], call, fail)
    with pytest.raises(TimeoutError if stalls else OSError, match="no answer"):
        cluster.update(1)
    resumed = ["resume_kv_cache", "resume_generation"]
    assert [replica.log[-2:] for replica in cluster.replicas] == [resumed] * 3
    assert cluster.steps() == [None] * 3


def test_a_trainer_rank_takes_all_its_weights_when_the_update_fails(cluster: Cluster) -> None:
    """The others gather each tensor with it."""
    cluster.begin(WeightcastCheckpointManager, (1,))
    cluster.update(1)
    cluster.rollouts.workers[0].setup.remote(fails_at="layers.7.w")
    with pytest.raises(InstallError):
        cluster.update(2)
    assert [taken for _, taken in cluster.trainers.state()] == [len(SHAPES)] * 2


@pytest.mark.parametrize("transport", [None, GLOO])
def test_a_rollout_that_stands_still_is_an_error_by_the_deadline(cluster: Cluster, transport: str | None) -> None:
    cluster.begin(WeightcastCheckpointManager, (1, 1, 1), deadline_seconds=5.0, transport=transport)
    cluster.update(1)
    cluster.trainers.setup(seconds=2.0)
    pid = cluster.states()[2][0]
    updating = cluster.update_in_background(2)
    try:
        while cluster.replicas[0].log != ["abort", "release"]:
            time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises((PeerError, UpdateAbortedError, TimeoutError)):
            updating.result(DEADLINE_SECONDS * 4)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [replica.is_serving for replica in cluster.replicas[:2]] == [True] * 2
    assert cluster.steps() == [1] * 3
    cluster.update(3)
    assert cluster.steps() == [3] * 3


def test_weights_that_change_between_versions_are_refused_then_learned(cluster: Cluster, tmp_path: Path) -> None:
    cluster.begin(WeightcastCheckpointManager, (1,))
    cluster.update(1)
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    ).save_pretrained(tmp_path)
    cluster.trainers.setup(path=str(tmp_path))
    with pytest.raises(IncompatibleWeightsError, match=r"expected 'layers\.0\.w'"):
        cluster.update(2)
    assert cluster.steps() == [1]
    assert cluster.update(2)["weightcast/version"] == 2
