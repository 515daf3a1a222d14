"""A directory of the engines behind a Kubernetes service, read from the API server."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from weightcast.errors import ControlError, PeerDiedError, WeightcastError, import_of_extra
from weightcast.format.manifest import decode

with import_of_extra():
    import httpx

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Token, certificate and namespace of the pod's service account."""


class _Conditions(msgspec.Struct):
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct, rename="camel"):
    """The part of a discovery.k8s.io/v1 EndpointSlice that is used."""

    address_type: str
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Slices(msgspec.Struct):
    items: list[_Slice]


class ServiceEngines:
    """Implements `EngineDirectory`: the pods behind a service, from its EndpointSlices.

    Pods that are not ready are included, since `/weight_ready` as their readiness probe fails until their first
    version; those that are shutting down are not. The pod's service account needs the verb `list` for
    `endpointslices` of the API group `discovery.k8s.io`. Its token is read again for each request, since it expires.
    """

    def __init__(
        self,
        service: str,
        *,
        namespace: str | None = None,
        port: str | None = None,
        scheme: Literal["http", "https"] = "http",
        address_type: Literal["IPv4", "IPv6"] = "IPv4",
        server: str | None = None,
        account: str | os.PathLike[str] = _ACCOUNT,
        timeout_seconds: float = 10.0,
    ) -> None:
        """`namespace`: by default this pod's. `port`: name of the service's port, which may be left out if it has one.

        `scheme`: of the engines' URLs. `server`: the API server's URL, by default that of this cluster. `account`:
        directory with `token`, `ca.crt` and `namespace`. Raises ValueError outside a cluster, without `server`.
        """
        if server is None:
            host, number = (os.environ.get(f"KUBERNETES_SERVICE_{what}") for what in ("HOST", "PORT"))
            if not (host and number):
                raise ValueError("this process is not in a pod of Kubernetes: pass server=, the URL of the API server")
            server = f"https://[{host}]:{number}" if ":" in host else f"https://{host}:{number}"
        self._account = Path(account)
        self._service, self._port, self._scheme, self._address_type = service, port, scheme, address_type
        self._server = server.rstrip("/")
        self._namespace = namespace
        self._timeout_seconds = timeout_seconds

    def engines(self) -> Sequence[str]:
        """Return the pods' URLs. Raises PeerDiedError if the server is not reached, ControlError for its refusal."""
        namespace = self._namespace or (self._account / "namespace").read_text().strip()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        is_https = self._server.startswith("https:")
        trusted = ssl.create_default_context(cafile=self._account / "ca.crt") if is_https else False
        try:
            # Not through a proxy from the environment.
            with httpx.Client(verify=trusted, timeout=self._timeout_seconds, trust_env=False) as client:
                reply = client.get(
                    self._server + path,
                    params={"labelSelector": f"kubernetes.io/service-name={self._service}"},
                    headers={"authorization": f"Bearer {(self._account / 'token').read_text().strip()}"},
                )
        except httpx.HTTPError as exc:
            raise PeerDiedError(
                f"Kubernetes' API at {self._server} can't be reached: {exc}", peer="Kubernetes"
            ) from exc
        if reply.status_code != 200:
            remedy = ": the service account needs the verb list for endpointslices" if reply.status_code == 403 else ""
            raise ControlError(
                f"Kubernetes' API answered {reply.status_code} for {path}{remedy}: {reply.text[:300]}",
                peer="Kubernetes",
            )
        found: _Slices = decode(reply.content, _Slices)
        slices = [each for each in found.items if each.address_type == self._address_type]
        return sorted({url for each in slices for url in self._urls(each)})

    def _urls(self, found: _Slice) -> Sequence[str]:
        ports = [port.port for port in found.ports or () if port.port and self._port in (None, port.name)]
        addresses = [e.addresses[0] for e in found.endpoints or () if not e.conditions.terminating]
        if addresses and len(ports) != 1:
            names = ", ".join(str(port.name) for port in found.ports or ())
            raise WeightcastError(f"service {self._service} has the ports {names}: pass the name of one as port=")
        hosts = (f"[{host}]" if ipaddress.ip_address(host).version == 6 else host for host in addresses)
        return [f"{self._scheme}://{host}:{ports[0]}" for host in hosts]
