"""Processes of a dry run, forked from one that has imported everything, since imports take longest there."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import IO

ADDRESS = "WEIGHTCAST_GPU_SERVER"
"""The environment variable with the socket address of the process to fork from."""
LONGEST_IMPORT_SECONDS = 120.0


class Forked:
    """Runs `module.main(*arguments)` like subprocess.Popen. Its stderr goes to `errors`, or where its stdout goes."""

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], errors: int | None
    ) -> None:
        self.returncode: int | None = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.settimeout(LONGEST_IMPORT_SECONDS)
        self._server.connect(environment[ADDRESS])
        (stdin, into), (out, stdout) = os.pipe(), os.pipe()
        job = json.dumps([module, list(arguments), dict(environment)]).encode()
        socket.send_fds(self._server, [len(job).to_bytes(4)], [stdin, stdout, stdout if errors is None else errors])
        self._server.sendall(job)
        os.close(stdin)
        os.close(stdout)
        self.stdin: IO[bytes] = os.fdopen(into, "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(out, "rb", buffering=0)
        self._answers = self._server.makefile()
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
            self._server.close()
        return self.returncode

    def wait(self, timeout: float = 3600.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def serve(address: str, *modules: str) -> None:
    """Import `modules` and fork for each connection to `address`, until stdin ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # it is there once it can be connected to
    for module in modules:
        importlib.import_module(module)
    assert threading.active_count() == 1, "what is forked would lack these threads"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _fork(connection)
        connection.close()


def _fork(connection: socket.socket) -> None:
    """Fork once more, wait for that process, and send its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    text = connection.recv(int.from_bytes(size), socket.MSG_WAITALL)
    pid = os.fork()
    if pid == 0:
        connection.close()
        status = 1
        try:
            _run(text, descriptors)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(f"{pid}\n".encode())
    connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def _run(text: bytes, descriptors: Sequence[int]) -> None:
    module, arguments, environment = json.loads(text)
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    # `started_with` looks for the mark in the name, too, since /proc/PID/environ is that of the server.
    with open("/proc/self/comm", "w") as name:
        name.write(environment["WEIGHTCAST_GPU"][:15])
    importlib.import_module(module).main(*arguments)
