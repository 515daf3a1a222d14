"""`import weightcast` costs next to nothing, and each side loads only what is its own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

SERVER = ("fastapi", "starlette", "uvicorn", "transformers", "prometheus_client", "weightcast.control.server.app")
CLIENT = ("httpx", "h11", "weightcast.trainer.publisher", "weightcast.control.client")
TOOLS = ("rich", "matplotlib", "weightcast.cli", "weightcast.demo", "weightcast.bench", "weightcast.testing")
ENGINES = ("vllm", "sglang", "torchrl", "ray", "megatron", "verl")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    return set(run(f"import sys\n{code}\nprint(*sys.modules)").split())


def test_it_takes_under_a_third_of_a_second_beyond_torch() -> None:
    """The best of three: a busy machine makes it slower, nothing makes it faster."""
    code = "import time, torch; t = time.perf_counter(); import weightcast; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_the_package_itself_loads_nothing_but_itself() -> None:
    found = loaded("import weightcast")
    assert {name for name in found if name.startswith("weightcast")} == {"weightcast"}
    assert not found & {"torch", *SERVER, *CLIENT, *TOOLS, *ENGINES}


@pytest.mark.parametrize(
    ("code", "foreign"),
    [
        ("import weightcast; weightcast.errors.PublishError", ("torch", *SERVER, *CLIENT, *TOOLS, *ENGINES)),
        ("from weightcast import Manifest, TensorSpec, Gate", ("torch", *SERVER, *CLIENT, *TOOLS, *ENGINES)),
        ("from weightcast import Publisher, ModuleSource, HttpEngine", (*SERVER, *TOOLS, *ENGINES, "pickle_server")),
        ("from weightcast import ModuleEngine", (*SERVER, *CLIENT, *TOOLS, *ENGINES)),
        ("from weightcast import EngineServer", ("fastapi", *CLIENT, *TOOLS, *ENGINES)),
        ("import weightcast.serving.worker", (*SERVER, *CLIENT, *TOOLS, *ENGINES)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_side_does_not_load_the_others(code: str, foreign: tuple[str, ...]) -> None:
    assert not loaded(code) & set(foreign)


def test_no_distributed_group_and_no_thread_is_made() -> None:
    code = """
import threading, weightcast
for name in weightcast.__all__:
    getattr(weightcast, name)
import torch.distributed
print(torch.distributed.is_available() and torch.distributed.is_initialized(), threading.active_count())
"""
    assert run(code).split() == ["False", "1"]


@pytest.mark.parametrize(
    ("package", "use", "extra"),
    [
        ("starlette", "import weightcast; weightcast.EngineServer", "serve"),
        ("torchrl", "import weightcast.integrations.torchrl", "torchrl"),
        ("trl", "import weightcast.integrations.trl", "trl"),
        ("ray", "import weightcast.integrations.nemo_rl", "ray"),
        ("vllm", "from weightcast.integrations.vllm import WeightcastTrainerInitInfo", ""),
        ("nemo_rl", "import weightcast.integrations.nemo_rl", ""),
    ],
)
def test_a_missing_package_is_named_with_what_to_do(package: str, use: str, extra: str) -> None:
    code = f"""
import sys
sys.modules["{package}"] = None
try:
    {use}
except ModuleNotFoundError as error:
    print(error)
"""
    remedy = rf"it comes with weightcast's extra `{extra}`: pip install 'PATH_TO_WEIGHTCAST\[{extra}\]'"
    assert re.search(remedy if extra else rf"in this environment \(docs/{package}\.md|docs/nemo-rl\.md", run(code))
