"""Client of a vLLM server without weightcast's backend: calls its workers' `reload_weights` by `/collective_rpc`, and
its routes of runtime LoRA updates.

After a tensor of a wrong shape vLLM can't reload any more, and must be restarted. It applies every setting of a PEFT
directory, but does not check shapes: a smaller tensor is filled up with zeros. An adapter that it has evicted is loaded
from its directory again when a request needs it, and vLLM ends if that fails.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightcast.checkpoint.files import SINGLE_FILE, write_tensors
from weightcast.control.client import HttpRoutes
from weightcast.errors import ControlError, EngineTornError, UnsupportedError
from weightcast.format.adapters import LoraConfig
from weightcast.format.manifest import Manifest
from weightcast.format.messages import PauseMode
from weightcast.host.deadline import LOAD_SECONDS
from weightcast.integrations.plugin.checkpoint_header import reference
from weightcast.integrations.stock_directory import INCOMPLETE, StockApi, StockServer
from weightcast.integrations.vllm.plugin import BACKEND, OPTION, PLUGINS
from weightcast.links.watchdog import RecoveryRequest

_REMEDY = f"`pip install PATH_TO_WEIGHTCAST` in its environment, and start it with {PLUGINS} and {OPTION}"
_RESUME = "/wake_up?tags=scheduling"
"""Not /resume, since a server whose KV cache is asleep must not schedule."""
_ADAPTERS_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_GAUGE = "vllm:lora_requests_info"
_SAMPLE = re.compile(rf"^{_GAUGE}{{(.*)}} ([0-9.e+]+)$", re.MULTILINE)
_ADAPTERS = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


def detect(routes: HttpRoutes, pause: PauseMode) -> StockServer | None:
    """Return the client for a vLLM server with development routes; None if it is not a vLLM server.

    Raises ControlError, with the remedy, for a vLLM server without weight routes.
    """
    server = _server_info(routes)
    transfer = None if server is None else server.vllm_config.weight_transfer_config
    if server is not None and (transfer is None or transfer.backend != BACKEND):
        return StockServer(StockVllmApi(routes, server, pause))
    version = routes.probe("/version", _Version)
    if version is None:
        return None
    lacking = f"{routes.name} is vLLM {version.version} without weightcast's routes: {_REMEDY}"
    raise ControlError(lacking, peer=routes.name)


def _server_info(routes: HttpRoutes) -> VllmServerInfo | None:
    """Return the configuration that a vLLM server was started with; None if it has no development routes."""
    return routes.probe("/server_info?config_format=json", VllmServerInfo)


class StockVllmApi(StockApi):
    """vLLM's own routes that are needed for an update, of the model or of an adapter."""

    dialect = "vllm"
    remedy = _REMEDY
    load_route, unload_route = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    limits = "a larger --max-lora-rank"
    capacity = None
    is_uniform = False

    def __init__(self, http: HttpRoutes, server: VllmServerInfo, pause: PauseMode) -> None:
        self.http, self.name, config = http, http.name, server.vllm_config
        transfer = config.weight_transfer_config
        backend = "none" if transfer is None else repr(transfer.backend)
        self.kind = f"vLLM with the weight-transfer backend {backend}, not {BACKEND!r}"
        model = config.model_config
        self.held = reference(model.model, revision=model.revision, cache_dir=config.load_config.download_dir)
        self.dtype = model.dtype.removeprefix("torch.")
        self._server = server
        self._lora, self._parallel = config.lora_config, config.parallel_config
        self.has_lora = self._lora is not None
        self.max_rank = None if self._lora is None else self._lora.max_lora_rank
        num_ranks = self._parallel.tensor_parallel_size * self._parallel.pipeline_parallel_size
        self.after_failure = (
            f", but the replies of its {num_ranks} ranks may be out of step: restart it" if num_ranks > 1 else ""
        )
        self._pause_mode = pause
        self._num_ranks = 1

    def status(self) -> tuple[str, bool]:
        label = self.http.get("/weight_info", _WeightInfoReply).weight_version
        return label, self.http.get("/is_paused", _IsPaused).is_paused

    def set_label(self, label: str) -> None:
        self.http.post("/update_weight_version", {"new_version": label})

    def pause(self) -> None:
        self.http.post(f"/pause?mode={self._pause_mode}&clear_cache=true")

    def resume(self) -> None:
        self.http.post(_RESUME)

    def require_unchanged(self) -> None:
        if _server_info(self.http) != self._server:
            raise ControlError(f"{self.name} was restarted with another configuration: publish again", peer=self.name)

    def require_loadable(self, manifest: Manifest, *, is_torn: bool) -> None:
        self.require_unchanged()
        self._num_ranks = self.http.get("/get_world_size", _WorldSize).world_size
        if self._num_ranks > 1 and is_torn:
            raise EngineTornError(
                f"a reload has failed on {self.name}, since when the replies of its {self._num_ranks} ranks are out of "
                "step and later reloads can't be trusted: restart it. With weightcast's backend this can't happen: "
                f"{_REMEDY}"
            )
        if self._server.vllm_config.device_config.device != "cpu":
            return
        # Weights that vLLM's reload silently leaves unchanged when it packs weights for a CPU.
        records, stale = manifest.tensors, []
        if not any(record.name.endswith("lm_head.weight") and not record.aliases for record in records):
            stale.append("an lm_head that is tied to the embeddings")
        if any(".experts." in record.name for record in records):
            stale.append("experts")
        if stale:
            what = " and ".join(stale)
            raise UnsupportedError(f"{self.name} runs on a CPU, where vLLM's own reload leaves {what} stale: {_REMEDY}")

    def is_unharmed(self) -> bool:
        return False

    def load(self, directory: Path, *, was_torn: bool) -> None:
        """Reload from a directory. After a failed reload, first reload without tensors, to end vLLM's last try."""
        for path in (_empty(directory), directory) if was_torn else (directory,):
            # Without vLLM's own `timeout`, which would leave a reply that the next step would read.
            results = self.http.post_for("/collective_rpc", _reload(path), _RankResults).results
            if results != [None] * len(results) or not results:
                raise ControlError(f"its ranks answered {results!r}, so their replies are out of step: restart it")

    def recovery_requests(self, directory: Path, former: str, label: str) -> list[RecoveryRequest]:
        request = functools.partial(self.http.recovery_request, timeout_seconds=LOAD_SECONDS)
        # One null for each rank; anything else is a reply to another call.
        all_done = {"results": [None] * self._num_ranks}
        return [
            request("/update_weight_version", {"new_version": f"{INCOMPLETE}{former}"}),
            request("/collective_rpc", _reload(_empty(directory)), expected=all_done),
            request("/collective_rpc", _reload(directory), expected=all_done),
            request("/update_weight_version", {"new_version": label}),
            request(_RESUME),
        ]

    # --- adapters ---

    def require_adapters(self) -> None:
        if not (self.has_lora and self._server.vllm_env.allows_updates):
            raise UnsupportedError(
                f"{self.name} can't load adapters: start it with --enable-lora and {_ADAPTERS_VARIABLE}=1, or publish "
                "the merged model, ModuleSource(model)"
            )
        parallel = self._parallel
        if parallel.data_parallel_size > 1 or parallel.api_servers > 1:
            raise UnsupportedError(
                f"{self.name} has data_parallel_size {parallel.data_parallel_size} and {parallel.api_servers} API "
                "servers, of which only one would learn an adapter's name: start a server for each replica, with "
                "--api-server-count 1"
            )
        if self._metrics().find(f"# HELP {_GAUGE}") < 0:
            raise UnsupportedError(
                f"{self.name} has no {_GAUGE} at /metrics, so old directories could not be removed safely: start it "
                "without --disable-log-stats"
            )

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        wanted = None if self._lora is None else self._lora.target_modules
        return {m: shape for m, shape in super().shapes().items() if wanted is None or m.rpartition(".")[2] in wanted}

    def peft_form(
        self, tensors: Mapping[str, torch.Tensor], config: LoraConfig
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
        return tensors, config.peft()

    def adapters_in_use(self) -> frozenset[str]:
        """Return the adapters of requests that wait or run."""
        samples = _SAMPLE.findall(self._metrics())
        labels, _ = max(samples, key=lambda sample: float(sample[1]), default=("", ""))
        return frozenset(name for names in _ADAPTERS.findall(labels) for name in names.split(","))

    def _metrics(self) -> str:
        _, content = self.http.request("GET", "/metrics")
        return content.decode("utf-8", "replace")


def _reload(directory: Path) -> dict[str, Any]:
    return {"method": "reload_weights", "kwargs": {"weights_path": str(directory), "is_checkpoint_format": True}}


def _empty(directory: Path) -> Path:
    """Write a checkpoint without tensors beside the directory; return its path."""
    path = directory.with_name("empty")
    path.mkdir(exist_ok=True)
    write_tensors(path / SINGLE_FILE, {})
    return path


# --- what vLLM's routes answer, as far as it is read ---


class _WeightInfoReply(msgspec.Struct):
    weight_version: str


class _IsPaused(msgspec.Struct):
    is_paused: bool


class _WorldSize(msgspec.Struct):
    world_size: int


class _RankResults(msgspec.Struct):
    results: list[Any]


class _Version(msgspec.Struct):
    version: str


class _TransferConfig(msgspec.Struct):
    backend: str


class _ModelConfig(msgspec.Struct):
    model: str
    dtype: str
    revision: str | None = None


class _LoadConfig(msgspec.Struct):
    download_dir: str | None = None


class _DeviceConfig(msgspec.Struct):
    device: str


class _LoraOptions(msgspec.Struct):
    max_lora_rank: int
    target_modules: list[str] | None = None


class _ParallelOptions(msgspec.Struct, frozen=True):
    """`api_servers`: how many processes answer requests."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    api_servers: int = msgspec.field(default=1, name="_api_process_count")


class _Environment(msgspec.Struct, frozen=True):
    allows_updates: bool = msgspec.field(default=False, name=_ADAPTERS_VARIABLE)


class VllmConfig(msgspec.Struct):
    model_config: _ModelConfig
    load_config: _LoadConfig
    device_config: _DeviceConfig
    weight_transfer_config: _TransferConfig | None = None
    lora_config: _LoraOptions | None = None
    parallel_config: _ParallelOptions = _ParallelOptions()


class VllmServerInfo(msgspec.Struct):
    vllm_config: VllmConfig
    vllm_env: _Environment = _Environment()
