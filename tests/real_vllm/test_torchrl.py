"""TorchRL's scheme over a store, with a real `vllm.LLM` at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_vllm.conftest import Checkpoints
from real_vllm.programs import run
from real_vllm.servers import TESTS, Setup, child_environment


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "tp"), [("tensordict", 1), ("state_dict", 2)])
def test_an_llm_takes_each_version_by_the_scheme(
    strategy: str, tp: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    program, environment = Path(TESTS, "real_vllm", "torchrl_llm.py"), child_environment(Setup(tp=tp))
    run(program, str(checkpoint()), str(tmp_path / "weights"), strategy, str(tp), environment=environment)


@pytest.mark.full
def test_an_llm_goes_back_or_refuses_when_a_load_fails_on_some_rank(checkpoint: Checkpoints, tmp_path: Path) -> None:
    program, environment = Path(TESTS, "real_vllm", "torchrl_failing_llm.py"), child_environment(Setup(tp=2))
    run(program, str(checkpoint()), str(tmp_path / "weights"), environment=environment)
