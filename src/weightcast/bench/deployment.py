"""What publishes to what: the question that `cost` answers. torch is not needed to ask it."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from weightcast import registry
from weightcast.format.messages import InstallMode
from weightcast.format.plan import fitting_bucket_size, largest_bucket_size

Scheme = Literal["memory", "ipc", "gloo", "nccl", "file"]
Sharding = Literal["whole", "fsdp", "hsdp", "tp", "pp"]


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What publishes to what. Raises ValueError for what can't be.

    sharding: what a trainer host holds. "fsdp": rows of every tensor, sharded over all ranks; "hsdp", "tp": all of
    every tensor, over the ranks of a host; "pp" (expert parallelism too): whole tensors, each on one host; "whole": one
    rank has everything.
    engine_hosts: over which all workers are spread, in order; `colocated`: they are the trainer's own hosts, the first.
    takes_parts: engines that take parts of tensors (ModuleEngine); others (vLLM, SGLang) get them whole.
    link_gbit: of each host, in each direction; None: nothing is slower than the hosts themselves.
    """

    transport: Scheme = "ipc"
    install: InstallMode = "staged"
    trainer_hosts: int = 1
    ranks_per_host: int = 1
    sharding: Sharding = "whole"
    num_engines: int = 1
    workers_per_engine: int = 1
    engine_hosts: int = 1
    colocated: bool = True
    takes_parts: bool = False
    undo: bool = False
    link_gbit: float | None = None
    bucket_size_bytes: int | None = None
    num_cores: int | None = None

    def __post_init__(self) -> None:
        counts = ("trainer_hosts", "ranks_per_host", "num_engines", "workers_per_engine", "engine_hosts")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sharding not in get_args(Sharding):
            raise ValueError(f"sharding is {self.sharding!r}; it must be one of {', '.join(get_args(Sharding))}")
        num_ranks = self.trainer_hosts * self.ranks_per_host
        if self.sharding == "whole" and num_ranks > 1:
            raise ValueError(f"{num_ranks} trainer ranks hold shards: say which, with sharding fsdp, hsdp, tp or pp")
        is_apart = not self.colocated or self.engine_hosts > 1 or self.trainer_hosts > 1
        if self.transport in ("memory", "ipc") and is_apart:
            raise ValueError(
                f"{self.transport} needs trainer and engines on one host: use gloo, nccl or file between hosts"
            )
        if self.transport == "memory" and num_ranks > 1:
            raise ValueError("memory is one process: use ipc for several trainer ranks of one host")
        if self.colocated and self.engine_hosts > self.trainer_hosts:
            raise ValueError(
                f"{self.engine_hosts} engine hosts can't be among {self.trainer_hosts} trainer hosts: say that they "
                "are apart, or have fewer"
            )
        if self.link_gbit is not None and not 0 < self.link_gbit < math.inf:
            raise ValueError(f"link_gbit is {self.link_gbit}; it must be a finite number above 0")
        if self.num_workers % self.engine_hosts:
            raise ValueError(
                f"{self.num_workers} workers can't be spread evenly over {self.engine_hosts} engine hosts: choose a "
                "number of hosts that divides the number of workers"
            )

    @property
    def num_workers(self) -> int:
        return self.num_engines * self.workers_per_engine

    @property
    def is_staged(self) -> bool:
        return self.install == "staged"

    def is_cached(self, bucket_size_bytes: int) -> bool:
        """Whether a bucket of that size, which streams, is read where it was packed while it is in the cache."""
        most = registry.transport(f"{self.transport}://").default_bucket_size_bytes.get("cache", 0)
        return not self.is_staged and bucket_size_bytes <= most

    def bucket_size_for(self, num_bytes: int) -> int:
        """What was asked for, or what a publisher of weights in host memory chooses."""
        sizes = registry.transport(f"{self.transport}://").default_bucket_size_bytes
        is_alone = self.trainer_hosts * self.ranks_per_host == 1
        default = largest_bucket_size(sizes, "cpu", self.install, is_alone=is_alone)
        return self.bucket_size_bytes or fitting_bucket_size(num_bytes, default)
