"""The transport that docs/writing-a-transport.md shows is one file, and keeps the contract."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcast import registry
from weightcast.testing import TransportContract

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-transport.md"
MAX_LINES = 150


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Registered under its scheme, as by an entry point."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    [program] = [block for block in blocks if "TRANSPORT =" in block]
    assert program.count("\n") <= MAX_LINES
    path = tmp_path_factory.mktemp("docs") / "documented_transport.py"
    path.write_text(program)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, path.stem, module)
        patch.setitem(registry.TRANSPORTS, "mapped", f"{path.stem}:TRANSPORT")
        spec.loader.exec_module(module)
        yield


@pytest.mark.usefixtures("documented")
class TestDocumented(TransportContract):
    url = "mapped://127.0.0.1:0"
