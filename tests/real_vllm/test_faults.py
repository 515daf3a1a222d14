"""What goes wrong with updates of a real vLLM: refused, rolled back or healed; the engine lives and never mixes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from publishers import publisher_of
from real_engines.setups import on

from real_vllm.cold import Cold, assert_answered, assert_serves
from real_vllm.conftest import Checkpoints
from real_vllm.drafts import assert_a_draft_model_is_refused
from real_vllm.models import make_model
from real_vllm.oracle import NUM_STREAMED, PROMPT, joined
from real_vllm.servers import EXPERTS, MOE_REPLICAS, ONE, PIPELINE, REPLICAS, TWO, Server, Setup
from real_vllm.test_acceptance import Stream
from real_vllm.trainer import Tensors, checkpoint_tensors, trainer
from weightcast import HttpEngine, PublishError
from weightcast.errors import ControlError, IncompatibleWeightsError, InstallError, PeerTimeoutError, WeightcastError
from weightcast.integrations.vllm.engine import DEADLINE_SECONDS

Spoil = Callable[[dict[str, torch.Tensor]], list[str]]
"""Changes a checkpoint; returns what the refusal must name."""

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
DOWN_PROJ = "model.layers.2.mlp.down_proj.weight"
NORM = "model.norm.weight"


def unknown_names(tensors: dict[str, torch.Tensor]) -> list[str]:
    names = ["model.layers.0.self_attn.nonsense.weight", "model.layers.99.mlp.up_proj.weight"]
    tensors |= {name: torch.zeros(4, 4) for name in names}
    return names


def small_shapes(tensors: dict[str, torch.Tensor]) -> list[str]:
    for name in (Q_PROJ, NORM):
        tensors[name] = tensors[name][:16]
    return [Q_PROJ, NORM]


def large_shapes(tensors: dict[str, torch.Tensor]) -> list[str]:
    """vLLM's own loader takes the part that fits, and says nothing."""
    tensors[Q_PROJ] = torch.cat([tensors[Q_PROJ]] * 2)
    tensors[DOWN_PROJ] = torch.cat([tensors[DOWN_PROJ]] * 2, dim=1)
    return [Q_PROJ, DOWN_PROJ]


def other_dtype(tensors: dict[str, torch.Tensor]) -> list[str]:
    tensors[DOWN_PROJ] = tensors[DOWN_PROJ].to(torch.int32)
    return [DOWN_PROJ]


def missing_layer(tensors: dict[str, torch.Tensor]) -> list[str]:
    names = [name for name in tensors if name.startswith("model.layers.1.")]
    for name in names:
        del tensors[name]
    return names


SPOILED = (unknown_names, small_shapes, large_shapes, other_dtype, missing_layer)


def publish_spoiled(server: Server, spoil: Spoil, **options: Any) -> tuple[WeightcastError, list[str]]:
    tensors = checkpoint_tensors(make_model(server.setup.family, 1, server.setup.dtype))
    names = spoil(tensors)
    with (
        publisher_of(Tensors(tensors), engines=[server.url], **options) as publisher,
        pytest.raises(PublishError) as caught,
    ):
        publisher.publish()
    (error,) = caught.value.failures.values()
    return error, names


@on(ONE, TWO, PIPELINE, full=[EXPERTS])
@pytest.mark.parametrize("undo", [pytest.param(True, marks=pytest.mark.full), False], ids=["undo", "no-undo"])
@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_unfit_weights_are_refused_by_name_before_the_model_is_touched(
    server: Server, spoil: Spoil, undo: bool
) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
    error, names = publish_spoiled(server, spoil, undo=undo)
    assert isinstance(error, IncompatibleWeightsError), error
    for name in names:
        assert any(name in problem for problem in error.problems), (name, error.problems)
    assert_as_before(server, 0, version)
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        assert_serves(server, 1)


@on(ONE)
def test_an_engine_without_a_draft_model_refuses_one(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
    assert_a_draft_model_is_refused(server)
    assert_as_before(server, 0, version)
    with trainer(server.setup, server.url) as it:
        assert_as_before(server, 1, it.publish(1).version)


def assert_as_before(server: Server, seed: int, version: int) -> None:
    """The engine goes on serving that version of those weights."""
    assert server.is_healthy()
    assert server.version() == str(version)
    assert not server.is_paused()
    assert_serves(server, seed)


@dataclasses.dataclass(frozen=True)
class Break:
    """The model's loader raises before this tensor, on one rank of the world or on all (-1)."""

    after: int
    rank: int = -1

    def __str__(self) -> str:
        return f"at-{self.after}" + ("" if self.rank < 0 else f"-on-rank-{self.rank}")


BREAKS_OF_ONE = [pytest.param(Break(after), id=str(Break(after))) for after in (0, 17, 34)]
BREAKS_OF_TWO = [pytest.param(Break(17, rank), id=str(Break(17, rank))) for rank in (0, 1, -1)]
BREAKS_OF_REPLICAS = [
    pytest.param(Break(17, rank), id=str(Break(17, rank)), marks=[] if rank == 1 else pytest.mark.full)
    for rank in (0, 1, -1)
]


def break_and_undo(server: Server, fault: Break) -> None:
    with trainer(server.setup, server.url, undo=True) as it:
        version = it.publish(0).version
        server.call("test_fail_load", fault.after, fault.rank)
        error = it.failure(1)
        assert isinstance(error, InstallError), error
        assert "the test's fault" in str(error)
        assert not error.torn
        assert_as_before(server, 0, version)
        for seed in (1, 0):
            assert_as_before(server, seed, it.publish(seed).version)


def break_and_heal(server: Server, fault: Break) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
        server.call("test_fail_load", fault.after, fault.rank)
        error = it.failure(1)
        assert isinstance(error, InstallError), error
        assert "the test's fault" in str(error)
        assert error.torn
        assert server.is_healthy()
        assert_does_not_generate(server)
        assert server.version() == str(version)
        for seed in (1, 0):
            assert_as_before(server, seed, it.publish(seed).version)


def assert_does_not_generate(server: Server) -> None:
    reply = server.complete(PROMPT, 4)
    assert reply.status_code == 503, reply.text


@on(ONE)
@pytest.mark.parametrize("fault", BREAKS_OF_ONE)
def test_a_failed_install_goes_back(server: Server, fault: Break) -> None:
    break_and_undo(server, fault)


@on(ONE)
@pytest.mark.parametrize("fault", BREAKS_OF_ONE)
def test_a_failed_install_without_undo_stops_generation_until_healed(server: Server, fault: Break) -> None:
    break_and_heal(server, fault)


@on(TWO, PIPELINE, full=[EXPERTS])
@pytest.mark.parametrize("fault", BREAKS_OF_TWO)
def test_a_rank_that_fails_takes_all_back(server: Server, fault: Break) -> None:
    break_and_undo(server, fault)


@on(TWO, full=[PIPELINE, EXPERTS])
@pytest.mark.parametrize("fault", BREAKS_OF_TWO)
def test_a_rank_that_fails_without_undo_stops_all_until_healed(server: Server, fault: Break) -> None:
    break_and_heal(server, fault)


@on(REPLICAS, full=[MOE_REPLICAS])
@pytest.mark.parametrize("fault", BREAKS_OF_REPLICAS)
def test_a_data_parallel_engine_that_fails_takes_all_back(server: Server, fault: Break) -> None:
    break_and_undo(server, fault)


@on(REPLICAS, full=[MOE_REPLICAS])
@pytest.mark.parametrize("fault", BREAKS_OF_REPLICAS)
def test_a_data_parallel_engine_that_fails_without_undo_stops_all_until_healed(server: Server, fault: Break) -> None:
    break_and_heal(server, fault)


@on(full=[ONE, MOE_REPLICAS])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["slow", "stopped"])
def test_a_pause_that_takes_too_long_leaves_the_old_version(server: Server, is_stopped: bool) -> None:
    """It waits for a request that is running, past the deadline; `stopped`: and a worker does nothing."""
    (worker,) = server.call("test_pid")

    def stop() -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        while not server.is_paused():
            assert time.monotonic() < end
        os.kill(int(worker), signal.SIGSTOP)
        time.sleep(DEADLINE_SECONDS + 5)
        os.kill(int(worker), signal.SIGCONT)

    engine = HttpEngine(server.url, pause="wait", timeout_seconds=4 * DEADLINE_SECONDS)
    with contextlib.closing(engine), trainer(server.setup, engine) as it, ThreadPoolExecutor(1) as pool:
        version = it.publish(0).version
        server.call("test_slow_down", 0.2)
        stream = Stream(server.stream(PROMPT, NUM_STREAMED))
        stopped: list[Future[None]] = []

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            stream(done_bytes, total_bytes)
            if done_bytes == total_bytes and is_stopped:
                stopped.append(pool.submit(stop))

        error = it.failure(1, on_progress=on_progress)
        for future in stopped:
            future.result(60)
        server.call("test_slow_down", 0.0)
        assert isinstance(error, PeerTimeoutError), repr(error)
        assert error.peer == server.url
        assert "pause with mode=keep" in str(error)
        assert_as_before(server, 0, version)
        answer = joined(stream.awaited())
        assert len(answer.tokens) == NUM_STREAMED
        assert_answered(server, 0, PROMPT, answer)
        for seed in (1, 0):
            assert_as_before(server, seed, it.publish(seed).version)


_DIES_HALFWAY = """
import os, signal, sys
sys.path.insert(0, "tests")
from real_vllm.models import make_model
from real_vllm.trainer import change_first_rows
from weightcast import ModuleSource, Publisher, PublishOptions
def on_progress(done, total):
    if 2 * done >= total:
        os.kill(os.getpid(), signal.SIGKILL)
url, transport, family, delta = sys.argv[1:]
model, options = make_model(family, 0), PublishOptions(bucket_size_bytes=1 << 18, delta=delta or None)
publisher = Publisher(ModuleSource(model), engines=[url], transport=transport, options=options)
publisher.publish()
change_first_rows(model)
publisher.publish(on_progress=on_progress)
"""


@on(ONE, TWO, PIPELINE, EXPERTS)
@pytest.mark.parametrize("delta", ["", "always"], ids=["full", "delta"])
@pytest.mark.parametrize("transport", ["ipc://", "gloo://127.0.0.1:0"], ids=["ipc", "gloo"])
def test_a_trainer_that_dies_halfway_leaves_the_old_version(server: Server, transport: str, delta: str) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
    command = [sys.executable, "-c", _DIES_HALFWAY, server.url, transport, server.setup.family, delta]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert_as_before(server, 0, version + 1)
    with trainer(server.setup, server.url, transport=transport, takeover=True) as it:
        assert_as_before(server, 1, it.publish(1).version)


@on(ONE, TWO)
def test_requests_are_answered_while_an_update_is_open(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        answers = []
        it.publish(1, on_progress=lambda done, total: answers.append(server.ask(PROMPT, 4)))
        assert len(answers) > 3
        assert_serves(server, 1)


@on(ONE)
def test_a_request_between_start_and_finish_does_not_kill_the_engine(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
    server.post("/start_weight_update")
    assert_serves(server, 0)
    reply = server.post("/finish_weight_update")
    assert reply.status_code != 200, "nothing was sent"
    assert_serves(server, 0)
    with trainer(server.setup, server.url) as it:
        assert_as_before(server, 1, it.publish(1).version)


GARBAGE = {"update_info": {"kind": "nonsense"}}
MISUSES: dict[str, list[tuple[str, Any]]] = {
    "update before init": [("/update_weights", GARBAGE)],
    "finish before start": [("/finish_weight_update", {"weight_version": "7"})],
    "start twice": [("/start_weight_update", None), ("/start_weight_update", None), ("/finish_weight_update", None)],
    "init with garbage": [("/init_weight_transfer_engine", {"init_info": {"run": "x"}})],
    "update with garbage": [("/start_weight_update", None), ("/update_weights", GARBAGE)],
    "shutdown twice": [("/shutdown_weight_transfer_engine", None), ("/shutdown_weight_transfer_engine", None)],
    "finish between other calls": [
        ("/reset_prefix_cache", None),
        ("/finish_weight_update", {"weight_version": "7"}),
        ("/reset_prefix_cache", None),
    ],
    "finish in a sleep": [
        ("/sleep?level=0", None),
        ("/finish_weight_update", {"weight_version": "7"}),
        ("/wake_up?tags=scheduling", None),
    ],
    "finish after shutdown": [
        ("/shutdown_weight_transfer_engine", None),
        ("/finish_weight_update", {"weight_version": "7"}),
    ],
}


@on(ONE, TWO)
@pytest.mark.parametrize("steps", MISUSES.values(), ids=[name.replace(" ", "-") for name in MISUSES])
def test_misuse_is_an_error_and_later_calls_are_in_step(server: Server, steps: list[tuple[str, Any]]) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
    replies = [server.post(path, body) for path, body in steps]
    if "shutdown" not in steps[-1][0]:
        assert any(reply.status_code >= 400 for reply in replies), [reply.text for reply in replies]
    assert_as_before(server, 0, version)
    with trainer(server.setup, server.url) as it:
        assert_as_before(server, 1, it.publish(1).version)


@pytest.mark.full
def test_workers_that_somebody_else_has_brought_out_of_step_are_found_out(checkpoint: Checkpoints, cold: Cold) -> None:
    """What such a server says of an install may be the answer to another call."""
    setup = Setup(tp=2)
    folder = checkpoint(setup.family, 0, setup.dtype)
    with Server(setup, folder, cold=cold) as server, trainer(setup, server.url) as it:
        it.publish(0)
        assert server.post("/collective_rpc", {"method": "nonsense"}).status_code == 500
        errors = [it.failure(1) for _ in range(3)]
        assert all(isinstance(error, ControlError) for error in errors), errors
        assert all("start the server again" in str(error) for error in errors[1:]), errors
        assert_serves(server, 0)


@on(ONE, TWO)
def test_another_run_transport_and_bucket_size_in_the_same_server(server: Server) -> None:
    for seed, transport in enumerate(("ipc://", "gloo://127.0.0.1:0", "ipc://")):
        with trainer(server.setup, server.url, transport=transport, bucket_size_bytes=1 << (18 + seed)) as it:
            assert_as_before(server, seed % 2, it.publish(seed % 2).version)


@on(ONE)
def test_a_second_publisher_is_refused_while_the_first_lives(server: Server) -> None:
    with trainer(server.setup, server.url) as first, trainer(server.setup, server.url) as second:
        version = first.publish(0).version
        error = second.failure(1)
        assert "held" in str(error) or "holds" in str(error), error
        assert_as_before(server, 0, version)
        assert_as_before(server, 1, first.publish(1).version)
