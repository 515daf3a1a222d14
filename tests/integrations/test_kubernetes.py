"""Directories of frameworks: Kubernetes' API as a server of the test's own answers it, and actors of a real Ray."""

from __future__ import annotations

import collections
import contextlib
import json
import shutil
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import certifi
import httpx
import pytest
import torch

from weightcast import EngineServer, ModuleEngine, Publisher, PublishOptions, PublishReport, TensorSource
from weightcast.errors import ControlError, ManifestError, PeerDiedError, WeightcastError
from weightcast.host.deadline import Deadline
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


def ray_engine() -> type:
    """Return a class of this function's own, since Ray's workers can't import this file."""

    class RayEngine:
        """An engine server in an actor. All of its weights have one value: the number of the version."""

        def __init__(self) -> None:
            self._model = torch.nn.Linear(2, 2, bias=False)
            self._server = EngineServer(ModuleEngine(self._model)).start()

        def url(self) -> str:
            return self._server.url

        def value(self) -> float:
            return float(self._model.weight.detach().unique())

        def token(self) -> tuple[int, list[float]]:
            """The version under which a token is made, and the weights that make it."""
            with self._server.step(timeout_seconds=20) as version:
                return -1 if version is None else version.number, self._model.weight.detach().unique().tolist()

        def close(self) -> None:
            self._server.close()

    return RayEngine


@pytest.fixture
def start_actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """In a Ray of the test's own: start an engine in an actor of this name."""
    for name, value in (("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"), ("RAY_AUTH_MODE", "disabled")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="wc", dir="/tmp") as folder:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False, namespace="rl")
        try:
            yield lambda name: ray.remote(num_cpus=0)(ray_engine()).options(name=name).remote()
        finally:
            ray.shutdown()


@pytest.mark.cluster
def test_actors_of_ray(start_actor: Callable[[str], Any]) -> None:
    import ray

    from weightcast.integrations.ray import ActorEngines

    tensors = {"weight": torch.zeros(2, 2)}
    directory = ActorEngines("engine-", timeout_seconds=60.0)
    assert directory.engines() == []
    first, _other = start_actor("engine-0"), start_actor("another")
    with Publisher(TensorSource(tensors), engines=directory) as publisher:
        for number in (1, 2, 3):
            tensors["weight"].fill_(number)
            if number == 2:
                second = start_actor("engine-1")
            if number == 3:
                ray.kill(first)
                first = start_actor("engine-0")
            report = publisher.publish(number)
            actors = [first] if number == 1 else [first, second]
            assert set(report.engines) == set(ray.get([actor.url.remote() for actor in actors]))
            assert ray.get([actor.value.remote() for actor in actors]) == [number] * len(actors)


class Trainer(threading.Thread):
    """Publishes one version after the other to a directory. `reports`: of those that have ended, by version."""

    def __init__(self, directory: EngineDirectory) -> None:
        super().__init__()
        self.tensors = {"weight": torch.zeros(2, 2)}
        options = PublishOptions(on_failure="report", deadline_seconds=20)
        self.publisher = Publisher(TensorSource(self.tensors), engines=directory, options=options)
        self.reports: dict[int, PublishReport] = {}
        self.ends = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.publisher:
                while not self.ends.is_set():
                    number = len(self.reports) + 1
                    self.tensors["weight"].fill_(number)
                    self.reports[number] = self.publisher.publish(number)
        except BaseException as exc:
            self.error = exc


@pytest.mark.cluster
def test_actors_scale_out_and_in_while_publishes_run(start_actor: Callable[[str], Any]) -> None:
    """An engine joins, is killed, is replaced under its name, and leaves. A router asks each if it is ready first.

    Each token of a ready engine is of the last version that had been published when it was ready, or of a later one.
    """
    import ray

    from weightcast.integrations.ray import ActorEngines

    actors = {name: start_actor(name) for name in ("engine-0", "engine-1")}
    urls = {name: ray.get(actor.url.remote(), timeout=60) for name, actor in actors.items()}
    trainer = Trainer(ActorEngines("engine-", timeout_seconds=1.0))
    num_tokens = collections.Counter[str]()

    def route() -> None:
        """Ask each engine for a token, if it is ready."""
        for name, actor in actors.items():
            published = len(trainer.reports)
            with contextlib.suppress(httpx.TransportError, ray.exceptions.RayActorError):
                if httpx.get(f"{urls[name]}/weight_ready?max_behind=0", trust_env=False, timeout=20).is_success:
                    version, values = ray.get(actor.token.remote(), timeout=60)
                    assert values == [version], "a mix"
                    assert version >= published, f"{name} was ready"
                    num_tokens[urls[name]] += 1

    def route_until(is_so: Callable[[], bool]) -> None:
        for _ in Deadline(60.0).polls():
            route()
            assert trainer.error is None
            if is_so():
                return
        raise AssertionError(f"{num_tokens}, {urls}, {list(trainer.reports.values())[-1]}")

    def last() -> set[str]:
        return {name for name, result in trainer.reports[len(trainer.reports)].engines.items() if result.ok}

    def start(name: str) -> None:
        actor = start_actor(name)
        url = ray.get(actor.url.remote(), timeout=60)
        actors[name], urls[name] = actor, url
        route_until(lambda: num_tokens[url] > 2)

    trainer.start()
    try:
        route_until(lambda: all(num_tokens[url] > 2 for url in urls.values()))
        start("engine-2")
        killed = urls["engine-0"]
        ray.kill(actors["engine-0"])
        route_until(lambda: killed not in last())
        start("engine-0")
        leaver = urls["engine-1"]
        ray.get(actors["engine-1"].close.remote(), timeout=60)
        ray.kill(actors.pop("engine-1"))
        route_until(lambda: leaver not in trainer.reports[len(trainer.reports)].engines)
        route_until(lambda: last() == {urls[name] for name in actors})
    finally:
        trainer.ends.set()
        trainer.join(120)
    assert trainer.error is None
    failed = {name for report in trainer.reports.values() for name in report.failures}
    assert failed <= {killed, leaver}
    number = len(trainer.reports)
    assert ray.get([actor.value.remote() for actor in actors.values()], timeout=60) == [number] * len(actors)
