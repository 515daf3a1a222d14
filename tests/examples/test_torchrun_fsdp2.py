"""The torchrun example as users start it: two ranks, its own engine or one that runs, judged by what that holds."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from examples.program import Program
from safetensors.torch import load_file

import weightcast
from weightcast.format.tensor_digest import tensor_digest

pytestmark = pytest.mark.cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_fsdp2.py"
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
    str(EXAMPLE),
]


@pytest.mark.usefixtures("leaves_nothing")
def test_the_engine_holds_the_trainers_last_weights(tmp_path: Path) -> None:
    temporary, saved_to = tmp_path / "tmp", tmp_path / "checkpoint"
    temporary.mkdir()
    command = [*TORCHRUN, "--steps", "3", "--checkpoint", str(saved_to), "--stay"]
    with Program(command, {"TMPDIR": str(temporary)}) as program:
        text = program.read_until("^done", 90)
        published = re.findall(
            r"^version (\d+): loss .* bytes to (http://127.0.0.1:\d+) in \d+ ms$", text, re.MULTILINE
        )
        assert [number for number, _ in published] == ["0", "1", "2"]
        with contextlib.closing(weightcast.HttpEngine(published[0][1])) as engine:
            assert engine.info().weight_version == "2"
            saved = load_file(saved_to / "model.safetensors")
            assert engine.digests() == {name: tensor_digest(tensor) for name, tensor in saved.items()}
        program.end(30)
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torch")]  # torch leaves logs
    assert not left


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.usefixtures("leaves_nothing")
def test_an_engine_that_runs_already_is_filled_and_let_go(tmp_path: Path) -> None:
    with load_example().engine_of_our_own() as url:
        command = [*TORCHRUN, "--engine", url, "--steps", "2", "--checkpoint", str(tmp_path)]
        with Program(command) as program:
            text = program.end(90)
        assert re.findall(r"^version (\d+): .* bytes to (\S+) in", text, re.MULTILINE) == [("0", url), ("1", url)]
        with contextlib.closing(weightcast.HttpEngine(url)) as engine:
            info = engine.info()
            assert (info.weight_version, info.holder, info.paused) == ("1", "", False)
            saved = load_file(tmp_path / "model.safetensors")
            assert engine.digests() == {name: tensor_digest(tensor) for name, tensor in saved.items()}
