"""An `LLM` that shares a device with its trainer: put to sleep, woken for weights, updated, woken for its KV cache.

A program, since vLLM wants a main module of its own. Run as `colocated_llm.py FOLDER EXPECTED`. On a CPU vLLM frees
nothing in its sleep; that it schedules nothing until it is wholly awake is the same everywhere, and fails this program
if not so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from real_vllm.offline_llm import Asked, from_argument, start
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.servers import Setup
from real_vllm.trainer import trainer
from weightcast.errors import EngineTornError
from weightcast.integrations.vllm import LLMEngine


def main(folder: str, expected: str) -> None:
    from vllm import SamplingParams

    setup, prompt = Setup(), {"prompt_token_ids": list(PROMPT)}
    llm = start(folder, setup)
    ask, answers = Asked(llm), from_argument(expected)
    with trainer(setup, LLMEngine(llm)) as it:
        for seed, level in ((1, 1), (0, 2)):
            llm.sleep(level=level)
            assert not llm.wake_up(tags=["weights"])
            report = it.publish(seed)
            assert llm.llm_engine.is_sleeping(), "the publish has woken an engine whose KV cache is not there"
            assert llm.wake_up(tags=["kv_cache"])
            assert ask(PROMPT, NUM_TOKENS) == answers[seed]
            assert ask.spans == [(str(report.version), 0, 12)]
        llm.sleep(level=2)
        with trainer(setup, LLMEngine(llm)) as other:
            assert "has held this engine since" in str(other.failure(1))
        assert llm.wake_up()
        requests: list[Callable[[], object]] = [
            lambda: ask(PROMPT, NUM_TOKENS),
            lambda: llm.enqueue([prompt], SamplingParams(max_tokens=1)),
            lambda: llm.llm_engine.add_request("of a client", prompt, SamplingParams(max_tokens=1, n=2)),
            llm.llm_engine.step,
        ]
        for request in requests:
            try:
                request()
                raise AssertionError("what a sleep has dropped was not replaced, and is served")
            except EngineTornError:
                assert not llm.llm_engine.has_unfinished_requests()
        it.publish(1)
        assert ask(PROMPT, NUM_TOKENS) == answers[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
