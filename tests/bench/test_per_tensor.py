"""The per-tensor baseline and its channel: real sockets, real shared memory, every way a peer can go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import torch
from publishing.baselines import TensorMessage, TensorSlot, UseSlot, load_each, take_from_slot
from publishing.channel import BenchChannel, Done, await_done
from publishing.model import build_model, fill, local_tensors

from weightcast.engines.module import ModuleEngine
from weightcast.errors import IntegrityError, PeerDiedError, PeerTimeoutError
from weightcast.format.bucket import BucketBuffer
from weightcast.format.manifest import TensorSpec
from weightcast.host.memory import SharedMemory

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SPECS = (
    TensorSpec("a.weight", "bfloat16", (16, 33)),
    TensorSpec("b.weight", "float32", (7,)),
    TensorSpec("c.scale", "float32", ()),
    TensorSpec("d.empty", "bfloat16", (0, 4)),
)


class Note(msgspec.Struct, frozen=True):
    text: str


def pair(deadline_seconds: float = 60.0) -> tuple[BenchChannel, BenchChannel]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours = BenchChannel(near, peer="the engine", deadline_seconds=deadline_seconds)
    return ours, BenchChannel(far, peer="the bench", deadline_seconds=deadline_seconds)


@pytest.fixture
def ends() -> Iterator[tuple[BenchChannel, BenchChannel]]:
    ours, theirs = pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_every_tensor_arrives_at_every_engine() -> None:
    source = build_model(SPECS)
    fill(source, seed=3)
    tensors = local_tensors(source)
    targets = [build_model(SPECS) for _ in range(2)]
    pairs = [pair() for _ in targets]
    channels = [channel for channel, _ in pairs]
    slot = TensorSlot(max(tensor.nbytes for tensor in tensors.values()))
    threads = [threading.Thread(target=_load, args=(m, bench)) for m, (_, bench) in zip(targets, pairs, strict=True)]
    for thread in threads:
        thread.start()
    slot.lend(channels)
    assert slot.publish(tensors, channels) > 0
    slot.end(channels)
    for thread in threads:
        thread.join(60)
    for target in targets:
        assert all(torch.equal(p, tensors[name]) for name, p in target.named_parameters())
    for channel in channels:
        channel.close()
    slot.close()


def _load(model: torch.nn.Module, bench: BenchChannel) -> None:
    memory = SharedMemory.open(bench.receive(UseSlot).location).map().tensor()
    load_each(ModuleEngine(model), bench, partial(take_from_slot, BucketBuffer.of(memory)))
    bench.close()


def test_a_tensor_that_was_changed_on_the_way_is_refused(ends: tuple[BenchChannel, BenchChannel]) -> None:
    ours, theirs = ends
    slot = TensorSlot(8)
    theirs.send(Done())  # answers before it has looked
    slot.publish({"a": torch.ones(2)}, [ours])
    message = theirs.receive(TensorMessage)
    assert take_from_slot(slot.buffer, message).tolist() == [1, 1]
    slot.buffer.payload[0] += 1
    with pytest.raises(IntegrityError):
        take_from_slot(slot.buffer, message)
    slot.close()


def test_what_a_worker_failed_with_is_told(ends: tuple[BenchChannel, BenchChannel]) -> None:
    ours, theirs = ends
    theirs.send(Done())
    assert await_done([ours]) == [Done()]
    theirs.send(Done("InstallError: no"))
    with pytest.raises(PeerDiedError, match="the engine failed: InstallError: no"):
        await_done([ours])


def test_the_end_of_the_peer_is_an_error(ends: tuple[BenchChannel, BenchChannel]) -> None:
    ours, theirs = ends
    theirs.close()
    for call in (lambda: ours.receive(Note), lambda: ours.send(Note("x"))):
        with pytest.raises(PeerDiedError, match="the engine"):
            call()


def test_a_silent_peer_is_an_error() -> None:
    ours, theirs = pair(deadline_seconds=0.05)
    with pytest.raises(PeerTimeoutError, match=r"the engine did not answer within 0\.05 s"):
        ours.receive(Note)
    ours.close()
    theirs.close()
