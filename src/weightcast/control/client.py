"""The trainer's side of the control protocol: one engine behind vLLM's four-phase routes, over HTTP.

Invariants: every request has a deadline and is sent once (the protocol's own idempotence heals lost replies, not
retries here); an engine's error comes back as the class it was raised as, naming the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from weightcast.control.messages import InitInfo, PauseMode, UpdateInfo, WeightInfo
from weightcast.errors import (
    ControlError,
    ErrorRecord,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    WeightcastError,
    from_record,
)
from weightcast.guard import RescueRequest
from weightcast.manifest import MAX_MESSAGE_BYTES, TensorSpec, decode

T = TypeVar("T")
_PAUSE_MODES = ("keep", "wait", "abort")
_encode = msgspec.json.encode


class HttpEngine:
    """An engine server that speaks the native protocol: `weightcast serve` or EngineServer.

    `pause` is how its requests are treated during an install: `keep` freezes them and goes on with the new weights
    (the answer says which tokens came from which), `wait` finishes them first, `abort` ends them. Requests go straight
    to the engine, never through a proxy that the environment names. Thread-safe.
    """

    def __init__(
        self, url: str, *, token: str | None = None, pause: PauseMode = "keep", timeout_seconds: float = 60.0
    ) -> None:
        import httpx

        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not the URL of an engine; write one like http://127.0.0.1:8000")
        if pause not in _PAUSE_MODES:
            raise ValueError(f"pause is {pause!r}; it must be one of {', '.join(_PAUSE_MODES)}")
        self.name = url.rstrip("/")
        self._pause_mode = pause
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout_seconds = timeout_seconds
        try:
            self._http = httpx.Client(
                base_url=self.name, headers=self._headers, timeout=timeout_seconds, trust_env=False
            )
        except httpx.InvalidURL as exc:
            raise ValueError(f"{url!r} is not the URL of an engine: {exc}") from exc
        self._httpx = httpx

    def info(self) -> WeightInfo:
        """GET /weight_info. Raises PeerError."""
        return self._typed("GET", "/weight_info", WeightInfo)

    def init(self, info: InitInfo) -> None:
        """POST /init_weight_transfer_engine. Raises EngineBusyError, UnsupportedError, PeerError."""
        self._call("POST", "/init_weight_transfer_engine", _encode({"init_info": info}))

    def update(self, info: UpdateInfo) -> None:
        """POST /update_weights with an offer, a seal or an abort. Raises what the engine refused it with."""
        self._call("POST", "/update_weights", _encode({"update_info": info}))

    def finish(self, version: int) -> None:
        """POST /finish_weight_update: install the sealed update. Raises IncompleteUpdateError, InstallError."""
        self._call("POST", "/finish_weight_update", _encode({"weight_version": str(version)}))

    def pause(self, run: str) -> None:
        """POST /pause; the pause ends with the run's lease where the engine has that ability."""
        self._call("POST", f"/pause?mode={self._pause_mode}&run={run}")

    def resume(self, run: str) -> None:
        """POST /resume."""
        self._call("POST", f"/resume?run={run}")

    def shutdown(self) -> None:
        """POST /shutdown_weight_transfer_engine: end whichever run's hold; the engine serves on."""
        self._call("POST", "/shutdown_weight_transfer_engine")

    def specs(self) -> list[TensorSpec]:
        """GET /weight_specs: the tensors that the engine holds. Raises UnsupportedError, PeerError."""
        return self._typed("GET", "/weight_specs", _Specs).tensors

    def digests(self) -> dict[str, str]:
        """GET /weight_digests: a digest for each tensor, all of one version (see `tensor_digest`)."""
        return self._typed("GET", "/weight_digests", _Digests).digests

    def rescue(self, run: str) -> list[RescueRequest]:
        """What the guard process must send in our place if this process dies while the engine is paused for `run`."""
        return [RescueRequest(url=f"{self.name}/resume?run={run}", headers=dict(self._headers))]

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def _typed(self, method: str, path: str, kind: type[T]) -> T:
        reply = self._call(method, path)
        try:
            return decode(reply, kind)
        except WeightcastError as exc:
            raise ControlError(f"{self.name}{path} did not answer as an engine: {exc}", peer=self.name) from exc

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        httpx, end = self._httpx, time.monotonic() + self._timeout_seconds
        try:
            with self._http.stream(method, path, content=body) as reply:
                content = self._read(path, reply.iter_bytes(), end)
        except httpx.TimeoutException as exc:
            raise PeerTimeoutError(f"{self.name}{path} gave no answer in time: {exc}", peer=self.name) from exc
        except httpx.HTTPError as exc:
            raise PeerDiedError(f"{self.name}{path} can't be reached: {exc}", peer=self.name) from exc
        if reply.status_code == 200:
            return content
        raise self._error(path, reply.status_code, content)

    def _read(self, path: str, chunks: Iterator[bytes], end: float) -> bytes:
        """The whole reply: by `end`, and no larger than a message may be."""
        content = bytearray()
        for chunk in chunks:
            content += chunk
            if time.monotonic() > end:
                raise PeerTimeoutError(f"{self.name}{path} did not end its answer in time", peer=self.name)
            if len(content) > MAX_MESSAGE_BYTES:
                raise ControlError(f"{self.name}{path} answered with over {MAX_MESSAGE_BYTES} bytes", peer=self.name)
        return bytes(content)

    def _error(self, path: str, status: int, content: bytes) -> WeightcastError:
        """The error inside a reply: our own record where there is one, else the text of vLLM's or a stranger's."""
        try:
            body: Any = msgspec.json.decode(content)
            error = body.get("error") if isinstance(body, Mapping) else None
            if isinstance(error, Mapping) and "record" in error:
                raised = from_record(msgspec.convert(error["record"], ErrorRecord))
                if isinstance(raised, PeerError):
                    raised.peer = self.name
                return raised
            message = error.get("message") if isinstance(error, Mapping) else None
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            message = None
        text = message or content[:500].decode("utf-8", "replace")
        has_token = "authorization" in self._headers
        hint = {
            401: ": the token does not match" if has_token else ": pass the engine's token",
            404: ": is this an engine server?",
        }.get(status, "")
        return ControlError(f"{self.name}{path} answered {status}{hint}: {text}", peer=self.name)


class _Specs(msgspec.Struct):
    tensors: list[TensorSpec]


class _Digests(msgspec.Struct):
    digests: dict[str, str]
