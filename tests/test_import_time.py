"""`import weightcast` costs next to nothing, and each side loads only what is its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_python import WarmPython

SERVER = ("fastapi", "starlette", "uvicorn", "transformers", "prometheus_client", "weightcast.control.server.app")
CLIENT = ("httpx", "h11", "weightcast.trainer.publisher", "weightcast.control.client")
TOOLS = ("rich", "matplotlib", "weightcast.cli", "weightcast.testing")
ENGINES = ("vllm", "sglang", "torchrl", "ray", "megatron", "verl")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    return set(run(f"import sys\n{code}\nprint(*sys.modules)").split())


def test_the_package_itself_loads_nothing_but_itself() -> None:
    found = loaded("import weightcast")
    assert {name for name in found if name.startswith("weightcast")} == {"weightcast"}
    assert not found & {"torch", *SERVER, *CLIENT, *TOOLS, *ENGINES}


@pytest.mark.parametrize(
    "code",
    ["import weightcast; weightcast.errors.PublishError", "from weightcast import PublishReport, TensorSpec, Region"],
)
def test_plain_values_load_no_torch(code: str) -> None:
    assert not loaded(code) & {"torch", *SERVER, *CLIENT, *TOOLS, *ENGINES}


@pytest.fixture(scope="module")
def python_with_torch() -> Iterator[WarmPython]:
    """The import of torch takes seconds, and is not what is tried here."""
    with contextlib.closing(WarmPython("torch", environment=os.environ)) as python:
        yield python


@pytest.mark.parametrize(
    ("code", "foreign"),
    [
        ("from weightcast import Publisher, ModuleSource, HttpEngine", (*SERVER, *TOOLS, *ENGINES, "pickle_server")),
        ("from weightcast import ModuleEngine", (*SERVER, *CLIENT, *TOOLS, *ENGINES)),
        ("from weightcast import EngineServer", ("fastapi", *CLIENT, *TOOLS, *ENGINES)),
        ("import weightcast.serving.worker", (*SERVER, *CLIENT, *TOOLS, *ENGINES)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_side_does_not_load_the_others(
    python_with_torch: WarmPython, tmp_path: Path, code: str, foreign: tuple[str, ...]
) -> None:
    found = tmp_path / "modules"
    script = f"import sys\n{code}\nopen(sys.argv[1], 'w').write(' '.join(sys.modules))"
    assert python_with_torch.run(script, str(found)) == 0
    names = set(found.read_text().split())
    assert {"torch", "weightcast"} <= names
    assert not names & set(foreign)


def test_a_first_publish_imports_nothing_and_makes_no_decoder() -> None:
    code = """
import sys, msgspec, torch, weightcast
engine, source = (made(torch.nn.Linear(8, 8)) for made in (weightcast.ModuleEngine, weightcast.ModuleSource))
with weightcast.EngineServer(engine) as server, weightcast.Publisher(source, engines=[server.url]) as publisher:
    publisher.prepare()
    modules, msgspec.json.Decoder = set(sys.modules), None
    publisher.publish()
    print(*set(sys.modules) - modules)
"""
    assert run(code).split() == []


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
        ("ray", "sys.modules['nemo_rl'] = sys; import weightcast.integrations.nemo_rl", "ray"),
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
