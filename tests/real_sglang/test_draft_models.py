"""Draft models and MTP layers in real SGLang servers: updated with the main model, whole or not at all.

The oracle is a server that was started cold from the same weights: tokens, log-probabilities, and how many of the
proposed tokens were taken, are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from real_vllm.drafts import FAILURES, MOMENTS, NUM_TOKENS, Pair, Served, Speculated
from real_vllm.oracle import NUM_STREAMED, PROMPT, joined
from real_vllm.test_acceptance import NUM_TRIES, Stream
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


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of a setup. A draft model that is kept is of seed 0 in both cold servers.

    Of this module, since its ranks, which wait for each other with all of a core, would go on until the session's end.
    """
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
    return pytest.mark.parametrize("served", [*always, *besides], indirect=True, scope="module")


def failing(served: Served, of_draft: bool, is_draft_first: bool, rank: int) -> Break:
    """Once the rank has taken some of that model's tensors."""
    others = served.pair.main if of_draft else served.pair.draft
    return Break(3 + (0 if of_draft is is_draft_first else len(others.specs())), rank=rank)


@on(EAGLE, full=(SMALL, MTP))
def test_both_models_are_those_of_a_cold_start(served: Served) -> None:
    served.assert_is_of_a_cold_start()


@on(EAGLE, full=(SMALL, MTP))
@pytest.mark.parametrize(("of_draft", "is_draft_first"), FAILURES)
@pytest.mark.parametrize("undo", [True, False], ids=["undo", "no-undo"])
def test_a_model_that_fails(served: Served, undo: bool, is_draft_first: bool, of_draft: bool) -> None:
    """It takes both back, or without undo stops generation until healed. On the last rank, or the first one.

    The model that comes first is whole by then.
    """
    rank = 0 if is_draft_first else served.server.setup.tp - 1
    with served.publisher(served.pair.joined(is_draft_first), undo=undo) as publisher:
        version = served.publish(publisher, 0)
        with served.server.failing(failing(served, of_draft, is_draft_first, rank)):
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
def test_unfit_updates_are_refused_by_name(served: Served) -> None:
    served.assert_unfit_updates_are_refused()


@on(EAGLE)
def test_a_changed_bit_is_found(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.assert_a_changed_bit_is_found(monkeypatch)


@on(EAGLE)
def test_only_a_newer_version_of_its_own_publisher_is_taken(served: Served) -> None:
    served.assert_only_a_newer_version_of_its_own_publisher_is_taken()


@on(EAGLE)
def test_a_nan_is_refused(served: Served) -> None:
    served.assert_a_nan_is_refused()


@on(EAGLE)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_trainer_that_dies_leaves_both(served: Served, moment: str, python: WarmPython) -> None:
    served.assert_a_trainer_that_dies_leaves_both(moment, python)


@on(full=(SMALL,))
def test_a_streamed_update_brings_both(served: Served) -> None:
    with served.publisher(install="streaming") as publisher:
        for seed in (1, 0):
            served.assert_serves(seed, served.publish(publisher, seed))


@on(full=(SMALL,))
def test_a_running_request_goes_on_with_both_new_models(served: Served) -> None:
    with served.publisher() as publisher:
        for _ in range(NUM_TRIES):
            first = served.publish(publisher, 0)
            stream = Stream(served.server.stream(PROMPT, NUM_STREAMED))
            served.pair.step_to(1)
            second = publisher.publish(on_progress=stream).version
            parts = stream.awaited()
            if len(parts[-1].spans) > 1:
                break
        (old, _, cut), (new, start, end) = parts[-1].spans
        assert (old, new, start, end) == (str(first), str(second), cut, NUM_STREAMED)
        tokens = joined(part.answer for part in parts).tokens
        assert tokens[: min(cut, NUM_TOKENS)] == served.cold[0].answer.tokens[:cut]
        assert tokens[cut : cut + NUM_TOKENS] == served.server.ask([*PROMPT, *tokens[:cut]], NUM_TOKENS).tokens
        served.assert_serves(1, second)


@on(full=(KEPT,))
def test_a_kept_draft_model_is_that_of_the_start(served: Served) -> None:
    served.assert_keeps_the_draft_model()
