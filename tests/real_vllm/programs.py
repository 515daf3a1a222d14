"""Programs that a test starts as a user does, and judges by what they print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROGRAM_SECONDS = 300


def run(program: Path, *arguments: str, environment: Mapping[str, str]) -> str:
    """What it printed. Raises AssertionError if it fails."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
