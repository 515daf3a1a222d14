"""ipc over CUDA IPC: two processes on one GPU. Run by scripts/test-gpu."""

from __future__ import annotations

import contextlib
import multiprocessing.connection

import pytest
import torch
from transports.conftest import Ends
from transports.ipc_children import Child

from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.format.bucket import Layout, check_bucket
from weightcast.format.manifest import TensorSpec
from weightcast.format.plan import plan
from weightcast.sources.tensors import TensorSource
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    LinkAddress,
    address_of,
    make_receiver,
    pack_and_send,
    value_of,
    version,
)
from weightcast.trainer.packer import Packer, tiling

pytestmark = pytest.mark.gpu

NUM_BUCKETS = 6
SPECS = [TensorSpec(f"t{index}", "bfloat16", (512, 1024)) for index in range(NUM_BUCKETS)]
MANIFEST = plan(SPECS, 1 << 20)


def _value(number: int, index: int) -> int:
    return value_of(number, index) % 128


def receive_on_gpu(pipe: multiprocessing.connection.Connection, address: LinkAddress, peer: str, staged: bool) -> None:
    """Load each update into tensors on the GPU; report what bucket was loaded, then whether all values are right."""
    layout = Layout(MANIFEST)
    device = torch.device("cpu" if staged else "cuda")
    stack = contextlib.ExitStack()
    receiver = make_receiver(stack, address, peer, device=torch.device("cuda"))
    weights = [torch.zeros(512, 1024, dtype=torch.bfloat16, device="cuda") for _ in SPECS]
    pipe.send("connected")
    while (number := pipe.recv()) is not None:
        receiver.open(MANIFEST, version(number), staged=staged)
        pipe.send("open")
        for bucket in receiver:
            assert bucket.buffer.payload.device.type == device.type
            size = MANIFEST.buckets[bucket.index]
            check_bucket(bucket.buffer, size, version(number), bucket.index)
            for entry, view in zip(
                layout.entries[bucket.index], layout.views(bucket.index, bucket.buffer.payload), strict=True
            ):
                weights[entry.tensor].copy_(view)
            pipe.send(bucket.index)
        pipe.send(all(bool((w == _value(number, i)).all()) for i, w in enumerate(weights)))
        receiver.end()
    stack.close()
    layout.forget_views()


@pytest.mark.parametrize("staged", [False, True], ids=["streaming", "staged"])
def test_two_processes_on_one_gpu(ipc_ends: Ends, staged: bool) -> None:
    ipc_ends.device = torch.device("cuda:0")
    sender = ipc_ends.sender()
    weights = {spec.name: torch.zeros(512, 1024, dtype=torch.bfloat16, device="cuda:0") for spec in SPECS}
    packer, stream = (
        Packer(Layout(MANIFEST), tiling(MANIFEST.tensors, TensorSource(weights).regions())),
        torch.cuda.Stream(),
    )
    with (
        Child(receive_on_gpu, address_of(sender, "ipc://"), "a", staged) as a,
        Child(receive_on_gpu, address_of(sender, "ipc://"), "b", staged) as b,
    ):
        for child in (a, b):
            assert child.hear() == "connected"
        for number in range(1, 5):
            for index, weight in enumerate(weights.values()):
                weight.fill_(_value(number, index))
            for child in (a, b):
                child.pipe.send(number)
                assert child.hear() == "open"
            sender.open(MANIFEST, version(number), peers=["a", "b"], staged=staged)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for index in range(len(MANIFEST.buckets)):
                    pack_and_send(sender, packer, MANIFEST, version(number), index)
            for child in (a, b):
                assert [child.hear() for _ in range(NUM_BUCKETS)] == list(range(NUM_BUCKETS))
                assert child.hear() is True
            assert not sender.failures
        for child in (a, b):
            child.pipe.send(None)
            child.process.join(PATIENCE_SECONDS)
            assert child.process.exitcode == 0


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_process_does_not_hold_the_others_up(ipc_ends: Ends, how: str) -> None:
    ipc_ends.device = torch.device("cuda:0")
    sender = ipc_ends.sender(deadline_seconds=2.0)
    weights = {spec.name: torch.full((512, 1024), 3.0, dtype=torch.bfloat16, device="cuda:0") for spec in SPECS}
    for index, weight in enumerate(weights.values()):
        weight.fill_(_value(1, index))
    packer = Packer(Layout(MANIFEST), tiling(MANIFEST.tensors, TensorSource(weights).regions()))
    with (
        Child(receive_on_gpu, address_of(sender, "ipc://"), "victim", False) as victim,
        Child(receive_on_gpu, address_of(sender, "ipc://"), "lively", False) as lively,
    ):
        for child in (victim, lively):
            assert child.hear() == "connected"
            child.pipe.send(1)
            assert child.hear() == "open"
        sender.open(MANIFEST, version(1), peers=["victim", "lively"], staged=False)
        getattr(victim, how)()
        for index in range(len(MANIFEST.buckets)):
            pack_and_send(sender, packer, MANIFEST, version(1), index)
        assert [lively.hear() for _ in range(NUM_BUCKETS)] == list(range(NUM_BUCKETS))
        assert lively.hear() is True
        expected = PeerDiedError if how == "kill" else PeerTimeoutError
        assert {name: type(error) for name, error in sender.failures.items()} == {"victim": expected}
