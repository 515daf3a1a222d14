"""Every command of every page runs as it stands there.

A page's commands run in one shell, in the order of the page. What serves goes on until the page's end; what follows a
store is ended after its first version. Packages are those of this environment, which pip finds in place of an index.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pages import ROOT, commands, put_repository, run
from transformers import AutoModelForCausalLM, Qwen3Config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
NOT_RUN = {
    "pip install 'PATH_TO_WEIGHTCAST[trl]'": "needs TRL: scripts/test-vllm installs it by the extra",
    "pip install 'PATH_TO_WEIGHTCAST[verl]'": "needs verl: scripts/test-verl installs it",
    "./scripts/test": "is what runs tests, and CI runs it",
    "./scripts/gpu --wheels wheels --python 3.12": "needs a package index",
    "./scripts/gpu --from wheels": "needs a GPU: tests/test_gpu_script.py runs it dry",
    """VLLM_PLUGINS=weightcast vllm serve MODEL --weight-transfer-config '{"backend": "weightcast"}'""": (
        "needs vLLM: tests/real_vllm/test_page.py runs it"
    ),
    "python -m sglang.launch_server --model-path MODEL": "needs SGLang: tests/real_sglang/test_page.py runs it",
    "weightcast status http://127.0.0.1:8000 http://127.0.0.1:8001 --watch 2": (
        "goes on until Ctrl-C: tests/cli/test_status.py"
    ),
    "torchrun --nproc-per-node 8 examples/torchrun_fsdp2.py --transport nccl --engine http://engine-0:8000 "
    "--token-file token": "needs eight GPUs",
}
LONG = {
    "./scripts/demo",
    "./scripts/demo --trainer-ranks 2 --transport gloo",
    "weightcast bench ipc://",
    *commands(ROOT / "docs" / "benchmarks.md"),
    *commands(ROOT / "bench" / "README.md"),
}
"""They take minutes together, or gigabytes: run with --full only."""
LONG_PAGES = {"distributed.md", "ray.md", "sglang.md", "vllm.md"}
"""Each takes a minute, for what other tests run too (test_torchrun_fsdp2, test_ray_cluster, README's own install)."""


def _complete(folder: str, marker: str = "config.json") -> list[str]:
    """Make a checkpoint directory as a training loop does."""
    return [f"mkdir -p {folder}", f"cp CHECKPOINT_DIR/* {folder}", f"touch {folder}/{marker}"]


ENVIRONMENT = ["python3 -m venv .venv", "source .venv/bin/activate"]
FIRST = {
    "fleet.md": [
        *(f"weightcast serve MODEL_DIR --port {port}" for port in (8000, 8001)),
        "weightcast publish CHECKPOINT_DIR --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001 --wait",
    ],
    "quickstart.md": [
        "weightcast publish CHECKPOINT_DIR --transport file:///mnt/weights --version 699",
        *_complete("DIR/step_1000", "STABLE"),
    ],
    "ray.md": [
        "export RAY_TMPDIR=/mnt RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0",
        "python -m ray.scripts.scripts start --head --num-cpus 4 --include-dashboard false",
    ],
    "sglang.md": ENVIRONMENT,
    "store.md": ["weightcast serve MODEL_DIR --port 8000", *_complete("outputs/broadcasts/step_1", "STABLE")],
    "vllm.md": ENVIRONMENT,
}
"""What a page's commands find: versions in its store, a server at its URL, a cluster, an environment of one's own."""


def test_what_is_not_run_is_on_a_page() -> None:
    assert (NOT_RUN.keys() | LONG) - {command for page in PAGES for command in commands(page)} == set()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The repository's files under their names, and the models that pages speak of."""
    put_repository(tmp_path)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, **heads)
    for name in ("MODEL_DIR", "CHECKPOINT_DIR", "checkpoint"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.full] * (page.name in LONG_PAGES))
        for page in PAGES
        if set(commands(page)) - NOT_RUN.keys() - LONG
    ],
)
def test_the_commands_of_a_page_run(page: Path, directory: Path) -> None:
    lines = [command for command in commands(page) if command not in NOT_RUN.keys() | LONG]
    run(FIRST.get(page.name, []) + lines, directory)


@pytest.mark.full
@pytest.mark.parametrize("command", sorted(LONG))
def test_a_long_command_runs(command: str, directory: Path) -> None:
    run([command], directory)
