"""Names to code, as strings only: nothing is imported until it is asked for.

Third parties add a transport with an entry point in the group `weightcast.transports`: its name is the URL scheme,
its value `module:attribute`, a `Transport` pair.
"""

from __future__ import annotations

import importlib
import urllib.parse
from importlib.metadata import entry_points
from typing import Any

TRANSPORTS = {
    "memory": "weightcast.transports.memory:TRANSPORT",
    "ipc": "weightcast.transports.ipc:TRANSPORT",
    "gloo": "weightcast.transports.collective:TRANSPORT",
    "nccl": "weightcast.transports.collective:TRANSPORT",
    "file": "weightcast.transports.store:TRANSPORT",
}
ENTRY_POINT_GROUP = "weightcast.transports"

KEPT_SOURCES = {"file": "weightcast.sources.store:StoreSource"}
"""Of transports that keep versions: a `Source` of the newest one, made from the transport's URL."""

HTTP_DIALECTS = {
    "vllm": "weightcast.integrations.vllm.http:speak",
    "sglang": "weightcast.integrations.sglang.dialect:speak",
    "vllm without weightcast": "weightcast.integrations.vllm.reload_client:speak",
}
"""Kinds of servers that are not asked in the native protocol: a function of the routes and the pause mode for each,
which returns an `EngineClient`, or None for a server of another kind."""

OBJECT_DIALECTS = {"vllm": "weightcast.integrations.vllm.objects:speak"}
"""Kinds of engines that are Python objects: a function of the object for each, which returns an `EngineClient` for each
part of it that takes updates by itself, or an empty list for an object of another kind."""


def scheme(url: str) -> str:
    """The scheme of a transport's URL. Raises ValueError if there is none."""
    name, separator, _ = url.partition("://")
    if not separator or not name:
        raise ValueError(f"{url!r} is not a transport URL; write one like {', '.join(f'{n}://' for n in known())}")
    return name


def known() -> list[str]:
    """The schemes that can be resolved here."""
    return sorted({*TRANSPORTS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def transport(url: str) -> Any:
    """Import the `Transport` for a URL's scheme. Raises ValueError, naming the known ones, if there is none."""
    name = scheme(url)
    target = TRANSPORTS.get(name)
    if target is None:
        target = next((p.value for p in entry_points(group=ENTRY_POINT_GROUP) if p.name == name), None)
    if target is None:
        raise ValueError(f"no transport {name!r}; known here: {', '.join(known())}")
    return _load(target)


def keeps(url: str) -> bool:
    """Whether the transport of this URL keeps versions that `kept_source` can read."""
    return scheme(url) in KEPT_SOURCES


def kept_source(url: str, **options: Any) -> Any:
    """A `Source` of the newest version that is kept at this URL; its `version` says which. Raises what it raises."""
    return _load(KEPT_SOURCES[scheme(url)])(url, **options)


def http_dialects() -> list[Any]:
    """Import what `HTTP_DIALECTS` names, in the order in which a server is to be asked."""
    return [_load(target) for target in HTTP_DIALECTS.values()]


def engine_clients(engine: object) -> list[Any]:
    """An `EngineClient` for each part of an engine object that takes updates by itself. Raises TypeError for none."""
    for target in OBJECT_DIALECTS.values():
        clients: list[Any] = _load(target)(engine)
        if clients:
            return clients
    raise TypeError(f"{type(engine).__name__} is no engine of a known kind ({', '.join(OBJECT_DIALECTS)})")


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def host(url: str) -> str:
    """The host of a transport's URL, without the port."""
    return urllib.parse.urlsplit(url).hostname or "127.0.0.1"
