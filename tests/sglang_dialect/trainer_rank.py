"""One of two trainer ranks, each with half of the rows of every matrix. Run: trainer_rank.py RANK PORT URL."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sglang_dialect.conftest import BUCKET_BYTES, tensors
from weightcast import Publisher, PublishOptions, Region, TensorSpec
from weightcast.seams.source import Held, Regions


class Half:
    """The rows of one rank; what has one dim or no elements is held by both."""

    def __init__(self, rank: int) -> None:
        self.held = tensors(0)
        self._specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.held.items()]
        self._regions: Regions = {name: [_part(tensor, rank)] for name, tensor in self.held.items()}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def _part(tensor: torch.Tensor, rank: int) -> Held:
    if tensor.ndim == 1 or not tensor.numel():
        return Region((0,) * tensor.ndim, tuple(tensor.shape)), tensor
    rows = tensor.shape[0] // 2
    return Region((rank * rows, 0), (rows, tensor.shape[1])), tensor[rank * rows : (rank + 1) * rows]


def main(rank: int, port: int, url: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    source = Half(rank)
    with Publisher(
        source,
        transport="gloo://127.0.0.1:0",
        engines=[url],
        options=PublishOptions(bucket_size_bytes=BUCKET_BYTES, deadline_seconds=30.0),
    ) as publisher:
        for value in (1, 2):
            for tensor in source.held.values():
                tensor.fill_(value)
            assert publisher.publish(version=value).ok
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
