"""The baselines of the collective transports: both ends in a real gloo group, every byte where it belongs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from weightcast.bench.broadcasts import Broadcasts, RawBroadcast, TensorBroadcasts
from weightcast.bench.channel import BenchChannel, pair
from weightcast.bench.model import build_model, fill, local_tensors
from weightcast.engines.module import ModuleEngine
from weightcast.format.manifest import TensorSpec
from weightcast.process_group import ProcessGroup, join_store, serve_store

pytestmark = pytest.mark.usefixtures("leaves_nothing")

HOST, SECONDS = "127.0.0.1", 20.0
SPECS = (
    TensorSpec("a.weight", "bfloat16", (16, 33)),
    TensorSpec("b.scale", "float32", ()),
    TensorSpec("c.weight", "float32", (7,)),
)


class Peer(threading.Thread):
    """The engine's end: takes part in whatever it is told, until its channel ends."""

    def __init__(self, channel: BenchChannel, port: int, num_buffers: int) -> None:
        super().__init__()
        self.model = build_model(SPECS)
        self._channel, self._port, self._num_buffers = channel, port, num_buffers
        self.received: list[torch.Tensor] = []

    def run(self) -> None:
        store = join_store(HOST, self._port, SECONDS)
        group = ProcessGroup("gloo", store, rank=1, size=2, timeout_seconds=SECONDS, host=HOST)
        end = Broadcasts(group, 1000, torch.device("cpu"), self._num_buffers)
        command, _ = self._channel.receive_command(RawBroadcast | TensorBroadcasts)
        if isinstance(command, RawBroadcast):
            end.take_raw(command.num_bytes, self._channel)
        else:
            end.take_each(ModuleEngine(self.model), self._channel)
        self.received = end.buffers
        end.close()
        self._channel.close()


@pytest.fixture
def ends() -> Iterator[tuple[Broadcasts, BenchChannel, Peer]]:
    ours, connection = pair("the engine", deadline_seconds=SECONDS)
    store, port = serve_store(HOST, SECONDS)
    peer = Peer(BenchChannel(connection, peer="the bench", deadline_seconds=SECONDS), port, num_buffers=3)
    peer.start()
    group = ProcessGroup("gloo", store, rank=0, size=2, timeout_seconds=SECONDS, host=HOST)
    end = Broadcasts(group, 1000, torch.device("cpu"), 2)
    yield end, ours, peer
    peer.join(SECONDS)
    end.close()
    ours.close()


def test_raw_bytes_fill_flat_buffers(ends: tuple[Broadcasts, BenchChannel, Peer]) -> None:
    end, channel, peer = ends
    end.buffers[0].fill_(7)
    end.buffers[1].fill_(8)
    assert end.send_raw(2900, [channel]) > 0
    peer.join(SECONDS)
    assert [buffer.unique().tolist() for buffer in peer.received[:2]] == [[7], [8]]
    assert peer.received[2].tolist() == [7] * 900 + [1] * 100


def test_each_tensor_arrives_and_is_loaded(ends: tuple[Broadcasts, BenchChannel, Peer]) -> None:
    end, channel, peer = ends
    tensors = local_tensors(build_model(SPECS))
    fill(tensors.values(), seed=3)
    assert end.send_each(tensors, [channel]) > 0
    peer.join(SECONDS)
    assert all(torch.equal(p, tensors[name]) for name, p in peer.model.named_parameters())
