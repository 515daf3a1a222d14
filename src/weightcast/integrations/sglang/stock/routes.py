"""Client of a stock SGLang server's routes for weights and adapters: one method for each route.

SGLang checks the rank and the names of an adapter's layers when it loads it, but shapes only when a request first uses
it, and its process ends then. It unloads a version once that one's requests have ended; the route waits for them, and
loads wait for it. A version that was unloaded is loaded again from its directory if a request names it.

Invariants: nothing is sent that SGLang does not check and that would end its process (wrong names, shapes and byte
counts are refused earlier); a refusal is a ControlError with the server's own text. SGLang silently ignores unknown
fields, so the bodies are typed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from weightcast.control.client import HttpRoutes
from weightcast.errors import ControlError, InstallError, UnsupportedError, WeightcastError
from weightcast.format.adapters import LoraConfig
from weightcast.format.manifest import Manifest
from weightcast.host.deadline import LOAD_SECONDS
from weightcast.integrations.plugin.checkpoint_header import reference
from weightcast.integrations.sglang import adapter_form
from weightcast.integrations.sglang.stock.buckets import FlatTensor
from weightcast.integrations.sglang.stock.group import StockGroup
from weightcast.integrations.stock_directory import INCOMPLETE, StockApi
from weightcast.links.watchdog import RecoveryRequest

SglangPause: TypeAlias = Literal["retract", "abort"]
MAX_PARALLEL = 64
"""Limit on the servers that are called concurrently."""
_FLATTENED = "flattened_bucket"


class ModelInfo(msgspec.Struct):
    """GET /model_info."""

    model_path: str
    weight_version: str


class ServerInfo(msgspec.Struct):
    """GET /server_info: the server's start options."""

    tp_size: int
    dp_size: int = 1
    pp_size: int = 1
    quantization: str | None = None
    speculative_algorithm: str | None = None
    version: str = "unknown"
    host: str = ""
    dtype: str = "auto"
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loaded_loras: int | None = None


class RankChecksums(msgspec.Struct):
    """One rank's weights: a checksum for each of the engine's own parameters."""

    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """POST /weights_checker: every rank's checksums in rank order, and one for all."""

    ranks: list[RankChecksums]
    per_engine_checksum: str

    def differ(self, name: str) -> bool:
        """Return whether the ranks have different values of a parameter."""
        return len({rank.checksums.get(name) for rank in self.ranks}) > 1


class SglangRoutes(StockApi):
    """The routes of the server at `routes`. Every call has a deadline, and raises PeerError. Thread-safe.

    Joins, broadcasts and handles are sent `once`: the server would wait for a second join or broadcast, or map a handle
    again. All other routes are idempotent, or (`begin`) raise when they are repeated.

    `pause`: "retract" (requests wait, and are recomputed with the new weights) or "abort" (they end). SGLang's third
    mode, "in_place", is not supported: requests would continue with the old weights' cache.
    """

    kind, dialect = "stock SGLang", "sglang"
    remedy = "install weightcast in its environment (if SGLANG_PLUGINS is set there, it must name weightcast)"
    load_route, unload_route = "/load_lora_adapter", "/unload_lora_adapter"
    limits = "a larger --max-lora-rank or --max-loaded-loras"
    is_uniform = True

    def __init__(self, http: HttpRoutes, model: ModelInfo, server: ServerInfo, pause: SglangPause) -> None:
        self.http, self.name = http, http.name
        self.held = reference(model.model_path, revision=None, cache_dir=None)
        self.dtype = server.dtype
        self.num_ranks = server.tp_size
        self.has_lora = bool(server.enable_lora)
        self.max_rank, self.capacity = server.max_lora_rank, server.max_loaded_loras
        self._model_path = model.model_path
        self.version, self.listens_on = server.version, server.host
        self._pause_mode = pause
        self.group: StockGroup | None = None
        """The group that its ranks have joined, if any."""
        self._former_label = ""
        self._unharmed: Checksums | None = None
        """The checksums of the weights of the last whole version, whose label is `_former_label`."""

    def require_unchanged(self) -> None:
        if self.http.get("/model_info", ModelInfo).model_path != self._model_path:
            raise ControlError(f"{self.name} was restarted with another model: publish again", peer=self.name)

    def status(self) -> tuple[str, bool]:
        return self.http.get("/model_info", ModelInfo).weight_version, False

    # --- checksums ---

    def _checksums(self) -> Checksums:
        """Return checksums of all ranks' present weights. The server reads every weight once."""
        return self.http.post_for("/weights_checker", {"action": "checksum"}, Checksums)

    def require_loadable(self, manifest: Manifest, *, is_torn: bool) -> None:
        """Get the checksums of the former version while the server serves, unless they are known from an update."""
        former = self.status()[0].removeprefix(INCOMPLETE)
        if self._former_label != former:
            self._unharmed = None
        if self._unharmed is None and not is_torn:
            self._former_label, self._unharmed = former, self._checksums()

    def is_unharmed(self) -> bool:
        return self._unharmed is not None and self._checksums() == self._unharmed

    def require_alike(self, version: str) -> None:
        """Raise InstallError if ranks have different values of a parameter that was equal on all of them before."""
        before, now = self._unharmed, self._checksums()
        if before is not None and len(before.ranks) == len(now.ranks):
            for name in before.ranks[0].checksums:
                if now.differ(name) and not before.differ(name):
                    raise InstallError(f"the ranks of {self.name} have different {name}: publish again", torn=True)
        self._former_label, self._unharmed = version, now

    # --- pauses ---

    def pause(self) -> None:
        self.http.post("/pause_generation", {"mode": self._pause_mode})

    def resume(self) -> None:
        # SGLang's default first empties torch's cache of GPU memory.
        self.http.post("/continue_generation", {"torch_empty_cache": False})

    # --- the session ---

    def begin(self) -> None:
        """Open a weight-update session, also if a dead client has left one open."""
        try:
            self.http.post("/begin_weight_update", {})
        except ControlError:
            # A session has no owner and no timeout. If an open one was not the reason, the second try raises.
            self.http.post("/end_weight_update", {})
            self.http.post("/begin_weight_update", {})

    def end(self) -> None:
        self.http.post("/end_weight_update", {})

    def set_label(self, label: str) -> None:
        """Label the present weights, in the scheduler and the HTTP server. No request is aborted."""
        self.http.post("/update_weight_version", _label(label))

    # --- weights ---

    def join(self, group: StockGroup) -> None:
        """Have every rank join a group; block until all members have. The server does nothing else meanwhile."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self.http.post("/init_weights_update_group", body, once=True)

    def leave_group(self) -> None:
        """Have the server leave its group, if it still answers, and close the group."""
        group, self.group = self.group, None
        if group is not None:
            with contextlib.suppress(WeightcastError):
                self.http.post("/destroy_weights_update_group", {"group_name": group.name})
            group.close()

    def receive(self, places: Sequence[FlatTensor], group: StockGroup, *, is_last: bool) -> None:
        """Have every rank receive one broadcast of a flattened bucket, and load it. Blocks until it is loaded.

        `is_last`: drop the cache of the old weights.
        """
        body = {
            "names": [place.name for place in places],
            "dtypes": [place.dtype for place in places],
            "shapes": [place.shape for place in places],
            "group_name": group.name,
            "load_format": _FLATTENED,
            "flush_cache": is_last,
        }
        self.http.post("/update_weights_from_distributed", body, once=True)

    def map(self, handles: Sequence[str], *, is_last: bool) -> None:
        """Have rank r load the flattened bucket of `handles[r]`."""
        body = {"serialized_named_tensors": handles, "load_format": _FLATTENED, "flush_cache": is_last}
        self.http.post("/update_weights_from_tensor", body, once=True)

    def load(self, directory: Path, *, was_torn: bool) -> None:
        self.http.post("/update_weights_from_disk", _disk(directory))
        self.require_alike(directory.name.partition("-")[0])

    # --- adapters ---

    def require_adapters(self) -> None:
        if not self.has_lora:
            raise UnsupportedError(
                f"{self.name} can't load adapters: start it with --enable-lora, --max-lora-rank and "
                "--lora-target-modules, or publish the merged model, ModuleSource(model)"
            )
        if any(".experts." in spec.name for spec in self.held or ()):
            raise UnsupportedError(
                f"{self.name} serves a mixture of experts with LoRA, which was not tried: publish the merged model, "
                "ModuleSource(model)"
            )

    def peft_form(
        self, tensors: Mapping[str, torch.Tensor], config: LoraConfig
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
        return adapter_form.completed(tensors, config, self.shapes()), adapter_form.settings(config)

    def adapters_in_use(self) -> tuple[str, ...]:
        """Return none: an adapter's directory is read only when it is loaded."""
        return ()

    # --- for the watchdog ---

    def recovery_requests(self, directory: Path, former: str, label: str) -> list[RecoveryRequest]:
        request = self.http.recovery_request
        is_loaded = {"success": True}
        return [
            request("/update_weight_version", _label(f"{INCOMPLETE}{former}")),
            request("/update_weights_from_disk", _disk(directory), expected=is_loaded, timeout_seconds=LOAD_SECONDS),
            request("/update_weight_version", _label(label)),
            request("/continue_generation", {"torch_empty_cache": False}),
        ]

    def restoring_requests(self, former: str) -> list[RecoveryRequest]:
        """End the session; if the weights are those of the former version, restore its label and resume."""
        request, known = self.http.recovery_request, self._unharmed
        unharmed = {"per_engine_checksum": None if known is None else known.per_engine_checksum}
        return [
            request("/end_weight_update", {}),
            request("/weights_checker", {"action": "checksum"}, expected=unharmed),
            request("/update_weight_version", _label(former)),
            request("/continue_generation", {"torch_empty_cache": False}),
        ]


def _label(label: str) -> dict[str, Any]:
    return {"new_version": label, "abort_all_requests": False}


def _disk(directory: Path) -> dict[str, Any]:
    return {"model_path": str(directory), "flush_cache": True}
