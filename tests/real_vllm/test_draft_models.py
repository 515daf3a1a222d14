"""Draft models and MTP layers in real vLLM servers: updated with the main model, whole or not at all.

The oracle is a server that was started cold from the same weights: tokens, log-probabilities, and how many of the
proposed tokens were taken, are equal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from publishers import publisher_of

from real_vllm.drafts import Pair
from real_vllm.oracle import PROMPT, Answer
from real_vllm.servers import Server, Setup
from weightcast import HttpEngine, Publisher, PublishError, TensorSource
from weightcast.errors import IncompatibleWeightsError, InstallError, WeightcastError
from weightcast.format.tensor_digest import tensor_digest

MTP = Setup("glm4-moe", speculation="mtp")
SMALL = Setup(speculation="draft_model")
EAGLE = Setup(tp=2, speculation="eagle")
KEPT = Setup(speculation="draft_model", keeps_draft=True)
NUM_TOKENS = 60
METRIC_SECONDS = 30.0


class Speculated(NamedTuple):
    """A greedy answer, and how many tokens were proposed and taken for it."""

    answer: Answer
    num_proposed: float
    num_taken: float


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


class Served:
    """A server that was started from seed 0, and what servers answer that were started from each seed."""

    def __init__(self, server: Server, pair: Pair, cold: list[Speculated]) -> None:
        self.server = server
        self.pair = pair
        self.cold = cold

    @contextlib.contextmanager
    def publisher(self, source: object = None, **options: object) -> Iterator[Publisher]:
        made = publisher_of(source or self.pair.source, engines=[self.server.url], bucket_size_bytes=1 << 18, **options)
        with made as publisher:
            yield publisher

    def publish(self, publisher: Publisher, seed: int) -> int:
        self.pair.step_to(seed)
        return publisher.publish().version

    def failure(self, publisher: Publisher, seed: int) -> WeightcastError:
        with pytest.raises(PublishError) as caught:
            self.publish(publisher, seed)
        (cause,) = caught.value.failures.values()
        return cause

    def assert_serves(self, seed: int, version: int) -> None:
        assert self.server.version() == str(version)
        assert not self.server.is_paused()
        assert speculated(self.server) == self.cold[seed]


@pytest.fixture(scope="session")
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
        yield Served(server, pair, [speculated(server), other])


def on(*setups: Setup) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("served", setups, indirect=True, scope="session", ids=str)


@on(MTP, SMALL, EAGLE)
def test_both_models_are_those_of_a_cold_start(served: Served) -> None:
    assert all(cold.num_taken > 5 for cold in served.cold)
    assert served.cold[0] != served.cold[1]
    with served.publisher(verify="installed") as publisher:
        for seed in (1, 0, 1):
            served.assert_serves(seed, served.publish(publisher, seed))
    with contextlib.closing(HttpEngine(served.server.url)) as engine:
        held = engine.held()
    assert held is not None
    norms = {name: tensor for name, tensor in served.pair.draft_of(1).items() if name.endswith("norm.weight")}
    assert {name: held.digests[name] for name in norms} == {name: tensor_digest(t) for name, t in norms.items()}


@on(SMALL)
def test_a_streamed_update_brings_both(served: Served) -> None:
    with served.publisher(install="streaming") as publisher:
        for seed in (1, 0):
            served.assert_serves(seed, served.publish(publisher, seed))


@on(MTP, SMALL, EAGLE)
def test_a_draft_model_that_fails_takes_both_back(served: Served) -> None:
    """On the last rank, once it has taken some tensors."""
    with served.publisher(undo=True) as publisher:
        version = served.publish(publisher, 0)
        served.server.call("test_fail_load", 3, served.server.setup.tp - 1, 1, True)
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
def test_unfit_draft_tensors_are_refused_by_name(served: Served) -> None:
    with served.publisher() as publisher:
        version = served.publish(publisher, 0)
    tensors = served.pair.draft_of(1)
    small, gone = list(tensors)[:2]
    tensors[small] = tensors[small][:16]
    del tensors[gone]
    unknown = f"{served.pair.prefix}model.layers.7.nonsense.weight"
    tensors[unknown] = torch.zeros(4)
    main = {name: held[0][1] for name, held in served.pair.main.regions().items()}
    with served.publisher(TensorSource(main | tensors), takeover=True) as publisher:
        error = served.failure(publisher, 0)
    assert isinstance(error, IncompatibleWeightsError), error
    for name in (small, gone, unknown):
        assert any(name in problem for problem in error.problems), (name, error.problems)
    served.assert_serves(0, version)


_DIES_HALFWAY = """
import os, signal, sys
sys.path.insert(0, "tests")
from real_vllm.drafts import Pair
from weightcast import Publisher, PublishOptions
def on_progress(done, total):
    if 2 * done >= total:
        os.kill(os.getpid(), signal.SIGKILL)
url, family, method = sys.argv[1:]
pair, options = Pair(family, method), PublishOptions(bucket_size_bytes=1 << 18)
pair.step_to(1)
Publisher(pair.source, engines=[url], options=options).publish(on_progress=on_progress)
"""


@on(EAGLE)
def test_a_trainer_that_dies_halfway_leaves_both(served: Served) -> None:
    with served.publisher() as publisher:
        version = served.publish(publisher, 0)
    setup = served.server.setup
    command = [sys.executable, "-c", _DIES_HALFWAY, served.server.url, setup.family, setup.speculation]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    served.assert_serves(0, version)
    with served.publisher(takeover=True) as publisher:
        served.assert_serves(1, served.publish(publisher, 1))


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
    with served.publisher(served.pair.main, verify="installed") as publisher:
        for seed in (1, 0):
            served.assert_serves(seed, served.publish(publisher, seed))
    assert served.cold[1].num_taken < served.cold[0].num_taken
    with served.publisher(takeover=True) as publisher:
        error = served.failure(publisher, 1)
    assert isinstance(error, IncompatibleWeightsError), error
    assert all("draft." in problem for problem in error.problems)
