"""A stock vLLM server that has weightcast's backend, but not its endpoint plugin: driven by vLLM's own routes.

Rank calls go through `/collective_rpc`, around an install through `/pause`, `/update_weight_version` and `/wake_up`.
Invariant: a rank call is sent only to a server that was started with our backend. Any other would raise on all its
ranks at once, and vLLM then leaves replies unread and answers later calls with them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weightcast.control.client import HttpRoutes
from weightcast.control.worker_rpc import METHOD, Ask
from weightcast.errors import ControlError
from weightcast.format.messages import PauseMode
from weightcast.integrations.vllm.rank_client import RankClient, Status
from weightcast.integrations.vllm.replies import RankResults, WeightInfoReply, WorldSizeReply
from weightcast.links.watchdog import RecoveryRequest

BACKEND = "weightcast"
_CONFIG = '{"backend": "weightcast"}'
_encode = msgspec.json.encode
# Not /resume: a server of which only the weights are awake must not schedule before its KV cache is.
RESUME = "/wake_up?tags=scheduling"
_IS_TORN = r'"torn":\s*"[^"]'


def detect(routes: HttpRoutes, pause: PauseMode) -> VllmStockServer | None:
    """The client for a vLLM server with our backend; None if it is none. Raises ControlError if it has no routes."""
    if routes.probe("/weight_info", WeightInfoReply) is None:
        version = routes.probe("/version", _Version)
        if version is None:
            return None
        raise ControlError(
            f"{routes.name} is vLLM {version.version} without weight routes: `pip install weightcast` where it runs, "
            f"and start it with VLLM_PLUGINS=weightcast and --weight-transfer-config '{_CONFIG}'",
            peer=routes.name,
        )
    info = routes.probe("/server_info?config_format=json", _ServerKind)
    if info is None:
        return None
    transfer = info.vllm_config.weight_transfer_config
    if transfer is None or transfer.backend != BACKEND:
        return None
    return VllmStockServer(routes, pause=pause)


class VllmStockServer(RankClient):
    """A vLLM server by its stock routes. If this process dies in a pause, the watchdog resumes it unless torn."""

    def __init__(self, routes: HttpRoutes, *, pause: PauseMode) -> None:
        super().__init__(routes.name, VllmRoutes(routes), pause=pause, token=routes.token)
        self._routes = routes

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        """Ask whether a rank is torn (that waits for an install under way); if none is, resume."""
        headers = dict(self._routes.headers)
        ask = _encode(_rank_call(msgspec.to_builtins(Ask()))).decode()
        return [
            RecoveryRequest(f"{self.name}/collective_rpc", headers, ask, stop_if=_IS_TORN),
            RecoveryRequest(f"{self.name}{RESUME}", headers),
        ]

    def close(self) -> None:
        self._routes.close()


class VllmRoutes:
    """`Control` by vLLM's own routes."""

    def __init__(self, routes: HttpRoutes) -> None:
        self._routes = routes

    def call_ranks(self, call: Any) -> list[Any]:
        return self._routes.post_for("/collective_rpc", _encode(_rank_call(call)), RankResults).results

    def status(self) -> Status:
        label = self._routes.get("/weight_info", WeightInfoReply).weight_version
        world_size = self._routes.get("/get_world_size", WorldSizeReply).world_size
        return Status(label, self._routes.get("/is_paused", _IsPaused).is_paused, world_size)

    def pause(self, mode: PauseMode) -> None:
        self._routes.post(f"/pause?mode={mode}&clear_cache=true")

    def resume(self) -> None:
        self._routes.post(RESUME)

    def set_label(self, version: str) -> None:
        self._routes.post("/update_weight_version", _encode({"new_version": version}))


def _rank_call(call: Any) -> dict[str, Any]:
    # Never with vLLM's own `timeout`: one that passes leaves a reply behind, which the next step would read.
    return {"method": METHOD, "args": [call]}


class _IsPaused(msgspec.Struct):
    is_paused: bool


class _Version(msgspec.Struct):
    version: str


class _WeightTransferConfig(msgspec.Struct):
    backend: str


class _VllmConfig(msgspec.Struct):
    weight_transfer_config: _WeightTransferConfig | None = None


class _ServerKind(msgspec.Struct):
    vllm_config: _VllmConfig
