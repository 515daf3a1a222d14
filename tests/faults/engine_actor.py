"""An engine server in a process of its own, told over a pipe where to stop, what to break and when to end."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from ports import free_port

from faults.actors import WIDTH, Actor, Stops, build_model, digests, fill, footprint, settle_in


def engine_main(pipe: Connection, port: int, width: int, options: dict[str, Any]) -> None:
    from weightcast.control.server.app import EngineServer
    from weightcast.engines.module import ModuleEngine

    settle_in(options)
    load_seconds = options.pop("load_seconds", 0.0)
    stops = Stops(pipe)
    model = build_model(width)
    fill(model, 0)

    class StoppingEngine(ModuleEngine):
        fail_load = False

        def load(self, tensors: Any) -> None:
            stops.reach("load")
            if StoppingEngine.fail_load:
                some = list(tensors)[:2]
                super().load(some)
                raise RuntimeError("the test's loader failed half-way")
            time.sleep(load_seconds)
            super().load(tensors)

    with EngineServer(StoppingEngine(model), port=port, **options) as server:
        pipe.send(("url", server.url))
        while (words := pipe.recv())[0] != "end":
            match words:
                case ("stop at", phase):
                    stops.arm(phase)
                    pipe.send(("done",))
                case ("go",):
                    stops.go.set()
                case ("fail load", flag):
                    StoppingEngine.fail_load = flag
                    pipe.send(("done",))
                case ("cut", connection):
                    cut(connection, server.worker._session.info, server.port)
                    pipe.send(("done",))
                case ("served",):
                    pipe.send(("served", (msgspec.to_builtins(server.worker.info()), digests(model))))
                case ("footprint",):
                    pipe.send(("footprint", footprint()))


def cut(connection: str, info: Any, server_port: int) -> None:
    """Break connections to the publisher as the network would: its "link", or "data" (all else).

    At least one is there.
    """
    link, num_cut = _name(info.link), 0
    for number in os.listdir("/proc/self/fd"):
        # Descriptors come and go meanwhile, and are of all kinds.
        with contextlib.suppress(OSError), _socket(int(number)) as sock:
            peer, local = _name(sock.getpeername()), _name(sock.getsockname())
            is_data = sock.family == socket.AF_INET and peer != link and local != server_port
            if is_data if connection == "data" else peer == link:
                sock.shutdown(socket.SHUT_RDWR)
                num_cut += 1
    assert num_cut, f"no connection of the {connection}; the link's is {link}"


def _socket(number: int) -> socket.socket:
    """The socket behind a descriptor, by one of its own. Raises OSError if it is none."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _name(address: Any) -> int | str:
    """What tells a socket's address, or a URL of one, from others: a TCP port or an abstract name."""
    match address:
        case (_, int(port), *_):
            return port
        case bytes():
            return address.decode().removeprefix("\0")
        case str() if "@" in address:
            return address.rpartition("@")[2]
        case str() if found := re.search(r":(\d+)(/|$)", address):
            return int(found[1])
    return ""


class EngineProcess(Actor):
    def __init__(self, port: int = 0, *, width: int = WIDTH, **options: Any) -> None:
        super().__init__(engine_main, port or free_port(), width, options)
        self.width = width
        self.url: str = self.hear("url")

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])
