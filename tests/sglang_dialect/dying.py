"""Has this process, a trainer, die at a certain moment of the making of a group with a stock SGLang server."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import urllib.parse
from typing import Any, Literal, get_args

from weightcast.integrations.sglang.stock import group as stock_group
from weightcast.integrations.sglang.stock.group import StockGroup
from weightcast.integrations.sglang.stock.routes import SglangRoutes
from weightcast.process_group import join_store

Moment = Literal["before ranks connect", "when ranks wait for ours", "when ranks wait in gloo", "after the join"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)

_HIGHEST = struct.pack("=H", socket.AF_INET) + struct.pack(">H", 0xFFFF) + bytes([255] * 4)
"""Of two addresses, the higher one's rank connects to the other one, in gloo."""


def die_in_join(moment: Moment, store_port: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
    """Patch this process, which sends itself this signal then. `store_port`: of a store that outlives it, for gloo."""

    def die() -> None:
        os.kill(os.getpid(), number)

    match moment:
        case "before ranks connect":

            def ask_and_die(routes: SglangRoutes, group: str, host: str, port: int, *rest: Any) -> None:
                _send_join(routes, group, host, port, *rest)
                die()

            SglangRoutes.join_group = ask_and_die  # type: ignore[method-assign]
            StockGroup.connect = lambda _: threading.Event().wait()  # type: ignore[method-assign,assign,return-value]
        case "when ranks wait for ours":

            def wait_for_them_and_die(backend: str, store: Any, *, size: int, **options: Any) -> None:
                store.wait([f"0/{rank}" for rank in range(1, size)])
                die()

            stock_group.ProcessGroup = wait_for_them_and_die  # type: ignore[misc,assign]
        case "when ranks wait in gloo":

            def answer_and_die(backend: str, store: Any, *, size: int, **options: Any) -> None:
                member = bytearray(store.get("0/1"))
                name_bytes = struct.unpack_from("=Q", member)[0]
                member[16 + name_bytes : 24 + name_bytes] = _HIGHEST
                store.set("0/0", bytes(member))
                die()

            serve = stock_group.serve_shared_store

            def serve_elsewhere(host: str, seconds: float) -> Any:
                _, listener = serve(host, seconds)
                return join_store(host, store_port, seconds), listener

            def ask(routes: SglangRoutes, group: str, host: str, port: int, *rest: Any) -> None:
                join(routes, group, host, store_port, *rest)

            join = SglangRoutes.join_group
            SglangRoutes.join_group = ask  # type: ignore[method-assign]
            stock_group.serve_shared_store = serve_elsewhere
            stock_group.ProcessGroup = answer_and_die  # type: ignore[misc,assign]
        case "after the join":
            connect = StockGroup.connect

            def connect_and_die(group: StockGroup) -> None:
                connect(group)
                die()

            StockGroup.connect = connect_and_die  # type: ignore[method-assign]


def _send_join(
    routes: SglangRoutes, group: str, host: str, port: int, rank_offset: int, size: int, backend: str
) -> None:
    """The request without its reply: it has gone when this returns."""
    server = urllib.parse.urlsplit(routes.name)
    body = {"master_address": host, "master_port": port, "rank_offset": rank_offset, "world_size": size}
    data = json.dumps(body | {"group_name": group, "backend": backend}).encode()
    head = f"POST /init_weights_update_group HTTP/1.1\r\nHost: {server.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((server.hostname, server.port)) as sock:
        sock.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
