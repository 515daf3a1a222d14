"""The trainer's side of the control protocol over HTTP: one engine behind vLLM's four-phase routes.

Invariants: every request has a deadline; connections are kept between requests, and a request is sent again, once, only
if a kept connection was closed before any byte of the answer came (control calls are idempotent, so a lost reply does
no harm); no reply is read beyond the largest size of a message; errors name the engine and have the class that the
engine raised; requests never go through a proxy from the environment. The kind of server is detected whenever a
publisher connects, never configured.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 (socket encodes host names with it: else imported by the first connection)
import re
import select
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar, get_args

import h11
import msgspec

from weightcast import registry
from weightcast.errors import (
    ClosedError,
    ControlError,
    PeerDiedError,
    PeerTimeoutError,
    WeightcastError,
)
from weightcast.format.manifest import MAX_MESSAGE_BYTES, TensorSpec, decode, decoder
from weightcast.format.messages import (
    DtypesQuestion,
    HeldWeights,
    InitInfo,
    Offer,
    PauseMode,
    Seal,
    TensorDtypes,
    UpdateInfo,
    WeightInfo,
)
from weightcast.host.closing import close_in_child, on_failure
from weightcast.host.deadline import Deadline, number_of_seconds
from weightcast.host.descriptors import shortage
from weightcast.links.answers import error_in, tls_error
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import EngineClient, ServesTraffic

T = TypeVar("T")
_MAX_IDLE_SECONDS = 4.0
"""Below 5 s, after which uvicorn, and so vLLM and SGLang, closes an idle connection by default."""
_READ_BYTES = 1 << 16
_PAGE_BYTES = 64 << 20
"""Bytes of weights that an engine reads in one request, during which it does not generate."""

NOT_READY = (502, 503, 504)
"""Statuses that a starting server sends, or a proxy whose server has not answered."""
_START_FIRST = "start the server first, or wait for it: publish(wait_ready_seconds=...) or `weightcast publish --wait`"
_TOKEN = re.compile(r"[!-~]+")


class HttpEngine(EngineClient, ServesTraffic):
    """An engine server: `weightcast serve`, EngineServer, or vLLM.

    `pause`: how running requests are treated during an install. "keep" freezes them and continues with the new weights
    (the answer says which tokens came from which version), "wait" finishes them first, "abort" ends them. `token`: the
    server's bearer token. The methods speak weightcast's protocol; `connect` returns the client for a server of another
    dialect. Requests never go through a proxy from the environment. Thread-safe.
    """

    def __init__(
        self, url: str, *, token: str | None = None, pause: PauseMode = "keep", timeout_seconds: float = 60.0
    ) -> None:
        if pause not in get_args(PauseMode):
            raise ValueError(f"pause is {pause!r}; it must be one of {', '.join(get_args(PauseMode))}")
        self._routes = HttpRoutes(url, token=token, timeout_seconds=timeout_seconds)
        self.name = self._routes.name
        self._pause_mode = pause
        self._negotiated: EngineClient | None = None
        self._run = ""
        self._offered = -1
        """The version whose seal is sent with `finish`: the one that was offered last, until then; -1 for none."""
        self._seal: Seal | None = None
        self._has_lease = False

    def connect(self) -> EngineClient:
        """Detect the kind of server at the URL; return the client for it: this one, or one of a registered dialect.

        Raises PeerDiedError if nothing answers yet, ControlError if the server is not an engine server or lacks a route
        that the message names, other PeerErrors.
        """
        info = self._routes.probe("/weight_info", _AnyInfo)
        if info is not None and info.protocol is not None:
            self._has_lease = "lease" in info.abilities
            self.paused_seconds = 0.0 if "install" in info.abilities else None
            return self
        asked = []
        for kind, detect in registry.http_dialects():
            client = detect(self._routes, self._pause_mode)
            if client is not None:
                self._negotiated = client
                return client
            asked.append(kind)
        raise ControlError(
            f"{self.name} is not an engine server that weightcast knows: it has no route /weight_info of weightcast's "
            f"protocol, and it is not one of {', '.join(asked)}{self._routes.path_hint}",
            peer=self.name,
        )

    def info(self) -> WeightInfo:
        """GET /weight_info. Raises PeerError."""
        return self._routes.get("/weight_info", WeightInfo)

    def init(self, info: InitInfo) -> None:
        """POST /init_weight_transfer_engine. Raises EngineBusyError, UnsupportedError, PeerError."""
        token = self._routes.token
        info = info if token is None else msgspec.structs.replace(info, token=token)
        self._routes.post("/init_weight_transfer_engine", {"init_info": info})
        self._run, self._offered, self._seal = info.run, -1, None

    def update(self, info: UpdateInfo) -> None:
        """POST /update_weights with an offer, a seal or an abort. Raises the engine's error.

        The seal of the version that was offered is sent with `finish`, which follows.
        """
        if isinstance(info, Seal) and info.version == self._offered:
            self._seal = info
            return
        self._offered, self._seal = -1, None
        self._routes.post("/update_weights", {"update_info": info})
        if isinstance(info, Offer):
            self._offered = info.version

    def finish(self, version: int) -> None:
        """POST /finish_weight_update: seal and install the update. Raises IncompleteUpdateError, InstallError.

        An engine with the ability "install" pauses by itself, in this client's `pause` mode.
        """
        run = f"&run={self._run}" if self._run else ""
        path, start, said_seconds = f"/finish_weight_update?mode={self._pause_mode}{run}", time.perf_counter(), None
        body = {"weight_version": str(version), "seal": self._seal}
        self._offered, self._seal = -1, None
        try:
            content = self._routes.request("POST", path, msgspec.json.encode(body))[1]
            said_seconds = self._routes.decoded(path, content, _Finished).pause_seconds
        finally:
            if self.paused_seconds is not None:
                self.paused_seconds = time.perf_counter() - start if said_seconds is None else said_seconds

    def pause(self, run: str) -> None:
        """POST /pause. In an engine with the ability "lease" the pause ends with the run's lease."""
        self._routes.post(f"/pause?mode={self._pause_mode}&run={run}")

    def resume(self, run: str) -> None:
        """POST /resume."""
        self._routes.post(f"/resume?run={run}")

    def shutdown(self) -> None:
        """POST /shutdown_weight_transfer_engine: end the present run's session; the engine goes on serving."""
        self._routes.post("/shutdown_weight_transfer_engine")

    def specs(self) -> list[TensorSpec]:
        """GET /weight_specs: the engine's tensors. Raises UnsupportedError, PeerError."""
        return self._routes.get("/weight_specs", _Specs).tensors

    def dtypes(self, specs: Sequence[TensorSpec]) -> Mapping[str, str] | None:
        """POST /weight_dtypes. Returns None if the server has no such route. Raises UnsupportedError, PeerError."""
        if "dtypes" not in self.info().abilities:
            return None
        return self._routes.post_for("/weight_dtypes", DtypesQuestion(list(specs)), TensorDtypes).dtypes

    def held(self, names: Sequence[str] = (), *, bytes_per_second: float | None = None) -> HeldWeights | None:
        """GET /weight_digests: digests of all tensors (or of `names`), all of one version (see `tensor_digest`).

        Returns None if the engine's weights can't be read. The engine reads about 64 MiB per request, and may generate
        between requests; `bytes_per_second` limits the average.
        Raises ControlError if the version changes meanwhile.
        """
        if "prove" not in self.info().abilities:
            return None
        found: HeldWeights | None = None
        start, named = 0, "".join(f"&names={urllib.parse.quote(name)}" for name in names)
        while start >= 0:
            began = time.monotonic()
            page = self._routes.get(f"/weight_digests?start={start}&limit_bytes={_PAGE_BYTES}{named}", HeldWeights)
            if found is None:
                found = page
            elif (page.run, page.weight_version) != (found.run, found.weight_version):
                change = f"from version {found.weight_version} to {page.weight_version}"
                raise ControlError(f"{self.name} changed {change} while it was read: read it again", peer=self.name)
            else:
                found.tensors.extend(page.tensors)
                found.digests.update(page.digests)
                found.blocks.update(page.blocks)
                found.differing.update(page.differing)
                found.unproven.update(page.unproven)
            if 0 <= page.next <= start:
                raise ControlError(
                    f"{self.name} repeats its list of weights from tensor {start} on: install the same version of "
                    "weightcast in the engine",
                    peer=self.name,
                )
            start, num_bytes = page.next, sum(spec.num_bytes for spec in page.tensors)
            if bytes_per_second is not None and start >= 0:
                time.sleep(max(0.0, num_bytes / bytes_per_second - (time.monotonic() - began)))
        return found

    def digests(self) -> dict[str, str]:
        """Return the digest of every tensor that can be read. Raises what `held` raises."""
        held = self.held()
        return {} if held is None else held.digests

    def quarantine(self, reason: str) -> None:
        """POST /quarantine: the engine refuses to serve until a complete update has come."""
        self._routes.post("/quarantine", {"reason": reason[:4096]})

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        """Return the requests that the watchdog process sends if this process dies during the pause of `run`.

        Empty if the engine that `connect` has detected ends the pause with the run's lease.
        """
        if self._has_lease:
            return []
        return [self._routes.recovery_request(f"/resume?run={run}")]

    def close(self) -> None:
        """Close the connections, and the client that `connect` returned last. Idempotent."""
        if self._negotiated is not None:
            self._negotiated.close()
        self._routes.close()


class _AnyInfo(msgspec.Struct):
    """Reply of /weight_info, of weightcast's protocol or of stock vLLM, whose reply has no `protocol`."""

    weight_version: str
    protocol: int | None = None
    abilities: tuple[str, ...] = ()


class _Finished(msgspec.Struct):
    """The part of an engine's reply to an install that is used."""

    pause_seconds: float | None = None


class _Specs(msgspec.Struct):
    tensors: list[TensorSpec]


for _kind in (_AnyInfo, WeightInfo, _Finished):
    decoder(_kind)


class HttpRoutes:
    """HTTP requests to the server at `url`, which is the engine's name in errors. Thread-safe.

    `headers`: sent with every request. `token`: sent as a bearer token. `timeout_seconds`: limit of a whole request.
    Raises ValueError if `url` is not the URL of a server.
    """

    def __init__(self, url: str, *, token: str | None, timeout_seconds: float) -> None:
        wanted = "is not the URL of an engine; write one like http://127.0.0.1:8000"
        if not isinstance(url, str):
            raise TypeError(f"{url!r:.80} {wanted}")
        self.name = url.rstrip("/")
        try:
            parts = self._url = urllib.parse.urlsplit(self.name)
            is_whole = url.startswith(("http://", "https://")) and parts.hostname and parts.port != 0
        except ValueError:
            is_whole = False
        if not is_whole or parts.query or parts.fragment or url.split() != [url]:
            raise ValueError(f"{url!r} {wanted}")
        if "@" in parts.netloc:
            raise ValueError(
                f"{url!r} is not the URL of an engine: it has a user name, which is not sent; leave it out, and pass "
                "token="
            )
        given: Any = token
        if given is not None and not (isinstance(given, str) and _TOKEN.fullmatch(given)):
            raise ValueError("the token must be one word of ASCII, without spaces and line ends: strip() it")
        root = f"{parts.scheme}://{parts.netloc}"
        self.path_hint = f"; its URL has the path {parts.path}: give the server's root, {root}" if parts.path else ""
        """For a server that is not an engine: the remedy if its URL has a path, else empty."""
        self.token = token
        self.headers = {"content-type": "application/json"}
        if token is not None:
            self.headers["authorization"] = f"Bearer {token}"
        self._timeout_seconds = number_of_seconds("timeout_seconds", timeout_seconds)
        self._lock = threading.Lock()
        self._idle: list[tuple[HttpConnection, float]] = []
        """Idle connections with the time of their last answer, by `time.monotonic`, the most recent one last."""
        self._closed = False

    def get(self, path: str, kind: type[T]) -> T:
        """Send a GET and decode the reply. Raises PeerError, the engine's error; ControlError for an invalid reply."""
        return self.decoded(path, self.request("GET", path)[1], kind)

    def post(self, path: str, body: object = None, *, once: bool = False) -> bytes:
        """Send a POST, `body` as JSON, and return the reply's bytes. Raises PeerError, or the engine's error.

        `once`: for a request that is not idempotent. It uses a new connection and is never repeated.
        """
        return self.request("POST", path, b"" if body is None else msgspec.json.encode(body), once=once)[1]

    def post_for(self, path: str, body: object, kind: type[T]) -> T:
        """Send a POST and decode the reply. Raises what `get` raises."""
        return self.decoded(path, self.post(path, body), kind)

    def recovery_request(self, path: str, body: object = None, **options: Any) -> RecoveryRequest:
        """Return such a POST as a request for the watchdog process. `options`: those of `RecoveryRequest`."""
        text = "" if body is None else msgspec.json.encode(body).decode()
        return RecoveryRequest(f"{self.name}{path}", dict(self.headers), text, **options)

    def probe(self, path: str, kind: type[T]) -> T | None:
        """Send a GET; return None if the server lacks the route or its reply is invalid. Else raises what `get` raises.

        The statuses 502, 503 and 504, which a starting server or its proxy sends, raise PeerDiedError, as if nothing
        had answered.
        """
        try:
            status, content = self.request("GET", path, expected=(200, 404, 405, *NOT_READY))
        except PeerDiedError as exc:
            has_no_address = isinstance(exc.__cause__, socket.gaierror)
            remedy = f"check the host name; {_START_FIRST}" if has_no_address else _START_FIRST
            raise PeerDiedError(f"{exc}; {remedy}", peer=self.name) from exc
        if status in NOT_READY:
            error = self._error(path, status, content)
            if isinstance(error, ControlError):
                error = PeerDiedError(f"{error}; {_START_FIRST}", peer=self.name)
            raise error
        try:
            return decode(content, kind) if status == 200 else None
        except WeightcastError:
            return None

    def close(self) -> None:
        """Close the connections; one with a request in progress is closed when that ends. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def decoded(self, path: str, content: bytes, kind: type[T]) -> T:
        """Decode a reply. Raises ControlError if it is invalid."""
        try:
            return decode(content, kind)
        except WeightcastError as exc:
            raise ControlError(f"{self.name}{path} did not answer as an engine does: {exc}", peer=self.name) from exc

    def request(
        self, method: str, path: str, body: bytes = b"", *, expected: Collection[int] = (200,), once: bool = False
    ) -> tuple[int, bytes]:
        """Return the status, one of `expected`, and the reply, up to the size limit of a message, by the deadline.

        If the server closes a kept connection before any byte of the answer came, the request is sent once more, over a
        new connection: most likely the server had closed an idle connection. If it did act on the request, the repeat
        does no harm, since control calls are idempotent for a (run, version); all other requests use `once`.
        """
        deadline = Deadline(self._timeout_seconds)
        connection = None if once else self._kept()
        is_kept = connection is not None
        try:
            while True:
                connection = connection or HttpConnection(self._url, deadline)
                try:
                    target = f"{self._url.path}{path}"
                    status, content = connection.request(method, target, self.headers, body, deadline)
                    break
                except BaseException as exc:
                    connection.close()
                    is_closed = isinstance(exc, (ConnectionResetError, BrokenPipeError))
                    if not (is_kept and is_closed) or connection.has_answered:
                        raise
                connection, is_kept = None, False
        except TimeoutError as exc:
            has_begun = connection is not None and connection.has_answered
            what = "did not complete its answer in time" if has_begun else "gave no answer in time"
            raise PeerTimeoutError(f"{self.name}{path} {what}", peer=self.name) from exc
        except (OSError, h11.ProtocolError, UnicodeError) as exc:
            if isinstance(exc, ssl.SSLError):
                trusted = "this system or the file in SSL_CERT_FILE has"
                raise tls_error(exc, self.name, trusted=trusted, scheme="http://") from exc
            if short := shortage(exc):
                raise WeightcastError(f"{self.name}{path} can't be called: {short}") from exc
            raise PeerDiedError(f"{self.name}{path} can't be reached: {exc}", peer=self.name) from exc
        with self._lock:
            is_kept = not self._closed and connection.is_idle
            if is_kept:
                self._idle.append((connection, time.monotonic()))
        if not is_kept:
            connection.close()
        if len(content) > MAX_MESSAGE_BYTES:
            raise ControlError(
                f"{self.name}{path} answered with more than {MAX_MESSAGE_BYTES} bytes, the limit of a message",
                peer=self.name,
            )
        if status not in expected:
            raise self._error(path, status, content)
        return status, content

    def _kept(self) -> HttpConnection | None:
        """Return an idle connection that can be reused, if there is one. Raises ClosedError."""
        while True:
            with self._lock:
                if self._closed:
                    raise ClosedError(f"the client of {self.name} was closed: make another one")
                if not self._idle:
                    return None
                connection, used_at = self._idle.pop()
            if time.monotonic() - used_at < _MAX_IDLE_SECONDS and connection.is_reusable:
                return connection
            connection.close()

    def _error(self, path: str, status: int, content: bytes) -> WeightcastError:
        error = error_in(content, self.name)
        if isinstance(error, WeightcastError):
            return error
        hint = {
            401: ": pass the engine's token" if self.token is None else ": the token does not match",
            404: self.path_hint or ": check that this is the URL of an engine server",
        }.get(status, "")
        return ControlError(f"{self.name}{path} answered {status}{hint}: {error}", peer=self.name, status=status)


class HttpConnection:
    """One HTTP/1.1 connection, for one request at a time. Connects on creation; is closed in forked children.

    A request ends by its deadline, however slowly bytes come. Raises OSError, at the deadline TimeoutError.
    """

    def __init__(self, url: urllib.parse.SplitResult, deadline: Deadline) -> None:
        """`url`: must have a host; the default port is that of its scheme, http or https."""
        assert url.hostname is not None
        port = url.port or (443 if url.scheme == "https" else 80)
        sock = socket.create_connection((url.hostname, port), deadline.require_seconds())
        with on_failure(sock.close):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if url.scheme == "https":
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=url.hostname)
        self._socket = close_in_child(sock)
        self._host = url.netloc.rpartition("@")[2]
        self._protocol = h11.Connection(h11.CLIENT)
        self.has_answered = False
        """True once a byte of the answer to the present request was received."""
        self.is_idle = True
        """True if no request is in progress: the last answer is complete, and the server keeps the connection."""

    @property
    def is_reusable(self) -> bool:
        """True if another request may be sent: neither bytes nor EOF followed the last answer."""
        if not self.is_idle or self._protocol.trailing_data[0] or self._socket.fileno() < 0:  # closed in a forked child
            return False
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)

    def request(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, deadline: Deadline
    ) -> tuple[int, bytes]:
        """Send a request; return the answer's status and content, of which at most `MAX_MESSAGE_BYTES` are read.

        Raises OSError if the connection breaks, TimeoutError at the deadline, h11.ProtocolError for invalid HTTP.
        """
        self.has_answered = self.is_idle = False
        fields = {"host": self._host, "content-length": str(len(body)), **headers}
        request = h11.Request(method=method, target=target, headers=list(fields.items()))
        data = b"".join(filter(None, map(self._protocol.send, (request, h11.Data(body), h11.EndOfMessage()))))
        # A server may refuse a request and close before it has read all of it; its answer can still be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.settimeout(deadline.require_seconds())
            self._socket.sendall(data)
        status, content = 0, bytearray()
        while len(content) <= MAX_MESSAGE_BYTES:
            event = self._protocol.next_event()
            if event is h11.NEED_DATA:
                self._socket.settimeout(deadline.require_seconds())
                # A server without TCP_NODELAY sends the body only after the ACK of the header, which Linux delays by
                # 40 ms on a kept connection. The option is reset by the kernel, so it is set each time.
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                received = self._socket.recv(_READ_BYTES)
                self.has_answered |= bool(received)
                if not received and not status:
                    raise ConnectionResetError("the server closed the connection without an answer")
                self._protocol.receive_data(received)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.EndOfMessage):
                if self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE:
                    self._protocol.start_next_cycle()
                    self.is_idle = True
                break
        return status, bytes(content)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
