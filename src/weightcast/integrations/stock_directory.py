"""Servers without weightcast's plugin that load a version from a checkpoint directory: stock vLLM, stock SGLang.

Such a server has no link, no staging and no undo: a version is written from the store to a directory of safetensors
files, and loaded from there while the server is paused.

Invariants: an offer is compared with the headers of the server's own checkpoint, if these can be read here; a directory
gets its name when it is complete; while a server has no whole version its label begins with `INCOMPLETE`, and it is not
resumed, until the next complete update.

The directories are inside the store's directory, which servers see at the same path. The newest one is kept, since a
server or the watchdog may still read it. Host memory for writing: one shard.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from weightcast import registry
from weightcast.checkpoint.live import CASTABLE
from weightcast.errors import (
    ControlError,
    IncompleteUpdateError,
    InstallError,
    StaleVersionError,
    UnsupportedError,
    VersionNotFoundError,
)
from weightcast.format.adapters import AdapterTarget
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.messages import InitInfo, Offer, Seal, UpdateInfo, WeightInfo
from weightcast.integrations.stock_adapters import AdapterApi, StockAdapters
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import EngineClient, ServesTraffic
from weightcast.seams.source import Regions, Source
from weightcast.serving.admission import require_fit
from weightcast.store.address import DirectoryAddress, StoreAddress
from weightcast.trainer.export import export

logger = logging.getLogger(__name__)

FOLDER = ".checkpoint"
"""Subdirectory of the store. A store ignores names that begin with a dot."""
INCOMPLETE = "incomplete, was "
"""Prefix of a server's label, before the label of its last version."""


class StockApi(AdapterApi, Protocol):
    """The calls to one stock server. Every call has a deadline and raises PeerError. Thread-safe.

    `kind`: the server's kind, for errors. `dtype`: the dtype in which it serves. `remedy`: how to add weightcast's
    routes to such a server.
    """

    kind: str
    dtype: str
    remedy: str

    def require_unchanged(self) -> None:
        """Raise ControlError if another server was started at this URL since this client was made."""

    def status(self) -> tuple[str, bool]:
        """Return the label of the server's weights, and whether it is paused; False if the server can't say."""
        ...

    def set_label(self, label: str) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def require_loadable(self, manifest: Manifest, *, is_torn: bool) -> None:
        """Raise PeerError or UnsupportedError if the server can't load this manifest. Called while it serves."""

    def is_unharmed(self) -> bool:
        """Return whether the weights are those of the former version, although the label says "incomplete"."""

    def load(self, directory: Path, *, was_torn: bool) -> None:
        """Load a checkpoint directory on every rank, and drop all caches. Raises InstallError."""

    def recovery_requests(self, directory: Path, former: str, label: str) -> list[RecoveryRequest]:
        """Return requests that label the server as incomplete, load the directory, label the version, and resume."""
        ...


class StockServer(EngineClient, ServesTraffic):
    """Client of a stock server. It runs no weightcast worker, so only its own replies describe an install."""

    abilities: tuple[str, ...] = ("adapters",)
    _store_directory: Path
    """The directory of the store; set by `init`."""

    def __init__(self, api: StockApi) -> None:
        self.name = api.http.name
        self.api = api
        self._held = api.held
        """Tensors of the server's checkpoint or, if unknown, of the first complete offer."""
        self._label = ""
        self._run = self._version_run = self._store = ""
        self._manifest: Manifest | None = None
        self._adapters = StockAdapters(api)
        self._target: AdapterTarget | None = None
        """The adapter that the update in progress is of; None: of the model."""
        self._directory: Path | None = None
        """That of the sealed version."""

    # --- control ---

    def info(self) -> WeightInfo:
        label, is_paused = self.api.status()
        if label != self._label:
            # Another client has updated the server, or it was restarted.
            self._label, self._version_run = label, ""
        return WeightInfo(
            weight_version=label.removeprefix(INCOMPLETE),
            run=self._version_run,
            torn=f"{self.name} has no whole version" if self.is_torn else "",
            paused=is_paused,
            world_size=0,
            abilities=self.abilities,
            adapters=self._adapters.versions(),
        )

    @property
    def is_torn(self) -> bool:
        return self._label.startswith(INCOMPLETE)

    @property
    def former(self) -> str:
        """Label of the last whole version."""
        return self._label.removeprefix(INCOMPLETE)

    @property
    def wanted_names(self) -> frozenset[str]:
        """Names of the server's own checkpoint. Tied tensors are sent under each of these."""
        return frozenset(spec.name for spec in self._held or ())

    def init(self, info: InitInfo) -> None:
        """Begin a session. The server has no sessions, so a second publisher is not detected.

        Raises UnsupportedError.
        """
        address = StoreAddress.parse(info.transport) if registry.is_stored(info.transport) else None
        if not isinstance(address, DirectoryAddress):
            raise UnsupportedError(
                f"{self.name} is {self.api.kind}, which loads versions from a directory, not from {info.transport}: "
                f"publish with transport='file:///dir', a directory that the server sees too; or {self.api.remedy}"
            )
        self._run, self._store, self._store_directory = info.run, info.transport, address.directory

    def update(self, info: UpdateInfo) -> None:
        """Upon an offer, check it. Upon a seal, write the directory, before the pause."""
        self._directory = None
        if isinstance(info, Offer):
            self._target = info.target or None
            if self._target is not None:
                self.api.require_unchanged()
                self._adapters.check(self._target, info.version, self._accepted(info), self._store_directory)
                return
            if info.install != "staged":
                raise UnsupportedError(
                    f"{self.name} can't load a version bucket by bucket: publish with install='staged', or "
                    f"{self.api.remedy}"
                )
            self.check(info)
        elif isinstance(info, Seal):
            version = WeightVersion(info.run, info.version)
            if self._target is not None:
                self._directory = self._adapters.write(self._target, self._store, self._store_directory, version)
                return
            assert self._manifest is not None, "an offer comes first"
            aliases = self.wanted_names - {record.name for record in self._manifest.tensors}
            self._directory = _written(self._store, self._store_directory, version, aliases)

    def check(self, offer: Offer) -> None:
        """Check an offer.

        Raises UnsupportedError, IncompatibleWeightsError, or EngineTornError if a restart is needed.
        """
        if offer.undo:
            raise UnsupportedError(f"{self.name} can't undo an install: publish with undo=False, or {self.api.remedy}")
        self.info()
        manifest = self._accepted(offer)
        if versions := self._adapters.versions():
            labels = ", ".join(version.label for version in versions)
            raise UnsupportedError(
                f"{self.name} has the adapters {labels}, which were trained on the model that it serves: unload them "
                "first, by its own route"
            )
        self.api.require_loadable(manifest, is_torn=self.is_torn)
        offered = [record.spec for record in manifest.tensors]
        if self._held is None:
            self._held = offered

        def can_cast(offered: str, held: str) -> bool:
            # A server with a dtype option casts its checkpoint at the start, so it accepts tensors in that dtype.
            return offered == self.api.dtype and {offered, held} <= CASTABLE

        require_fit(offered, self._held, can_cast=can_cast)

    def _accepted(self, offer: Offer) -> Manifest:
        if offer.manifest is not None:
            self._manifest = Manifest.decode(offer.manifest)
        assert self._manifest is not None, "a manifest is left out only if it was accepted before"
        return self._manifest

    # --- the update, in this order ---

    def pause(self, run: str) -> None:
        self.api.pause()

    def mark(self) -> None:
        """Label the paused server as incomplete."""
        self.info()
        if not self.is_torn:
            self.set_label(f"{INCOMPLETE}{self._label}")

    def set_label(self, label: str) -> None:
        self.api.set_label(label)
        self._label = label

    def finish(self, version: int) -> None:
        """Load the directory, and label the server once every rank has loaded it. Raises InstallError.

        If it is raised for a model, the server is torn.
        """
        if self._directory is None:
            raise IncompleteUpdateError(f"no version was sealed for {self.name}: publish again")
        if self._target is not None:
            self._adapters.load(self._target, version, self._directory)
            return
        self.info()
        was_torn = self.is_torn
        self.mark()
        try:
            self.api.load(self._directory, was_torn=was_torn)
        except ControlError as exc:
            raise InstallError(
                f"{self.name} could not load {self._directory}: {exc}; check that it sees this path. It stays paused "
                "until a complete update heals it",
                torn=True,
            ) from exc
        self.loaded(version)

    def loaded(self, version: int) -> None:
        self.set_label(str(version))
        self._version_run = self._run

    def resume(self, run: str) -> None:
        """Resume the server, unless it has no whole version."""
        self.info()
        if self.is_torn:
            if not self.api.is_unharmed():
                logger.warning("%s stays paused until a complete update heals it: it has no whole version", self.name)
                return
            self.set_label(self.former)
        self.api.resume()

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        """Return requests for the whole install of the sealed version, even if it had begun, and a resume."""
        if self._directory is None or self._target is not None:
            return []
        version = self._directory.name.partition("-")[0]
        return self.api.recovery_requests(self._directory, self.former, version)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.api.http.close()


# --- the directories ---

_lock = threading.Lock()


class _Untied(Source):
    """A source in which some aliases are separate tensors."""

    def __init__(self, source: Source, aliases: frozenset[str]) -> None:
        self._specs, self._regions = list[TensorSpec](), dict(source.regions())
        for spec in source.specs():
            self._specs.append(TensorSpec(spec.name, spec.dtype, spec.shape))
            for alias in aliases.intersection(spec.aliases):
                self._specs.append(TensorSpec(alias, spec.dtype, spec.shape))
                # A safetensors file can't have two names for one piece of memory.
                self._regions[alias] = [(region, tensor.clone()) for region, tensor in self._regions[spec.name]]

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def _written(url: str, store: Path, version: WeightVersion, aliases: frozenset[str]) -> Path:
    """Return the directory of the version in publication; it is written for the first server that needs it.

    Raises StaleVersionError if the store has another one, IntegrityError, InsufficientMemoryError, OSError.
    """
    name = f"{version.number}-{version.run}"
    if aliases:
        name += f"-{hashlib.sha256(repr(sorted(aliases)).encode()).hexdigest()[:8]}"
    path = store / FOLDER / name
    with _lock:
        if not path.exists():
            # Directories of other versions are no longer needed.
            for other in path.parent.glob("[!.]*"):
                if not other.name.startswith(f"{version.number}-{version.run}"):
                    shutil.rmtree(other, ignore_errors=True)
            for unfinished in path.parent.glob(".*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            try:
                source = registry.stored_source(url, version=version)
            except VersionNotFoundError as exc:
                raise StaleVersionError(f"{exc}: another publisher writes to it; give each its own store") from exc
            export(_Untied(source, aliases) if aliases else source, path)
    return path
