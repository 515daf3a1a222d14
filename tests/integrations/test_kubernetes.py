"""The directory of Kubernetes: a server of the test's own answers as its API does."""

from __future__ import annotations

import json
import shutil
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import certifi
import pytest

from weightcast.errors import ControlError, ManifestError, PeerDiedError, WeightcastError
from weightcast.integrations.kubernetes import ServiceEngines
from weightcast.seams.directory import EngineDirectory

CERTIFICATE = Path(__file__).with_name("api_server.pem")
"""Of 127.0.0.1, signed by itself, with its key."""


def endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    target = {"kind": "Pod", "namespace": "rl", "name": f"engine-{address[-1]}", "uid": "6c3f"}
    return {"addresses": [address], "conditions": conditions, "targetRef": target, "nodeName": "n", "zone": "z"}


def endpoint_slice(*endpoints: dict[str, Any], kind: str = "IPv4", **ports: int) -> dict[str, Any]:
    metadata = {"name": "engines-x7k2p", "namespace": "rl", "labels": {"kubernetes.io/service-name": "engines"}}
    named = [{"name": name, "protocol": "TCP", "port": port} for name, port in ports.items()]
    return {"metadata": metadata, "addressType": kind, "endpoints": list(endpoints) or None, "ports": named}


class ApiServer(ThreadingHTTPServer):
    """Lists the EndpointSlices of the service `engines` in the namespace `rl` to whoever has the token."""

    slices: list[dict[str, Any]]
    token = "first"
    body: bytes | None = None

    def __init__(self, *, has_tls: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http{'s' * has_tls}://127.0.0.1:{self.server_address[1]}"
        if has_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            self.socket = context.wrap_socket(self.socket, server_side=True)


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        url, slices = urlsplit(self.path), self.server.slices
        body = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": {}, "items": slices}
        status = 200
        if self.headers["authorization"] != f"Bearer {self.server.token}":
            status, body = 403, {"kind": "Status", "message": "endpointslices is forbidden", "code": 403}
        elif url.path != "/apis/discovery.k8s.io/v1/namespaces/rl/endpointslices":
            status, body = 404, {"kind": "Status", "code": 404}
        elif parse_qs(url.query) != {"labelSelector": ["kubernetes.io/service-name=engines"]}:
            body["items"] = []
        content = json.dumps(body).encode() if self.server.body is None else self.server.body
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(params=[False, True], ids=["http", "https"])
def api(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    with ApiServer(has_tls=request.param) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("rl")
    shutil.copy(CERTIFICATE, tmp_path / "ca.crt")
    return tmp_path


def test_pods_of_a_service(api: ApiServer, account: Path, leaves_nothing: None) -> None:
    directory = ServiceEngines("engines", server=api.url, account=account)
    assert isinstance(directory, EngineDirectory)
    api.slices = [
        endpoint_slice(
            endpoint("10.0.0.2", ready=True, serving=True, terminating=False),
            endpoint("10.0.0.1", ready=False, serving=False, terminating=False),
            endpoint("10.0.0.3", ready=False, serving=True, terminating=True),
            http=8000,
        ),
        endpoint_slice(endpoint("10.0.0.4"), endpoint("10.0.0.2", ready=True), http=8000),
        endpoint_slice(endpoint("fd00::2", ready=True), kind="IPv6", http=8000),
        endpoint_slice(),
    ]
    assert directory.engines() == [f"http://10.0.0.{n}:8000" for n in (1, 2, 4)]
    other = ServiceEngines("engines", server=api.url, account=account, scheme="https", address_type="IPv6")
    assert other.engines() == ["https://[fd00::2]:8000"]
    assert ServiceEngines("others", server=api.url, account=account).engines() == []
    api.slices = [endpoint_slice(endpoint("10.0.0.1"), http=8000, metrics=9000)]
    with pytest.raises(WeightcastError, match="ports http, metrics: pass the name"):
        directory.engines()
    assert ServiceEngines("engines", server=api.url, account=account, port="http").engines() == ["http://10.0.0.1:8000"]


def test_an_api_that_refuses_is_gone_or_is_no_api(api: ApiServer, account: Path, leaves_nothing: None) -> None:
    directory = ServiceEngines("engines", server=api.url, account=account)
    api.slices, api.token = [], "second"
    with pytest.raises(ControlError, match=r"403.*needs the verb list.*forbidden"):
        directory.engines()
    (account / "token").write_text("second")
    assert directory.engines() == []
    with pytest.raises(ControlError, match="404"):
        ServiceEngines("engines", server=api.url, account=account, namespace="elsewhere").engines()
    api.body = b'{"items": [{"endpoints": []}]}'
    with pytest.raises(ManifestError, match="addressType"):
        directory.engines()
    if api.url.startswith("https"):
        shutil.copy(certifi.where(), account / "ca.crt")
        with pytest.raises(PeerDiedError, match="certificate verify failed"):
            directory.engines()
    api.shutdown()
    api.server_close()
    with pytest.raises(PeerDiedError, match="can't be reached"):
        directory.engines()


def test_outside_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="server="):
        ServiceEngines("engines")
