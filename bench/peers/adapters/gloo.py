"""torch.distributed by hand: one broadcast for each tensor, as trainers do that have no transfer library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from peers.ends import End, Update


@contextlib.contextmanager
def default_group(end: End) -> Iterator[None]:
    """torch's default group of the two ends, over gloo on the loopback interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{end.folder}/group", rank=0 if end.is_trainer else 1, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def broadcast(end: End) -> Iterator[Update]:
    """Each tensor arrives in one of its own, and is loaded: as SGLang's and vLLM's unpacked ways do it."""
    with default_group(end):

        def update(step: int) -> None:
            for name, tensor in end.tensors.items():
                if end.is_trainer:
                    dist.broadcast(tensor, 0)
                else:
                    arrived = torch.empty_like(tensor)
                    dist.broadcast(arrived, 0)
                    end.load([(name, arrived)])

        yield update
