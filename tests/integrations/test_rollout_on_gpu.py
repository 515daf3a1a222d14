"""A rollout worker whose framework loads from buckets on a GPU, in a thread and on a stream of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from pretended import LazyGpu
from publishers import publisher_of

from weightcast import LocalEngine, TensorSource
from weightcast.host import device as host_device
from weightcast.integrations.rollout.receiving import RolloutEngine

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("bucket_size_bytes", [512, 4096])
def test_each_reads_what_the_other_has_queued(bucket_size_bytes: int, waits: bool) -> None:
    """The framework whole tensors that the worker puts together, the next bucket's writer what the framework reads.

    `waits`: the framework waits for its own stream after each batch.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {str(number): torch.randn(200, generator=generator) for number in range(24)}
    with LazyGpu() as gpu:
        weights = {name: gpu.tensor(tensor) for name, tensor in tensors.items()}
        live = {name: gpu.tensor(torch.zeros(200)) for name in tensors}
        engine = RolloutEngine(device=gpu.device, deadline_seconds=60.0, deadline_option="deadline_seconds")
        client = LocalEngine(engine, gate=engine.worker.gate)
        client.worker.close()
        client.worker = engine.worker

        async def load() -> None:
            async for batch in engine.receive(None):
                for name, tensor in batch:
                    live[name].copy_(tensor)
                if waits:
                    host_device.synchronize_stream(gpu.device)

        options = {"install": "streaming", "transport": "memory://", "bucket_size_bytes": bucket_size_bytes}
        try:
            with publisher_of(TensorSource(weights), engines=[client], **options) as publisher:
                publishing = threading.Thread(target=publisher.publish)
                publishing.start()
                asyncio.run(load())
                publishing.join(60)
                for tensor in weights.values():
                    tensor.fill_(-1.0)
                gpu.synchronize(gpu.device)
            assert {name for name in tensors if not torch.equal(gpu.read(live[name]), tensors[name])} == set()
        finally:
            client.close()
