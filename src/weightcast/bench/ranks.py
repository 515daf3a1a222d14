"""What every trainer rank of the bench does: meet the others, hold its shards, take part in a step.

The model is sharded by FSDP2 as users do it (made without memory, sharded, then given memory), so that no rank ever
holds all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightcast.bench.model import build_model, fill, local_tensors
from weightcast.format.manifest import TensorSpec
from weightcast.process_group import Store

_INTERFACE = "GLOO_SOCKET_IFNAME"
GROUP_SECONDS = 600.0


@contextlib.contextmanager
def default_group(store: Store, trainer_rank: int, num_ranks: int) -> Iterator[None]:
    """torch's default group, of gloo over loopback, as a trainer has it."""
    is_chosen = _INTERFACE in os.environ
    os.environ.setdefault(_INTERFACE, "lo")
    timeout = datetime.timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", store=store, rank=trainer_rank, world_size=num_ranks, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if not is_chosen:
            del os.environ[_INTERFACE]


def sharded_model(specs: Sequence[TensorSpec], num_ranks: int) -> nn.Module:
    """This rank's shards of a model of these specs, with values. Needs the default group."""
    model = build_model(specs, "meta")
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    model.to_empty(device="cpu")
    fill(local_tensors(model).values(), seed=dist.get_rank())
    return model


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter whole, one after the other. With shards this is a collective: `full_tensor()` on all ranks."""
    for name, parameter in model.named_parameters():
        tensor = parameter.data
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def return_free_memory() -> None:
    """Give what was freed back to the system, so that taking it again is seen as memory taken. glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
