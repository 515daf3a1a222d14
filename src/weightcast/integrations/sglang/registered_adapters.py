"""Published adapters in SGLang's HTTP server: which version answers a request, and which have no request.

Invariants: SGLang's registry has a version from the moment when all ranks have it; a version is unloaded only after it
has left the registry and every request that the registry had found it for has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from weightcast.errors import RefusedError
from weightcast.format.adapters import AdapterVersion, adapter_label
from weightcast.format.messages import Offer
from weightcast.integrations.sglang import internals


class RegisteredAdapters:
    """The published adapters of one HTTP server. `manager`: SGLang's TokenizerManager.

    Raises UnsupportedError if this SGLang lacks a required name.
    """

    def __init__(self, manager: Any) -> None:
        internals.require(manager, "lora_registry", "lora_ref_cache", "_validate_and_resolve_lora")
        self._registry = manager.lora_registry
        internals.require(self._registry, "register", "unregister", "wait_for_unload", "get_all_adapters")
        internals.adapter_record()
        self._loaded_from_paths = manager.lora_ref_cache
        self._resolve = manager._validate_and_resolve_lora
        manager._validate_and_resolve_lora = self._resolved
        self._loaded: frozenset[str] = frozenset()
        self._registered: dict[str, str] = {}
        """By label that a request can name, the id of the version."""
        self._current: dict[str, str] = {}
        """By adapter, the label of its newest version."""
        self._draining: dict[str, asyncio.Task[None]] = {}
        """By label of a loaded version that no request can name any more, the wait for its requests."""

    async def _resolved(self, request: Any) -> None:
        """Find the ids of a request's adapters, as SGLang does; an adapter's name stands for its newest version."""
        named = request.lora_path
        if isinstance(named, str):
            request.lora_path = self._current.get(named, named)
        elif named:
            request.lora_path = [self._current.get(name, name) for name in named]
        await self._resolve(request)

    def require_room(self, offer: Offer) -> None:
        """Raise RefusedError if the name is that of an adapter that was loaded from a path."""
        assert offer.target
        label = adapter_label(offer.target.name, offer.version)
        others = self._loaded_from_paths.keys() | (self._registry.get_all_adapters().keys() - self._registered.keys())
        for name in (offer.target.name, label):
            if name in others:
                raise RefusedError(f"this server has an adapter {name!r} already: publish under another name")

    async def update(self, versions: Sequence[AdapterVersion], ids: Mapping[str, int | str]) -> None:
        """Answer requests with these versions. `ids`: by label, those of all loaded versions."""
        self._loaded = frozenset(ids)
        named = {version.label: version for version in versions}
        for label in named.keys() - self._registered.keys():
            adapter = internals.adapter(label, named[label].run, is_pinned=True)
            await self._registry.register(adapter)
            self._registered[label] = adapter.lora_id
        self._current = {version.name: version.label for version in versions if version.is_current}
        self._draining = {label: task for label, task in self._draining.items() if label in ids}
        for label in self._registered.keys() - named.keys():
            lora_id = self._registered.pop(label)
            # A client of SGLang's own route may have unloaded it.
            if label in self._registry.get_all_adapters():
                await self._registry.unregister(label)
                self._draining[label] = asyncio.ensure_future(self._registry.wait_for_unload(lora_id))

    def idle(self) -> tuple[str, ...]:
        """Return the labels of loaded versions that no request uses or can name."""
        waiting = {label for label, task in self._draining.items() if not task.done()}
        return tuple(sorted(self._loaded - self._registered.keys() - waiting))
