"""LoRA adapters on servers without weightcast's plugin: each version is a directory of PEFT's form, which the server
loads by its own route.

Invariants: a version has a name, `NAME@NUMBER`, and a directory, for ever: neither a running request nor the server's
prefix cache, whose keys have the name and the path or an id of the load, ever meets another version under them. A
directory is complete when it gets its name, and stays as long as the server may read it: a server that has evicted a
version loads it again, whatever has become of its publisher, and one that takes longer than a publisher waits may load
it still. The server's list of models has the paths, so it alone says which versions it has.

The directories are inside the store's directory, apart for each server, as hard links to the same files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from weightcast import registry
from weightcast.checkpoint.files import UnfinishedDirectory, write_tensors
from weightcast.control.client import NOT_READY, HttpRoutes
from weightcast.errors import (
    ControlError,
    InstallError,
    PeerDiedError,
    RefusedError,
    StaleVersionError,
    UnsupportedError,
    WeightcastError,
    listed,
)
from weightcast.format.adapters import AdapterTarget, AdapterVersion, LoraConfig, adapter_label
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.host.closing import on_failure
from weightcast.host.deadline import LOAD_SECONDS
from weightcast.integrations.plugin.checkpoint_header import linear_shapes
from weightcast.seams.adapters import AdapterLimits
from weightcast.serving.adapters import adapter_problems
from weightcast.serving.admission import misfit_error
from weightcast.trainer.export import joined_tensors

logger = logging.getLogger(__name__)

FOLDER = ".adapters"
"""Subdirectory of the store. A store ignores names that begin with a dot."""
_ROOT = re.compile(rf"/{re.escape(FOLDER)}/[^/]+/[^/]+/([A-Za-z0-9][A-Za-z0-9._-]*)@([0-9]{{1,15}})-([0-9a-f]{{32}})\Z")
_LAYER = re.compile(r"model\.layers\.[0-9]+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)")
"""Layers that every server applies an adapter to. Of others, such as those of a vision tower, stock servers ignore it.
"""
_lock = threading.Lock()


class AdapterApi(AdapterLimits, Protocol):
    """One stock server, as far as adapters are concerned. `max_rank` and so on: see `AdapterLimits`.

    `dialect`: the kind of server, in paths. `http`: the way to its routes. `held`: the tensors of the checkpoint from
    which it was started, None if that can't be read. `has_lora`: it was started with LoRA. `load_route`,
    `unload_route`: paths of its routes for adapters. `capacity`: how many it names at most. `after_failure`: what to do
    after a failed load.
    """

    dialect: str
    http: HttpRoutes
    held: Sequence[TensorSpec] | None
    has_lora: bool
    load_route: str
    unload_route: str
    after_failure: str = ""

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        remedy = f"give this host the checkpoint under the same path as {self.http.name}, which does not check them"
        return linear_shapes(self.held, remedy, lambda module: _LAYER.fullmatch(module) is not None)

    def require_adapters(self) -> None:
        """Raise UnsupportedError, with the remedy, if the server can't load adapters. Raises PeerError."""

    def peft_form(
        self, tensors: Mapping[str, torch.Tensor], config: LoraConfig
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
        """Return the tensors and the `adapter_config.json` of a directory that the server reads as this adapter."""
        ...

    def adapters_in_use(self) -> Collection[str]:
        """Return the adapters whose directories requests may still need, although the server does not name them."""


class StockAdapters:
    """The published adapters of one stock server.

    Host memory for writing: the adapter once, and on the store's disk once for each version that a server names.
    """

    def __init__(self, api: AdapterApi) -> None:
        self._api = api
        self.name = api.http.name

    def versions(self) -> tuple[AdapterVersion, ...]:
        """Return the published versions that the server names, by number. The current one has the highest number."""
        return self._versions(self._served())

    def _served(self) -> Mapping[str, str]:
        """Return by name the path of each adapter that the server lists."""
        if not self._api.has_lora:
            return {}
        models = self._api.http.get("/v1/models", _Models).data
        return {model.id: model.root or "" for model in models if model.parent is not None}

    def _versions(self, served: Mapping[str, str]) -> tuple[AdapterVersion, ...]:
        found = list[tuple[int, str, str]]()
        for label, root in served.items():
            match = _ROOT.search(root)
            if match is not None and label == adapter_label(match[1], int(match[2])):
                found.append((int(match[2]), match[1], match[3]))
        found.sort()
        newest = {name: number for number, name, _ in found}
        return tuple(AdapterVersion(name, n, run, is_current=n == newest[name]) for n, name, run in found)

    # --- an update, in this order ---

    def check(self, target: AdapterTarget, version: int, manifest: Manifest, store: Path) -> None:
        """Check an offer, remove unused directories, and unload older versions that an earlier publish could not.

        Raises UnsupportedError, RefusedError, StaleVersionError, IncompatibleWeightsError.
        """
        api = self._api
        api.require_adapters()
        if target.base:
            raise UnsupportedError(
                f"{self.name} is a stock server, which can't say of which run its model is: publish without base"
            )
        if problems := list(adapter_problems(manifest, target, api)):
            raise misfit_error(problems)
        served = self._served()
        ours, label = self._of(target, served), adapter_label(target.name, version)
        if label in served.keys() - {each.label for each in ours}:
            raise RefusedError(f"{self.name} has an adapter {label!r} already: publish under another name")
        if ours and ours[-1].number >= version:
            raise StaleVersionError(
                f"{self.name} names {ours[-1].label} of run {ours[-1].run}, and {label} would not be newer: publish a "
                "version with a higher number"
            )
        self._remove_unused(served, store)
        self._unload([each.label for each in ours[: -1 - target.keep]])
        served = self._served()
        if api.capacity is not None and len(served) >= api.capacity:
            raise UnsupportedError(
                f"{self.name} has {len(served)} adapters loaded ({listed(sorted(served), separator=', ')}) and would "
                f"drop one: publish with a smaller keep, or start it with {api.limits}"
            )

    def write(self, target: AdapterTarget, url: str, store: Path, version: WeightVersion) -> Path:
        """Write and return the directory of a version in publication.

        `url`: the store's. Raises IntegrityError, VersionNotFoundError, OSError.
        """
        name = f"{adapter_label(target.name, version.number)}-{version.run}"
        path = self._folder(store) / name
        with _lock:
            if not path.exists():
                known = next(path.parent.parent.glob(f"*/{name}"), None)
                unfinished = UnfinishedDirectory(path)
                with on_failure(unfinished.discard):
                    if known is None:
                        source = registry.stored_source(url, version=version)
                        tensors, settings = self._api.peft_form(joined_tensors(source), target.config)
                        write_tensors(unfinished.path / "adapter_model.safetensors", tensors)
                        (unfinished.path / "adapter_config.json").write_text(json.dumps(settings, indent=2))
                    else:
                        shutil.copytree(known, unfinished.path, copy_function=_link, dirs_exist_ok=True)
                    unfinished.finish()
            os.utime(path)  # The server begins to load it now, also if it was written for an earlier try.
        return path

    def load(self, target: AdapterTarget, version: int, path: Path) -> None:
        """Have the server load the sealed version, and unload those that are older than `keep`.

        Raises InstallError if the server refuses it, RefusedError if it has another version of this name: its other
        versions go on. After a lost reply, ask for `versions`; a proxy's failure raises PeerDiedError, since the server
        may go on loading behind it.
        """
        label = adapter_label(target.name, version)
        try:
            self._api.http.post(self._api.load_route, {"lora_name": label, "lora_path": str(path)}, once=True)
        except ControlError as exc:
            if exc.status in NOT_READY:
                raise PeerDiedError(f"{exc}; the server may still load {label}", peer=self.name) from exc
            root = self._served().get(label)
            if root is None:
                # SGLang keeps it on the ranks that have loaded it, unlisted, until it is told to unload it.
                with contextlib.suppress(WeightcastError):
                    self._unload([label])
                shutil.rmtree(path, ignore_errors=True)
                raise InstallError(
                    f"{self.name} could not load {label} from {path}: {exc}; check that it sees this path. Its other "
                    f"versions go on{self._api.after_failure}"
                ) from exc
            if root != str(path):
                shutil.rmtree(path, ignore_errors=True)
                raise RefusedError(
                    f"since {label} was offered to {self.name}, another run or client has loaded {root} there under "
                    "this name: close the other publisher and publish again, or publish under another name"
                ) from exc
            # Loaded by an earlier request, whose reply was lost.
        try:
            self._unload([each.label for each in self._of(target, self._served())[: -1 - target.keep]])
        except WeightcastError as exc:
            logger.warning("%s did not unload older versions, the next offer will: %s", self.name, exc)

    def _of(self, target: AdapterTarget, served: Mapping[str, str]) -> list[AdapterVersion]:
        return [version for version in self._versions(served) if version.name == target.name]

    def _unload(self, labels: Sequence[str]) -> None:
        for label in labels:
            self._api.http.post(self._api.unload_route, {"lora_name": label}, once=True)

    # --- the directories ---

    def _folder(self, store: Path) -> Path:
        return store / FOLDER / self._api.dialect / urllib.parse.quote(self.name, safe="")

    def _remove_unused(self, served: Mapping[str, str], store: Path) -> None:
        """Remove directories of versions that the server does not name, and no request uses.

        A version has lost its name in an earlier publish, so the requests that had found it by then have begun. A
        server loads one after the other, so it may still be loading versions that are newer than those it names.
        """
        named = {Path(root).name for root in served.values()}
        newest = {version.name: version.number for version in self._versions(served)}
        unnamed = [path for path in self._folder(store).glob("*") if path.name not in named]
        in_use = self._api.adapters_in_use() if unnamed else ()
        for path in unnamed:
            match = _ROOT.search(str(path))
            is_newer = match is not None and int(match[2]) > newest.get(match[1], -1)
            may_be_loading = is_newer and time.time() - path.stat().st_mtime < LOAD_SECONDS
            if not may_be_loading and path.name.rpartition("-")[0] not in in_use:
                shutil.rmtree(path, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Make a hard link; a copy where the filesystem has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class _Model(msgspec.Struct):
    """`root`: an adapter's path. `parent`: an adapter's model; None for a model."""

    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]
