"""A stock vLLM server that has weightcast's backend, but not its endpoint plugin: driven by vLLM's own routes.

Rank calls go through `/collective_rpc`, around an install through `/pause`, `/update_weight_version` and `/wake_up`.
Invariant: a rank call is sent only to a server that was started with our backend. Any other would raise on all its
ranks at once, and vLLM then leaves replies unread and answers later calls with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weightcast.control.client import HttpRoutes
from weightcast.control.worker_rpc import METHOD, Ask
from weightcast.errors import ControlError
from weightcast.format.messages import PauseMode
from weightcast.integrations.vllm.plugin import BACKEND, OPTION
from weightcast.integrations.vllm.rank_client import RankClient, Status
from weightcast.links.watchdog import RecoveryRequest


def detect(routes: HttpRoutes, pause: PauseMode) -> VllmStockServer | None:
    """The client for a vLLM server with our backend; None if it is none. Raises ControlError if it has no routes."""
    if routes.probe("/weight_info", WeightInfoReply) is None:
        version = routes.probe("/version", _Version)
        if version is None:
            return None
        raise ControlError(
            f"{routes.name} is vLLM {version.version} without weight routes: `pip install PATH_TO_WEIGHTCAST` where it "
            f"runs, and start it with VLLM_PLUGINS=weightcast and {OPTION}",
            peer=routes.name,
        )
    config = server_config(routes)
    transfer = None if config is None else config.weight_transfer_config
    return VllmStockServer(routes, pause=pause) if transfer is not None and transfer.backend == BACKEND else None


def server_config(routes: HttpRoutes) -> VllmConfig | None:
    """What a vLLM server with development routes was started with; None if it is none."""
    info = routes.probe("/server_info?config_format=json", _ServerInfo)
    return None if info is None else info.vllm_config


class VllmStockServer(RankClient):
    """A vLLM server by its stock routes. If this process dies in a pause, the watchdog resumes it unless torn."""

    def __init__(self, routes: HttpRoutes, *, pause: PauseMode) -> None:
        self._routes = VllmRoutes(routes)
        super().__init__(routes.name, self._routes, pause=pause, token=routes.token)

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        """Ask whether a rank is torn (that waits for an install under way); if none is, resume."""
        ask = _rank_call(msgspec.to_builtins(Ask()))
        return [
            self._routes.recovery_request("/collective_rpc", ask, stop_if=r'"torn":\s*"[^"]'),
            self._routes.recovery_request(RESUME),
        ]

    def close(self) -> None:
        self._routes.http.close()


# Not /resume: a server of which only the weights are awake must not schedule before its KV cache is.
RESUME = "/wake_up?tags=scheduling"


class VllmRoutes:
    """`Control` by vLLM's own routes."""

    def __init__(self, http: HttpRoutes) -> None:
        self.http = http

    def call_ranks(self, call: Any) -> list[Any]:
        return self.rpc(_rank_call(call))

    def rpc(self, body: Mapping[str, Any]) -> list[Any]:
        """What a method of vLLM's workers returned, rank by rank.

        Never with vLLM's own `timeout`: one that passes leaves a reply behind, which the next step would read.
        """
        return self.http.post_for("/collective_rpc", msgspec.json.encode(body), _RankResults).results

    def status(self) -> Status:
        label = self.http.get("/weight_info", WeightInfoReply).weight_version
        return Status(label, self.http.get("/is_paused", _IsPaused).is_paused, self.world_size())

    def world_size(self) -> int:
        return self.http.get("/get_world_size", _WorldSize).world_size

    def pause(self, mode: PauseMode) -> None:
        self.http.post(f"/pause?mode={mode}&clear_cache=true")

    def resume(self) -> None:
        self.http.post(RESUME)

    def set_label(self, version: str) -> None:
        self.http.post("/update_weight_version", msgspec.json.encode({"new_version": version}))

    def recovery_request(self, path: str, body: Any = None, **options: Any) -> RecoveryRequest:
        """A POST that the watchdog sends if this process dies; `options` are those of `RecoveryRequest`."""
        text = "" if body is None else msgspec.json.encode(body).decode()
        return RecoveryRequest(f"{self.http.name}{path}", dict(self.http.headers), text, **options)


def _rank_call(call: Any) -> dict[str, Any]:
    return {"method": METHOD, "args": [call]}


# --- what vLLM's routes answer, as far as it is read ---


class WeightInfoReply(msgspec.Struct):
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


class VllmConfig(msgspec.Struct):
    model_config: _ModelConfig
    load_config: _LoadConfig
    device_config: _DeviceConfig
    weight_transfer_config: _TransferConfig | None = None


class _ServerInfo(msgspec.Struct):
    vllm_config: VllmConfig
