"""The page's command, as it stands, starts a server; what is published to it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import ROOT, commands, run

from real_vllm.conftest import Checkpoints
from real_vllm.servers import ENVIRONMENT


@pytest.mark.full
def test_the_pages_server_takes_a_version(tmp_path: Path, checkpoint: Checkpoints) -> None:
    (tmp_path / "MODEL").symlink_to(checkpoint(seed=0))
    (tmp_path / "NEXT").symlink_to(checkpoint(seed=1))
    server = [command for command in commands(ROOT / "docs" / "vllm.md") if " serve " in command]
    assert len(server) == 1
    url = "http://127.0.0.1:8000"
    then = [f"weightcast publish NEXT --engine {url} --version 7", f"weightcast inspect {url} | grep 'version 7'"]
    # The command says nothing of compilation, so vLLM compiles.
    environment = {
        name: value
        for name, value in ENVIRONMENT.items()
        if name not in ("VLLM_SERVER_DEV_MODE", "TORCHDYNAMO_DISABLE")
    }
    run(
        server + then,
        tmp_path,
        environment | {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
