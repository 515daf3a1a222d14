"""BASELINE, not weightcast: a broadcast per tensor over gloo, in vLLM's own four phases, as its examples do with NCCL.

The trainer names all tensors in one call, which waits in the engine while they come one by one; vLLM's layerwise
reload takes each as it comes. Nothing is checked and nothing can be taken back. The engine's half is a mixin of vLLM's
workers, so that the same server can be updated by weightcast too.
"""

from __future__ import annotations

import concurrent.futures
import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = datetime.timedelta(seconds=120)


def _group(port: int, rank: int, world_size: int) -> tuple[Any, Any]:
    """A group outside the default one, which vLLM owns."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, _TIMEOUT, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore("baseline", store), rank, world_size, _TIMEOUT), store


class Workers:
    """The engine's half, in each worker."""

    _baseline: Any = None

    def baseline_init(self, port: int, world_size: int) -> None:
        self._baseline = _group(port, 1 + self.rank, world_size)  # type: ignore[attr-defined]

    def baseline_start(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.get_model())  # type: ignore[attr-defined]

    def baseline_update(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        from vllm.config import set_current_vllm_config

        def received() -> Any:
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self._baseline[0].broadcast(tensor, 0).wait()
                yield name, tensor

        with torch.inference_mode(), set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            self.model_runner.get_model().load_weights(received())  # type: ignore[attr-defined]

    def baseline_finish(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.inference_mode(), set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            model, config = self.model_runner.get_model(), self.model_runner.model_config  # type: ignore[attr-defined]
            finalize_layerwise_reload(model, config)

    def baseline_close(self) -> None:
        self._baseline = None


class PerTensorTrainer:
    """The trainer's half. `server` is a `real_vllm.servers.Server` whose workers are `Workers`."""

    def __init__(self, server: Any, port: int, num_workers: int) -> None:
        self._server = server
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            joining = pool.submit(server.call, "baseline_init", port, 1 + num_workers)
            self._group, self._store = _group(port, 0, 1 + num_workers)
            joining.result()

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """One update: all tensors, and the engine has installed them when it returns. Pause around it."""
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        shapes = [list(tensor.shape) for tensor in tensors.values()]
        self._server.call("baseline_start")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            updating = pool.submit(self._server.call, "baseline_update", list(tensors), dtypes, shapes)
            for tensor in tensors.values():
                self._group.broadcast(tensor.detach().contiguous(), 0).wait()
            updating.result()
        self._server.call("baseline_finish")

    def close(self) -> None:
        self._server.call("baseline_close")
        self._group = self._store = None
