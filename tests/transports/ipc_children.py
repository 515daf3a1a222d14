"""Ends of the ipc transport in processes of their own, so that they can be stopped and killed."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
from types import TracebackType
from typing import Any

import forking
from stopping import send_signal

from weightcast.errors import WeightcastError
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    LinkAddress,
    address_of,
    check,
    make_receiver,
    make_sender,
    numbered,
    send,
    version,
)

_context = forking.preloaded("torch", "transports.ipc_children", "weightcast.transports.ipc", "weightcast.testing")


class Child:
    """A process with a pipe to it; ended by its pid, whatever state it is in."""

    def __init__(self, target: Any, *args: Any) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self.pipe.close()
        self.process.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_SECONDS), "the child said nothing"
        return self.pipe.recv()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        assert self.process.pid is not None
        send_signal(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join(PATIENCE_SECONDS)


def receive(
    pipe: multiprocessing.connection.Connection, address: LinkAddress, peer: str, staged: bool, num_buckets: int
) -> None:
    """Take part in one update for each number that comes; report each bucket when it was checked, and the outcome.

    After each report, wait for a word before going on, so that the parent can stop this process at a known place.
    """
    manifest, stack = numbered(num_buckets), contextlib.ExitStack()
    receiver = make_receiver(stack, address, peer)
    pipe.send("connected")
    while (number := pipe.recv()) is not None:
        held = []
        try:
            receiver.open(manifest, version(number), staged=staged)
            pipe.send("open")
            for bucket in receiver:
                held.append(bucket)
                check(bucket, manifest, number)
                pipe.send(bucket.index)
                pipe.recv()
                # Nothing was rewritten while this process stood still.
                for kept in held if staged else held[-1:]:
                    check(kept, manifest, number)
            pipe.send("whole")
        except WeightcastError as exc:
            pipe.send(type(exc).__name__)
        receiver.end()
    stack.close()


def publish_one_bucket(pipe: multiprocessing.connection.Connection, staged: bool) -> None:
    """Open an update for "engine", send one bucket of several, say so and wait for the end of time."""
    manifest, stack = numbered(), contextlib.ExitStack()
    sender = make_sender(stack, "ipc://")
    pipe.send(address_of(sender, "ipc://"))
    pipe.recv()
    sender.open(manifest, version(1), peers=["engine"], staged=staged)
    send(sender, manifest, 1, 0)
    pipe.send("sent")
    pipe.recv()
