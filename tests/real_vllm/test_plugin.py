"""vLLM's four stock calls, made by a client that knows nothing of weightcast's routes: a working path of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.servers import STOCK, Server, Setup, child_environment
from real_vllm.trainer import GLOO, IPC, trainer
from weightcast.control.worker_rpc import Ask, RankReply, unmarked
from weightcast.errors import ClosedError, IncompleteUpdateError, UnsupportedError, WeightcastError, from_record
from weightcast.format.messages import InitInfo, Offer, Seal, UpdateInfo, WeightInfo
from weightcast.host.deadline import Deadline
from weightcast.integrations.vllm import plugin
from weightcast.seams.client import EngineClient, ServesTraffic

STOCK_TWO = Setup(tp=2, endpoints=False)


class FourCalls(EngineClient, ServesTraffic):
    """An EngineClient by vLLM's stock routes only. `seals`: whether it passes seals on."""

    def __init__(self, server: Server, *, seals: bool = True) -> None:
        self.name = server.url
        self._server = server
        self._seals = seals

    def info(self) -> WeightInfo:
        world_size = self._server.get("/get_world_size")["world_size"]
        return WeightInfo(self._server.version(), world_size=world_size, abilities=("undo",))

    def init(self, info: InitInfo) -> None:
        self.call("init_weight_transfer_engine", {"init_info": msgspec.to_builtins(info)})

    def update(self, info: UpdateInfo) -> None:
        if isinstance(info, Offer):
            self.call("start_weight_update")
        if not isinstance(info, Seal) or self._seals:
            self.call("update_weights", {"update_info": msgspec.to_builtins(info)})

    def finish(self, version: int) -> None:
        self.call("finish_weight_update", {"weight_version": str(version)})

    def pause(self, run: str) -> None:
        self.call("pause?mode=keep")

    def resume(self, run: str) -> None:
        self.call("resume")

    def close(self) -> None:
        pass

    def call(self, name: str, body: Any = None) -> None:
        """Raises the error that vLLM passes on as a text."""
        reply = self._server.post(f"/{name}", body)
        if reply.status_code != 200:
            record = unmarked(reply.json()["error"]["message"])
            assert record is not None, reply.text
            raise from_record(record)


@on(STOCK, full=[STOCK_TWO])
@pytest.mark.parametrize("transport", [IPC, GLOO], ids=["ipc", "gloo"])
def test_the_four_stock_calls_update(server: Server, transport: str) -> None:
    with trainer(server.setup, FourCalls(server), transport=transport) as it:
        for seed in (1, 0, 1):
            version = it.publish(seed).version
            assert server.version() == str(version)
            assert_serves(server, seed)
            assert not server.is_paused()


@on(STOCK, full=[STOCK_TWO])
def test_finish_finds_nothing_to_do_where_nothing_is_sealed(server: Server) -> None:
    with trainer(server.setup, FourCalls(server)) as it:
        version = it.publish(0).version
    with trainer(server.setup, FourCalls(server, seals=False)) as it:
        for _ in range(2):
            error = it.failure(1)
            assert isinstance(error, IncompleteUpdateError), error
            assert "not sealed" in str(error)
            assert server.version() == str(version)
            assert_serves(server, 0)
    with trainer(server.setup, FourCalls(server)) as it:
        it.publish(1)
        assert_serves(server, 1)


RUN = "a" * 32
ABORT = {"update_info": {"kind": "abort", "run": RUN, "version": 7, "reason": "the test's"}}


@on(STOCK, full=[STOCK_TWO])
def test_each_misuse_is_answered_with_its_own_error(server: Server) -> None:
    """Were replies out of step, an answer would be of the call before."""
    calls = FourCalls(server)
    misuses: list[tuple[str, Any, type[WeightcastError] | None, str]] = [
        ("shutdown_weight_transfer_engine", None, None, ""),
        ("start_weight_update", None, ClosedError, "no publisher holds"),
        ("update_weights", {"update_info": {"kind": "nonsense"}}, WeightcastError, "not a request"),
        ("update_weights", ABORT, ClosedError, "call /init_weight_transfer_engine first"),
        ("finish_weight_update", None, ClosedError, "no publisher holds"),
        ("start_draft_weight_update", None, UnsupportedError, "draft"),
        ("init_weight_transfer_engine", {"init_info": {"run": "x"}}, WeightcastError, "not a request"),
        ("shutdown_weight_transfer_engine", None, None, ""),
        ("update_weights", {"update_info": [{}, {}]}, WeightcastError, "not a request"),
    ]
    with trainer(server.setup, calls) as it:
        it.publish(0)
    for _ in range(2):
        for name, body, kind, text in misuses:
            if kind is None:
                calls.call(name, body)
                continue
            with pytest.raises(kind, match=text):
                calls.call(name, body)
    with trainer(server.setup, calls) as it:
        for seed in (1, 0):
            it.publish(seed)
            assert_serves(server, seed)


@on(STOCK, full=[STOCK_TWO])
def test_nothing_of_a_transfer_stays_in_the_workers(server: Server) -> None:
    calls = FourCalls(server)

    def cycle(transport: str) -> None:
        with trainer(server.setup, calls, transport=transport) as it:
            it.publish(1)
            calls.call("shutdown_weight_transfer_engine")

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


@on(STOCK, full=[STOCK_TWO])
def test_an_install_is_one_line_of_the_servers_log(server: Server) -> None:
    """Whatever the number of workers."""
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        report = it.publish(0)
    lines = server.log_lines(f"installed version {report.version} of run {report.run[:8]} in ")
    assert len(lines) == 1, lines
    assert " INFO " in lines[0]


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
