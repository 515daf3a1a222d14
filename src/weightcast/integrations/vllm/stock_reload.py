"""A vLLM server that was started without weightcast's backend: it reloads a version as a checkpoint folder.

All that it has for this is `reload_weights`, a method of vLLM's workers, by `/collective_rpc`. Nothing runs there that
could hold a link, stage or undo: a version goes from the store into a folder, and from there into the model, paused.

Invariants: an offer is compared with the header of the server's own checkpoint before the first request to the server,
if that can be read here; while its weights are of no whole version the server's label says so, and it is not resumed.
After a tensor of a wrong shape vLLM itself can't reload: that server must be started again.

The folder lies in the store's own directory, which servers see under the same path; writing it takes the host memory of
one version.
"""

from __future__ import annotations

import functools
import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightcast import registry
from weightcast.checkpoint.files import SINGLE_FILE, write_tensors
from weightcast.checkpoint.live import CASTABLE
from weightcast.control.client import HttpRoutes
from weightcast.errors import (
    ControlError,
    EngineTornError,
    IncompleteUpdateError,
    InstallError,
    StaleVersionError,
    UnsupportedError,
    VersionNotFoundError,
)
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.messages import InitInfo, Offer, PauseMode, Seal, UpdateInfo, WeightInfo
from weightcast.host.closing import on_failure
from weightcast.integrations.plugin.checkpoint_header import reference
from weightcast.integrations.vllm.plugin import BACKEND, OPTION, PLUGINS
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import EngineClient, ServesTraffic
from weightcast.serving.load_plan import require_fit
from weightcast.store.address import StoreAddress
from weightcast.trainer.export import export

logger = logging.getLogger(__name__)

FOLDER = ".checkpoint"
"""In the store. Its name begins with a point, as do those of all that a store leaves alone."""
_INCOMPLETE = "-incomplete"
_REMEDY = f"`pip install PATH_TO_WEIGHTCAST` in its environment, and start it with {PLUGINS} and {OPTION}"
_RESUME = "/wake_up?tags=scheduling"
"""Not /resume: a server of which only the weights are awake must not schedule before its KV cache is."""


def detect(routes: HttpRoutes, pause: PauseMode) -> ReloadServer | None:
    """The client for a vLLM server with development routes; None if it is no vLLM server.

    Raises ControlError for one whose weight routes are not loaded, saying how to load them.
    """
    config = _config(routes)
    if config is not None and (
        config.weight_transfer_config is None or config.weight_transfer_config.backend != BACKEND
    ):
        return ReloadServer(routes, config, pause=pause)
    version = routes.probe("/version", _Version)
    if version is None:
        return None
    raise ControlError(
        f"{routes.name} is vLLM {version.version} without weightcast's routes: {_REMEDY}", peer=routes.name
    )


def _config(routes: HttpRoutes) -> VllmConfig | None:
    """What a vLLM server with development routes was started with; None if it has none."""
    info = routes.probe("/server_info?config_format=json", _VllmServerInfo)
    return None if info is None else info.vllm_config


class ReloadServer(EngineClient, ServesTraffic):
    """Such a server. It has no workers that connect: what it says of an install is all that is known of it."""

    def __init__(self, http: HttpRoutes, config: VllmConfig, *, pause: PauseMode) -> None:
        self.name = http.name
        self._routes = VllmRoutes(http)
        self._config = config
        self._pause_mode: PauseMode = pause
        self._store = ""
        self._manifest: Manifest | None = None
        self._folder: Path | None = None
        """Kept after the install, since the watchdog's recovery requests may need it until the next update."""

    def info(self) -> WeightInfo:
        """What the server says; it has no workers that connect a link."""
        label, torn = self._routes.label(), ""
        if label.endswith(_INCOMPLETE):
            torn = f"a reload of version {label.removesuffix(_INCOMPLETE)} did not end"
        return WeightInfo(weight_version=label, paused=self._routes.is_paused(), torn=torn, world_size=0)

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
            self._folder = _hold(self._store, WeightVersion(info.run, info.version))

    def pause(self, run: str) -> None:
        # A server that failed is left out, and detected again for the next publish: its folder is removed.
        with on_failure(self._release):
            self._routes.pause(self._pause_mode)

    def finish(self, version: int) -> None:
        """Reload, and label the server with the version once every rank has. Raises InstallError, and it is torn then.

        A server that was torn reloads a checkpoint without tensors first, which ends what vLLM keeps of the last try.
        """
        if self._folder is None:
            raise IncompleteUpdateError(f"no version was sealed for {self.name}")
        with on_failure(self._release):
            is_torn = bool(self.info().torn)
            self._routes.set_label(f"{version}{_INCOMPLETE}")
            if is_torn:
                self._reload(_empty(self._folder))
            self._reload(self._folder)
            self._routes.set_label(str(version))

    def resume(self, run: str) -> None:
        """Schedule again, unless the weights are of no whole version."""
        torn = self.info().torn
        if torn:
            logger.warning("%s stays paused until a complete update heals it: %s", self.name, torn)
            return
        self._routes.resume()

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        """Do the install from its beginning, whether it had begun or not: its version was sealed. Then resume."""
        if self._folder is None:
            return []
        version = self._folder.name.partition("-")[0]
        request = functools.partial(self._routes.recovery_request, timeout_seconds=600.0)
        # One null for each rank: anything else is a reply to another call.
        not_all_done = r'"results":\s*\[(?!null(,\s*null)*\])'
        return [
            request("/update_weight_version", {"new_version": f"{version}{_INCOMPLETE}"}),
            request("/collective_rpc", _reload_call(_empty(self._folder)), stop_if=not_all_done),
            request("/collective_rpc", _reload_call(self._folder), stop_if=not_all_done),
            request("/update_weight_version", {"new_version": version}),
            request(_RESUME),
        ]

    def close(self) -> None:
        """Remove what this client has written, and close the connections. Idempotent."""
        self._release()
        self._routes.http.close()

    def _check(self, offer: Offer) -> None:
        """Raises UnsupportedError, IncompatibleWeightsError, or EngineTornError if only a restart helps."""
        if offer.install != "staged" or offer.undo:
            what = "undo" if offer.undo else f"install={offer.install!r}"
            raise UnsupportedError(
                f"{self.name} can only reload a version whole, without {what}: publish so, or {_REMEDY}"
            )
        self._manifest = offer.manifest or self._manifest
        assert self._manifest is not None, "a manifest is left out only if it was accepted before"
        # Another server may have been started here since this client was made.
        if _config(self._routes.http) != self._config:
            raise ControlError(f"{self.name} is another server now: publish again", peer=self.name)
        num_ranks = self._routes.world_size()
        if num_ranks > 1 and self.info().torn:
            raise EngineTornError(
                f"a reload has failed on {self.name}: vLLM answers for its {num_ranks} ranks out of step since then, "
                f"and no later one can be trusted. Start it again; with our backend that is not needed: {_REMEDY}"
            )
        self._check_cpu(self._manifest)
        model, load = self._config.model_config, self._config.load_config
        held = reference(model.model, revision=model.revision, cache_dir=load.download_dir)
        if held is not None:
            # vLLM casts at its start, if it was given a dtype; what has that dtype already it takes as it is.
            dtype = model.dtype.removeprefix("torch.")
            require_fit(
                self._manifest.tensors,
                held,
                can_cast=lambda offered, saved: offered == dtype and {offered, saved} <= CASTABLE,
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

    def _reload(self, folder: Path) -> None:
        try:
            results = self._routes.rpc(_reload_call(folder))
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

    def _release(self) -> None:
        """With its last user the folder goes."""
        folder, self._folder = self._folder, None
        if folder is None:
            return  # without the lock, which another client has while it writes a folder
        with _lock:
            if folder in _num_users:
                _num_users[folder] -= 1
                if _num_users[folder] == 0:
                    del _num_users[folder]
                    shutil.rmtree(folder.parent, ignore_errors=True)


# --- the checkpoint folder: a version of a store, written out while a server needs it ---

_lock = threading.Lock()
_num_users: dict[Path, int] = {}


def _hold(url: str, version: WeightVersion) -> Path:
    """The folder of this version, which is being published: written for the first client that asks, then shared.

    Raises StaleVersionError if the store has got another one, IntegrityError, InsufficientMemoryError, OSError.
    """
    folder = StoreAddress.parse(url).directory / FOLDER
    path = folder / f"{version.number}-{version.run}"
    with _lock:
        if path not in _num_users:
            # What is there was left by a publisher that died, or by an update that was given up.
            shutil.rmtree(folder, ignore_errors=True)
            for other in [known for known in _num_users if known.parent == folder]:
                del _num_users[other]
            try:
                source = registry.stored_source(url, version=version)
            except VersionNotFoundError as exc:
                raise StaleVersionError(f"{exc}: another publisher writes it; give each a store of its own") from exc
            with on_failure(lambda: shutil.rmtree(folder, ignore_errors=True)):
                _empty(path).mkdir(parents=True)
                write_tensors(_empty(path) / SINGLE_FILE, {})
                export(source, path)
        _num_users[path] = _num_users.get(path, 0) + 1
    return path


def _empty(path: Path) -> Path:
    """A checkpoint without tensors, beside `path`."""
    return path.with_name("empty")


def _reload_call(folder: Path) -> Mapping[str, Any]:
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder), "is_checkpoint_format": True}}


class VllmRoutes:
    """vLLM's own routes, as far as they are called here."""

    def __init__(self, http: HttpRoutes) -> None:
        self.http = http

    def rpc(self, body: Mapping[str, Any]) -> list[Any]:
        """Call a method of vLLM's workers; what each rank returned.

        Never with vLLM's own `timeout`: one that passes leaves a reply behind, which the next step would read.
        """
        return self.http.post_for("/collective_rpc", msgspec.json.encode(body), _RankResults).results

    def label(self) -> str:
        return self.http.get("/weight_info", _WeightInfoReply).weight_version

    def is_paused(self) -> bool:
        return self.http.get("/is_paused", _IsPaused).is_paused

    def world_size(self) -> int:
        return self.http.get("/get_world_size", _WorldSize).world_size

    def pause(self, mode: PauseMode) -> None:
        self.http.post(f"/pause?mode={mode}&clear_cache=true")

    def resume(self) -> None:
        self.http.post(_RESUME)

    def set_label(self, version: str) -> None:
        self.http.post("/update_weight_version", msgspec.json.encode({"new_version": version}))

    def recovery_request(self, path: str, body: Any = None, **options: Any) -> RecoveryRequest:
        """A POST that the watchdog sends if this process dies; `options` are those of `RecoveryRequest`."""
        text = "" if body is None else msgspec.json.encode(body).decode()
        return RecoveryRequest(f"{self.http.name}{path}", dict(self.http.headers), text, **options)


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


class VllmConfig(msgspec.Struct):
    model_config: _ModelConfig
    load_config: _LoadConfig
    device_config: _DeviceConfig
    weight_transfer_config: _TransferConfig | None = None


class _VllmServerInfo(msgspec.Struct):
    vllm_config: VllmConfig
