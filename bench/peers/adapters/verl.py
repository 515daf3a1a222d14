"""verl's two ways that run without a GPU: buckets in shared memory, and its "nccl" engine over gloo.

Both classes are verl's as they come. Without CUDA a few names that they import need stand-ins: torch in the place of
cupy, torch.distributed's gloo in that of Ray's NCCL groups, and calls that synchronise a device, which do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from peers.adapters.gloo import default_group
from peers.ends import End, Update


@contextlib.contextmanager
def bucketed(end: End, bucket_mib: int) -> Iterator[Update]:
    """`BucketedWeightSender` and its receiver: what a colocated update does before the server loads."""
    # The package that the module is in imports vLLM.
    folder = Path(importlib.util.find_spec("verl.workers.rollout").origin).parent  # type: ignore[union-attr,arg-type]
    spec = importlib.util.spec_from_file_location("bucketed", folder / "vllm_rollout" / "bucketed_weight_transfer.py")
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    nothing = types.SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None)
    module.get_torch_device, module.is_support_ipc = lambda: nothing, lambda: False
    handle = f"ipc://{end.folder}/zmq.sock"

    def update(step: int) -> None:
        if end.is_trainer:
            sender = module.BucketedWeightSender(handle, bucket_mib, use_shm=True)
            asyncio.run(sender.async_send_weights(iter(end.tensors.items())))
        else:
            receiver = module.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
            receiver.receive_weights(lambda pairs, is_last: end.load(pairs))

    yield update


@contextlib.contextmanager
def nccl(end: End, bucket_mib: int) -> Iterator[Update]:
    """`NCCLCheckpointEngine`: metadata by ZMQ, buckets by broadcast, two buffers. Its group is kept between updates."""
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update(zeros=torch.zeros, asarray=lambda tensor: tensor, uint8=torch.uint8, ndarray=torch.Tensor)
    sys.modules["cupy"] = cupy
    torch.cuda.synchronize = lambda *args: None  # type: ignore[assignment]
    from verl.checkpoint_engine import nccl_checkpoint_engine as module

    module.collective = types.SimpleNamespace(
        is_group_initialized=lambda name: False,
        init_collective_group=lambda *args: None,
        barrier=lambda name: dist.barrier(),
        broadcast=lambda bucket, src_rank, group_name: dist.broadcast(bucket, src_rank),
    )
    num_bytes = bucket_mib << 20
    with default_group(end), mock.patch("ray.util.get_node_ip_address", return_value="127.0.0.1"):
        engine = module.NCCLCheckpointEngine(num_bytes, is_master=end.is_trainer, multi_sender=False)
        if end.is_trainer:
            end.send((engine.ip, engine.listen_port))
        address = (engine.ip, engine.listen_port) if end.is_trainer else end.receive()
        metadata = module.MasterMetadata(*address, multi_sender=False)
        engine.init_process_group(0 if end.is_trainer else 1, 2, metadata, 1)

        async def receive(step: int) -> None:
            async for pair in engine.receive_weights(step):
                end.load([pair])

        def update(step: int) -> None:
            # What `prepare` does, which asks for CUDA memory.
            engine.send_buf, engine.recv_buf = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
            if end.is_trainer:
                asyncio.run(engine.send_weights(iter(end.tensors.items()), step))
            else:
                asyncio.run(receive(step))
            engine.finalize()

        yield update
