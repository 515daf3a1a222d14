"""The check at the end of a run: against a real engine over HTTP, and it can fail."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from rl_demo import policy
from rl_demo.policy import check, differences
from rl_demo.rollouts import BEFORE_ANY_UPDATE, Answer, Rollouts, wait
from rl_demo.task import Puzzle, draw

from weightcast.control.server.app import EngineServer
from weightcast.engines.gate import Gate
from weightcast.engines.module import ModuleEngine
from weightcast.engines.transformers import TextGenerator
from weightcast.errors import PeerDiedError

Model = policy.Qwen3ForCausalLM
PUZZLES = draw(random.Random(1), 4, 3)


def make_model(seed: int) -> Model:
    """Sharpened, so that two seeds differ by far more than the tolerance."""
    model = policy.make_model(seed=seed, hidden_size=64, num_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


@contextmanager
def serving(model: Model) -> Iterator[str]:
    gate = Gate()
    generator = TextGenerator(model, policy.make_tokenizer(), gate=gate)
    with EngineServer(ModuleEngine(model), gate=gate, generator=generator) as server:
        yield server.url


@pytest.mark.usefixtures("leaves_nothing")
def test_an_engine_is_equal_to_its_own_model_only() -> None:
    model, other = make_model(0), make_model(1)
    with serving(make_model(0)) as url, closing(Rollouts([url], prompts_per_request=2, seed=0)) as rollouts:
        same = check(url, rollouts, model, other, PUZZLES, BEFORE_ANY_UPDATE)
        assert not same.problems
        assert same.max_difference == 0.0 < same.tolerance < same.control_difference
        assert same.num_prompts == len(PUZZLES) <= same.num_tokens
        assert check(url, rollouts, other, model, PUZZLES, BEFORE_ANY_UPDATE).problems
        assert "nothing is proven" in check(url, rollouts, model, model, PUZZLES, BEFORE_ANY_UPDATE).problems[0]
        assert "not 7" in check(url, rollouts, model, other, PUZZLES, 7).problems[0]


@pytest.mark.usefixtures("leaves_nothing")
def test_rollouts_come_in_order_from_all_engines() -> None:
    with (
        serving(make_model(0)) as first,
        serving(make_model(1)) as second,
        closing(Rollouts([first, second], prompts_per_request=1, seed=0)) as rollouts,
    ):
        groups = wait(rollouts.request(PUZZLES, 3))
        again = wait(rollouts.request(PUZZLES, 3))
    assert [group.puzzle for group in groups] == PUZZLES
    for group in groups:
        assert len(group.answers) == 3
        for answer in group.answers:
            assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions)
            assert set(answer.versions) == {BEFORE_ANY_UPDATE}
    assert groups != again, "every request has a seed of its own"


@pytest.mark.usefixtures("leaves_nothing")
def test_an_engine_that_is_gone_is_named() -> None:
    with serving(make_model(0)) as url:
        pass
    with closing(Rollouts([url], prompts_per_request=2, seed=0)) as rollouts, pytest.raises(PeerDiedError, match=url):
        wait(rollouts.request(PUZZLES, 1))


EXPECTED = Answer((5, 6, 1), (-0.5, -0.25, 0.0), (3, 3, 3))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer((5, 6, 1), (-0.5, -0.25, 0.0), (3, 3, 3)), None),
        (Answer((5, 6, 1), (-0.5, -0.2501, 0.0), (3, 3, 3)), None),
        (Answer((5, 6, 1), (-0.5, -0.3, 0.0), (3, 3, 3)), "log-probability"),
        (Answer((5, 6, 1), (-0.5, float("nan"), 0.0), (3, 3, 3)), "log-probability"),
        (Answer((5, 7, 1), (-0.5, -0.25, 0.0), (3, 3, 3)), "answered with"),
        (Answer((5, 6), (-0.5, -0.25), (3, 3)), "answered with"),
        (Answer((5, 6, 1), (-0.5, -0.25, 0.0), (2, 3, 3)), r"versions \[2, 3\], not 3"),
    ],
)
def test_differences(answer: Answer, problem: str | None) -> None:
    found = differences(Puzzle((1, 2)), EXPECTED, answer)
    assert len(found) == (problem is not None)
    assert problem is None or re.search(problem, found[0])
