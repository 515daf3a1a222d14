"""One engine's HTTP routes, called: deadlines, caps, and errors in the class that the engine raised.

Invariants: every request has a deadline and is sent once; no reply is read beyond what a message may be; whatever goes
wrong is a WeightcastError that names the engine; requests go straight to it, never through a proxy of the environment.
Each request has a connection of its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

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
from weightcast.format.manifest import MAX_MESSAGE_BYTES, decode

T = TypeVar("T")


class HttpRoutes:
    """The routes of the server at `url`, which is the engine's name. `headers` go with every request. Thread-safe.

    `token` is sent as a bearer token. `timeout_seconds` bounds a whole request. Raises ValueError if `url` is no URL.
    """

    def __init__(self, url: str, *, token: str | None, timeout_seconds: float) -> None:
        import httpx  # Here, since it imports rich where that is installed, and takes long.

        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not the URL of an engine; write one like http://127.0.0.1:8000")
        self.name = url.rstrip("/")
        self.token = token
        self.headers = {"content-type": "application/json"}
        if token is not None:
            self.headers["authorization"] = f"Bearer {token}"
        self._timeout_seconds = timeout_seconds
        try:
            # A server may close a connection that is idle, or that it has answered an error on, while the next
            # request is on its way: no connection is used twice.
            self._client = httpx.Client(
                base_url=self.name,
                headers=self.headers,
                timeout=timeout_seconds,
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
        """GET; None if the server has no such route or answers in another form. Raises the other errors of `get`."""
        status, content = self._request("GET", path, expected=(200, 404, 405))
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
        end, content = time.monotonic() + self._timeout_seconds, bytearray()
        try:
            with self._client.stream(method, path, content=body) as reply:
                for chunk in reply.iter_bytes():
                    content += chunk
                    if time.monotonic() > end:
                        raise PeerTimeoutError(f"{self.name}{path} did not end its answer in time", peer=self.name)
                    if len(content) > MAX_MESSAGE_BYTES:
                        message = f"{self.name}{path} answered with over {MAX_MESSAGE_BYTES} bytes"
                        raise ControlError(message, peer=self.name)
        except self._httpx.TimeoutException as exc:
            raise PeerTimeoutError(f"{self.name}{path} gave no answer in time: {exc}", peer=self.name) from exc
        except self._httpx.HTTPError as exc:
            raise PeerDiedError(f"{self.name}{path} can't be reached: {exc}", peer=self.name) from exc
        if reply.status_code not in expected:
            raise self._error(path, reply.status_code, bytes(content))
        return reply.status_code, bytes(content)

    def _error(self, path: str, status: int, content: bytes) -> WeightcastError:
        """The error inside a reply: weightcast's own record where there is one, else the text that came."""
        record, text = _record_and_text(content)
        if record is not None:
            raised = from_record(record)
            if isinstance(raised, PeerError):
                raised.peer = self.name
            return raised
        hint = {
            401: ": pass the engine's token" if self.token is None else ": the token does not match",
            404: ": is this an engine server?",
        }.get(status, "")
        return ControlError(f"{self.name}{path} answered {status}{hint}: {text}", peer=self.name)


def _record_and_text(content: bytes) -> tuple[ErrorRecord | None, str]:
    """What an error's body says: {"error": {"record", "message"}} here, {"error": text or {"message"}} in vLLM."""
    text = content[:500].decode("utf-8", "replace")
    try:
        body: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, text
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, Mapping):
        try:
            if "record" in error:
                return msgspec.convert(error["record"], ErrorRecord), ""
        except msgspec.ValidationError:
            return None, text
        error = error.get("message")
    return (unmarked(error), error) if isinstance(error, str) else (None, text)
