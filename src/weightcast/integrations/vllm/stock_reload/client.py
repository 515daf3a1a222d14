"""A vLLM server that was started without weightcast's backend: it reloads a version as a checkpoint folder.

All that it has for this is `reload_weights`, a method of vLLM's workers, by `/collective_rpc`. Nothing runs there that
could hold a link, stage or undo: a version goes from the store into a folder, and from there into the model, paused.

Invariants: an offer is held against the header of the server's own checkpoint before the server is told anything, if
that can be read here; while its weights are of no whole version the server's label says so, whoever reads it, and it
is not resumed. vLLM itself gives no second chance to a tensor of a wrong shape: that server must be started again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightcast import registry
from weightcast.checkpoint.live import CASTABLE
from weightcast.control.client import HttpRoutes
from weightcast.errors import ControlError, EngineTornError, IncompleteUpdateError, InstallError, UnsupportedError
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.messages import InitInfo, Offer, PauseMode, Seal, UpdateInfo, WeightInfo
from weightcast.integrations.vllm.http import RESUME, VllmRoutes
from weightcast.integrations.vllm.reference import reference
from weightcast.integrations.vllm.replies import RankResults, WeightInfoReply, WorldSizeReply
from weightcast.integrations.vllm.stock_reload import folder as reload_folder
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import EngineClient, ServesTraffic
from weightcast.serving.load_plan import compare_specs, require_fit

logger = logging.getLogger(__name__)

_INCOMPLETE = "-incomplete"
_REMEDY = (
    "`pip install weightcast` in its environment, and start it with "
    """--weight-transfer-config '{"backend": "weightcast"}'"""
)
# One null for each rank: anything else is a reply to another call.
_NOT_ALL_DONE = r'"results":\s*\[(?!null(,\s*null)*\])'
_RESCUE_SECONDS = 600.0
_encode = msgspec.json.encode


def detect(routes: HttpRoutes, pause: PauseMode) -> ReloadServer | None:
    """The client for a vLLM server with development routes; None if it is none."""
    if routes.probe("/weight_info", WeightInfoReply) is None:
        return None
    config = _config(routes)
    return None if config is None else ReloadServer(routes, config, pause=pause)


class ReloadServer(EngineClient, ServesTraffic):
    """Such a server. It has no workers that connect: what it says of an install is all that is known of it."""

    def __init__(self, routes: HttpRoutes, config: VllmConfig, *, pause: PauseMode) -> None:
        self.name = routes.name
        self._routes = routes
        self._control = VllmRoutes(routes)
        self._config = config
        self._pause_mode: PauseMode = pause
        self._store = ""
        self._manifest: Manifest | None = None
        self._folder: Path | None = None
        """Kept after the install, since whoever rescues the server may need it until the publisher says otherwise."""

    def info(self) -> WeightInfo:
        """What the server says; it has no workers that connect a link."""
        status, torn = self._control.status(), ""
        if status.label.endswith(_INCOMPLETE):
            torn = f"a reload of version {status.label.removesuffix(_INCOMPLETE)} did not end"
        return WeightInfo(weight_version=status.label, paused=status.is_paused, torn=torn, world_size=0)

    def init(self, info: InitInfo) -> None:
        """Nothing is begun there. Raises UnsupportedError for a transport that keeps no versions."""
        if not registry.is_stored(info.transport):
            transfer = self._config.weight_transfer_config
            found = "none" if transfer is None else repr(transfer.backend)
            raise UnsupportedError(
                f"{self.name} is vLLM with the weight-transfer backend {found}, not 'weightcast', which takes versions "
                f"from a store only: publish with transport='file:///dir', a directory that it sees too; or {_REMEDY}"
            )
        self._store = info.transport

    def update(self, info: UpdateInfo) -> None:
        """Offer: refuse what does not fit. Seal: write the folder, before the pause. Each drops the one before."""
        self._release()
        if isinstance(info, Offer):
            self._check(info)
        elif isinstance(info, Seal):
            self._folder = reload_folder.hold(self._store, WeightVersion(info.run, info.version))

    def pause(self, run: str) -> None:
        with self._folder_for_success():
            self._control.pause(self._pause_mode)

    def finish(self, version: int) -> None:
        """Reload, and label the server with the version once every rank has. Raises InstallError, and it is torn then.

        A server that was torn reloads a checkpoint without tensors first, which ends what vLLM keeps of the last try.
        """
        if self._folder is None:
            raise IncompleteUpdateError(f"no version was sealed for {self.name}")
        with self._folder_for_success():
            is_torn = bool(self.info().torn)
            self._control.set_label(f"{version}{_INCOMPLETE}")
            if is_torn:
                self._reload(reload_folder.empty(self._folder))
            self._reload(self._folder)
            self._control.set_label(str(version))

    def resume(self, run: str) -> None:
        """Schedule again, unless the weights are of no whole version."""
        torn = self.info().torn
        if torn:
            logger.warning("%s stays paused until a complete update heals it: %s", self.name, torn)
            return
        self._control.resume()

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        """Do the install from its beginning, whether it had begun or not: its version was sealed. Then resume."""
        if self._folder is None:
            return []
        version = self._folder.name.partition("-")[0]
        return [
            self._request("/update_weight_version", {"new_version": f"{version}{_INCOMPLETE}"}),
            self._request("/collective_rpc", _reload_call(reload_folder.empty(self._folder)), stop_if=_NOT_ALL_DONE),
            self._request("/collective_rpc", _reload_call(self._folder), stop_if=_NOT_ALL_DONE),
            self._request("/update_weight_version", {"new_version": version}),
            self._request(RESUME, None),
        ]

    def close(self) -> None:
        """Remove what this client has written, and close the connections. Idempotent."""
        self._release()
        self._routes.close()

    def _request(self, path: str, body: Any, *, stop_if: str = "") -> RecoveryRequest:
        text = "" if body is None else _encode(body).decode()
        headers = dict(self._routes.headers)
        return RecoveryRequest(f"{self.name}{path}", headers, text, stop_if=stop_if, timeout_seconds=_RESCUE_SECONDS)

    def _check(self, offer: Offer) -> None:
        """Raises UnsupportedError, IncompatibleWeightsError, or EngineTornError if only a restart helps."""
        if offer.install != "staged" or offer.undo:
            what = "undo" if offer.undo else f"install={offer.install!r}"
            raise UnsupportedError(
                f"{self.name} can only reload a version whole, without {what}: publish so, or {_REMEDY}"
            )
        self._manifest = offer.manifest or self._manifest
        assert self._manifest is not None, "a manifest is left out only if it was accepted before"
        self._check_server()
        self._check_cpu(self._manifest)
        held = self._reference()
        if held is not None:
            require_fit(compare_specs(self._manifest.tensors, held, can_cast=self._can_cast))

    def _can_cast(self, offered: str, saved: str) -> bool:
        """vLLM does at its start, if it was told a dtype; what is in that one already it takes as it is."""
        return offered == self._config.model_config.dtype.removeprefix("torch.") and {offered, saved} <= CASTABLE

    def _check_server(self) -> None:
        """It may have been started anew since this client was made; and be torn."""
        if _config(self._routes) != self._config:
            raise ControlError(f"{self.name} is another server now: publish again", peer=self.name)
        num_ranks = self._routes.get("/get_world_size", WorldSizeReply).world_size
        if num_ranks > 1 and self.info().torn:
            raise EngineTornError(
                f"a reload has failed on {self.name}: vLLM answers for its {num_ranks} ranks out of step since then, "
                f"and no later one can be trusted. Start it again; with our backend that is not needed: {_REMEDY}"
            )

    def _check_cpu(self, manifest: Manifest) -> None:
        """What vLLM's reload leaves as it was, and says nothing of, where it packs weights for a CPU."""
        if self._config.device_config.device != "cpu":
            return
        records, stale = manifest.tensors, []
        if not any(record.name.endswith("lm_head.weight") and not record.aliases for record in records):
            stale.append("an lm_head that is tied to the embeddings")
        if any(".experts." in record.name for record in records):
            stale.append("experts")
        if stale:
            what = " and ".join(stale)
            raise UnsupportedError(f"{self.name} runs on a CPU, where vLLM's own reload leaves {what} stale: {_REMEDY}")

    def _reference(self) -> list[TensorSpec] | None:
        """The header of the checkpoint that the server was started from; None, and a warning, if none is seen here."""
        with contextlib.suppress(ImportError):  # a repository's name, and no huggingface_hub to find it with
            return reference(self._config)
        logger.warning("%s can't be checked against the checkpoint of %s", self.name, self._config.model_config.model)
        return None

    def _reload(self, folder: Path) -> None:
        try:
            results = self._routes.post_for("/collective_rpc", _encode(_reload_call(folder)), RankResults).results
        except ControlError as exc:
            raise InstallError(
                f"{self.name} could not reload {folder} (does it see this path?): {exc}; it stays paused until a "
                "complete update heals it",
                torn=True,
            ) from exc
        if not results or any(result is not None for result in results):
            raise InstallError(
                f"the ranks of {self.name} answered a reload with {results!r}: their replies are out of step, start it "
                "again",
                torn=True,
            )

    @contextlib.contextmanager
    def _folder_for_success(self) -> Iterator[None]:
        """A server that failed is given up, and asked anew what it is: its folder goes."""
        try:
            yield
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            reload_folder.release(folder)


def _config(routes: HttpRoutes) -> VllmConfig | None:
    info = routes.probe("/server_info?config_format=json", _ServerConfig)
    return None if info is None else info.vllm_config


def _reload_call(folder: Path) -> Mapping[str, Any]:
    # Never with vLLM's own `timeout`: one that passes leaves a reply behind, which the next step would read.
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder), "is_checkpoint_format": True}}


class _Backend(msgspec.Struct):
    backend: str


class _Device(msgspec.Struct):
    device: str


class _Model(msgspec.Struct):
    model: str
    dtype: str
    revision: str | None = None


class _Load(msgspec.Struct):
    download_dir: str | None = None


class VllmConfig(msgspec.Struct):
    """What is read of vLLM's configuration."""

    model_config: _Model
    load_config: _Load
    device_config: _Device
    weight_transfer_config: _Backend | None = None


class _ServerConfig(msgspec.Struct):
    vllm_config: VllmConfig
