"""Draft models and MTP layers in real vLLM servers: updated with the main model, whole or not at all.

The oracle is a server that was started cold from the same weights: tokens, log-probabilities, and how many of the
proposed tokens were taken, are equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from warm_python import WarmPython

from real_vllm.drafts import FAILURES, MOMENTS, NUM_TOKENS, Pair, Served, Speculated
from real_vllm.oracle import PROMPT
from real_vllm.servers import Server, Setup
from weightcast.errors import InstallError

MTP = Setup("glm4-moe", speculation="mtp")
SMALL = Setup(speculation="draft_model")
EAGLE = Setup(tp=2, speculation="eagle")
KEPT = Setup(speculation="draft_model", keeps_draft=True)
METRIC_SECONDS = 30.0


def speculated(server: Server) -> Speculated:
    def counts() -> tuple[float, float, float]:
        names = ("generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        first, second, third = (server.metric(f"vllm:{name}_total") for name in names)
        return first, second, third

    generated, proposed, taken = counts()
    answer = server.ask(PROMPT, NUM_TOKENS)
    end = time.monotonic() + METRIC_SECONDS
    while (now := counts())[0] < generated + NUM_TOKENS:  # vLLM counts after it has answered
        assert time.monotonic() < end
    return Speculated(answer, now[1] - proposed, now[2] - taken)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of a setup. A draft model that is kept is of seed 0 in both cold servers."""
    setup: Setup = request.param
    pair = Pair(setup.family, setup.speculation)
    folders = [pair.save(seed, tmp_path_factory.mktemp("checkpoint")) for seed in (0, 1)]
    if setup.keeps_draft:
        folders[1] = folders[1][0], folders[0][1]
    with Server(setup, folders[1][0], draft=folders[1][1]) as server:
        other = speculated(server)
    with Server(setup, folders[0][0], draft=folders[0][1]) as server:
        yield Served(server, pair, [speculated(server), other], speculated)


def on(*setups: Setup) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("served", setups, indirect=True, scope="module", ids=str)


@on(MTP, SMALL, EAGLE)
def test_both_models_are_those_of_a_cold_start(served: Served) -> None:
    served.assert_is_of_a_cold_start()


@on(SMALL)
def test_a_streamed_update_brings_both(served: Served) -> None:
    with served.publisher(install="streaming") as publisher:
        for seed in (1, 0):
            served.assert_serves(seed, served.publish(publisher, seed))


@on(MTP, SMALL)
def test_a_draft_model_that_fails_takes_both_back(served: Served) -> None:
    assert_a_failure_takes_both_back(served, of_draft=True, is_draft_first=False)


@on(EAGLE)
@pytest.mark.parametrize(("of_draft", "is_draft_first"), FAILURES)
def test_a_model_that_fails_on_one_rank_takes_both_back(served: Served, of_draft: bool, is_draft_first: bool) -> None:
    assert_a_failure_takes_both_back(served, of_draft=of_draft, is_draft_first=is_draft_first)


def assert_a_failure_takes_both_back(served: Served, *, of_draft: bool, is_draft_first: bool) -> None:
    """On the last rank, once a model has taken some tensors; if the draft model comes first, on the first rank, once it
    has taken all.
    """
    rank, after = (0, 1 << 20) if is_draft_first else (served.server.setup.tp - 1, 3)
    with served.publisher(served.pair.joined(is_draft_first), undo=True) as publisher:
        version = served.publish(publisher, 0)
        served.server.call("test_fail_load", after, rank, 1, of_draft)
        error = served.failure(publisher, 1)
        assert isinstance(error, InstallError), error
        assert "the test's fault" in str(error)
        assert not error.torn
        served.assert_serves(0, version)
        served.assert_serves(1, served.publish(publisher, 1))


@on(SMALL, EAGLE)
def test_a_draft_model_that_fails_without_undo_stops_generation_until_healed(served: Served) -> None:
    with served.publisher() as publisher:
        served.publish(publisher, 0)
        served.server.call("test_fail_load", 3, served.server.setup.tp - 1, 1, True)
        error = served.failure(publisher, 1)
        assert isinstance(error, InstallError), error
        assert error.torn
        assert served.server.complete(PROMPT, 4).status_code == 503
        served.assert_serves(1, served.publish(publisher, 1))


@on(MTP, SMALL, EAGLE)
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


@on(SMALL)
def test_a_reload_by_vllm_itself_leaves_the_engine_torn(served: Served) -> None:
    """It does not reload the draft model."""
    server = served.server
    with served.publisher() as publisher:
        served.publish(publisher, 1)
        assert server.post("/collective_rpc", {"method": "reload_weights"}).status_code == 200
        assert server.complete(PROMPT, 4).status_code == 503
        served.assert_serves(1, served.publish(publisher, 1))


@on(KEPT)
def test_a_kept_draft_model_is_that_of_the_start(served: Served) -> None:
    served.assert_keeps_the_draft_model()
