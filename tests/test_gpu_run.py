"""On a GPU: the sections of scripts/gpu that prove bytes, order and faults, and the bench. Run by scripts/test-gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[1]


def test_bytes_order_and_faults(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu", "--only", "a,c,d,f", "--out", tmp_path],
        env={**os.environ, "WEIGHTCAST_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr


def test_the_bench_runs() -> None:
    options = ["--shapes", "uniform", "--num-tensors", "20", "--total-mib", "64", "--runs", "1"]
    done = subprocess.run(
        [ROOT / "scripts" / "bench", "--device", "cuda", "--install", "streaming", *options],
        env={**os.environ, "WEIGHTCAST_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engines hold what was sent" in done.stdout
