"""What the plugin puts into vLLM, and what a vLLM refuses that has only a part of it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import httpx
import msgspec
from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.servers import ONE, STOCK, TWO, Server, Setup, child_environment
from real_vllm.trainer import GLOO, IPC, trainer
from weightcast.control.worker_rpc import Ask, RankReply
from weightcast.errors import ControlError
from weightcast.host.deadline import Deadline
from weightcast.integrations.vllm import plugin

GATED = Setup(token="its", max_behind="1")
STOCK_TWO = Setup(tp=2, endpoints=False)


@on(full=[STOCK, STOCK_TWO])
def test_a_server_that_has_not_loaded_the_routes_is_told_how_and_refuses_vllms_own_calls(server: Server) -> None:
    """On one rank alone, so that later answers are those to later calls."""
    with trainer(server.setup, server.url) as it:
        error = it.failure(1)
    assert isinstance(error, ControlError)
    assert "VLLM_PLUGINS=weightcast" in str(error)
    for _ in range(2):
        for name, body in (("init_weight_transfer_engine", {"init_info": {}}), ("start_weight_update", None)):
            reply = server.post(f"/{name}", body)
            assert reply.status_code == 500
            assert "VLLM_PLUGINS=weightcast" in reply.text
        assert server.call("test_pid") == server.call("test_pid")
    assert_serves(server, 0)


@on(ONE, full=[TWO])
def test_nothing_of_a_transfer_stays_in_the_workers(server: Server) -> None:
    def cycle(transport: str) -> None:
        with trainer(server.setup, server.url, transport=transport) as it:
            it.publish(1)
            assert server.post("/shutdown_weight_transfer_engine").status_code == 200

    for transport in (IPC, GLOO):
        cycle(transport)
    before = [_kept(pid) for pid in server.call("test_pid")]
    for transport in (IPC, GLOO, IPC, GLOO):
        cycle(transport)
    for _ in Deadline(60.0).polls(0.05, 0.2):
        after = [_kept(pid) for pid in server.call("test_pid")]
        # A group's threads and sockets end in the background; there may be less than before.
        if all(now <= then for pair in zip(after, before, strict=True) for now, then in zip(*pair, strict=True)):
            return
    raise AssertionError(f"(threads, descriptors, mappings) were {before} and are {after}")


def _kept(pid: int) -> tuple[int, int, int]:
    """Threads, descriptors and shared mappings of a process."""
    with open(f"/proc/{pid}/maps") as lines:
        mappings = sum("/memfd:" in line or "/dev/shm" in line for line in lines)
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")), mappings


_REGISTERS_TWICE = """
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins
from weightcast.integrations.vllm import plugin

load_general_plugins()
plugin.register()
import weightcast.integrations.vllm.trainer_engine
for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
    try:
        factory.register_engine(plugin.BACKEND, "somewhere", "else")
    except ValueError:
        print("registered")
"""


@on(ONE, full=[TWO])
def test_an_install_is_one_line_of_the_servers_log(server: Server) -> None:
    """Whatever the number of workers."""
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        report = it.publish(0)
    lines = server.log_lines(f"installed version {report.version} of run {report.run[:8]} in ")
    assert len(lines) == 1, lines
    assert " INFO " in lines[0]


@on(ONE)
def test_updates_are_in_the_servers_own_metrics(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        before, report = server.metrics(), it.publish(0)
    after = server.metrics()
    served = [each["weightcast_engine_version"] for each in (before, after)]
    assert served == [report.version - 1, report.version]
    assert after["weightcast_torn"] == 0
    stages = [f"weightcast_update_seconds_count {stage}" for stage in ("offer", "seal", "install")]
    for name in ("weightcast_pause_seconds_count", *stages):
        assert after[name] == before[name] + 1
    assert after["weightcast_paused"] == 0
    for path, paused in (("/pause", 1), ("/resume", 0)):
        assert server.post(path).status_code == 200
        assert server.metrics()["weightcast_paused"] == paused


@on(GATED)
def test_health_depends_on_the_version(server: Server) -> None:
    """That of routers. It needs no token, and vLLM answers it where weightcast doesn't refuse."""

    def health() -> tuple[int, str]:
        assert httpx.get(f"{server.url}/ping", trust_env=False).status_code == 200, "it lives"
        reply = httpx.get(f"{server.url}/health", trust_env=False)
        return reply.status_code, reply.json()["error"]["message"] if reply.content else ""

    assert health() == (503, "no publisher's version was installed yet")
    assert_serves(server, 0)
    with trainer(server.setup, server.url, undo=True) as it:
        version = it.publish(1).version
        assert health() == (200, "")
        for behind in (1, 2):
            server.call("test_fail_load", 9, -1)
            it.failure(0)
            stale = f"version {version} is served, 2 behind {version + 2}; at most 1 is allowed"
            assert health() == ((200, "") if behind == 1 else (503, stale))
        it.publish(0)
        assert health() == (200, "")
        it.publisher.remove_engine(server.url)
        status, reason = health()
        assert status == 503
        assert "goes on without this engine" in reason
        assert_serves(server, 0)


def test_register_may_run_more_than_once() -> None:
    command = [sys.executable, "-c", _REGISTERS_TWICE]
    done = subprocess.run(command, env=child_environment(STOCK), capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines().count("registered") == 2, done.stderr


def test_a_worker_without_the_backend_says_what_to_do() -> None:
    worker = SimpleNamespace(weight_transfer_engine=None, rank=1)
    reply = msgspec.convert(plugin._answer(worker, msgspec.to_builtins(Ask())), RankReply)
    assert reply.engine_rank == 1
    assert reply.error is not None
    assert reply.error.kind == "UnsupportedError"
    assert "--weight-transfer-config" in reply.error.message
