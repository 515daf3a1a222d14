"""A program that ends in mid-broadcast and has closed nothing ends with its own status: torch aborts nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stopping import send_signal
from transports.collective_child import EXIT_STATUS

pytestmark = pytest.mark.cluster

CHILD = Path(__file__).with_name("collective_child.py")
DEADLINE_SECONDS = 2.0
PATIENCE_SECONDS = 60.0


class Ends:
    """A sender and a receiver, each a process, of which the first bucket has come over."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.sender = self._start("sender", str(DEADLINE_SECONDS))
        self.receiver = self._start("receiver")
        self.go_on(self.receiver, self.line(self.sender))
        assert self.line(self.receiver) == "open"
        self.go_on(self.sender)
        assert (self.line(self.sender), self.line(self.receiver)) == ("sent", "received")

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        child = subprocess.Popen([sys.executable, str(CHILD), *arguments], text=True, **pipes)
        self._stack.callback(child.communicate)
        self._stack.callback(child.kill)
        return child

    @staticmethod
    def line(child: subprocess.Popen[str]) -> str:
        assert child.stdout is not None
        return child.stdout.readline().strip()

    @staticmethod
    def go_on(child: subprocess.Popen[str], word: str = "") -> None:
        assert child.stdin is not None
        print(word, file=child.stdin, flush=True)

    @staticmethod
    def end(child: subprocess.Popen[str]) -> None:
        """Its end must be of its own making."""
        _, errors = child.communicate(timeout=PATIENCE_SECONDS)
        assert child.returncode == EXIT_STATUS, errors
        assert "terminate" not in errors


@pytest.fixture
def ends() -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        yield Ends(stack)


def test_the_sender_ends_while_its_receiver_stands_still(ends: Ends) -> None:
    """Its broadcast can't be ended: the program waits for it as long as that takes."""
    send_signal(ends.receiver.pid, signal.SIGSTOP)
    ends.go_on(ends.sender)
    ends.end(ends.sender)
    os.kill(ends.receiver.pid, signal.SIGCONT)
    ends.go_on(ends.receiver)
    ends.end(ends.receiver)


def test_the_receiver_ends_while_the_sender_goes_on(ends: Ends) -> None:
    """It says so, whereupon the sender leaves the group and with it ends what the receiver waits for."""
    for child in (ends.receiver, ends.sender):
        ends.go_on(child)
    for child in (ends.receiver, ends.sender):
        ends.end(child)
