"""What the plugin puts into vLLM, and what a vLLM refuses that has only a part of it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.servers import ONE, STOCK, TWO, Server, Setup, child_environment
from real_vllm.trainer import GLOO, IPC, trainer
from weightcast.control.worker_rpc import Ask, RankReply
from weightcast.errors import ControlError
from weightcast.host.deadline import Deadline
from weightcast.integrations.vllm import plugin

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
    for _ in Deadline(15.0).polls(0.05, 0.2):
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
    def values() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics", follow_redirects=True).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {" ".join((s.name, *s.labels.values())): s.value for s in samples if s.name.startswith("weightcast_")}

    with trainer(server.setup, server.url) as it:
        it.publish(1)
        before, report = values(), it.publish(0)
    after = values()
    assert (before["weightcast_weight_version"], after["weightcast_weight_version"]) == (
        report.version - 1,
        report.version,
    )
    assert after["weightcast_torn"] == 0
    stages = [f"weightcast_update_seconds_count {stage}" for stage in ("offer", "seal", "install")]
    for name in ("weightcast_pause_seconds_count", *stages):
        assert after[name] == before[name] + 1


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
