"""Mixed into vLLM's workers by `--worker-extension-cls`: what the tests do inside them, and see of them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from real_vllm.balanced_on_cpus import balance_experts, rebalance
from real_vllm.baseline.per_tensor import Workers
from real_vllm.experts_on_cpus import add_collectives, read_expert_maps
from real_vllm.packed_copy import pack_with_a_flipped_bit

add_collectives()
read_expert_maps()
balance_experts()


class Extension(Workers):
    """Reached by `/collective_rpc`. Method names carry a prefix, since they are mixed into vLLM's own class."""

    def test_fail_load(self, after: int, rank: int = -1, times: int = 1, of_draft: bool = False) -> None:
        """Let the model's loader raise once it has taken `after` real tensors, in the next `times` loads.

        At its end, if it is given fewer, the others being copied to where they belong.
        `rank`: only on that rank of the world; -1: on every rank. `of_draft`: the draft model's loader. A dry run on
        meta tensors is left alone.
        """
        if rank in (-1, _world_rank(self)):
            runner = self.model_runner  # type: ignore[attr-defined]
            _faults(runner.get_draft_model() if of_draft else runner.get_model()).append([after, times])

    def test_clear_faults(self) -> None:
        _faults(self.model_runner.get_model()).clear()  # type: ignore[attr-defined]

    def test_slow_down(self, seconds: float) -> None:
        """Let every step of the model take so much longer."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        if not hasattr(model, "test_step_seconds"):
            model.register_forward_pre_hook(lambda module, inputs: time.sleep(module.test_step_seconds))
        model.test_step_seconds = seconds

    def test_weights_digest(self) -> str:
        """Of this rank's parameters and buffers, bit by bit."""
        digest, model = hashlib.sha256(), self.model_runner.get_model()  # type: ignore[attr-defined]
        for tensor in (*model.parameters(), *model.buffers()):
            digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def test_flip_packed_bit(self, rank: int) -> None:
        """Of the head's packed copy, on that rank of the world."""
        if rank == _world_rank(self):
            head = self.model_runner.get_model().lm_head  # type: ignore[attr-defined]
            pack_with_a_flipped_bit(head, row=101, column=77, bit=0)

    def test_rebalance(self, load: list[list[int]]) -> list[list[int]]:
        """Move experts between ranks, as vLLM does for this load of each, by layer; the expert of each place then."""
        return rebalance(self, load)

    def test_adapters(self) -> list[int]:
        """The ids of the adapters that vLLM's own manager has."""
        return sorted(self.list_loras())  # type: ignore[attr-defined]

    def test_fail_adapter(self, rank: int) -> None:
        """Let vLLM's manager raise when the next adapter is added, on that rank of the world."""
        if rank == _world_rank(self):
            manager = self.model_runner.get_model().lora_manager  # type: ignore[attr-defined]

            def fail(lora: object) -> bool:
                del manager.add_adapter
                raise RuntimeError("this rank was told to fail")

            manager.add_adapter = fail

    def test_pid(self) -> int:
        return os.getpid()


def _world_rank(worker: Any) -> int:
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_index * parallel.world_size + worker.rank)


def _faults(model: Any) -> list[list[int]]:
    """The model's list of faults to come, [tensors before it, how often]; from the first call on it is heeded."""
    loader = model.load_weights
    if not hasattr(loader, "faults"):
        faults: list[list[int]] = []

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            return loader(_cut(weights, faults), *args, **kwargs)

        load_weights.faults = faults  # type: ignore[attr-defined]
        model.load_weights = load_weights
    return model.load_weights.faults  # type: ignore[no-any-return]


def _cut(weights: Iterable[tuple[str, torch.Tensor]], faults: list[list[int]]) -> Iterator[tuple[str, torch.Tensor]]:
    num_real = 0
    for name, tensor in weights:
        if faults and not tensor.is_meta and num_real == faults[0][0]:
            _fail(faults, f"before {name!r}")
        num_real += not tensor.is_meta
        yield name, tensor
    if faults and num_real:
        _fail(faults, "at the end")


def _fail(faults: list[list[int]], where: str) -> None:
    faults[0][1] -= 1
    if faults[0][1] == 0:
        faults.pop(0)
    raise RuntimeError(f"the test's fault {where}")
