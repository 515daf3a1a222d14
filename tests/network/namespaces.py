"""Hosts on one switch, as network namespaces of this machine: links with a rate, links that go down.

Needs `ip` and `tc` (iproute2) and the right to make namespaces. The names carry this process's id: what a killed
process has left behind is removed by the next. A process is moved to a host with `enter`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator

_PREFIX = "weightcast"
_SUBNET = "10.77.0"
_CLONE_NEWNET = 0x40000000
_COMMAND_SECONDS = 20.0
_numbers = itertools.count()


class NotPermittedError(Exception):
    """This machine or container lets this user make no network namespaces."""


class Network:
    """One namespace for each host and one for the switch. The links go by the hosts' names."""

    def __init__(self, *hosts: str) -> None:
        """Raises NotPermittedError; FileNotFoundError without iproute2."""
        self._hosts = hosts
        self._prefix = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = self.namespace("switch")
        _remove_stale()
        try:
            self._make_switch()
            for host in hosts:
                self._make_host(host)
        except BaseException:
            self.close()
            raise

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: str) -> str:
        return f"{_SUBNET}.{1 + self._hosts.index(host)}"

    def limit(self, host: str, mbit_per_second: int) -> None:
        """Give the host's link that rate, in both directions."""
        for namespace, device in ((self.namespace(host), "eth0"), (self._switch, host)):
            rate, burst = f"{mbit_per_second}mbit", "256kb"
            shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape)

    def set_link(self, host: str, state: str) -> None:
        """`state` "down": pull the host's cable out of the switch; "up": put it back."""
        _run("ip", "-n", self._switch, "link", "set", "dev", host, state)

    def close(self) -> None:
        """Remove everything. Idempotent; ends no process."""
        for host in (*self._hosts, "switch"):
            if self.namespace(host) in namespaces():
                _run("ip", "netns", "delete", self.namespace(host))

    def _make_switch(self) -> None:
        try:
            _run("ip", "netns", "add", self._switch)
        except subprocess.CalledProcessError as exc:
            if "not permitted" in exc.stderr or "denied" in exc.stderr:
                raise NotPermittedError(exc.stderr.strip()) from exc
            raise
        _run("ip", "-n", self._switch, "link", "add", "name", "bridge", "up", "type", "bridge")

    def _make_host(self, host: str) -> None:
        namespace = self.namespace(host)
        _run("ip", "netns", "add", namespace)
        peer = ("peer", "name", "eth0", "netns", namespace)
        _run("ip", "-n", self._switch, "link", "add", "name", host, "master", "bridge", "up", "type", "veth", *peer)
        _run("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", namespace, "link", "set", device, "up")


@contextlib.contextmanager
def network(*hosts: str) -> Iterator[Network]:
    made = Network(*hosts)
    try:
        yield made
    finally:
        made.close()


def enter(namespace: str) -> None:
    """Move this process, which must have one thread only, to that namespace's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), namespace)


def namespaces() -> list[str]:
    """The names of all that this machine has."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _remove_stale() -> None:
    for name in namespaces():
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_SECONDS).stdout
    except subprocess.CalledProcessError as exc:
        exc.add_note(exc.stderr)
        raise
