"""Programs that a test starts as a user does, and judges by what they print; how ranks among them end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

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


def end_rank() -> NoReturn:
    """End this rank's process, once all ranks are here.

    An interpreter that ends as usual is aborted now and then, with "terminate called without an active exception",
    where torch's default group has just gathered something: gloo's thread still drops the tensor, and wants Python.
    `destroy_process_group` does not wait for that thread while a DeviceMesh holds the group.
    """
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
