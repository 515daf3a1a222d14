"""TRL's AsyncGRPOTrainer, in vLLM's environment, with a real SGLang that makes its rollouts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from real_engines.process import python_of
from real_engines.setups import on
from real_vllm.oracle import NUM_TOKENS, PROMPT

from real_sglang.conftest import Checkpoints
from real_sglang.oracle import ColdServers
from real_sglang.servers import ONE, TESTS, Server

TRAINING_SECONDS = 300
NUM_STEPS = 4


@on(full=[ONE])
def test_trl_trains_a_policy_that_the_server_serves(
    server: Server, cold: ColdServers, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    before = server.ask(PROMPT, NUM_TOKENS)
    options = {"model": str(checkpoint()), "output": str(tmp_path), "urls": [server.url], "sglang": server.url}
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [
            python_of("vllm"),
            str(TESTS / "real_vllm" / "trl_training.py"),
            json.dumps(options | {"num_steps": NUM_STEPS}),
        ],
        env=os.environ | {"PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TRAINING_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    logs = json.loads(done.stdout.splitlines()[-1])["logs"]
    versions = [int(log["weightcast/version_max"]) for log in logs if "weightcast/version_max" in log]
    assert len(versions) == NUM_STEPS + 1
    assert server.version() == str(versions[-1])
    divergence = [log["kl"] for log in logs if "kl" in log]
    assert len(divergence) == NUM_STEPS
    assert abs(divergence[0]) < 1e-4, "the first step trains on answers of the very weights that it has"
    trained = cold.of(server.setup, tmp_path)
    assert server.checksums() == trained.checksums()
    assert server.ask(PROMPT, NUM_TOKENS) == trained.ask(PROMPT, NUM_TOKENS) != before
