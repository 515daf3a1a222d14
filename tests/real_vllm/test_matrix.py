"""The same trainer against every kind of engine: families, dtypes, parallelism, routes, transports, HTTP and offline.

It runs with `--full`. The diagonal, which always runs, is in other files: families and dtypes at TP=1 in
test_model.py, an offline `LLM` and an `AsyncLLM` in test_examples.py and test_clients.py, and in test_acceptance.py
every transport with Qwen3 at TP=1, a tied Llama at TP=2 and experts at DP=2.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_engines.setups import on

from real_vllm.cold import Cold, assert_serves
from real_vllm.conftest import Checkpoints
from real_vllm.offline_llm import as_argument
from real_vllm.servers import TESTS, Server, Setup, child_environment
from real_vllm.trainer import GLOO, IPC, trainer

FAMILIES = ("qwen3", "qwen3-moe", "llama-tied", "qwen2")
DTYPES = (torch.float32, torch.bfloat16)
PARALLEL = ((1, 1), (2, 1), (1, 2))
TRANSPORTS = (IPC, GLOO)
OFFLINE_SECONDS = 300

SERVED = [Setup(family, dtype, tp, dp) for family, dtype, (tp, dp) in itertools.product(FAMILIES, DTYPES, PARALLEL)]
OFFLINE = [
    (Setup(family, dtype, tp), transport)
    for family, dtype, tp, transport in itertools.product(FAMILIES, DTYPES, (1, 2), TRANSPORTS)
]


@on(full=SERVED)
@pytest.mark.parametrize("transport", TRANSPORTS, ids=["ipc", "gloo"])
def test_a_server_serves_what_was_published(server: Server, transport: str) -> None:
    with trainer(server.setup, server.url, transport=transport) as it:
        for seed in (1, 0, 1):
            version = it.publish(seed).version
            assert server.version() == str(version)
            assert_serves(server, seed)


@pytest.mark.parametrize(
    ("setup", "transport"),
    [pytest.param(*case, marks=pytest.mark.full, id=f"{case[0]}-{case[1].partition(':')[0]}") for case in OFFLINE],
)
def test_an_offline_llm_serves_what_was_published(
    setup: Setup, transport: str, checkpoint: Checkpoints, cold: Cold
) -> None:
    folder = checkpoint(setup.family, 0, setup.dtype)
    program = str(Path(TESTS, "real_vllm", "offline_llm.py"))
    dtype = str(setup.dtype).removeprefix("torch.")
    command = [sys.executable, program, str(folder), setup.family, dtype, str(setup.tp), transport]
    command.append(as_argument(cold.of_seeds(setup)))
    done = subprocess.run(
        command,
        env=child_environment(setup),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=OFFLINE_SECONDS,
        check=False,
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0
