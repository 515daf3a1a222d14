"""`weightcast serve-store`: a store over HTTP, for readers and copies on other machines."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import socket
from pathlib import Path

from weightcast.cli import exits, output, values

EPILOG = """
examples:
  weightcast serve-store file:///mnt/weights
  weightcast serve-store file:///mnt/weights --host 0.0.0.0 --token-file ./token
  weightcast serve-store file:///mnt/copies --allow-push --port 8201

Others read it as the store store+http://HOST:8200?token_file=FILE: `weightcast pull`, `follow`, `export`, `inspect`
and `verify`. With --allow-push `weightcast push` writes versions into it. It speaks no TLS: let a reverse proxy do
that, and use store+https://. The first line on stdout is `weightcast: serving STORE at URL`. Ctrl-C or SIGTERM ends it,
with status 0.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", type=values.store, metavar="STORE", help="a store, file:///dir or s3://bucket/prefix")
    add("--host", default="127.0.0.1", help="address to listen on; except loopback, needs --token-file (%(default)s)")
    add("--port", type=values.integer(0, 65535), default=8200, help="port; 0: any free one (default: %(default)s)")
    add("--token-file", type=Path, metavar="FILE", help="a file with the bearer token that all requests need")
    add("--allow-push", action="store_true", help="take versions from `weightcast push`; without it, only reads")


def run(args: argparse.Namespace) -> int:
    token = output.read_token(args.token_file)
    with output.stage(output.IMPORTING):
        from weightcast.control.server.app import check_exposure
        from weightcast.control.server.store import StoreServer
        from weightcast.store.address import StoreAddress

    check_exposure(args.host, token)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.ExitStack() as stack:
        # SIGTERM raises like Ctrl-C, so that everything is closed.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        family, _, _, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        listening = stack.enter_context(socket.create_server(address, family=family))
        # Accepted connections inherit it, which asyncio does not set on this socket.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        store = StoreServer(StoreAddress.parse(args.store), token=token, allow_push=args.allow_push)
        stack.callback(store.close)
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"weightcast: serving {args.store} at store+http://{host}:{listening.getsockname()[1]}", flush=True)
        store.server().run(sockets=[listening])
    return exits.OK
