"""The page's command, as it stands, starts a server; what is published to it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import ROOT, commands, run

from real_sglang.conftest import Checkpoints
from real_sglang.servers import ONE, child_environment


@pytest.mark.full
def test_the_pages_server_takes_a_version(tmp_path: Path, checkpoint: Checkpoints) -> None:
    """Not in CI: a server that is not limited takes most of the host's memory for its cache."""
    (tmp_path / "MODEL").symlink_to(checkpoint(seed=0))
    (tmp_path / "NEXT").symlink_to(checkpoint(seed=1))
    server = [command for command in commands(ROOT / "docs" / "sglang.md") if "launch_server" in command]
    assert len(server) == 1
    url = "http://127.0.0.1:30000"
    then = [f"weightcast publish NEXT --engine {url} --version 7", f"weightcast inspect {url} | grep 'version 7'"]
    environment = child_environment(ONE)
    del environment["SGLANG_PLUGINS"]  # the page names none: SGLang loads all that it finds
    run(server + then, tmp_path, environment)
