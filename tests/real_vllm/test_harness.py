"""The tests' own parts: what a real server without weightcast answers makes sense, by every route the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from real_engines.setups import on

from real_vllm.models import model_of
from real_vllm.oracle import PROMPT, assert_serves, joined
from real_vllm.servers import PLAIN, Server


@on(PLAIN)
def test_a_server_answers_as_transformers_but_for_rounding(server: Server, checkpoint: Callable[..., Path]) -> None:
    # It may have served other weights since.
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint("qwen3", 0))}}
    server.post("/pause?mode=wait&clear_cache=true").raise_for_status()
    server.post("/collective_rpc", reload).raise_for_status()
    server.post("/resume").raise_for_status()
    assert_serves(server.ask, model_of("qwen3", 0), other=model_of("qwen3", 1))
    answer = server.ask(PROMPT, 12)
    assert joined(server.stream(PROMPT, 12)) == answer
    parts = list(server.generate(PROMPT, 12))
    assert joined(part.answer for part in parts) == answer
    assert parts[-1].spans == [(server.version(), 0, 12)]
    assert len(server.pids()) > 1
