"""The tests' own parts: what a real server without weightcast answers makes sense, by every route the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.models import make_model, model_of
from real_vllm.oracle import NUM_TOKENS, PROMPT, assert_is_of, assert_other, joined
from real_vllm.servers import ONE, PLAIN, Server
from real_vllm.trainer import Tensors, checkpoint_tensors, trainer
from weightcast import Publisher


@on(PLAIN)
def test_a_server_answers_as_transformers_but_for_rounding(server: Server, checkpoint: Callable[..., Path]) -> None:
    # It may have served other weights since.
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint("qwen3", 0))}}
    server.post("/pause?mode=wait&clear_cache=true").raise_for_status()
    server.post("/collective_rpc", reload).raise_for_status()
    server.post("/resume").raise_for_status()
    answer = server.ask(PROMPT, 12)
    assert_is_of(model_of("qwen3", 0), PROMPT, answer)
    assert_other(model_of("qwen3", 1), PROMPT, answer)
    assert joined(server.stream(PROMPT, 12)) == answer
    parts = list(server.generate(PROMPT, 12))
    assert joined(part.answer for part in parts) == answer
    assert parts[-1].spans == [(server.version(), 0, 12)]
    assert len(server.pids()) > 1


@on(ONE)
def test_a_tensor_that_is_slightly_off_is_noticed_though_transformers_would_not(server: Server) -> None:
    tensors = checkpoint_tensors(make_model(seed=1))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * (1 + 1e-5)
    with Publisher(Tensors(tensors), engines=[server.url]) as publisher:
        publisher.publish()
    assert_is_of(model_of(seed=1), PROMPT, server.ask(PROMPT, NUM_TOKENS))
    with pytest.raises(AssertionError, match="seed 1, engine 0"):
        assert_serves(server, 1)
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        assert_serves(server, 1)
