"""An `AsyncLLM` of the publisher's process, torn and healed, as a program: vLLM wants a main module of its own.

Run as `async_llm.py FOLDER EXPECTED`. Fails unless requests are refused while it is torn, and answered right before and
after.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from real_vllm.offline_llm import from_argument
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.servers import Setup
from real_vllm.trainer import trainer
from weightcast.errors import EngineTornError
from weightcast.integrations.vllm import AsyncLLMEngine


async def answer_of(llm: Any, request: str) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async for output in llm.generate({"prompt_token_ids": list(PROMPT)}, params, request):
        result = output
    return list(result.outputs[0].token_ids)


async def answers(folder: str, expected: str) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineGenerateError

    setup, tokens = Setup(), [answer.tokens for answer in from_argument(expected)]
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            folder,
            dtype=str(setup.dtype).removeprefix("torch."),
            max_model_len=512,
            enforce_eager=True,
            weight_transfer_config=WeightTransferConfig(backend="weightcast"),
        )
    )
    engine = AsyncLLMEngine(llm)
    with trainer(setup, engine) as it:
        assert await answer_of(llm, "first") == tokens[0] != tokens[1]
        await asyncio.to_thread(engine.quarantine, "the test's reason")
        with pytest.raises(EngineGenerateError) as caught:
            await answer_of(llm, "refused")
        cause = caught.value.__cause__
        assert isinstance(cause, EngineTornError), cause
        assert "the test's reason" in str(cause)
        assert not llm.output_processor.has_unfinished_requests()
        await asyncio.to_thread(it.publish, 1)
        assert await answer_of(llm, "healed") == tokens[1]
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(answers(*sys.argv[1:]))
