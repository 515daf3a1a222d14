"""Every transport test runs under a check that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from weightcast.testing.transport_kit import TransportEnds


@dataclasses.dataclass
class Ends(TransportEnds):
    url: str
    stack: contextlib.ExitStack


@pytest.fixture(params=["memory://", "ipc://"])
def ends(request: pytest.FixtureRequest, leaves_nothing: None) -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        yield Ends(request.param, stack)


@pytest.fixture
def ipc_ends(leaves_nothing: None) -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        yield Ends("ipc://", stack)
