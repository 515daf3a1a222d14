from __future__ import annotations

import pytest

from weightcast.process_group import serve_store


@pytest.fixture(autouse=True, scope="session")
def _libuv_is_up() -> None:
    """The first loop of torch's store opens a pipe that stays until the process ends."""
    serve_store("127.0.0.1", 10.0)
