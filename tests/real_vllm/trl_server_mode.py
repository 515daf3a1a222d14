"""Runs the recipe of docs/trl.md for GRPOTrainer on CPUs: `torchrun trl_server_mode.py RECIPE MODEL URL OUTPUT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from torch.distributed.tensor import DTensor

from real_vllm.programs import end_rank
from real_vllm.trl_on_cpus import shard_without_gpus


def even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1) for tokens in completion_ids]


def main() -> None:
    torch.set_num_threads(1)
    recipe, model, url, output = sys.argv[1:]
    arguments = {
        "model": model,
        "reward_funcs": even_tokens,
        "train_dataset": datasets.Dataset.from_dict({"prompt": ["w5 w6", "w7 w8", "w9"] * 4}),
        "args": trl.GRPOConfig(
            output_dir=output,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            max_steps=3,
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            max_completion_length=8,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **shard_without_gpus(),
        ),
    }
    names: dict[str, Any] = {"arguments": arguments, "url": url}
    exec(compile(Path(recipe).read_text(), recipe, "exec"), names)
    assert all(isinstance(parameter, DTensor) for parameter in names["trainer"].model.parameters())
    end_rank()


if __name__ == "__main__":
    main()
