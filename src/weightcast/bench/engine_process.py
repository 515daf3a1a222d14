"""An engine of the bench: `python -m weightcast.bench.engine_process FD`, where FD is its socket to the bench.

It holds a model of the given shapes in a ModuleEngine behind the real control routes, and ends when the socket does.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import msgspec
import torch

from weightcast.bench import per_tensor
from weightcast.bench.channel import Channel, SharedBytes
from weightcast.bench.model import build_model
from weightcast.control.server import EngineServer
from weightcast.engines.module import ModuleEngine
from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.gate import Gate
from weightcast.manifest import TensorSpec, decode

ANSWER_SECONDS = 600.0


class Serve(msgspec.Struct, frozen=True):
    """Build and serve a model; its specs are the JSON in the memory that comes along."""

    num_bytes: int


class PerTensor(msgspec.Struct, frozen=True):
    """Take part in the per-tensor baseline, through the memory that comes along."""

    num_bytes: int


class Ready(msgspec.Struct, frozen=True):
    """The command has been prepared; `url`: where the control routes are."""

    url: str


@contextlib.contextmanager
def served(model: torch.nn.Module) -> Iterator[EngineServer]:
    """The real control routes of an engine that holds `model`, on a port of the system's choice."""
    with EngineServer(ModuleEngine(model), gate=Gate()) as server:
        yield server


def attend(connection: socket.socket, model: torch.nn.Module, url: str) -> None:
    """Carry out the bench's commands until it closes its end of the connection; close this one."""
    channel = Channel(connection, peer="the bench", deadline_seconds=ANSWER_SECONDS)
    with contextlib.closing(channel), contextlib.suppress(PeerDiedError):
        engine = ModuleEngine(model)
        while True:
            with contextlib.suppress(PeerTimeoutError):  # between commands; the bench's end would end the connection
                _per_tensor(channel, engine, url)


def main(argv: list[str]) -> int:
    connection = socket.socket(fileno=int(argv[0]))
    model = build_model(_read_specs(connection))
    with served(model) as server:
        Channel(connection, peer="the bench", deadline_seconds=ANSWER_SECONDS).send(Ready(server.url))
        attend(connection, model, server.url)
    return 0


def _read_specs(connection: socket.socket) -> tuple[TensorSpec, ...]:
    command, fd = Channel(connection, peer="the bench", deadline_seconds=ANSWER_SECONDS).receive_with_fd(Serve)
    with contextlib.closing(SharedBytes(fd, command.num_bytes)) as shared:
        return decode(shared.tensor.numpy().tobytes(), tuple[TensorSpec, ...])


def _per_tensor(channel: Channel, engine: ModuleEngine, url: str) -> None:
    command, fd = channel.receive_with_fd(PerTensor)
    with contextlib.closing(SharedBytes(fd, command.num_bytes)) as slot:
        channel.send(Ready(url))
        per_tensor.receive(engine, slot.tensor, channel)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
