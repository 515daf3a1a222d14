"""Tables of names and import paths: nothing is imported before its first use.

Third parties add to each of the three tables by an entry point, whose value is `module:attribute`. In the group
`weightcast.transports` its name is a URL scheme, and its attribute a `seams.transport.Transport`; for
`weightcast.dialects` and `weightcast.engine_objects` see `HTTP_DIALECTS` and `OBJECT_DIALECTS`. Names of weightcast's
own can't be taken.
"""

from __future__ import annotations

import importlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcast.seams.client import EngineClient
    from weightcast.seams.transport import Transport

TRANSPORTS = {
    "memory": "weightcast.transports.memory:TRANSPORT",
    "ipc": "weightcast.transports.ipc:TRANSPORT",
    "gloo": "weightcast.transports.collective:GLOO",
    "nccl": "weightcast.transports.collective:NCCL",
    "file": "weightcast.transports.store:TRANSPORT",
    "s3": "weightcast.transports.store:S3",
}
READ_ONLY = dict.fromkeys(("store+http", "store+https"), "weightcast.transports.store:S3")
"""Stores that another host serves: a publisher can't write to them."""
ENTRY_POINT_GROUP = "weightcast.transports"

_ELSEWHERE = ("s3",)
"""Schemes of stores whose URL names another host than that of the publisher."""

STORED_SOURCES = dict.fromkeys(("file", "s3", "store+http", "store+https"), "weightcast.sources.store:StoreSource")
"""For transports that keep versions: a `Source` of the newest one, created from the transport's URL."""

HTTP_CLIENT = "weightcast.control.client:HttpEngine"
"""The client for an engine server given as a URL, which detects the server's dialect."""

HTTP_DIALECTS = {
    "vllm": "weightcast.integrations.vllm.stock_reload:detect",
    "sglang": "weightcast.integrations.sglang.dialect:detect",
}
"""Kinds of servers that don't speak weightcast's protocol. Each is a function of the server's
`control.client.HttpRoutes` and the pause mode, which returns an `EngineClient`, or None for a server of another kind.
Called in this order."""
DIALECT_GROUP = "weightcast.dialects"

OBJECT_DIALECTS = {"vllm": "weightcast.integrations.vllm.clients:detect"}
"""Kinds of engines that are Python objects. Each is a function of the object, which returns an `EngineClient` for each
part of it that takes updates by itself, or an empty list for an object of another kind."""
OBJECT_GROUP = "weightcast.engine_objects"


def scheme(url: str) -> str:
    """Return the scheme of a transport's URL. Raises ValueError if it has none, TypeError if it is not text."""
    if not isinstance(url, str):
        raise TypeError(
            f"{url!r:.80} is not a transport URL; pass a str such as 'ipc://', or 'file:///DIR' for a directory"
        )
    name, separator, rest = url.partition("://")
    if not separator or not name:
        schemes = ", ".join(f"{n}://" for n in registered_schemes())
        raise ValueError(f"{url!r} is not a transport URL; write one like {schemes} (a directory is file:///DIR)")
    netloc = rest.partition("/")[0]
    if netloc.count(":") > 1 and "[" not in netloc:
        raise ValueError(f"{url!r} has an IPv6 address without brackets: write one like '{name}://[::1]:0'")
    return name


def registered_schemes() -> list[str]:
    """Return the schemes that can be resolved."""
    return sorted(name for name, _ in _targets(TRANSPORTS, ENTRY_POINT_GROUP))


def transport(url: str) -> Transport:
    """Import the `Transport` for a URL's scheme. Raises ValueError, naming the known ones, if there is none."""
    name = scheme(url)
    target = next((target for other, target in _targets(TRANSPORTS, ENTRY_POINT_GROUP) if other == name), None)
    if name in READ_ONLY:
        raise ValueError(
            f"{url!r} is a store that another host serves, and is only read: publish into a store of this host, "
            "file:///DIR, and copy its versions with `weightcast push`"
        )
    if target is None:
        remedy = " (the URLs of engines go into engines=[...])" if name in ("http", "https") else ""
        raise ValueError(f"no transport {name!r}; known here: {', '.join(registered_schemes())}{remedy}")
    found: Transport = _load(target)
    return found


def readable_transport(url: str) -> Transport:
    """Return the `Transport` whose receiver reads from a URL that may be read only. Raises as `transport`."""
    target = READ_ONLY.get(scheme(url))
    found: Transport = transport(url) if target is None else _load(target)
    return found


def is_stored(url: str) -> bool:
    """Return whether the transport of this URL keeps versions that `stored_source` can read."""
    return scheme(url) in STORED_SOURCES


def stored_source(url: str, **options: Any) -> Any:
    """Return a `Source` of the newest version at this URL. Raises what its constructor raises."""
    return _load(STORED_SOURCES[scheme(url)])(url, **options)


def http_client(url: str, **options: Any) -> EngineClient:
    """Return the client for an engine server at a URL. `options`: those of `HttpEngine`."""
    found: EngineClient = _load(HTTP_CLIENT)(url, **options)
    return found


def http_dialects() -> Iterator[tuple[str, Callable[[Any, Any], EngineClient | None]]]:
    """Yield each dialect's name and function, which is imported only then."""
    return ((name, _load(target)) for name, target in _targets(HTTP_DIALECTS, DIALECT_GROUP))


def engine_clients(engine: object) -> list[EngineClient]:
    """Return an `EngineClient` for each independently updated part of an engine object.

    Raises TypeError for an object of an unknown kind.
    """
    targets = dict(_targets(OBJECT_DIALECTS, OBJECT_GROUP))
    for target in targets.values():
        clients: list[EngineClient] = _load(target)(engine)
        if clients:
            return clients
    raise TypeError(
        f"{type(engine).__name__} is not an engine of a known kind ({', '.join(targets)}): pass a URL or an "
        "EngineClient"
    )


def _targets(table: Mapping[str, str], group: str) -> Iterator[tuple[str, str]]:
    """The table's names and targets, then those of other packages."""
    yield from table.items()
    yield from ((point.name, point.value) for point in entry_points(group=group) if point.name not in table)


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def host(url: str) -> str:
    """Return the host of a transport's URL, without the port; of a store on another host the option `host`."""
    if scheme(url) in _ELSEWHERE:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)
        return query.get("host", ["127.0.0.1"])[0]
    return urllib.parse.urlsplit(url).hostname or "127.0.0.1"


def endpoint(url: str) -> tuple[str, int]:
    """Host and port that `scheme://HOST:PORT` listens at; port 0 for a free one. Raises ValueError."""
    try:
        port = 0 if scheme(url) in _ELSEWHERE else urllib.parse.urlsplit(url).port or 0
    except ValueError as exc:
        raise ValueError(f"{url!r}: {exc}") from exc
    if host(url) in ("0.0.0.0", "::"):
        raise ValueError(f"{url!r} names no address that engines can connect to: write this host's own")
    return host(url), port
