"""The baselines of the collective transports: both ends in a real gloo group, every byte where it belongs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from publishing.baselines import BaselineGroup, Broadcasts, JoinGroup, load_each, make_group
from publishing.channel import BenchChannel, Done
from publishing.model import build_model, fill, local_tensors
from publishing.result import BenchSettings

from weightcast.engines.module import ModuleEngine
from weightcast.format.manifest import TensorSpec
from weightcast.process_group import join_store

pytestmark = pytest.mark.usefixtures("leaves_nothing")

HOST, SECONDS = "127.0.0.1", 20.0
SPECS = (
    TensorSpec("a.weight", "bfloat16", (16, 33)),
    TensorSpec("b.scale", "float32", ()),
    TensorSpec("c.weight", "float32", (7,)),
)


SETTINGS = BenchSettings(transport="gloo", host=HOST, bucket_size_bytes=1000)
NUM_BYTES = 2900


class Peer(threading.Thread):
    """The engine's end: takes part in whatever it is told, until its channel ends."""

    def __init__(self, channel: BenchChannel) -> None:
        super().__init__()
        self.model = build_model(SPECS)
        self._channel = channel
        self.received: list[torch.Tensor] = []

    def run(self) -> None:
        store = join_store(HOST, self._channel.receive(JoinGroup).port, SECONDS)
        end = BaselineGroup(SETTINGS, NUM_BYTES, store, rank=1)
        self._channel.send(Done())
        if self._channel.receive(Broadcasts).per_tensor:
            load_each(ModuleEngine(self.model), self._channel, end.take)
        else:
            end.take_raw(self._channel)
        self.received = end.buffers
        end.close()
        self._channel.close()


@pytest.fixture
def ends() -> Iterator[tuple[BaselineGroup, BenchChannel, Peer]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours = BenchChannel(near, peer="the engine", deadline_seconds=SECONDS)
    peer = Peer(BenchChannel(far, peer="the bench", deadline_seconds=SECONDS))
    peer.start()
    end = make_group(SETTINGS, NUM_BYTES, [ours])
    yield end, ours, peer
    peer.join(SECONDS)
    end.close()
    ours.close()


def test_raw_bytes_fill_flat_buffers(ends: tuple[BaselineGroup, BenchChannel, Peer]) -> None:
    end, channel, peer = ends
    end.buffers[0].fill_(7)
    end.buffers[1].fill_(8)
    assert end.send_raw([channel]) > 0
    peer.join(SECONDS)
    assert [buffer.unique().tolist() for buffer in peer.received[:2]] == [[7], [8]]
    assert peer.received[2].tolist() == [7] * 900 + [1] * 100


def test_each_tensor_arrives_and_is_loaded(ends: tuple[BaselineGroup, BenchChannel, Peer]) -> None:
    end, channel, peer = ends
    source = build_model(SPECS)
    fill(source, seed=3)
    tensors = local_tensors(source)
    assert end.publish(tensors, [channel]) > 0
    peer.join(SECONDS)
    assert all(torch.equal(p, tensors[name]) for name, p in peer.model.named_parameters())
