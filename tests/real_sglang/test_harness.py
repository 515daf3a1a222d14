"""The tests' own parts: a real server without weightcast answers as transformers does."""

from __future__ import annotations

from real_engines.setups import on
from real_vllm.models import model_of
from real_vllm.oracle import PROMPT, assert_serves, joined

from real_sglang.servers import STOCK, STOCK_TWO, Server


@on(STOCK, full=[STOCK_TWO])
def test_a_server_answers_as_transformers(server: Server) -> None:
    assert_serves(server.ask, model_of("qwen3", 0), other=model_of("qwen3", 1))
    whole = server.answer(PROMPT, 12)
    parts = list(server.stream(PROMPT, 12))
    assert joined(part.answer for part in parts) == whole.answer
    assert parts[-1].spans == whole.spans == [("default", 0, 12)]
    assert len(server.pids()) > 1
