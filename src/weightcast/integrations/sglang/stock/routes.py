"""The weight routes of a stock SGLang server, called: one method for each, errors in their class.

Invariants: nothing is sent that SGLang does not check and that would end its process (a name, shape or byte count that
does not fit is refused before it comes here); a reply that says no is a ControlError with the server's own words. A
field that SGLang does not know is ignored there without a word, so the bodies are typed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from weightcast.control.client import HttpRoutes
from weightcast.errors import ControlError
from weightcast.integrations.sglang.stock.buckets import FlatTensor

SglangPause: TypeAlias = Literal["retract", "abort"]
_FLATTENED = "flattened_bucket"
_encode = msgspec.json.encode


class ModelInfo(msgspec.Struct):
    """GET /model_info."""

    model_path: str
    weight_version: str


class ServerInfo(msgspec.Struct):
    """GET /server_info: how the server was started."""

    tp_size: int
    dp_size: int = 1
    pp_size: int = 1
    quantization: str | None = None
    dtype: str = "auto"


class RankChecksums(msgspec.Struct):
    """One rank's weights: a checksum for each of the engine's own parameters."""

    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """POST /weights_checker: every rank's checksums in rank order, and one for all."""

    ranks: list[RankChecksums]
    per_engine_checksum: str


class SglangRoutes:
    """The routes of the server at `routes`. Every call has a deadline; raises PeerError. Thread-safe."""

    def __init__(self, routes: HttpRoutes) -> None:
        self.name = routes.name
        self.headers = dict(routes.headers)
        self._routes = routes

    def model_info(self) -> ModelInfo:
        return self._routes.get("/model_info", ModelInfo)

    def checksums(self) -> Checksums:
        """Of the weights as they are now, all ranks. Reads every weight once."""
        return self._routes.post_for("/weights_checker", _encode({"action": "checksum"}), Checksums)

    # --- pauses ---

    def pause(self, mode: SglangPause) -> None:
        """Stop generating. `retract`: requests wait, and are recomputed by the new weights; `abort`: they end.

        SGLang's third mode, `in_place`, is not offered: requests would go on with the old weights' cache.
        """
        self._post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        # SGLang's default empties a GPU's allocator first.
        self._post("/continue_generation", {"torch_empty_cache": False})

    # --- the session ---

    def begin(self) -> None:
        """Open a weight-update session, also where a client that has gone left one open."""
        try:
            self._post("/begin_weight_update", {})
        except ControlError:
            # A session has no owner and no end of its own; if that was not the reason, the second try says so.
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {})

    def end(self) -> None:
        self._post("/end_weight_update", {})

    def set_version(self, version: str) -> None:
        """Label the weights that are there now, in the scheduler and in front of it. No request is aborted."""
        self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    # --- weights ---

    def join_group(self, group: str, host: str, port: int, rank_offset: int, size: int, backend: str) -> None:
        """Have every rank join a group; blocks until all of the group have; the server does nothing else meanwhile."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": size,
            "group_name": group,
            "backend": backend,
        }
        self._post("/init_weights_update_group", body, once=True)

    def leave_group(self, group: str) -> None:
        self._post("/destroy_weights_update_group", {"group_name": group})

    def receive(self, places: Sequence[FlatTensor], group: str, *, is_last: bool) -> None:
        """Have every rank take part in one broadcast of a flattened bucket, and load it. Blocks until it is loaded.

        With the last one the cache of the old weights is dropped.
        """
        body = {
            "names": [place.name for place in places],
            "dtypes": [place.dtype for place in places],
            "shapes": [place.shape for place in places],
            "group_name": group,
            "load_format": _FLATTENED,
            "flush_cache": is_last,
        }
        self._post("/update_weights_from_distributed", body, once=True)

    def map(self, handles: Sequence[str], *, is_last: bool) -> None:
        """Have rank r load the flattened bucket that `handles[r]` leads to."""
        body = {"serialized_named_tensors": handles, "load_format": _FLATTENED, "flush_cache": is_last}
        self._post("/update_weights_from_tensor", body, once=True)

    def load_directory(self, path: str) -> None:
        """Have every rank load a checkpoint directory of the server's file system, and drop the cache."""
        self._post("/update_weights_from_disk", {"model_path": path, "flush_cache": True})

    def close(self) -> None:
        self._routes.close()

    def _post(self, path: str, body: Any, *, once: bool = False) -> None:
        """`once`: a server that has taken the call would wait for a second join or broadcast, or map a handle again.

        All other routes set what is so already when they are called again, or, as `begin`, say so.
        """
        self._routes.post(path, _encode(body), once=once)
