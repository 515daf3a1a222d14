"""vLLM's own ways into `vllm serve`: its "nccl" trainer and engine, with gloo in NCCL's place, and a reload from disk.

As vLLM's documents say, the caller pauses the server before an update and resumes it afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import httpx
from real_engines.process import free_port
from safetensors.torch import save_file

from peers.ends import DEADLINE_SECONDS, End, Update


@contextlib.contextmanager
def _paused_by(end: End, change: Callable[[httpx.Client], None]) -> Iterator[Update]:
    with httpx.Client(base_url=end.server, timeout=DEADLINE_SECONDS, trust_env=False) as http:

        def update(step: int) -> float:
            start = time.perf_counter()
            http.post("/pause", params={"mode": "keep", "clear_cache": "true"}).raise_for_status()
            change(http)
            http.post("/resume").raise_for_status()
            return time.perf_counter() - start

        yield update


@contextlib.contextmanager
def nccl(end: End, packed: bool) -> Iterator[Update]:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    import peers.adapters.vllm_on_cpus  # noqa: F401

    info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=free_port(), world_size=2, packed=packed)
    client, source = HTTPVLLMWeightSyncClient(end.server), ModuleSource(end.model)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    try:
        with _paused_by(end, lambda http: engine.send_weights()) as update:
            yield update
    finally:
        engine.shutdown()


@contextlib.contextmanager
def reload(end: End) -> Iterator[Update]:
    """The trainer writes safetensors to tmpfs; `reload_weights` reads them as a checkpoint."""

    def change(http: httpx.Client) -> None:
        arguments = {"weights_path": str(end.folder), "is_checkpoint_format": True}
        reply = http.post("/collective_rpc", json={"method": "reload_weights", "kwargs": arguments})
        reply.raise_for_status()

    with _paused_by(end, change) as update:

        def write_and_update(step: int) -> float | None:
            save_file(dict(end.tensors), end.folder / "model.safetensors")
            return update(step)

        yield write_and_update
