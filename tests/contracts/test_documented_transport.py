"""The transport that docs/writing-a-transport.md names is one file, and keeps the contract."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcast import registry
from weightcast.testing import TransportContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "mapped_transport.py"
MAX_LINES = 150


@pytest.fixture(scope="module")
def documented() -> Iterator[None]:
    """Registered under its scheme, as by an entry point."""
    assert EXAMPLE.read_text().count("\n") <= MAX_LINES
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, EXAMPLE.stem, module)
        patch.setitem(registry.TRANSPORTS, "mapped", f"{EXAMPLE.stem}:TRANSPORT")
        spec.loader.exec_module(module)
        yield


@pytest.mark.usefixtures("documented")
class TestDocumented(TransportContract):
    url = "mapped://127.0.0.1:0"
