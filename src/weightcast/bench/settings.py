"""What a bench run is asked for."""

from __future__ import annotations

import dataclasses

from weightcast import registry
from weightcast.format.messages import InstallMode
from weightcast.format.plan import fitting_bucket_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """One field for each option of `weightcast bench` that has a bearing on what is measured.

    `num_tensors` and `num_bytes` are for the shapes `uniform` only; `bucket_size_bytes` None: the default.
    `host`: the address that gloo and NCCL connect at. `trainer_ranks`: processes over which the model is sharded.
    `per_tensor`: measure the slow ways too. Raises ValueError for what can't be combined.
    """

    transport: str = "ipc"
    shapes: str = "qwen3-0.6b"
    install: InstallMode = "staged"
    num_engines: int = 1
    num_runs: int = 5
    bucket_size_bytes: int | None = None
    num_tensors: int = 500
    num_bytes: int = 1 << 30
    layers: int | None = None
    scale: int = 1
    per_tensor: bool = True
    host: str = "127.0.0.1"
    trainer_ranks: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.num_engines < 1 or self.num_runs < 1 or self.trainer_ranks < 1:
            raise ValueError(
                f"num_engines is {self.num_engines}, num_runs {self.num_runs}, trainer_ranks {self.trainer_ranks}; "
                "each must be at least 1"
            )
        if self.transport == "nccl" and self.device != "cuda":
            raise ValueError("nccl moves memory of a GPU only: add --device cuda, or use gloo")
        if self.trainer_ranks > 1 and self.device != "cpu":
            raise ValueError("several trainer ranks are measured on CPUs only: leave out --device")

    @property
    def transport_url(self) -> str:
        if not self.is_collective:
            return f"{self.transport}://"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.transport}://{host}:0"

    @property
    def is_collective(self) -> bool:
        """Whether buckets travel in a process group."""
        return self.transport in ("gloo", "nccl")

    def engine_device(self, index: int) -> str:
        """Where an engine's model is. The members of an NCCL group each need a GPU of their own; the trainer has 0."""
        return f"cuda:{index + 1}" if self.transport == "nccl" else self.device

    def bucket_size_for(self, num_bytes: int) -> int:
        """The bucket size that was asked for, or what a publisher of `num_bytes` chooses by itself."""
        default = registry.transport(self.transport_url).default_bucket_size_bytes[self.device]
        return self.bucket_size_bytes or fitting_bucket_size(num_bytes, default)
