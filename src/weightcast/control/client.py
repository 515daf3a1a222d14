"""The trainer's side of the control protocol: one engine behind vLLM's four-phase routes, over HTTP.

Invariants: every request has a deadline, a connection of its own, and is sent once (the protocol's own idempotence
heals lost replies, not retries here); no reply is read beyond what a message may be; errors name the engine, and are of
the class that it raised; requests go straight to it, never through a proxy of the environment. What kind of server
answers at a URL is asked whenever a publisher connects, and never configured.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import ssl
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args

import msgspec

from weightcast import registry
from weightcast.control.worker_rpc import unmarked
from weightcast.errors import (
    ClosedError,
    ControlError,
    ErrorRecord,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    WeightcastError,
    from_record,
)
from weightcast.format.manifest import MAX_MESSAGE_BYTES, TensorSpec, decode
from weightcast.format.messages import InitInfo, PauseMode, UpdateInfo, WeightInfo
from weightcast.host.deadline import Deadline, number_of_seconds
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import EngineClient, Fingerprint, ServesTraffic

T = TypeVar("T")
_encode = msgspec.json.encode

_NOT_READY = (502, 503, 504)
_START_FIRST = "start it first, or wait for it: publish(wait_ready_seconds=...), `weightcast publish --wait`"
_TOKEN = re.compile(r"[!-~]+")


class HttpEngine(EngineClient, ServesTraffic):
    """An engine server: `weightcast serve`, EngineServer, or vLLM.

    `pause` is how its requests are treated during an install: `keep` freezes them and goes on with the new weights
    (the answer says which tokens came from which), `wait` finishes them first, `abort` ends them. `token` is the
    server's. The methods speak the native protocol; `connect` has the client for a server of another dialect.
    Requests go straight to the engine, never through a proxy that the environment names. Thread-safe.
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

    def connect(self) -> EngineClient:
        """Ask what answers here now; return the client that speaks to it: this one, or one of a registered dialect.

        Raises PeerDiedError if nothing answers yet, ControlError if it is no engine server or lacks what it
        names, other PeerErrors.
        """
        info = self._routes.probe("/weight_info", _AnyInfo)
        if info is not None and info.protocol is not None:
            return self
        asked = []
        for kind, detect in registry.http_dialects():
            client = detect(self._routes, self._pause_mode)
            if client is not None:
                self._negotiated = client
                return client
            asked.append(kind)
        raise ControlError(
            f"{self.name} is no engine server that weightcast knows: it has no /weight_info of the control protocol, "
            f"and is none of {', '.join(asked)}{self._routes.path_hint}",
            peer=self.name,
        )

    def info(self) -> WeightInfo:
        """GET /weight_info. Raises PeerError."""
        return self._routes.get("/weight_info", WeightInfo)

    def init(self, info: InitInfo) -> None:
        """POST /init_weight_transfer_engine. Raises EngineBusyError, UnsupportedError, PeerError."""
        token = self._routes.token
        info = info if token is None else msgspec.structs.replace(info, token=token)
        self._routes.post("/init_weight_transfer_engine", _encode({"init_info": info}))
        self._run = info.run

    def update(self, info: UpdateInfo) -> None:
        """POST /update_weights with an offer, a seal or an abort. Raises what the engine refused it with."""
        self._routes.post("/update_weights", _encode({"update_info": info}))

    def finish(self, version: int) -> float | None:
        """POST /finish_weight_update: install the sealed update. Raises IncompleteUpdateError, InstallError.

        An engine with the ability "install" pauses for it by itself, in the mode that is named here, and says for how
        many seconds.
        """
        body, run = _encode({"weight_version": str(version)}), f"&run={self._run}" if self._run else ""
        path = f"/finish_weight_update?mode={self._pause_mode}{run}"
        return self._routes.post_for(path, body, _Finished).pause_seconds

    def pause(self, run: str) -> None:
        """POST /pause; the pause ends with the run's lease where the engine has that ability."""
        self._routes.post(f"/pause?mode={self._pause_mode}&run={run}")

    def resume(self, run: str) -> None:
        """POST /resume."""
        self._routes.post(f"/resume?run={run}")

    def shutdown(self) -> None:
        """POST /shutdown_weight_transfer_engine: end whichever run's hold; the engine serves on."""
        self._routes.post("/shutdown_weight_transfer_engine")

    def specs(self) -> list[TensorSpec]:
        """GET /weight_specs: the tensors that the engine holds. Raises UnsupportedError, PeerError."""
        return self._routes.get("/weight_specs", _Specs).tensors

    def digests(self) -> dict[str, str]:
        """GET /weight_digests: a digest for each tensor, all of one version (see `tensor_digest`)."""
        return self._routes.get("/weight_digests", _Digests).digests

    def fingerprint(self) -> Fingerprint | None:
        """All digests as one value; None if the engine's weights can't be read. It reads every weight once."""
        if "inspect" not in self.info().abilities:
            return None
        digests = sorted(self.digests().items())
        names = hashlib.sha256(_encode([name for name, _ in digests])).hexdigest()
        return Fingerprint(f"digests {names}", hashlib.sha256(_encode(digests)).hexdigest())

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        """What the watchdog process sends if this process dies while the engine is paused for `run`."""
        return [RecoveryRequest(url=f"{self.name}/resume?run={run}", headers=dict(self._routes.headers))]

    def close(self) -> None:
        """Close the connections, and the client that `connect` gave last. Idempotent."""
        if self._negotiated is not None:
            self._negotiated.close()
        self._routes.close()


class _AnyInfo(msgspec.Struct):
    """/weight_info of the control protocol, or of stock vLLM, which says nothing of a protocol."""

    weight_version: str
    protocol: int | None = None


class _Finished(msgspec.Struct):
    """Of whatever an engine says after an install."""

    pause_seconds: float | None = None


class _Specs(msgspec.Struct):
    tensors: list[TensorSpec]


class _Digests(msgspec.Struct):
    digests: dict[str, str]


class HttpRoutes:
    """The routes of the server at `url`, which is the engine's name. `headers` go with every request. Thread-safe.

    `token` is sent as a bearer token. `timeout_seconds` bounds a whole request. Raises ValueError if `url` is no URL.
    """

    def __init__(self, url: str, *, token: str | None, timeout_seconds: float) -> None:
        import httpx  # Here, since it imports rich where that is installed, and takes long.

        root = _root_of(url)
        if token is not None and not _TOKEN.fullmatch(str(token)):
            raise ValueError("the token must be one word of ASCII, without spaces and line ends")
        self.name = url.rstrip("/")
        path = self.name.removeprefix(root)
        self.path_hint = f"; its URL has the path {path}: give the server's root, {root}" if path else ""
        """For a server that does not answer as an engine: what is wrong with its URL, or empty."""
        self.token = token
        self.headers = {"content-type": "application/json"}
        if token is not None:
            self.headers["authorization"] = f"Bearer {token}"
        self._timeout_seconds = number_of_seconds("timeout_seconds", timeout_seconds)
        try:
            # A server may close a connection that is idle, or that it has answered an error on, while the next
            # request is on its way: no connection is used twice.
            self._client = httpx.Client(
                base_url=self.name,
                headers=self.headers,
                timeout=self._timeout_seconds,
                limits=httpx.Limits(max_keepalive_connections=0),
                trust_env=False,
            )
        except httpx.InvalidURL as exc:
            raise ValueError(f"{url!r} is not the URL of an engine: {exc}") from exc
        self._httpx = httpx

    def get(self, path: str, kind: type[T]) -> T:
        """GET, decoded. Raises PeerError, or the engine's own error; ControlError for a reply of another form."""
        return self._decoded(path, self._request("GET", path)[1], kind)

    def post(self, path: str, body: bytes | None = None) -> bytes:
        """POST, and the reply's bytes. Raises PeerError, or the engine's own error."""
        return self._request("POST", path, body)[1]

    def post_for(self, path: str, body: bytes, kind: type[T]) -> T:
        """POST, and the reply decoded. Raises what `get` does."""
        return self._decoded(path, self._request("POST", path, body)[1], kind)

    def probe(self, path: str, kind: type[T]) -> T | None:
        """GET; None if the server has no such route or answers in another form. Raises the other errors of `get`.

        Where a server is starting, or a proxy answers for it, with 502, 503 or 504, that is a PeerDiedError, as if
        nothing had answered.
        """
        try:
            status, content = self._request("GET", path, expected=(200, 404, 405, *_NOT_READY))
        except PeerDiedError as exc:
            raise PeerDiedError(f"{exc}; {_START_FIRST}", peer=self.name) from exc
        if status in _NOT_READY:
            error = self._error(path, status, content)
            if isinstance(error, ControlError):
                error = PeerDiedError(f"{error}; {_START_FIRST}", peer=self.name)
            raise error
        try:
            return decode(content, kind) if status == 200 else None
        except WeightcastError:
            return None

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()

    def _decoded(self, path: str, content: bytes, kind: type[T]) -> T:
        try:
            return decode(content, kind)
        except WeightcastError as exc:
            raise ControlError(f"{self.name}{path} did not answer as an engine: {exc}", peer=self.name) from exc

    def _request(
        self, method: str, path: str, body: bytes | None = None, *, expected: Collection[int] = (200,)
    ) -> tuple[int, bytes]:
        """The status, one of those expected, and the whole reply: by the deadline, no larger than a message may be."""
        if self._client.is_closed:
            raise ClosedError(f"the connections to {self.name} were closed")
        deadline, content = Deadline(self._timeout_seconds), bytearray()
        try:
            with self._client.stream(method, path, content=body) as reply:
                for chunk in reply.iter_bytes():
                    content += chunk
                    if deadline.has_passed:
                        raise PeerTimeoutError(f"{self.name}{path} did not end its answer in time", peer=self.name)
                    if len(content) > MAX_MESSAGE_BYTES:
                        message = f"{self.name}{path} answered with over {MAX_MESSAGE_BYTES} bytes"
                        raise ControlError(message, peer=self.name)
        except self._httpx.TimeoutException as exc:
            raise PeerTimeoutError(f"{self.name}{path} gave no answer in time: {exc}", peer=self.name) from exc
        except self._httpx.HTTPError as exc:
            if isinstance(_first_cause(exc), ssl.SSLError):
                raise ControlError(f"{self.name}{path} did not answer by TLS: {exc}", peer=self.name) from exc
            raise PeerDiedError(f"{self.name}{path} can't be reached: {exc}", peer=self.name) from exc
        if reply.status_code not in expected:
            raise self._error(path, reply.status_code, bytes(content))
        return reply.status_code, bytes(content)

    def _error(self, path: str, status: int, content: bytes) -> WeightcastError:
        """The error inside a reply: weightcast's own record where there is one, else the text that came.

        The body is {"error": {"record", "message"}} here, {"error": text or {"message"}} in vLLM.
        """
        text, record = content[:500].decode("utf-8", "replace"), None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            body: Any = msgspec.json.decode(content)
            error = body.get("error") if isinstance(body, Mapping) else None
            if isinstance(error, Mapping) and "record" in error:
                record = msgspec.convert(error["record"], ErrorRecord)
            else:
                message = error.get("message") if isinstance(error, Mapping) else error
                if isinstance(message, str):
                    text, record = message, unmarked(message)
        if record is not None:
            raised = from_record(record)
            if isinstance(raised, PeerError):
                raised.peer = self.name
            return raised
        hint = {
            401: ": pass the engine's token" if self.token is None else ": the token does not match",
            404: self.path_hint or ": is this an engine server?",
        }.get(status, "")
        return ControlError(f"{self.name}{path} answered {status}{hint}: {text}", peer=self.name)


def _root_of(url: object) -> str:
    """The URL of a server without its path. Raises TypeError for what is no text, ValueError for what is no URL."""
    wanted = "is not the URL of an engine; write one like http://127.0.0.1:8000"
    if not isinstance(url, str):
        raise TypeError(f"{url!r:.80} {wanted}")
    try:
        parts = urllib.parse.urlsplit(url)
        is_whole = url.startswith(("http://", "https://")) and parts.hostname and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or parts.query or parts.fragment or url.split() != [url]:
        raise ValueError(f"{url!r} {wanted}")
    return f"{parts.scheme}://{parts.netloc}"


def _first_cause(exc: BaseException) -> BaseException:
    """The first of a chain of exceptions."""
    while cause := exc.__cause__ or exc.__context__:
        exc = cause
    return exc
