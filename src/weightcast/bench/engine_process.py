"""An engine of the bench: `python -m weightcast.bench.engine_process FD`, where FD is its socket to the bench.

It holds a model of the given shapes in a ModuleEngine behind the real control routes, and ends when the socket does.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import TypeAlias

import msgspec
import torch

from weightcast.bench import per_tensor
from weightcast.bench.broadcasts import Broadcasts, RawBroadcast, TensorBroadcasts
from weightcast.bench.channel import BenchChannel, SharedBytes
from weightcast.bench.model import build_model
from weightcast.control.server.app import EngineServer
from weightcast.engines.gate import Gate
from weightcast.engines.module import ModuleEngine
from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.format.manifest import TensorSpec, decode
from weightcast.process_group import ProcessGroup, join_store

ANSWER_SECONDS = 600.0


class Serve(msgspec.Struct, frozen=True):
    """Build and serve a model on `device`; its specs are the JSON in the memory that comes along."""

    num_bytes: int
    device: str


class PerTensor(msgspec.Struct, frozen=True, tag=True):
    """Take part in the per-tensor baseline, through the memory that comes along."""

    num_bytes: int


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Join the process group of the baselines, with so many flat buffers of that size."""

    backend: str
    host: str
    port: int
    group_rank: int
    group_size: int
    buffer_bytes: int
    num_buffers: int


class EngineReady(msgspec.Struct, frozen=True):
    """The command has been prepared; `url`: where the control routes are."""

    url: str


Command: TypeAlias = PerTensor | JoinGroup | RawBroadcast | TensorBroadcasts


@contextlib.contextmanager
def served(model: torch.nn.Module) -> Iterator[EngineServer]:
    """The real control routes of an engine that holds `model`, on a port of the system's choice."""
    with EngineServer(ModuleEngine(model), gate=Gate()) as server:
        yield server


def attend(connection: socket.socket, model: torch.nn.Module, url: str) -> None:
    """Carry out the bench's commands until it closes its end of the connection; close this one."""
    channel = BenchChannel(connection, peer="the bench", deadline_seconds=ANSWER_SECONDS)
    with contextlib.closing(channel), contextlib.closing(_Attendant(channel, model, url)) as attendant:
        attendant.run()


class _Attendant:
    """Does what the bench says, one command after the other."""

    def __init__(self, channel: BenchChannel, model: torch.nn.Module, url: str) -> None:
        self._channel = channel
        self._engine = ModuleEngine(model)
        self._device = next(model.parameters()).device
        self._url = url
        self._broadcasts: Broadcasts | None = None

    def run(self) -> None:
        """Until the bench ends the connection; it may be silent for longer than the channel's deadline."""
        with contextlib.suppress(PeerDiedError):
            while True:
                with contextlib.suppress(PeerTimeoutError):
                    self._do(*self._channel.receive_command(Command))

    def _do(self, command: Command, fd: int | None) -> None:
        match command:
            case PerTensor():
                assert fd is not None
                self._per_tensor(command, fd)
            case JoinGroup():
                self._join(command)
            case RawBroadcast():
                assert self._broadcasts is not None
                self._broadcasts.take_raw(command.num_bytes, self._channel)
            case TensorBroadcasts():
                assert self._broadcasts is not None
                self._broadcasts.take_each(self._engine, self._channel)

    def close(self) -> None:
        if self._broadcasts is not None:
            self._broadcasts.close()

    def _per_tensor(self, command: PerTensor, fd: int) -> None:
        with contextlib.closing(SharedBytes(fd, command.num_bytes)) as slot:
            self._channel.send(EngineReady(self._url))
            per_tensor.receive(self._engine, slot.tensor, self._channel)

    def _join(self, command: JoinGroup) -> None:
        group = ProcessGroup(
            command.backend,
            join_store(command.host, command.port, ANSWER_SECONDS),
            rank=command.group_rank,
            size=command.group_size,
            timeout_seconds=ANSWER_SECONDS,
            host=command.host,
            device=self._device if command.backend == "nccl" else None,
        )
        self._broadcasts = Broadcasts(group, command.buffer_bytes, self._device, command.num_buffers)
        self._channel.send(EngineReady(self._url))


def main(argv: list[str]) -> int:
    connection = socket.socket(fileno=int(argv[0]))
    model = _read_model(connection)
    with served(model) as server:
        BenchChannel(connection, peer="the bench", deadline_seconds=ANSWER_SECONDS).send(EngineReady(server.url))
        attend(connection, model, server.url)
    return 0


def _read_model(connection: socket.socket) -> torch.nn.Module:
    command, fd = BenchChannel(connection, peer="the bench", deadline_seconds=ANSWER_SECONDS).receive_with_fd(Serve)
    with contextlib.closing(SharedBytes(fd, command.num_bytes)) as shared:
        specs: tuple[TensorSpec, ...] = decode(shared.tensor.numpy().tobytes(), tuple[TensorSpec, ...])
    if command.device != "cpu":
        torch.cuda.set_device(command.device)
    return build_model(specs, command.device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
