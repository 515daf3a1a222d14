"""What a bench run is asked for, and its result: a record whose fields never change meaning (later ones are added).

Every median is over the timed runs; what comes before them (the first publish, which makes the arena and the
connections) is reported by itself. "Engine" figures are of the engine with the highest, except CPU time, which is added
up over the engines.
"""

from __future__ import annotations

import msgspec

from weightcast import registry
from weightcast.format.messages import InstallMode
from weightcast.format.plan import fitting_bucket_size, largest_bucket_size


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the result repeats. `trainer_ranks`: the processes over which the model is sharded."""

    transport: str = "ipc"
    shapes: str = "qwen3-0.6b"
    install: InstallMode = "staged"
    num_engines: int = 1
    layers: int | None = None
    scale: int = 1
    device: str = "cpu"
    trainer_ranks: int = 1


class BenchSettings(Asked, frozen=True, kw_only=True):
    """One field for each option of `scripts/bench` that has a bearing on what is measured.

    `num_tensors` and `num_bytes` are for the shapes `uniform` only; `bucket_size_bytes` None: the default.
    `host`: the address that gloo and NCCL connect at. `directory`: where the store of `file` is to be. `per_tensor`:
    measure the slow ways too. Raises ValueError for what can't be combined.
    """

    num_runs: int = 5
    bucket_size_bytes: int | None = None
    num_tensors: int = 500
    num_bytes: int = 1 << 30
    per_tensor: bool = True
    host: str = "127.0.0.1"
    directory: str = ""

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
            return f"{self.transport}://{self.directory}"
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
        sizes, is_alone = registry.transport(self.transport_url).default_bucket_size_bytes, self.trainer_ranks == 1
        default = largest_bucket_size(sizes, self.device, self.install, is_alone=is_alone)
        return self.bucket_size_bytes or fitting_bucket_size(num_bytes, default)


class Ends(msgspec.Struct, frozen=True):
    """A figure at both ends. Where one process holds both (`memory`), `publisher` is that process and `engine` 0."""

    publisher: float
    engine: float


class Bytes(msgspec.Struct, frozen=True):
    """Peak resident bytes beyond those before the publisher was made, warm-up included.

    A process's figure holds its private memory and every shared page that it has mapped and touched: the arena, which
    is one and the same memory, stands at both ends, as it does in the bound (slots x bucket + ...) that each is held
    to. `BenchResult.host_extra_bytes` counts it once.
    """

    publisher: int
    engine: int


class Run(msgspec.Struct, frozen=True):
    """One timed publish. `seconds` are the publisher's stages.

    `memcpy_seconds` and `raw_seconds` (None where buckets don't travel in a process group) were measured right before.
    """

    publish_seconds: float
    pause_seconds: float
    install_seconds: float
    memcpy_seconds: float
    cpu_seconds: Ends
    seconds: dict[str, float]
    raw_seconds: float | None = None

    @property
    def transfer_seconds(self) -> float:
        """Until every engine has every bucket."""
        return sum(self.seconds[stage] for stage in ("gather", "offer", "pack", "send"))

    @property
    def of_raw(self) -> float | None:
        return self.raw_seconds and self.raw_seconds / self.publish_seconds

    @property
    def transfer_of_raw(self) -> float | None:
        return self.raw_seconds and self.raw_seconds / self.transfer_seconds


class BenchResult(Asked, frozen=True, kw_only=True):
    """The JSON of `scripts/bench --json`. What was not measured is None.

    num_tensors, num_bytes, num_buckets: what one publish carries.
    memcpy_gb_per_s: 1e9 bytes a second of one memcpy (one thread) of num_bytes, from one warm buffer to another.
    all_threads_copy_gb_per_s: the same by torch's `copy_` with all its threads, once.
    publish_seconds: from the call of `publish` until every engine serves the version; median.
    memcpy_ratio: publish_seconds / memcpy_seconds, the median of both.
    pause_seconds: how long the engine was paused that was paused for longest; median.
    cpu_us_per_tensor: CPU time of the publisher (with its watchdog process) and all engines in a publish / num_tensors.
    extra_bytes: see Bytes. host_extra_bytes: the same for the host: private memory of all, and the arena once.
    other_ranks_extra_bytes: that of the trainer rank besides rank 0 that has the highest, which extra_bytes leaves out;
    the CPU time of these ranks counts as the publisher's.
    per_tensor_seconds: the way that buckets replaced. per_tensor_way says which one: "round trip", one for each tensor,
    see `TensorSlot`; "broadcast", one for each tensor, see `BaselineGroup`.
    full_tensor_seconds: `full_tensor()` of every parameter, one after the other on all ranks, and nothing else; median.
    per_tensor_speedup, full_tensor_speedup: these seconds / publish_seconds, of the whole publish therefore.
    bucket_size_bytes: the payload that a bucket of these publishes may hold, whether asked for or chosen.
    raw_seconds: one broadcast of num_bytes in flat buffers of the bucket's size, between the same processes, nothing
    else; median; None where buckets don't travel in a process group. of_raw: raw_seconds / publish_seconds of each run,
    the median of these; what the publish reaches of the raw throughput.
    transfer_seconds: of publish_seconds, until every engine has every bucket, checked; the rest is installing. With
    "streaming" that is nearly all. transfer_of_raw: the median of raw_seconds / the transfer's seconds of each run.
    verified: whether, after the last run, every engine held bit for bit what the publisher has.
    """

    num_tensors: int
    num_bytes: int
    memcpy_gb_per_s: float
    publish_seconds: float
    memcpy_ratio: float
    pause_seconds: float
    cpu_us_per_tensor: float
    extra_bytes: Bytes
    per_tensor_seconds: float | None = None
    per_tensor_speedup: float | None = None

    verified: bool
    host_extra_bytes: int
    cpu_seconds: Ends
    memcpy_seconds: float
    all_threads_copy_gb_per_s: float
    first_publish_seconds: float
    bucket_size_bytes: int
    num_buckets: int
    largest_tensor_bytes: int
    torch_threads: int
    num_cpus: int
    torch_version: str
    runs: list[Run]

    per_tensor_way: str | None = None
    raw_seconds: float | None = None
    of_raw: float | None = None
    transfer_seconds: float
    transfer_of_raw: float | None = None
    other_ranks_extra_bytes: int | None
    full_tensor_seconds: float | None = None
    full_tensor_speedup: float | None = None

    @property
    def gb_per_second(self) -> float:
        """Published bytes (1e9) a second, to one engine."""
        return self.num_bytes / self.publish_seconds / 1e9

    def encode(self) -> bytes:
        """The JSON, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)
