"""TRL's AsyncGRPOTrainer, with weightcast as its weight transfer: three lines more than TRL alone, marked with a plus.

    pip install 'PATH_TO_WEIGHTCAST[trl]' vllm
    VLLM_PLUGINS=weightcast vllm serve MODEL --weight-transfer-config '{"backend": "weightcast"}'
    python examples/trl_async_grpo.py MODEL http://127.0.0.1:8000

The task: completions of which as many tokens as possible have even ids. See docs/trl.md.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from weightcast.integrations.trl import WeightcastMetrics, WeightcastTransfer  # +


def even_tokens(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The reward: the share of even token ids."""
    return [sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1) for tokens in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as the server names it: a directory or a repository")
    parser.add_argument("url", help="the vLLM server's")
    parser.add_argument("output", nargs="?", default="trl_output", help="a folder for what TRL writes")
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    prompts = ["w5 w6 w7 w8", "w20 w21 w22", "w40 w41"]
    trainer = AsyncGRPOTrainer(
        model=options.model,
        reward_funcs=even_tokens,
        args=AsyncGRPOConfig(
            output_dir=options.output,
            vllm_server_base_url=options.url,
            max_steps=5,
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            max_completion_length=8,
            queue_maxsize=16,
            learning_rate=1e-2,
            use_cpu=not has_gpu,
            bf16=has_gpu,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompts]}),
        weight_transfer=WeightcastTransfer([options.url]),  # +
    )
    trainer.add_callback(WeightcastMetrics(trainer))  # +
    trainer.train()
    trainer.save_model(options.output)


if __name__ == "__main__":
    main()
