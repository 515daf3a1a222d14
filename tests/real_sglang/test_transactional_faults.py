"""What goes wrong with updates of a real SGLang: refused, rolled back or healed; the server lives and never mixes."""

from __future__ import annotations

import concurrent.futures
import signal
from typing import Any

import httpx
import pytest
import torch
from real_engines.process import REQUEST_SECONDS
from real_engines.setups import on
from real_vllm.drafts import assert_a_draft_model_is_refused
from real_vllm.models import make_model
from real_vllm.oracle import PROMPT
from real_vllm.test_faults import SPOILED, Spoil, publish_spoiled
from real_vllm.trainer import GLOO, IPC, Tensors, checkpoint_tensors, trainer
from warm_python import WarmPython

from real_sglang.faults import Break
from real_sglang.oracle import assert_serves
from real_sglang.servers import ONE, TWO, Server, Setup
from weightcast import Publisher, PublishError
from weightcast.errors import IncompatibleWeightsError, InstallError


def assert_as_before(server: Server, seed: int, version: int) -> None:
    """The server goes on serving that version of those weights."""
    assert server.version() == str(version)
    assert not server.is_paused()
    assert_serves(server, seed)
    assert server.answer(PROMPT, 4).spans == [(str(version), 0, 4)]


@on(ONE, TWO)
@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_unfit_weights_are_refused_by_name_before_the_model_is_touched(server: Server, spoil: Spoil) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
    error, names = publish_spoiled(server, spoil)
    assert isinstance(error, IncompatibleWeightsError), error
    for name in names:
        assert any(name in problem for problem in error.problems), (name, error.problems)
    assert_as_before(server, 0, version)
    with trainer(server.setup, server.url) as it:
        assert_as_before(server, 1, it.publish(1).version)


@on(ONE)
def test_an_engine_without_a_draft_model_refuses_one(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
    assert_a_draft_model_is_refused(server)
    assert_as_before(server, 0, version)
    with trainer(server.setup, server.url) as it:
        assert_as_before(server, 1, it.publish(1).version)


@on(ONE, TWO)
def test_the_order_of_tensors_is_nobodys_business(server: Server) -> None:
    tensors = checkpoint_tensors(make_model(server.setup.family, 1, server.setup.dtype))
    backwards = dict(reversed(tensors.items()))
    with Publisher(Tensors(backwards), engines=[server.url]) as publisher:
        version = publisher.publish().version
    with trainer(server.setup, server.url):
        assert_as_before(server, 1, version)


@on(ONE)
def test_a_nan_is_a_value_and_the_next_publish_heals_it(server: Server) -> None:
    tensors = checkpoint_tensors(make_model(server.setup.family, 1, server.setup.dtype))
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    with Publisher(Tensors(tensors), engines=[server.url]) as publisher:
        assert publisher.publish().ok
    with trainer(server.setup, server.url) as it:
        assert_as_before(server, 1, it.publish(1).version)


BREAKS_OF_ONE = [pytest.param(Break(after), id=str(Break(after))) for after in (0, 17)]
BREAKS_OF_TWO = [pytest.param(Break(17, rank), id=str(Break(17, rank))) for rank in (0, 1, -1)]


def break_and_undo(server: Server, fault: Break) -> None:
    with trainer(server.setup, server.url, undo=True) as it:
        version = it.publish(0).version
        before = server.checksum()
        with server.failing(fault):
            error = it.failure(1)
        assert isinstance(error, InstallError), error
        assert "the test's fault" in str(error)
        assert not error.torn
        assert server.checksum() == before
        assert_as_before(server, 0, version)
        for seed in (1, 0):
            assert_as_before(server, seed, it.publish(seed).version)


def break_and_heal(server: Server, fault: Break) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
        with server.failing(fault):
            error = it.failure(1)
        assert isinstance(error, InstallError), error
        assert "the test's fault" in str(error)
        assert error.torn
        reply = server.generate(PROMPT, 4)
        assert reply.status_code == 503, reply.text
        reply = server.post("/continue_generation")
        assert reply.status_code == 409, reply.text
        assert "stays paused" in reply.text
        assert server.version() == str(version)
        for seed in (1, 0):
            assert_as_before(server, seed, it.publish(seed).version)


@on(ONE)
@pytest.mark.parametrize("fault", BREAKS_OF_ONE)
def test_a_failed_install_goes_back(server: Server, fault: Break) -> None:
    break_and_undo(server, fault)


@on(ONE)
@pytest.mark.parametrize("fault", BREAKS_OF_ONE)
def test_a_failed_install_without_undo_stops_generation_until_healed(server: Server, fault: Break) -> None:
    break_and_heal(server, fault)


@on(TWO)
@pytest.mark.parametrize("fault", BREAKS_OF_TWO)
def test_a_rank_that_fails_takes_all_back(server: Server, fault: Break) -> None:
    break_and_undo(server, fault)


@on(TWO)
@pytest.mark.parametrize("fault", BREAKS_OF_TWO)
def test_a_rank_that_fails_without_undo_stops_all_until_healed(server: Server, fault: Break) -> None:
    break_and_heal(server, fault)


@on(ONE, TWO)
def test_a_request_that_an_install_has_torn_from_its_version_waits_and_ends_under_the_next(server: Server) -> None:
    with trainer(server.setup, server.url) as it, concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = it.publish(0).version
        running = pool.submit(server.answer, PROMPT, 450)
        with server.failing(Break(17)):
            it.failure(1)
        second = it.publish(1).version
        answer = running.result(REQUEST_SECONDS)
        assert len(answer.answer.tokens) == 450
        assert {span.version for span in answer.spans} <= {str(first), str(second)}
        assert_as_before(server, 1, second)


_DIES = """
import os, signal, sys
from real_vllm.drafts import assert_a_draft_model_is_refused
from real_vllm.models import make_model
from real_vllm.trainer import change_first_rows
from weightcast import ModuleSource, Publisher, PublishOptions
url, transport, share, delta = sys.argv[1:]
def on_progress(done, total):
    if done >= float(share) * total:
        os.kill(os.getpid(), signal.SIGKILL)
model, options = make_model("qwen3", 0), PublishOptions(bucket_size_bytes=1 << 18, delta=delta or None)
publisher = Publisher(ModuleSource(model), engines=[url], transport=transport, options=options)
publisher.publish()
change_first_rows(model)
publisher.publish(on_progress=on_progress)
"""


@on(ONE, TWO)
@pytest.mark.parametrize("delta", ["", "always"], ids=["full", "delta"])
@pytest.mark.parametrize("share", ["0.5", "0", "1"], ids=["half-way", "at-the-first-bucket", "at-the-last-bucket"])
@pytest.mark.parametrize("transport", [IPC, GLOO], ids=["ipc", "gloo"])
def test_a_trainer_that_dies_leaves_the_old_version(
    server: Server, transport: str, share: str, delta: str, python: WarmPython
) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
    assert python.run(_DIES, server.url, transport, share, delta) == -signal.SIGKILL
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
def test_an_offer_does_not_wait_for_running_requests(server: Server) -> None:
    with trainer(server.setup, server.url) as it, concurrent.futures.ThreadPoolExecutor(1) as pool:
        it.publish(0)
        running = pool.submit(server.answer, PROMPT, 480)
        done_before = []
        second = it.publish(1, on_progress=lambda done, total: done_before.append(running.done())).version
        assert not any(done_before)
        assert running.result(REQUEST_SECONDS).spans[-1].version == str(second)


@on(ONE, TWO)
def test_a_session_that_somebody_left_open_is_nobodys_business(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        assert server.post("/begin_weight_update").status_code == 200
        assert_as_before(server, 1, it.publish(1).version)
        assert server.post("/end_weight_update").status_code == 200
        assert_serves(server, 1)


@on(ONE)
def test_a_pause_that_somebody_asked_for_stays(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
        it.publish(1)
        assert server.is_paused()
        with pytest.raises(httpx.ReadTimeout):
            server.generate(PROMPT, 4, seconds=1.0)
        assert server.post("/continue_generation").status_code == 200
        # The request that was given up is computed now, and what shares its batch is rounded otherwise.
        server.generate(PROMPT, 4)
        assert_serves(server, 1)


CALLS: dict[str, tuple[str, Any]] = {
    "a rank call by SGLang's own route": (
        "/update_weights_from_tensor",
        {"load_format": "weightcast", "serialized_named_tensors": ["e30="]},
    ),
    "no record": ("/update_weights", {"update_info": {"kind": "nonsense"}}),
    "no run": ("/init_weight_transfer_engine", {"init_info": {"run": "x"}}),
    "nothing to finish": ("/finish_weight_update", {"weight_version": "7"}),
    "no number": ("/finish_weight_update", {"weight_version": "seven"}),
}


@on(ONE, TWO)
@pytest.mark.parametrize("call", CALLS.values(), ids=[name.replace(" ", "-") for name in CALLS])
def test_misuse_is_an_error_and_the_server_lives(server: Server, call: tuple[str, Any]) -> None:
    with trainer(server.setup, server.url) as it:
        version = it.publish(0).version
    reply = server.post(*call)
    assert 400 <= reply.status_code < 500, reply.text
    assert_as_before(server, 0, version)


@on(ONE)
def test_a_second_publisher_is_refused_while_the_first_lives(server: Server) -> None:
    with trainer(server.setup, server.url) as first, trainer(server.setup, server.url) as second:
        version = first.publish(0).version
        error = second.failure(1)
        assert "held" in str(error) or "holds" in str(error), error
        assert_as_before(server, 0, version)
        assert_as_before(server, 1, first.publish(1).version)


KEYED = Setup(admin_key="a-key", token="a-key")


@on(full=[KEYED])
def test_keys_are_sglangs_own(server: Server) -> None:
    with (
        Publisher(Tensors(checkpoint_tensors(make_model("qwen3", 1))), engines=[server.url]) as publisher,
        pytest.raises(PublishError, match="401"),
    ):
        publisher.publish()
    with trainer(server.setup, server.url) as it:
        assert_as_before(server, 1, it.publish(1).version)
