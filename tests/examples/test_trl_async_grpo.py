"""TRL's example is TRL's own program and at most three lines; tests/real_vllm/test_trl.py runs it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "  # +"


def test_the_example_differs_from_trl_alone_by_at_most_three_lines() -> None:
    lines = (ROOT / "examples" / "trl_async_grpo.py").read_text().splitlines()
    added = [line.removesuffix(MARK) for line in lines if line.endswith(MARK)]
    alone = "\n".join(line for line in lines if not line.endswith(MARK)) + "\n"
    assert 1 <= len(added) <= 3
    tree = ast.parse(alone)
    assert "weightcast" not in ast.unparse(tree.body[1:]).lower(), (
        "but for the docstring it knows nothing of weightcast"
    )
    # What is left is whole: every name is defined, every import used.
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "-"],
        input=alone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    # The page shows the same lines.
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs" / "trl.md").read_text(), re.MULTILINE | re.DOTALL)
    shown = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    assert shown == [line.strip().replace("options.url", '"http://127.0.0.1:8000"') for line in added]
