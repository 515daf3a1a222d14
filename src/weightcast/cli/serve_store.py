"""`weightcast serve-store`: a store over HTTP, for readers and copies on other machines."""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path

from weightcast.cli import exits, output, values

EPILOG = """
examples:
  weightcast serve-store file:///mnt/weights
  weightcast serve-store file:///mnt/weights --host 0.0.0.0 --token-file ./token
  weightcast serve-store file:///mnt/weights --host 0.0.0.0 --token-file ./token --tls-certificate ./chain-and-key.pem
  weightcast serve-store file:///mnt/copies --allow-push --port 8201

Others read it as the store store+http://HOST:8200?token_file=FILE: `weightcast pull`, `follow`, `export`, `inspect`
and `verify`. With --allow-push `weightcast push` writes versions into it. With --tls-certificate, or behind a reverse
proxy that speaks TLS, the URL is store+https://. The first line on stdout is `weightcast: serving STORE at URL`. Ctrl-C
or SIGTERM ends it, with status 0.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", type=values.store, metavar="STORE", help="a store, file:///dir or s3://bucket/prefix")
    add("--host", default="127.0.0.1", help="address to listen on; except loopback, needs --token-file (%(default)s)")
    add("--port", type=values.integer(0, 65535), default=8200, help="port; 0: any free one (default: %(default)s)")
    add("--token-file", type=Path, metavar="FILE", help="a file with the bearer token that all requests need")
    add("--tls-certificate", type=Path, metavar="FILE", help="serve TLS: a certificate with its chain, in PEM format")
    add("--tls-key", type=Path, metavar="FILE", help="the private key, in PEM format, if it is in a file of its own")
    add("--allow-push", action="store_true", help="accept versions from `weightcast push` (default: only reads)")


def run(args: argparse.Namespace) -> int:
    if args.tls_key is not None and args.tls_certificate is None:
        args.usage_error("--tls-key needs --tls-certificate")
    token = output.read_token(args.token_file)
    with output.stage(output.IMPORTING):
        from weightcast.control.server.connections import HttpServer
        from weightcast.control.server.listening import check_exposure, listen, url_of
        from weightcast.control.server.store import StoreServer
        from weightcast.store.address import StoreAddress

    check_exposure(args.host, token)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with output.until_interrupted(), contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(args.host, args.port))
        store = StoreServer(StoreAddress.parse(args.store), token=token, allow_push=args.allow_push)
        stack.callback(store.close)
        server = HttpServer(store.app, certificate=args.tls_certificate, key=args.tls_key)
        scheme = "http" if args.tls_certificate is None else "https"
        url = url_of(args.host, listening.getsockname()[1], scheme)
        print(f"weightcast: serving {args.store} at store+{url}", flush=True)
        server.run([listening])
    return exits.OK
