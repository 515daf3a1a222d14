"""Every command of every page runs as it stands there: in namespaces, with ports, host names and a /mnt of their own.

A page's commands run in one shell, in the order of the page. What serves goes on until the page's end; what follows a
store is ended after its first version.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
CONTINUED = re.compile(r"\s*\\\n\s*")
COMMENT = re.compile(r"\s{2,}#\s.*")

_INDEX = "needs a package index"
_BENCH = "a benchmark of minutes and gigabytes: tests/bench runs the same command with small shapes"
NOT_RUN = {
    "python3 -m venv .venv": _INDEX,
    "source .venv/bin/activate": _INDEX,
    "pip install '.[serve]'": _INDEX,
    "pip install PATH_TO_WEIGHTCAST": _INDEX,
    "pip install 'PATH_TO_WEIGHTCAST[trl]'": _INDEX,
    "./scripts/test": "is what runs tests, and CI runs it",
    """VLLM_PLUGINS=weightcast vllm serve MODEL --weight-transfer-config '{"backend": "weightcast"}'""": (
        "needs vLLM: tests/real_vllm starts its servers in this way"
    ),
    "python -m sglang.launch_server --model-path MODEL": (
        "needs SGLang: tests/real_sglang starts its servers in this way"
    ),
    "torchrun --nproc-per-node 8 examples/torchrun_fsdp2.py --transport nccl --engine http://engine-0:8000 "
    "--token-file token": "needs eight GPUs",
    "python examples/ray_cluster.py --address auto --trainers 2 --engines 2 --kill-engine-at 3": (
        "needs a Ray cluster: tests/examples/test_ray_cluster.py makes one and runs the example on it"
    ),
    "weightcast bench --shapes qwen3-0.6b --install streaming": _BENCH,
    "weightcast bench --transport gloo --shapes moonlight-16b-a3b --scale 16": _BENCH,
    "scripts/bench --shapes qwen3-0.6b --install streaming": _BENCH,
    "scripts/bench --shapes qwen3-0.6b --install staged": _BENCH,
    "scripts/bench --shapes qwen3-0.6b --install streaming --num-engines 4": _BENCH,
    "scripts/bench --shapes qwen3-0.6b --plot bench.png": _BENCH,
    "scripts/bench --shapes many-small": _BENCH,
    "scripts/bench --shapes many-small --json": _BENCH,
    "scripts/bench --shapes uniform --num-tensors 500": _BENCH,
    "scripts/bench --shapes uniform --num-tensors 50000": _BENCH,
    "python bench/store.py": "a benchmark of minutes and gigabytes",
}
LONG = {"./scripts/demo", "./scripts/demo --trainer-ranks 2 --transport gloo"}
"""A minute or two each: run with --full only."""

FIRST = {
    "README.md": ["weightcast publish CHECKPOINT_DIR --transport file:///mnt/weights"],
    "store.md": ["weightcast serve MODEL_DIR --port 8000"],
}
"""What a page's commands find: versions in its store, a server at its URL."""

SHELL = """
set -euo pipefail
ip link set lo up
hostname trainer-0
mount -t tmpfs none /mnt
printf '127.0.0.1 localhost HOST engine-0 trainer-0 trainer-1\\n' >hosts
mount --bind hosts /etc/hosts
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
serve() {
    "$@" &
    servers+=($!)
    python - <<'END'
import time, urllib.request
deadline = time.monotonic() + 100
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=10).read()
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
END
}
follow() {
    "$@" >followed &
    until grep -q '^version' followed; do kill -0 $! && sleep 0.1; done
    kill -TERM $!
    wait $!
}
on_two_hosts() {
    "$@" &
    local other=$!
    "$@"
    wait $other
}
servers=()
"""
END = """
for server in "${servers[@]}"; do kill -TERM "$server"; wait "$server"; done
echo "every command ended well"
"""


def commands(page: Path) -> list[str]:
    text = CONTINUED.sub(" ", page.read_text())
    lines = (line for _, body in FENCE.findall(text) for line in textwrap.dedent(body).splitlines())
    return [command for line in lines if (command := COMMENT.sub("", line).strip())]


def in_shell(command: str) -> str:
    """The command, after what the shell above does with its kind."""
    if " serve " in command:
        return f"serve {command.removesuffix('&')}"
    if command.startswith("weightcast follow"):
        return f"follow {command}"
    return f"on_two_hosts {command}" if "--nnodes 2" in command else command


def test_what_is_not_run_is_on_a_page() -> None:
    assert (NOT_RUN.keys() | LONG) - {command for page in PAGES for command in commands(page)} == set()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The repository's files under their names, and the models that pages speak of."""
    for path in ROOT.iterdir():
        if path.name not in (".git", "weightcast-demo"):
            (tmp_path / path.name).symlink_to(path)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, **heads)
    for name in ("MODEL_DIR", "CHECKPOINT_DIR", "checkpoint"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / name)
    return tmp_path


def run(page: Path, directory: Path, lines: list[str]) -> None:
    unshare = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces are not permitted here")
    script = [SHELL, *(f"echo {shlex.quote(line)}; {in_shell(line)}" for line in FIRST.get(page.name, []) + lines), END]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WEIGHTCAST_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*unshare, "bash", "-c", "\n".join(script)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("every command ended well\n")
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if set(commands(page)) - NOT_RUN.keys()], ids=lambda p: p.name)
def test_the_commands_of_a_page_run(page: Path, directory: Path) -> None:
    run(page, directory, [command for command in commands(page) if command not in NOT_RUN.keys() | LONG])


@pytest.mark.full
@pytest.mark.parametrize("command", sorted(LONG))
def test_a_long_command_runs(command: str, directory: Path) -> None:
    run(ROOT / "README.md", directory, [command])
