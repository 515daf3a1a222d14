"""The trainer's side of the control protocol: one engine behind vLLM's four-phase routes, over HTTP.

Invariants: a call is sent once (the protocol's own idempotence heals lost replies, not retries here); what kind of
server answers at a URL is asked whenever a publisher connects, and never configured.
"""

from __future__ import annotations

import hashlib

import msgspec

from weightcast import registry
from weightcast.control.http import HttpRoutes
from weightcast.errors import ControlError
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import InitInfo, PauseMode, UpdateInfo, WeightInfo
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import EngineClient, Fingerprint, ServesTraffic

_PAUSE_MODES = ("keep", "wait", "abort")
_encode = msgspec.json.encode


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
        if pause not in _PAUSE_MODES:
            raise ValueError(f"pause is {pause!r}; it must be one of {', '.join(_PAUSE_MODES)}")
        self._routes = HttpRoutes(url, token=token, timeout_seconds=timeout_seconds)
        self.name = self._routes.name
        self._pause_mode = pause
        self._negotiated: EngineClient | None = None
        self._run = ""

    def connect(self) -> EngineClient:
        """Ask what answers here now; return the client that speaks to it: this one, or one of a registered dialect.

        Raises PeerError; ControlError if it is no engine server, or one that lacks something, which is named.
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
            f"and is none of {', '.join(asked)}",
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
