"""Another trainer rank of the bench: `python -m weightcast.bench.trainer_process FD`, where FD is its socket to rank 0.

It does each step that rank 0 does, and ends when the socket does.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import Literal, TypeAlias

import msgspec
import torch

from weightcast.bench.channel import BenchChannel, SharedBytes
from weightcast.bench.model import change, local_tensors
from weightcast.bench.ranks import GROUP_SECONDS, default_group, return_free_memory, sharded_model, whole_tensors
from weightcast.errors import PeerDiedError, WeightcastError
from weightcast.format.manifest import TensorSpec, decode
from weightcast.format.messages import InstallMode
from weightcast.process_group import join_store
from weightcast.sources.module import ModuleSource
from weightcast.trainer.publisher import Publisher

What: TypeAlias = Literal["change", "publish", "gather_each"]


class Train(msgspec.Struct, frozen=True):
    """Join the trainer's default group and hold the shards of a model; its specs are in the memory that comes along."""

    num_bytes: int
    trainer_rank: int
    num_ranks: int
    host: str
    port: int


class Open(msgspec.Struct, frozen=True, tag=True):
    """Make a publisher."""

    transport: str
    install: InstallMode
    bucket_size_bytes: int | None
    engines: tuple[str, ...]


class Step(msgspec.Struct, frozen=True, tag=True):
    """Take part in this."""

    what: What


class Did(msgspec.Struct, frozen=True):
    """It is done; `error`: how it failed."""

    error: str = ""


def make_publisher(model: torch.nn.Module, terms: Open) -> Publisher:
    """The publisher that every trainer rank makes."""
    return Publisher(
        ModuleSource(model),
        transport=terms.transport,
        engines=terms.engines,
        bucket_size_bytes=terms.bucket_size_bytes,
        install=terms.install,
    )


def main(argv: list[str]) -> int:
    channel = BenchChannel(socket.socket(fileno=int(argv[0])), peer="trainer rank 0", deadline_seconds=GROUP_SECONDS)
    with contextlib.closing(channel), contextlib.suppress(PeerDiedError):
        train, specs = _read_specs(channel)
        store = join_store(train.host, train.port, GROUP_SECONDS)
        with default_group(store, train.trainer_rank, train.num_ranks):
            _follow(channel, sharded_model(specs, train.num_ranks))
    return 0


def _read_specs(channel: BenchChannel) -> tuple[Train, tuple[TensorSpec, ...]]:
    train, fd = channel.receive_with_fd(Train)
    with contextlib.closing(SharedBytes(fd, train.num_bytes)) as shared:
        return train, decode(shared.tensor.numpy().tobytes(), tuple[TensorSpec, ...])


def _follow(channel: BenchChannel, model: torch.nn.Module) -> None:
    """Do what rank 0 does until it ends."""
    return_free_memory()
    channel.send(Did())
    terms, _ = channel.receive_command(Open)
    with make_publisher(model, terms) as publisher:
        channel.send(Did())
        while True:
            step, _ = channel.receive_command(Step)
            try:
                _do(step.what, model, publisher)
            except WeightcastError as exc:
                channel.send(Did(f"{type(exc).__name__}: {exc}"[:4000]))
            else:
                channel.send(Did())


def _do(what: What, model: torch.nn.Module, publisher: Publisher) -> None:
    match what:
        case "change":
            change(list(local_tensors(model).values()))
        case "publish":
            publisher.publish()
        case "gather_each":
            for _ in whole_tensors(model):
                pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
