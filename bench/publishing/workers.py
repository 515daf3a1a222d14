"""The bench's workers: engines, and trainer ranks besides rank 0. Both sides of them are here.

A worker is a process of its own (`python -m publishing.workers FD`, its job as JSON on stdin, FD its socket to
the bench), or a thread for engines over `memory`. It does what the bench says, one command after the other, and ends
when the socket does or a command fails. Leaving a context ends every worker that was started in it, whatever happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from publishing.baselines import (
    BaselineGroup,
    Broadcasts,
    EngineCommand,
    JoinGroup,
    UseSlot,
    load_each,
    take_from_slot,
)
from publishing.channel import ANSWER_SECONDS, BenchChannel, Done, await_done, send_all
from publishing.model import TrainerRank, build_model, trainer_rank
from publishing.result import BenchSettings
from weightcast.control.server.app import EngineServer
from weightcast.engines.module import ModuleEngine
from weightcast.errors import PeerDiedError, WeightcastError
from weightcast.format.bucket import BucketBuffer
from weightcast.format.manifest import TensorSpec, decode
from weightcast.host.memory import SharedMemory
from weightcast.process_group import join_store, serve_store

LOOPBACK = "127.0.0.1"
END_SECONDS = 10.0
FOLDER = str(Path(__file__).parents[1])
"""Where a worker finds this package."""


class Job(msgspec.Struct, frozen=True):
    """What a worker is: the engine or the trainer rank of this number. `store_port`: where the trainer ranks meet."""

    role: Literal["engine", "trainer rank"]
    number: int
    settings: BenchSettings
    specs: Sequence[TensorSpec]
    store_port: int = 0


class Step(msgspec.Struct, frozen=True):
    """To a trainer rank: call this method of TrainerRank. `engines`: what "open" takes."""

    what: Literal["open", "change", "publish", "close", "gather_each", "digests"]
    engines: Sequence[str] = ()


def work(job: Job, connection: socket.socket) -> None:
    """Do a job until the bench ends the connection; close this end of it."""
    bench = BenchChannel(connection, peer="the bench")
    with contextlib.closing(bench), contextlib.suppress(PeerDiedError):
        try:
            serve_engine(job, bench) if job.role == "engine" else follow_rank_0(job, bench)
        except WeightcastError as exc:
            bench.send(Done(f"{type(exc).__name__}: {exc}"[:4000]))


def serve_engine(job: Job, bench: BenchChannel) -> None:
    """Serve a zeroed model in a ModuleEngine behind the real control routes, and take part in the baselines."""
    device = torch.device(job.settings.engine_device(job.number))
    if device.index is not None:
        torch.cuda.set_device(device)
    model = build_model(job.specs, str(device))
    engine, group, num_bytes = ModuleEngine(model), None, sum(spec.num_bytes for spec in job.specs)
    with EngineServer(ModuleEngine(model)) as server, contextlib.ExitStack() as stack:
        bench.send(Done(url=server.url))
        while True:
            match command := bench.receive(EngineCommand):
                case UseSlot(location):
                    memory = SharedMemory.open(location).map().tensor()
                    load_each(engine, bench, functools.partial(take_from_slot, BucketBuffer.of(memory)))
                case JoinGroup():
                    store = join_store(job.settings.host, command.port, ANSWER_SECONDS)
                    group = BaselineGroup(job.settings, num_bytes, store, job.number + 1)
                    stack.callback(group.close)
                    bench.send(Done())
                case Broadcasts() if group is not None:
                    load_each(engine, bench, group.take) if command.per_tensor else group.take_raw(bench)


def follow_rank_0(job: Job, bench: BenchChannel) -> None:
    """Take every step that rank 0 takes."""
    store = join_store(LOOPBACK, job.store_port, ANSWER_SECONDS)
    with trainer_rank(job.settings, job.specs, job.number, store) as rank:
        while True:
            bench.send(Done())
            step = bench.receive(Step)
            getattr(rank, step.what)(*step.engines)


@contextlib.contextmanager
def _started(job: Job) -> Iterator[tuple[BenchChannel, int | None]]:
    """A worker's channel and process id, which is None for a thread. The worker ends because its channel does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = BenchChannel(ours, peer=f"{job.role} {job.number}", deadline_seconds=ANSWER_SECONDS)
    with contextlib.closing(channel):
        if job.settings.transport == "memory" and job.role == "engine":
            thread = threading.Thread(target=work, args=(job, theirs), name=f"bench-engine-{job.number}")
            thread.start()
            try:
                yield channel, None
            finally:
                channel.close()
                thread.join(END_SECONDS)
            return
        # The job is in a file, not in a pipe, so that nothing waits for the worker to read it.
        with theirs, tempfile.TemporaryFile() as stdin:
            stdin.write(msgspec.json.encode(job))
            stdin.seek(0)
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            # A session of its own: Ctrl-C reaches the bench, which then ends its workers by closing their sockets.
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, [FOLDER, os.environ.get("PYTHONPATH")]))
            }
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=stdin, env=environment, start_new_session=True
            )
        try:
            yield channel, process.pid
        finally:
            channel.close()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclasses.dataclass(frozen=True)
class BenchEngine:
    """`pid` is None where the engine shares the publisher's process. `channel` speaks the baselines."""

    url: str
    channel: BenchChannel
    pid: int | None


@contextlib.contextmanager
def started_engines(specs: Sequence[TensorSpec], settings: BenchSettings) -> Iterator[list[BenchEngine]]:
    """The engines that the settings ask for; each serves a zeroed model of these specs."""
    with contextlib.ExitStack() as stack:
        jobs = [Job("engine", number, settings, specs) for number in range(settings.num_engines)]
        workers = [stack.enter_context(_started(job)) for job in jobs]
        ready = await_done([channel for channel, _ in workers])
        yield [BenchEngine(done.url, channel, pid) for done, (channel, pid) in zip(ready, workers, strict=True)]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Rank 0, which is in this process, and the channels of the other ranks."""

    rank_0: TrainerRank
    others: Sequence[BenchChannel] = ()
    other_pids: Sequence[int] = ()

    def step(self, step: Step) -> Any:
        """Have all ranks take a step; return what rank 0 has of it. Raises PeerDiedError if another rank failed."""
        send_all(self.others, step)
        result = getattr(self.rank_0, step.what)(*step.engines)
        await_done(self.others)
        return result


@contextlib.contextmanager
def started_trainer(specs: Sequence[TensorSpec], settings: BenchSettings) -> Iterator[Trainer]:
    """The trainer that the settings ask for; more than one rank: sharded by FSDP2, over gloo."""
    with contextlib.ExitStack() as stack:
        store, port = serve_store(LOOPBACK, ANSWER_SECONDS) if settings.trainer_ranks > 1 else (None, 0)
        jobs = [Job("trainer rank", number, settings, specs, port) for number in range(1, settings.trainer_ranks)]
        workers = [stack.enter_context(_started(job)) for job in jobs]
        rank_0 = stack.enter_context(trainer_rank(settings, specs, store=store))
        others = [channel for channel, _ in workers]
        await_done(others)
        yield Trainer(rank_0, others, [pid for _, pid in workers if pid is not None])


if __name__ == "__main__":
    work(decode(sys.stdin.buffer.read(), Job), socket.socket(fileno=int(sys.argv[1])))
