"""A real engine's server on a free loopback port: started with a deadline, and ended with all its processes."""

from __future__ import annotations

import abc
import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from warm_python import Forked, WarmPython

START_SECONDS = 400.0
REQUEST_SECONDS = 180.0
"""Of a request on a machine that does other things too: one of 450 tokens takes 8 s on a quiet one."""
STOP_SECONDS = 30.0
LOG_TAIL_BYTES = 6000
_ROOT = Path(__file__).parents[2]


def python_of(engine: str) -> str:
    """The interpreter of the environment that has an engine ("vllm", "sglang"): this one, or the one of its script.

    If there is none the test is skipped, and in CI (which sets `CI`) it fails.
    """
    if importlib.util.find_spec(engine) is not None:
        return sys.executable
    variable = f"WEIGHTCAST_{engine.upper()}_PYTHON"
    python = Path(os.environ.get(variable) or _ROOT / f".venv-{engine}" / "bin" / "python")
    if not python.exists():
        end_test = pytest.fail if os.environ.get("CI") else pytest.skip
        end_test(f"there is no {python}: run scripts/test-{engine} first, which makes it, or set {variable}")
    return str(python)


_IMPORTED = {
    "vllm": (
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
    ),
    "sglang": (
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.registry",
    ),
}
"""By engine: what each of a server's processes imports, for 12 seconds, one after another."""

_SERVE = """
import ctypes, json, multiprocessing.context, os, runpy, signal, sys
log, environment, module = sys.argv[1:4]
os.setsid()
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # its end, when the process ends that it was forked from
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for descriptor in (1, 2):
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), descriptor)
os.environ.clear()
os.environ.update(json.loads(environment))
# Engines ask for "spawn", in which each of their processes would import everything again.
multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.context._concrete_contexts["fork"]
sys.argv[1:] = sys.argv[4:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

_warm: dict[str, WarmPython] = {}
"""By engine, what servers are forked from. Each ends with this process."""


class ServerProcess(abc.ABC):
    """Start it by entering it. `kind` names its log; `headers` go with every request.

    `is_forked`: from a process that has imported the engine; else its command runs, as a user's would.
    """

    def __init__(
        self, kind: str, *, port: int = 0, headers: Mapping[str, str] | None = None, is_forked: bool = False
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._kind = kind
        self._is_forked = is_forked
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._log = tempfile.NamedTemporaryFile(prefix=f"weightcast-{kind}-", suffix=".log")  # noqa: SIM115
        # A server may close a connection after an error while the next request is on its way: each has one of its own.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(
            base_url=self.url, timeout=REQUEST_SECONDS, limits=limits, headers=dict(headers or {}), trust_env=False
        )

    @abc.abstractmethod
    def _command(self) -> list[str]: ...

    @abc.abstractmethod
    def _environment(self) -> dict[str, str]: ...

    @abc.abstractmethod
    def is_healthy(self) -> bool:
        """Whether it serves."""

    def launch(self) -> None:
        """Start it without waiting for it. Enter or close it afterwards."""
        # In a session of its own, so that it can be ended with its workers; it also ends if this process is killed.
        if self._is_forked:
            python, _, module, *arguments = self._command()
            environment = self._environment()
            if self._kind not in _warm:
                _warm[self._kind] = WarmPython(*_IMPORTED[self._kind], environment=environment, executable=python)
            # The first one waits until the engine is imported.
            self._process = _warm[self._kind].start(
                _SERVE, self._log.name, json.dumps(environment), module, *arguments, seconds=START_SECONDS
            )
            return
        self._process = subprocess.Popen(
            self._command(),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def __enter__(self) -> Self:
        try:
            if self._process is None:
                self.launch()
            self._await_health()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _await_health(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise AssertionError(f"{self} ended with {self.process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > end:
                raise AssertionError(f"{self} is not up after {START_SECONDS} s:\n{self.log_tail()}")
            self.process_ended(0.25)

    @property
    def process(self) -> subprocess.Popen[bytes] | Forked:
        assert self._process is not None, "the server was not started"
        return self._process

    def process_ended(self, seconds: float) -> bool:
        """Whether the server ends within that time."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _answers(self, path: str) -> bool:
        try:
            return self._http.get(path, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def metrics(self) -> dict[str, float]:
        """weightcast's samples among its metrics, by name and labels."""
        text = self._http.get("/metrics", follow_redirects=True).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {" ".join((s.name, *s.labels.values())): s.value for s in samples if s.name.startswith("weightcast_")}

    def log_lines(self, words: str) -> list[str]:
        """The lines of its log that have these words."""
        text = Path(self._log.name).read_text(errors="replace")
        return [line for line in text.splitlines() if words in line]

    def close(self) -> None:
        """End it as an operator would; what is left of its processes after that is killed. Idempotent."""
        if self._process is not None:
            self._signal(signal.SIGTERM)
            self.process_ended(STOP_SECONDS)
        self.kill()
        self._http.close()
        self._log.close()

    def kill(self) -> None:
        """SIGKILL to all its processes. Idempotent."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(STOP_SECONDS)

    def restart(self) -> None:
        """Start it again on its port, once it was killed."""
        self.launch()
        self._await_health()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def pids(self) -> list[int]:
        """The processes of the server's session: front end, engine, workers, their helpers."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == self.process.pid]

    def log_tail(self) -> str:
        if self._log.closed:
            return "gone with the server"
        with open(self._log.name, "rb") as log:
            log.seek(max(0, os.path.getsize(self._log.name) - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    def post(self, path: str, body: Any = None, *, seconds: float = REQUEST_SECONDS) -> httpx.Response:
        """The reply as it is."""
        return self._http.post(path, json=body, timeout=seconds)

    def get(self, path: str) -> Any:
        """The JSON of a reply that must be good."""
        reply = self._http.get(path)
        reply.raise_for_status()
        return reply.json()

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric over its labels."""
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a server's processes hold."""

    rss_bytes: int
    num_fds: int
    num_threads: int
    segments: frozenset[str]


def footprint(server: ServerProcess) -> Footprint:
    folders = [Path("/proc") / str(pid) for pid in server.pids()]
    status = [dict(line.split(":", 1) for line in (f / "status").read_text().splitlines()) for f in folders]
    maps = [line.split() for f in folders for line in (f / "maps").read_text().splitlines()]
    return Footprint(
        rss_bytes=sum(int(each["VmRSS"].split()[0]) << 10 for each in status if "VmRSS" in each),
        num_fds=sum(len(list((f / "fd").iterdir())) for f in folders),
        num_threads=sum(int(each["Threads"]) for each in status),
        segments=frozenset(" ".join(m[4:]) for m in maps if m[5:] and m[5].startswith(("/memfd:", "/dev/shm"))),
    )


class Halfway:
    """Asks the server for something once half of a version has come."""

    def __init__(self, server: ServerProcess, path: str, body: dict[str, str] | None = None) -> None:
        self._server = server
        self._request = path, body
        self.replies: list[int] = []

    def __call__(self, done: int, total: int) -> None:
        if 2 * done >= total and not self.replies:
            self.replies.append(self._server.post(*self._request).status_code)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
