"""Trainings with TRL's asynchronous trainers on a CPU, with rollouts that need no vLLM.

As a program: `trl_training.py JSON`, the fields of a `Training`; under torchrun the model is sharded with FSDP2.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import datasets
import httpx
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from trl.experimental.async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer
from trl.experimental.async_distillation import async_rollout_worker as distillation
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo import async_rollout_worker as grpo

from real_vllm.programs import end_rank
from real_vllm.trl_on_cpus import shard_without_gpus, train_without_a_gpu
from weightcast import PublishError, PublishOptions
from weightcast.integrations.trl import WeightcastMetrics, WeightcastTransfer

BATCH = 8
PROMPT = (5, 6, 7, 8)
NUM_TOKENS = 8
START_SECONDS = 120.0


@dataclasses.dataclass
class Training:
    """`sglang`: the URL of the server that makes the rollouts; without one they are made here.

    `victim`, `victim_pid`: an engine whose session is killed when the second step begins; the fourth one waits for it.
    """

    model: str
    output: str
    urls: list[str]
    kind: Literal["grpo", "distillation"] = "grpo"
    num_steps: int = 3
    on_failure: Literal["raise", "report"] = "raise"
    sglang: str = ""
    victim: str = ""
    victim_pid: int = 0

    def trainer(self) -> Any:
        transfer = WeightcastTransfer(
            self.urls,
            options=PublishOptions(on_failure=self.on_failure, deadline_seconds=20, lease_seconds=10),
        )
        options: dict[str, Any] = {
            "output_dir": self.output,
            "max_steps": self.num_steps,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": False,
            "learning_rate": 1e-2,
            "token_budget": 0,
            "max_staleness": 100,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        if dist.is_torchelastic_launched():
            options |= shard_without_gpus()
        parts: dict[str, Any] = {
            "model": self.model,
            "train_dataset": datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "w5"}]] * BATCH}),
            "callbacks": [Events(self)],
            "weight_transfer": transfer,
        }
        train_without_a_gpu()
        if self.kind == "grpo":
            parts["rollout_worker"] = SGLangRollouts(self.sglang) if self.sglang else MadeRollouts(graded)
            return AsyncGRPOTrainer(args=AsyncGRPOConfig(**options), reward_funcs=no_reward, **parts)
        parts["rollout_worker"] = MadeRollouts(taught)
        options["model_init_kwargs"] = {"attn_implementation": "sdpa"}
        return AsyncDistillationTrainer(args=AsyncDistillationConfig(**options), **parts)


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """The rollouts come with their advantages."""
    return [0.0] * len(completions)


def graded(tokens: Sequence[int], logprobs: Sequence[float], version: int, group: int) -> grpo.RolloutSample:
    """A completion for GRPO; even token ids are what it learns."""
    return grpo.RolloutSample(
        prompt=[{"role": "user", "content": ""}],
        completion=[{"role": "assistant", "content": ""}],
        input_ids=np.array([*PROMPT, *tokens]),
        completion_mask=np.array([0] * len(PROMPT) + [1] * len(tokens)),
        old_log_probs=np.array([0.0] * len(PROMPT) + list(logprobs), dtype=np.float32),
        advantage=float(np.mean([token % 2 == 0 for token in tokens])) - 0.5,
        model_version=version,
        group_id=group,
        metrics={},
        enqueued_at=time.time(),
    )


def taught(tokens: Sequence[int], logprobs: Sequence[float], version: int, group: int) -> distillation.RolloutSample:
    """A completion for distillation, whose teacher is sure of each token."""
    ids = np.full((len(PROMPT) + len(tokens), 2), -1)
    ids[len(PROMPT) :, 0] = tokens
    return distillation.RolloutSample(
        prompt=[{"role": "user", "content": ""}],
        completion=[{"role": "assistant", "content": ""}],
        input_ids=np.array([*PROMPT, *tokens]),
        completion_mask=np.array([0] * len(PROMPT) + [1] * len(tokens)),
        teacher_topk_ids=ids,
        teacher_topk_logprobs=np.where(ids < 0, -np.inf, np.log(0.9)).astype(np.float32),
        model_version=version,
        metrics={},
        teacher_id="default",
        prompt_id=group,
        enqueued_at=time.time(),
    )


class Events(transformers.TrainerCallback):
    """What happens to an engine in a training."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not (state.is_world_process_zero and self._training.victim):
            return
        if state.global_step == 1:
            os.killpg(self._training.victim_pid, signal.SIGKILL)
            self._await(is_up=False)
        if state.global_step == 3:
            self._await(is_up=True)

    def _await(self, *, is_up: bool) -> None:
        end = time.monotonic() + START_SECONDS
        while answers(self._training.victim) is not is_up:
            if time.monotonic() > end:
                raise TimeoutError(f"{self._training.victim} is {'not up' if is_up else 'up'} after {START_SECONDS} s")
            time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/weight_info", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class MadeRollouts:
    """TRL's `RolloutWorkerProtocol` with random completions. `versions`: those that it was told of."""

    def __init__(self, sample: Any) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.versions: list[int] = []
        self._sample = sample
        self._random = np.random.default_rng(0)
        self._num_groups = 0

    def start(self) -> None:
        """The first groups are there."""

    def stop(self) -> None:
        """There is nothing to stop."""

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("more rollouts were asked for than there are")

    def update_model_version(self, model_version: int) -> None:
        """A group for each version, and one for the batch that the trainer fetches in advance."""
        self.versions.append(model_version)
        for _ in range(1 if self._num_groups else 2):
            for tokens, logprobs in self._group():
                self.rollout_buffer.put(self._sample(tokens, logprobs, model_version, self._num_groups))
            self._num_groups += 1

    def _group(self) -> list[tuple[list[int], list[float]]]:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        tokens = self._random.integers(2, 500, (BATCH * num_ranks, NUM_TOKENS))
        return [(row.tolist(), [-6.0] * NUM_TOKENS) for row in tokens]


class SGLangRollouts(MadeRollouts):
    """Completions of a server."""

    def __init__(self, url: str) -> None:
        super().__init__(graded)
        self._url = url

    def _group(self) -> list[tuple[list[int], list[float]]]:
        wishes = {"n": BATCH, "max_new_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": list(PROMPT), "sampling_params": wishes, "return_logprob": True}
        reply = httpx.post(f"{self._url}/generate", json=body, timeout=120, trust_env=False)
        reply.raise_for_status()
        rows = [answer["meta_info"]["output_token_logprobs"] for answer in reply.json()]
        return [([token for _, token, *_ in row], [logprob for logprob, *_ in row]) for row in rows]


def main() -> None:
    torch.set_num_threads(1)
    training = Training(**json.loads(sys.argv[1]))
    trainer, failure = training.trainer(), None
    trainer.add_callback(WeightcastMetrics(trainer))
    try:
        trainer.train()
    except PublishError as error:
        if dist.is_initialized():
            raise
        failure = error
    state = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if trainer.accelerator.is_main_process:
        trainer.model.save_pretrained(training.output, state_dict=state)
        trainer.processing_class.save_pretrained(training.output)
        kinds = sorted({type(parameter).__name__ for parameter in trainer.model.parameters()})
        print(json.dumps({"parameters": kinds, "logs": trainer.state.log_history}), flush=True)
    if failure is not None:
        raise failure
    if dist.is_initialized():
        end_rank()


if __name__ == "__main__":
    main()
