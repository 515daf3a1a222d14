"""Stand-ins for what vLLM's "nccl" weight transfer asks of CUDA, in its workers and its trainer: gloo, and no streams.

Importing this module puts them in place. What transfers, packs and loads is vLLM's own, unchanged.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators import pynccl


class GlooCommunicator:
    """In the place of `PyNcclCommunicator`. `group`: vLLM's StatelessProcessGroup, of which it takes the store."""

    def __init__(self, group: Any, device: Any) -> None:
        store = dist.PrefixStore("gloo", group.store)
        self._group = dist.ProcessGroupGloo(store, group.rank, group.world_size, datetime.timedelta(seconds=300))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self._group.broadcast(tensor, src).wait()

    def destroy(self) -> None:
        del self._group


class Extension:
    """Mixed into vLLM's workers, so that they import this module."""


class Stream:
    """In the place of a CUDA stream: nothing runs on it."""

    def __init__(self, device: Any = None) -> None: ...

    def synchronize(self) -> None: ...


pynccl.PyNcclCommunicator = GlooCommunicator  # type: ignore[misc,assignment]
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.synchronize = lambda device=None: None
torch.cuda.Stream = Stream  # type: ignore[misc,assignment]
torch.cuda.current_stream = Stream  # type: ignore[assignment,return-value]
torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value,misc]
