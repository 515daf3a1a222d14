"""The engines of a bench run: processes of their own, or threads of this one where the transport is `memory`.

Leaving the context ends every engine that it started, whatever happened inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import msgspec

from weightcast.bench.channel import Channel, SharedBytes, pair
from weightcast.bench.engine_process import ANSWER_SECONDS, PerTensor, Ready, Serve, attend, served
from weightcast.bench.model import build_model
from weightcast.manifest import TensorSpec

END_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class BenchEngine:
    """`pid` is None where the engine shares the publisher's process. `channel` speaks the per-tensor baseline."""

    url: str
    channel: Channel
    pid: int | None


@contextlib.contextmanager
def started(specs: Sequence[TensorSpec], num_engines: int, *, one_process: bool) -> Iterator[list[BenchEngine]]:
    """`num_engines` engines that serve a zeroed model of these specs."""
    with contextlib.ExitStack() as stack:
        if one_process:
            yield [stack.enter_context(_in_thread(specs, index)) for index in range(num_engines)]
            return
        starting = [stack.enter_context(_process(index)) for index in range(num_engines)]
        with contextlib.closing(_shared_json(specs)) as shared:
            for _, channel in starting:
                channel.send(Serve(shared.tensor.numel()), shared.fd)
            engines = [BenchEngine(channel.receive(Ready).url, channel, process.pid) for process, channel in starting]
        yield engines


def lend_slot(engines: Sequence[BenchEngine], slot: SharedBytes) -> None:
    """Let every engine map the shared memory of the per-tensor baseline; they wait for its first message."""
    for engine in engines:
        engine.channel.send(PerTensor(slot.tensor.numel()), slot.fd)
    for engine in engines:
        engine.channel.receive(Ready)


def _shared_json(specs: Sequence[TensorSpec]) -> SharedBytes:
    data = msgspec.json.encode(specs)
    shared = SharedBytes.create(len(data))
    shared.tensor.numpy()[:] = memoryview(data)
    return shared


@contextlib.contextmanager
def _process(index: int) -> Iterator[tuple[subprocess.Popen[bytes], Channel]]:
    channel, theirs = pair(f"engine {index}", deadline_seconds=ANSWER_SECONDS)
    command = [sys.executable, "-m", "weightcast.bench.engine_process", str(theirs.fileno())]
    with contextlib.closing(channel):
        with contextlib.closing(theirs):
            # A session of its own: Ctrl-C reaches the bench, which then ends its engines by closing their sockets.
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            yield process, channel
        finally:
            channel.close()
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _in_thread(specs: Sequence[TensorSpec], index: int) -> Iterator[BenchEngine]:
    model = build_model(specs)
    channel, theirs = pair(f"engine {index}", deadline_seconds=ANSWER_SECONDS)
    with contextlib.closing(channel), served(model) as server:
        thread = threading.Thread(target=attend, args=(theirs, model, server.url), name=f"bench-engine-{index}")
        thread.start()
        try:
            yield BenchEngine(server.url, channel, None)
        finally:
            channel.close()
            thread.join(END_SECONDS)
