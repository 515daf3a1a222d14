"""`weightcast dashboard`: a page that shows a fleet and its publisher, live."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from weightcast.cli import exits, output, values
from weightcast.cli.dashboard.feed import Feed
from weightcast.control.server.connections import HttpServer
from weightcast.control.server.listening import listen, url_of

EPILOG = """
examples:
  weightcast dashboard http://127.0.0.1:8000 http://127.0.0.1:8001
  weightcast dashboard http://127.0.0.1:8000 --publisher http://127.0.0.1:9464
  weightcast dashboard --publisher http://127.0.0.1:9464 --port 0

--publisher is the address at which a Publisher(metrics="127.0.0.1:9464") serves its metrics: the page then has its last
publishes, and the reasons for which engines are behind. The publisher's engines are asked too, also those that join
later; a token is sent to them as well. The first line on stdout is `weightcast: dashboard at URL`. The page shows no
data of requests, and needs no token. Ctrl-C or SIGTERM ends the command, with status 0.
"""

_LOOK_SECONDS = 0.1
_SIGN_OF_LIFE_SECONDS = 5.0
_POLICY = "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engines", nargs="*", metavar="URL", help="an engine, such as http://127.0.0.1:8000")
    add("--publisher", metavar="URL", help="a publisher's metrics, such as http://127.0.0.1:9464")
    add(
        "--every",
        type=values.seconds,
        default=2.0,
        metavar="SECONDS",
        help="pause between two requests of an engine (%(default)s)",
    )
    add(
        "--deadline",
        type=values.seconds,
        default=5.0,
        metavar="SECONDS",
        help="longest wait for an answer (%(default)s)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=values.integer(0, 65535), default=8090, help="port; 0: any free one (default: %(default)s)")
    output.add_token(parser)


def run(args: argparse.Namespace) -> int:
    if not args.engines and args.publisher is None:
        args.usage_error("at least one URL or --publisher is required")
    token = output.read_token(args.token_file)
    with output.until_interrupted(), contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(args.host, args.port))
        feed = Feed(args.engines, args.publisher, token=token, every_seconds=args.every, deadline_seconds=args.deadline)
        stack.callback(feed.close)
        address, port = listening.getsockname()[:2]
        print(f"weightcast: dashboard at {url_of(args.host, port)}", flush=True)
        is_local = address in ("127.0.0.1", "::1")
        page_server(feed, ["127.0.0.1", "localhost", "::1", "[::1]"] if is_local else ["*"]).run(sockets=[listening])
    return exits.OK


def page_server(feed: Feed, hosts: list[str]) -> HttpServer:
    """Return a server of the page. Requests with another Host are refused, so that other sites' pages can't read it."""
    page = Path(__file__).with_name("page.html").read_text()
    script = page.partition("<script>")[2].partition("</script>")[0]
    policy = _POLICY.format(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy, "cache-control": "no-store"})

    async def events(request: Request) -> Response:
        return StreamingResponse(changes(), headers={"cache-control": "no-store"}, media_type="text/event-stream")

    async def changes() -> AsyncIterator[bytes]:
        """Yield what has changed. A slow page gets fewer events, never a queue of them."""
        seen, num_looks = 0, 0
        while not server.should_exit:
            found, num_looks = feed.changes(seen), num_looks + 1
            if found is not None:
                seen, num_looks = found.seen, 0
                yield b"data: " + msgspec.json.encode(found) + b"\n\n"
            elif num_looks * _LOOK_SECONDS > _SIGN_OF_LIFE_SECONDS:
                num_looks = 0
                yield b"data: null\n\n"
            await asyncio.sleep(_LOOK_SECONDS)

    app = Starlette(
        routes=[Route("/", show), Route("/events", events)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )
    server = HttpServer(app)
    return server
