"""A worker's link that can't be opened leaves nothing behind."""

from __future__ import annotations

import socket

import pytest

from weightcast.errors import PeerDiedError
from weightcast.format.messages import Hello
from weightcast.links import link
from weightcast.links.link import WorkerLink


def test_a_hello_that_fails_closes_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(link, "connect", lambda address, timeout_seconds: ours)
    with pytest.raises(PeerDiedError):
        WorkerLink("unix:@gone", Hello("5a" * 16, "engine", 0, "s" * 64), lease_seconds=1.0, on_end=lambda reason: None)
    assert ours.fileno() == -1
