"""One update by verl's backend "weightcast", by verl's "nccl" over gloo, and by the way of its "naive" into a server.

`python bench/verl_update.py [--rounds N] [--case small|large]`, in the environment that scripts/test-verl makes, with
pyzmq. A trainer process sends to a rollout process on this host, which copies every tensor into one of its own; each
round runs every backend once, and medians of the wall time are printed, from the first tensor asked for to the last one
copied. Groups and connections are kept between updates; an update before the first round is not counted.

"nccl" is verl's class as it is, with torch.distributed's gloo in the place of NCCL, and torch in that of cupy. "naive"
is verl's `BucketedWeightSender` through shared memory: all that its colocated update does before a server loads.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.util
import logging
import multiprocessing
import os
import socket
import statistics
import sys
import time
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

CASES = {"small": (20_000, (64, 64)), "large": (16, (64, 512, 1024))}
"""Tensors of bf16: 20,000 of 8 KiB, 16 of 64 MiB."""
BUCKET_MEGABYTES = 128


def stand_in_for_cupy() -> None:
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update(zeros=torch.zeros, asarray=lambda tensor: tensor, uint8=torch.uint8, ndarray=torch.Tensor)
    sys.modules["cupy"] = cupy
    torch.cuda.synchronize = lambda *args: None


class Held:
    """What the rollout copies into."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def take(self, pairs: list[tuple[str, torch.Tensor]], is_last: bool = False) -> None:
        for name, tensor in pairs:
            self.tensors[name].copy_(tensor)

    async def load(self, pairs: AsyncIterator[tuple[str, torch.Tensor]]) -> None:
        async for name, tensor in pairs:
            self.tensors[name].copy_(tensor)


def weightcast(rank: int, held: Held, tensors: dict[str, torch.Tensor], **options: Any) -> Callable[[int], None]:
    from verl.checkpoint_engine import CheckpointEngineRegistry

    options |= {"host": "127.0.0.1", **({"is_master": True} if rank == 0 else {})}
    engine = CheckpointEngineRegistry.new("weightcast", bucket_size=BUCKET_MEGABYTES << 20, **options)

    def update(step: int) -> None:
        metadata: list[Any] = [None, None]
        dist.all_gather_object(metadata, engine.prepare())
        topology = engine.build_topology(1, 1, metadata)[rank]
        engine.init_process_group(**{name: values[0] for name, values in topology.items()})
        if rank == 0:
            asyncio.run(engine.send_weights(iter(tensors.items()), step))
        else:
            asyncio.run(held.load(engine.receive_weights(step)))
        engine.finalize()

    return update


def nccl(rank: int, held: Held, tensors: dict[str, torch.Tensor]) -> Callable[[int], None]:
    stand_in_for_cupy()
    from verl.checkpoint_engine import nccl_checkpoint_engine as module

    module.collective = types.SimpleNamespace(
        is_group_initialized=lambda name: False,
        init_collective_group=lambda *args: None,
        barrier=lambda name: dist.barrier(),
        broadcast=lambda bucket, src_rank, group_name: dist.broadcast(bucket, src_rank),
    )
    with mock.patch("ray.util.get_node_ip_address", return_value="127.0.0.1"):
        engine = module.NCCLCheckpointEngine(BUCKET_MEGABYTES << 20, is_master=rank == 0, multi_sender=False)
    master: list[Any] = [(engine.ip, engine.listen_port) if rank == 0 else None]
    dist.broadcast_object_list(master, 0)
    metadata = module.MasterMetadata(*master[0], multi_sender=False)
    engine.init_process_group(rank, 2, metadata, 1)

    def update(step: int) -> None:
        engine.send_buf, engine.recv_buf = (torch.zeros(BUCKET_MEGABYTES << 20, dtype=torch.uint8) for _ in range(2))
        dist.barrier()
        if rank == 0:
            asyncio.run(engine.send_weights(iter(tensors.items()), step))
        else:
            asyncio.run(held.load(engine.receive_weights(step)))
        engine.finalize()

    return update


def naive(rank: int, held: Held, tensors: dict[str, torch.Tensor]) -> Callable[[int], None]:
    # The package that it is in imports vLLM.
    folder = Path(importlib.util.find_spec("verl.workers.rollout").origin).parent  # type: ignore[union-attr,arg-type]
    spec = importlib.util.spec_from_file_location("bucketed", folder / "vllm_rollout" / "bucketed_weight_transfer.py")
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    nothing = types.SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None)
    module.get_torch_device, module.is_support_ipc = lambda: nothing, lambda: False
    handle = f"ipc:///tmp/verl-bench-{os.environ['MASTER_PORT']}.sock"

    def update(step: int) -> None:
        if rank == 0:
            sender = module.BucketedWeightSender(handle, BUCKET_MEGABYTES, use_shm=True)
            asyncio.run(sender.async_send_weights(iter(tensors.items())))
        else:
            module.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(held.take)

    return update


BACKENDS: dict[str, Callable[..., Callable[[int], None]]] = {
    "weightcast": weightcast,
    "weightcast, streaming": functools.partial(weightcast, install="streaming"),
    "weightcast, gloo": functools.partial(weightcast, transport="gloo://127.0.0.1:0"),
    "weightcast, gloo, streaming": functools.partial(weightcast, transport="gloo://127.0.0.1:0", install="streaming"),
    "nccl": nccl,
    "naive": naive,
}


def run(rank: int, port: int, case: str, rounds: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    number, shape = CASES[case]
    tensors = {f"t{index}": torch.full(shape, 1.0, dtype=torch.bfloat16) for index in range(number)}
    held = Held(tensors)
    updates = {name: make(rank, held, tensors) for name, make in BACKENDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for step in range(rounds + 1):
        for name, update in updates.items():
            for tensor in tensors.values() if rank == 0 else ():
                tensor.fill_(step + 1)
            dist.barrier()
            start = time.perf_counter()
            update(step)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            assert rank == 0 or all(bool((tensor == step + 1).all()) for tensor in held.tensors.values())
    if rank == 0:
        results.put({name: statistics.median(found[1:]) for name, found in seconds.items()})
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for case in [options.case] if options.case else CASES:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        results = spawn.Queue()
        processes = [
            spawn.Process(target=run, args=(rank, port, case, options.rounds, results), daemon=True)
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        medians = results.get(timeout=600)
        for process in processes:
            process.join()
        for name, value in medians.items():
            print(f"{case:6} {name:26} {value:7.3f} s   {value / medians['weightcast']:5.2f} x weightcast's")


if __name__ == "__main__":
    main()
