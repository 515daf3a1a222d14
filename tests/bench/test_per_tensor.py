"""The per-tensor baseline and its channel: real sockets, real shared memory, every way a peer can go."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch

from weightcast.bench import per_tensor
from weightcast.bench.channel import BenchChannel, SharedBytes, pair
from weightcast.bench.model import build_model, fill, local_tensors
from weightcast.engines.module import ModuleEngine
from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.format.manifest import TensorSpec

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SPECS = (
    TensorSpec("a.weight", "bfloat16", (16, 33)),
    TensorSpec("b.weight", "float32", (7,)),
    TensorSpec("c.scale", "float32", ()),
    TensorSpec("d.empty", "bfloat16", (0, 4)),
)


class Note(msgspec.Struct, frozen=True):
    text: str


@pytest.fixture
def ends() -> Iterator[tuple[BenchChannel, BenchChannel]]:
    ours, connection = pair("the engine", deadline_seconds=5)
    theirs = BenchChannel(connection, peer="the bench", deadline_seconds=5)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_every_tensor_arrives_at_every_engine() -> None:
    source = build_model(SPECS)
    tensors = local_tensors(source)
    fill(tensors.values(), seed=3)
    targets = [build_model(SPECS) for _ in range(2)]
    pairs = [pair(f"engine {i}", deadline_seconds=5) for i in range(2)]
    channels = [channel for channel, _ in pairs]
    slot = per_tensor.make_slot(tensors)
    threads = [threading.Thread(target=_receive, args=item) for item in zip(targets, pairs, [slot] * 2, strict=True)]
    for thread in threads:
        thread.start()
    assert per_tensor.publish(tensors, slot.tensor, channels) > 0
    per_tensor.end(channels)
    for thread in threads:
        thread.join(5)
    for target in targets:
        assert all(torch.equal(p, tensors[name]) for name, p in target.named_parameters())
    for channel in channels:
        channel.close()
    slot.close()


def _receive(model: torch.nn.Module, connected: tuple[BenchChannel, socket.socket], slot: SharedBytes) -> None:
    channel = BenchChannel(connected[1], peer="the bench", deadline_seconds=5)
    per_tensor.receive(ModuleEngine(model), slot.tensor, channel)
    channel.close()


def test_a_message_and_a_descriptor(ends: tuple[BenchChannel, BenchChannel]) -> None:
    ours, theirs = ends
    shared = SharedBytes.create(10)
    shared.tensor.fill_(7)
    ours.send(Note("memory"), shared.fd)
    message, fd = theirs.receive_with_fd(Note)
    mapped = SharedBytes(fd, 10)
    assert message == Note("memory")
    assert mapped.tensor.tolist() == [7] * 10
    mapped.tensor[0] = 1
    assert shared.tensor[0] == 1
    mapped.close()
    shared.close()


def test_the_end_of_the_peer_is_an_error(ends: tuple[BenchChannel, BenchChannel]) -> None:
    ours, theirs = ends
    theirs.close()
    for call in (lambda: ours.receive(Note), lambda: ours.receive_with_fd(Note), lambda: ours.send(Note("x"))):
        with pytest.raises(PeerDiedError, match="the engine"):
            call()


def test_a_silent_peer_is_an_error() -> None:
    ours, connection = pair("the engine", deadline_seconds=0.05)
    for call in (lambda: ours.receive(Note), lambda: ours.receive_with_fd(Note)):
        with pytest.raises(PeerTimeoutError, match=r"the engine did not answer within 0\.05 s"):
            call()
    ours.close()
    connection.close()


def test_closing_shared_memory_twice_does_not_close_another_descriptor() -> None:
    shared = SharedBytes.create(10)
    shared.close()
    other = os.memfd_create("other")
    shared.close()
    os.fstat(other)
    os.close(other)
