"""What a bench run is asked for."""

from __future__ import annotations

import dataclasses

from weightcast.control.messages import InstallMode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """`num_tensors` and `num_bytes` are for the shapes `uniform` only; `bucket_size_bytes` None: the default."""

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

    def __post_init__(self) -> None:
        if self.num_engines < 1 or self.num_runs < 1:
            raise ValueError(f"num_engines is {self.num_engines}, num_runs {self.num_runs}; each must be at least 1")

    @property
    def transport_url(self) -> str:
        return f"{self.transport}://"

    @property
    def one_process(self) -> bool:
        """Whether the transport joins ends of one process only."""
        return self.transport == "memory"
