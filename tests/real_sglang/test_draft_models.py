"""Draft models and MTP layers in real SGLang servers: updated with the main model, whole or not at all.

The oracle is a server that was started cold from the same weights: tokens, log-probabilities, and how many of the
proposed tokens were taken, are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from real_vllm.drafts import NUM_TOKENS, Pair, Served, Speculated
from real_vllm.oracle import NUM_STREAMED, PROMPT, joined
from real_vllm.test_acceptance import Stream
from warm_python import WarmPython

from real_sglang.faults import Break
from real_sglang.servers import Server, Setup
from weightcast.errors import InstallError

SMALL = Setup(speculation="draft_model")
EAGLE = Setup(tp=2, speculation="eagle")
MTP = Setup("glm4-moe", speculation="mtp")
KEPT = Setup(speculation="draft_model", keeps_draft=True)


def speculated(server: Server) -> Speculated:
    found = server.answer(PROMPT, NUM_TOKENS)
    return Speculated(found.answer, found.num_proposed, found.num_taken)


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of a setup. A draft model that is kept is of seed 0 in both cold servers."""
    setup: Setup = request.param
    pair = Pair(setup.family, setup.speculation, "sglang")
    folders = [pair.save(seed, tmp_path_factory.mktemp("checkpoint")) for seed in (0, 1)]
    if setup.keeps_draft:
        folders[1] = folders[1][0], folders[0][1]
    with Server(dataclasses.replace(setup, plugin=False), folders[1][0], draft=folders[1][1]) as server:
        other = speculated(server)
    with Server(setup, folders[0][0], draft=folders[0][1]) as server:
        yield Served(server, pair, [speculated(server), other], speculated)


def on(*setups: Setup, full: tuple[Setup, ...] = ()) -> pytest.MarkDecorator:
    besides = [pytest.param(setup, id=str(setup), marks=pytest.mark.full) for setup in full]
    always: list[Any] = [pytest.param(setup, id=str(setup)) for setup in setups]
    return pytest.mark.parametrize("served", [*always, *besides], indirect=True, scope="session")


def fault_in_draft(served: Served) -> Break:
    """On the last rank, once it has taken some of the draft model's tensors."""
    return Break(len(served.pair.main.specs()) + 3, rank=served.server.setup.tp - 1)


@on(EAGLE, full=(SMALL, MTP))
def test_both_models_are_those_of_a_cold_start(served: Served) -> None:
    served.assert_is_of_a_cold_start()


@on(EAGLE, full=(SMALL, MTP))
@pytest.mark.parametrize("undo", [True, False])
def test_a_draft_model_that_fails(served: Served, undo: bool) -> None:
    """It takes both back, or without undo stops generation until healed."""
    with served.publisher(undo=undo) as publisher:
        version = served.publish(publisher, 0)
        with served.server.failing(fault_in_draft(served)):
            error = served.failure(publisher, 1)
        assert isinstance(error, InstallError), error
        assert "the test's fault" in str(error)
        assert error.torn is not undo
        if undo:
            served.assert_serves(0, version)
        else:
            assert served.server.generate(PROMPT, 4).status_code == 503
        served.assert_serves(1, served.publish(publisher, 1))


@on(EAGLE, full=(SMALL, MTP))
def test_unfit_draft_tensors_are_refused_by_name(served: Served) -> None:
    served.assert_unfit_tensors_are_refused()


@on(EAGLE)
def test_a_trainer_that_dies_halfway_leaves_both(served: Served, python: WarmPython) -> None:
    served.assert_a_trainer_that_dies_halfway_leaves_both(python)


@on(full=(SMALL,))
def test_a_streamed_update_brings_both(served: Served) -> None:
    with served.publisher(install="streaming") as publisher:
        for seed in (1, 0):
            served.assert_serves(seed, served.publish(publisher, seed))


@on(full=(SMALL,))
def test_a_running_request_goes_on_with_both_new_models(served: Served) -> None:
    with served.publisher() as publisher:
        first = served.publish(publisher, 0)
        stream = Stream(served.server.stream(PROMPT, NUM_STREAMED))
        served.pair.step_to(1)
        second = publisher.publish(on_progress=stream).version
        parts = stream.awaited()
        (old, _, cut), (new, start, end) = parts[-1].spans
        assert (old, new, start, end) == (str(first), str(second), cut, NUM_STREAMED)
        tokens = joined(part.answer for part in parts).tokens
        assert tokens[: min(cut, NUM_TOKENS)] == served.cold[0].answer.tokens[:cut]
        assert tokens[cut : cut + NUM_TOKENS] == served.server.ask([*PROMPT, *tokens[:cut]], NUM_TOKENS).tokens
        served.assert_serves(1, second)


@on(full=(KEPT,))
def test_a_kept_draft_model_is_that_of_the_start(served: Served) -> None:
    served.assert_keeps_the_draft_model()
