"""How the tests start a demo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo.watched import Demo


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Start a demo with these options; it is killed after the test if it still runs."""
    started: list[Demo] = []

    def launch(*options: str) -> Demo:
        demo = Demo(tmp_path, *options)
        started.append(demo)
        return demo

    yield launch
    for demo in started:
        demo.close()
