"""TRL's AsyncGRPOTrainer with weightcast as its `weight_transfer`: vLLM pauses to install, and only then.

    pip install trl==1.16.0 requests weightcast
    python examples/trl_async_grpo.py MODEL http://127.0.0.1:8000

The URL is a vLLM server's that serves MODEL (examples/vllm_http.py says how it is started), or a reference server's:
`weightcast serve MODEL --port 8000`. `WeightcastTransfer` is all that a TRL program needs; the rest of this page is a
task (say even tokens), a rollout worker that asks the server, and what lets TRL's trainer run without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import datasets
import httpx
import numpy as np
import torch
import transformers
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import weightcast

NUM_STEPS = 6
GROUP = 8
NUM_TOKENS = 8


class WeightcastTransfer:
    """TRL's `WeightTransferProtocol`. TRL gathers the weights itself, and hands whole tensors to its first process.

    Memory: nothing for an unsharded model, whose tensors TRL hands out as they are; under FSDP2 the whole model on the
    first process, for as long as a publish takes.
    """

    def __init__(self, urls: Sequence[str], *, token: str | None = None) -> None:
        self._source = Tensors()
        # Only the first process of TRL's is called: there are no other trainer ranks to publish with.
        self._publisher = weightcast.Publisher(self._source, engines=urls, token=token, trainer_group=None)

    def init_weight_transfer(self) -> None:
        """Engines are connected by the first publish."""

    def pause(self) -> None:
        """The server goes on generating while weights travel."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        with self._source.holding(iterator):
            report = self._publisher.publish()
        print(
            f"version {report.version}: {report.num_bytes} bytes in {report.seconds.total:.3f} s, "
            f"paused for {report.seconds.pause:.3f} s",
            flush=True,
        )

    def resume(self) -> None:
        """Publishing has done so."""

    def destroy(self) -> None:
        self._publisher.close()


class Tensors:
    """A weightcast `Source` of whatever named tensors it holds at the moment."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._specs: list[weightcast.TensorSpec] = []

    @contextlib.contextmanager
    def holding(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[None]:
        self._tensors = dict(tensors)
        try:
            yield
        finally:
            self._tensors = {}

    def specs(self) -> list[weightcast.TensorSpec]:
        specs = [
            weightcast.TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        ]
        if specs != self._specs:  # the same object as long as nothing changes: then nothing is planned anew
            self._specs = specs
        return self._specs

    def regions(self) -> dict[str, list[tuple[weightcast.Region, torch.Tensor]]]:
        return {
            name: [(weightcast.Region((0,) * tensor.ndim, tuple(tensor.shape)), tensor)]
            for name, tensor in self._tensors.items()
        }


class EvenTokens:
    """TRL's `RolloutWorkerProtocol`: asks the server for groups of completions, and rewards even token ids."""

    def __init__(self, url: str, prompts: Sequence[list[int]]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=4 * GROUP)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.rewards: dict[int, list[float]] = {}
        self._version = 0
        self._prompts = prompts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False)
        # Only vLLM has this route, and returns token ids only when it is asked to.
        self._wishes = {"return_token_ids": True} if self._http.get("/version").status_code == 200 else {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._http.close()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the rollout worker has ended")

    def _work(self) -> None:
        group = 0
        while not self._stop.is_set():
            for sample in self._group(group):
                while not self._stop.is_set():
                    try:
                        self.rollout_buffer.put(sample, timeout=0.1)
                        break
                    except queue.Full:
                        continue
            group += 1

    def _group(self, group: int) -> list[RolloutSample]:
        prompt, version = self._prompts[group % len(self._prompts)], self._version
        wishes = {"n": GROUP, "max_tokens": NUM_TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
        reply = self._http.post("/v1/completions", json={"prompt": prompt} | wishes | self._wishes)
        reply.raise_for_status()
        answers = [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in reply.json()["choices"]]
        rewards = np.array([np.mean([token % 2 == 0 for token in tokens]) for tokens, _ in answers])
        self.rewards.setdefault(version, []).extend(rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        return [
            RolloutSample(
                prompt=[{"role": "user", "content": ""}],
                completion=[{"role": "assistant", "content": ""}],
                input_ids=np.array([*prompt, *tokens]),
                completion_mask=np.array([0] * len(prompt) + [1] * len(tokens)),
                old_log_probs=np.array([0.0] * len(prompt) + logprobs, dtype=np.float32),
                advantage=float(advantage),
                model_version=version,
                group_id=group,
                metrics={},
                enqueued_at=time.time(),
            )
            for (tokens, logprobs), advantage in zip(answers, advantages, strict=True)
        ]


def train_without_a_gpu() -> None:
    """What TRL 1.16.0 wants of a GPU and does not need: its name, and an attention kernel for packed sequences."""
    from trl.experimental.async_grpo import packing

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        *_: Any,
        **options: Any,
    ) -> torch.Tensor:
        outputs = []
        for i in range(len(cu_q) - 1):
            parts = (q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]])
            heads = [part.transpose(0, 1)[None] for part in parts]
            # What a group shares, its queries leave out and its keys have: the last query sees the last key.
            num_q, num_k = len(parts[0]), len(parts[1])
            mask = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
            output = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=options["softmax_scale"], enable_gqa=True
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)

    torch.cuda.get_device_name = lambda *_: "cpu"
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("output", nargs="?", default="trl_output", help="a folder for what TRL writes")
    parser.add_argument("--token", help="what the server has in WEIGHTCAST_TOKEN")
    options = parser.parse_args()

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = tokenizer.chat_template or "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    is_cpu = not torch.cuda.is_available()
    if is_cpu:
        train_without_a_gpu()
    rollouts = EvenTokens(options.url, prompts=[[5, 6, 7, 8], [20, 21, 22], [40, 41]])
    trainer = AsyncGRPOTrainer(
        model=options.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),  # the worker rewards
        args=AsyncGRPOConfig(
            output_dir=options.output,
            vllm_server_base_url=options.url,
            token_budget=256,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            learning_rate=1e-2,
            use_cpu=is_cpu,
            bf16=not is_cpu,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "x"}]] * GROUP}),
        processing_class=tokenizer,
        rollout_worker=rollouts,
        weight_transfer=WeightcastTransfer([options.url], token=options.token),
    )
    trainer.train()
    trainer.save_model(options.output)
    for version, rewards in sorted(rollouts.rewards.items()):
        print(f"policy {version}: mean reward {np.mean(rewards):.3f} of {len(rewards)} rollouts")


if __name__ == "__main__":
    main()
