"""Processes of the bench's own, each with a channel to this one; leaving the context ends them, whatever happened."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from weightcast.bench.channel import BenchChannel, SharedBytes, pair
from weightcast.format.manifest import TensorSpec

END_SECONDS = 10.0


@contextlib.contextmanager
def process(
    module: str, *, peer: str, deadline_seconds: float
) -> Iterator[tuple[subprocess.Popen[bytes], BenchChannel]]:
    """`python -m module FD`, where FD is its end of the channel."""
    channel, theirs = pair(peer, deadline_seconds=deadline_seconds)
    command = [sys.executable, "-m", module, str(theirs.fileno())]
    with contextlib.closing(channel):
        with contextlib.closing(theirs):
            # A session of its own: Ctrl-C reaches the bench, which then ends its processes by closing their sockets.
            started = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            yield started, channel
        finally:
            channel.close()
            _end(started)


def _end(started: subprocess.Popen[bytes]) -> None:
    try:
        started.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()


def shared_specs(specs: Sequence[TensorSpec]) -> SharedBytes:
    """The specs as JSON, in memory that can be sent along with a message."""
    data = msgspec.json.encode(specs)
    shared = SharedBytes.create(len(data))
    shared.tensor.numpy()[:] = memoryview(data)
    return shared
