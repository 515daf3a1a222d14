"""Links: one that can't be opened leaves nothing behind; one that the publisher ends is closed for the worker too."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from weightcast.errors import PeerDiedError
from weightcast.format.messages import Hello
from weightcast.links import link
from weightcast.links.link import LinkListener, WorkerLink
from weightcast.testing.transport_kit import PATIENCE_SECONDS, RUN


def test_a_hello_that_fails_closes_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(link, "connect", lambda address, timeout_seconds: ours)
    with pytest.raises(PeerDiedError):
        WorkerLink("unix:@gone", Hello("5a" * 16, "engine", 0, "s" * 64), lease_seconds=1.0, on_end=lambda reason: None)
    assert ours.fileno() == -1


def test_a_link_that_the_publisher_ends_is_closed_at_once(leaves_nothing: None) -> None:
    """Not only with the listener, whose other links go on."""
    ended = threading.Event()
    with contextlib.closing(LinkListener(RUN)) as listener:
        hello = Hello(RUN, "engine", 0, listener.secret)
        worker = WorkerLink(listener.address, hello, lease_seconds=600.0, on_end=lambda reason: ended.set())
        with contextlib.closing(worker):
            (publishers,) = listener.wait("engine", 1, PATIENCE_SECONDS)
            publishers.end("the test ends it")
            assert ended.wait(PATIENCE_SECONDS)


def test_a_publisher_of_another_user_is_not_connected_to(leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    another = os.geteuid() + 1
    with contextlib.closing(LinkListener(RUN)) as listener:
        monkeypatch.setattr(os, "geteuid", lambda: another)
        with pytest.raises(PermissionError, match="the peer runs as user"):
            link.connect(listener.address, PATIENCE_SECONDS)
