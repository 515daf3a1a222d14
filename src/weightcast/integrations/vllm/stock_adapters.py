"""LoRA adapters on a vLLM server without weightcast's backend, by its routes of runtime LoRA updates.

vLLM applies every setting of a PEFT directory. It does not check shapes: a smaller tensor is filled up with zeros.
A version that it has evicted is loaded from its directory again when a request needs it, and vLLM ends if that fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from weightcast.control.client import HttpRoutes
from weightcast.errors import UnsupportedError
from weightcast.format.adapters import LoraConfig
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.stock_adapters import AdapterApi

_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_GAUGE = "vllm:lora_requests_info"
_SAMPLE = re.compile(rf"^{_GAUGE}{{(.*)}} ([0-9.e+]+)$", re.MULTILINE)
_ADAPTERS = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


class LoraOptions(msgspec.Struct, frozen=True):
    """vLLM's options of LoRA."""

    max_lora_rank: int
    target_modules: list[str] | None = None


class ParallelOptions(msgspec.Struct, frozen=True):
    """vLLM's options of parallelism. `api_servers`: how many processes answer requests."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    api_servers: int = msgspec.field(default=1, name="_api_process_count")


class Environment(msgspec.Struct, frozen=True):
    """vLLM's environment."""

    allows_updates: bool = msgspec.field(default=False, name=_VARIABLE)


class VllmStockAdapters(AdapterApi):
    """vLLM's own routes for adapters. `lora`: None if the server was started without."""

    kind = "vllm"
    load_route, unload_route = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    capacity = None
    limits = "a larger --max-lora-rank"
    is_uniform = False

    def __init__(
        self,
        http: HttpRoutes,
        checkpoint: Sequence[TensorSpec] | None,
        lora: LoraOptions | None,
        parallel: ParallelOptions,
        environment: Environment,
    ) -> None:
        self.http, self.checkpoint = http, checkpoint
        self._lora = lora
        self._parallel = parallel
        self._environment = environment
        self.is_enabled = lora is not None
        self.max_rank = None if lora is None else lora.max_lora_rank
        num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self.after_failure = (
            f", but the replies of its {num_ranks} ranks may be out of step: restart it" if num_ranks > 1 else ""
        )

    def require(self) -> None:
        if self._lora is None or not self._environment.allows_updates:
            raise UnsupportedError(
                f"{self.http.name} can't load adapters: start it with --enable-lora and {_VARIABLE}=1, or publish the "
                "merged model, ModuleSource(model)"
            )
        parallel = self._parallel
        if parallel.data_parallel_size > 1 or parallel.api_servers > 1:
            raise UnsupportedError(
                f"{self.http.name} has data_parallel_size {parallel.data_parallel_size} and {parallel.api_servers} API "
                "servers, of which only one would learn an adapter's name: start a server for each replica, with "
                "--api-server-count 1"
            )
        if self._metrics().find(f"# HELP {_GAUGE}") < 0:
            raise UnsupportedError(
                f"{self.http.name} has no {_GAUGE} at /metrics, so old directories could not be removed safely: start "
                "it without --disable-log-stats"
            )

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        wanted = None if self._lora is None else self._lora.target_modules
        return {m: shape for m, shape in super().shapes().items() if wanted is None or m.rpartition(".")[2] in wanted}

    def form(
        self, tensors: Mapping[str, torch.Tensor], config: LoraConfig
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
        return tensors, config.peft()

    def in_use(self) -> frozenset[str]:
        """Return the adapters of requests that wait or run."""
        samples = _SAMPLE.findall(self._metrics())
        labels, _ = max(samples, key=lambda sample: float(sample[1]), default=("", ""))
        return frozenset(name for names in _ADAPTERS.findall(labels) for name in names.split(","))

    def _metrics(self) -> str:
        _, content = self.http.request("GET", "/metrics")
        return content.decode("utf-8", "replace")
