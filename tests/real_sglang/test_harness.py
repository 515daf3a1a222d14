"""The tests' own parts: what stands for a cold start is one, and its versions can be told from each other."""

from __future__ import annotations

from real_engines.setups import on
from real_vllm.models import model_of
from real_vllm.oracle import FAR, NUM_TOKENS, PROMPT, deviation, joined

from real_sglang.oracle import LOOSE, assert_serves
from real_sglang.servers import STOCK, STOCK_TWO, Server


@on(STOCK, full=[STOCK_TWO])
def test_a_server_answers_as_one_that_was_forked(server: Server) -> None:
    assert_serves(server, 0)
    whole = server.answer(PROMPT, 12)
    parts = list(server.stream(PROMPT, 12))
    assert joined(part.answer for part in parts) == whole.answer
    assert parts[-1].spans == whole.spans == [("default", 0, 12)]
    assert len(server.pids()) > 1


@on(STOCK, full=[STOCK_TWO])
def test_versions_answer_differently_and_as_transformers_but_for_rounding(server: Server) -> None:
    answers = [server.cold(seed).ask(PROMPT, NUM_TOKENS) for seed in range(4)]
    for seed, answer in enumerate(answers):
        for other in range(4):
            found = deviation(model_of("qwen3", other), PROMPT, answer)
            assert found.logprob < LOOSE if other == seed else found.logprob > FAR, (seed, other, found)
            assert other == seed or answers[other].tokens != answer.tokens
