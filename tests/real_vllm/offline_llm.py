"""An offline `LLM`, updated by a publisher of the same process, as a program: vLLM wants a main module of its own.

Run as `offline_llm.py FOLDER FAMILY DTYPE TP TRANSPORT EXPECTED`. Publishes three versions in turn, and fails unless
the LLM answers each time as expected, and says of which version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from real_vllm.oracle import NUM_TOKENS, PROMPT, Answer
from real_vllm.servers import Setup, Span
from real_vllm.trainer import trainer


def start(folder: str, setup: Setup) -> Any:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        folder,
        dtype=str(setup.dtype).removeprefix("torch."),
        tensor_parallel_size=setup.tp,
        max_model_len=512,
        enforce_eager=True,
        worker_extension_cls="real_vllm.extension.Extension",
        weight_transfer_config=WeightTransferConfig(backend="weightcast"),
    )


class Asked:
    """`ask` of an LLM; `spans` are those of its last answer."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.spans: list[Span] = []

    def __call__(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=0, ignore_eos=True)
        (result,) = self._llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        output = result.outputs[0]
        self.spans = [Span(span.version, span.start, span.end) for span in output.weight_versions]
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return Answer(list(output.token_ids), [of_token[token].logprob for token, of_token in pairs])


def as_argument(answers: Sequence[Answer]) -> str:
    return json.dumps(answers)


def from_argument(text: str) -> list[Answer]:
    """What an LLM of each seed must answer to `PROMPT`."""
    return [Answer(*answer) for answer in json.loads(text)]


def main(folder: str, family: str, dtype: str, tp: str, transport: str, expected: str) -> None:
    from weightcast.integrations.vllm.clients import LLMEngine

    setup = Setup(family, getattr(torch, dtype), tp=int(tp))
    llm = start(folder, setup)
    ask, answers = Asked(llm), from_argument(expected)
    with trainer(setup, LLMEngine(llm), transport=transport) as it:
        assert ask(PROMPT, NUM_TOKENS) == answers[0] != answers[1]
        for seed in (1, 0, 1):
            report = it.publish(seed)
            assert ask(PROMPT, NUM_TOKENS) == answers[seed]
            assert ask.spans == [(str(report.version), 0, NUM_TOKENS)], ask.spans
    assert ask(PROMPT, NUM_TOKENS) == answers[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
