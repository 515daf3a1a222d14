"""How the tests start a demo."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from demo.watched import Demo


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Demo]]:
    """Start a demo with these options; what still runs is killed after the module's last test."""
    started: list[Demo] = []

    def launch(*options: str) -> Demo:
        demo = Demo(tmp_path_factory.mktemp("demo"), *options)
        started.append(demo)
        return demo

    yield launch
    for demo in started:
        demo.close()
