"""TorchRL's scheme over a store, with a real `vllm.LLM` at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_vllm.cold import Cold
from real_vllm.conftest import Checkpoints
from real_vllm.offline_llm import as_argument
from real_vllm.programs import run
from real_vllm.servers import TESTS, Setup, child_environment


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "tp"), [("tensordict", 1), ("state_dict", 2)])
def test_an_llm_takes_each_version_by_the_scheme(
    strategy: str, tp: int, checkpoint: Checkpoints, cold: Cold, tmp_path: Path
) -> None:
    program, setup = Path(TESTS, "real_vllm", "torchrl_llm.py"), Setup(tp=tp)
    arguments = [str(checkpoint()), str(tmp_path / "weights"), strategy, str(tp), as_argument(cold.of_seeds(setup))]
    run(program, *arguments, environment=child_environment(setup))


@pytest.mark.full
def test_an_llm_goes_back_or_refuses_when_a_load_fails_on_some_rank(
    checkpoint: Checkpoints, cold: Cold, tmp_path: Path
) -> None:
    program, setup = Path(TESTS, "real_vllm", "torchrl_failing_llm.py"), Setup(tp=2)
    arguments = [str(checkpoint()), str(tmp_path / "weights"), as_argument(cold.of_seeds(setup))]
    run(program, *arguments, environment=child_environment(setup))
