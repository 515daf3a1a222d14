"""A vLLM of one rank in this process, so that a test reaches its model, its config and vLLM's own records."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from real_vllm.fp8_on_cpus import add_kernel
from real_vllm.oracle import NUM_TOKENS, PROMPT, Answer
from real_vllm.servers import ENVIRONMENT

Test = TypeVar("Test", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class OfflineSetup:
    """Which checkpoint (seed 0 of `family`, in `saved_dtype`), served in `dtype`.

    `packs`: whether weights are packed for the CPU's kernels; without, layers use their parameters as they are.
    `attention`: vLLM's name of the backend; "": the one that it takes by itself. `quantization`: vLLM's name of how it
    quantises while it loads.
    """

    family: str
    dtype: torch.dtype = torch.float32
    saved_dtype: torch.dtype = torch.float32
    packs: bool = True
    attention: str = ""
    quantization: str = ""

    def __str__(self) -> str:
        name = self.family + "-unpacked" * (not self.packs) + f"-{self.quantization}" * bool(self.quantization)
        return name if self.dtype == self.saved_dtype else f"{name}-{self.dtype}"


def offline_on(*setups: OfflineSetup) -> Callable[[Test], Test]:
    """Run the test on each setup's engine, its fixture `offline`. Engines are kept while tests name them."""
    return pytest.mark.parametrize("offline", setups, indirect=True, ids=str)


class Offline:
    """The engine, its `model` and `config`, and how to ask it.

    `cold`: by seed, what such an engine answers to `PROMPT` that was started from the weights of that seed.
    """

    def __init__(self, setup: OfflineSetup, llm: Any) -> None:
        self.setup = setup
        self.llm = llm
        self.cold: dict[int, Answer] = {}
        self.model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        self.config = llm.llm_engine.vllm_config

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=0, ignore_eos=True)
        with _vllms_warnings():
            result = self.llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        output = result[0].outputs[0]
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return Answer(list(output.token_ids), [of_token[token].logprob for token, of_token in pairs])


@contextlib.contextmanager
def offline(setup: OfflineSetup, checkpoint: Callable[[str, int, torch.dtype], Path]) -> Iterator[Offline]:
    """Start it from seed 0 of its family, after another from seed 1 for what that answers."""
    with _started(setup, checkpoint(setup.family, 1, setup.saved_dtype)) as other:
        answer = other.ask(PROMPT, NUM_TOKENS)
        del other
    with _started(setup, checkpoint(setup.family, 0, setup.saved_dtype)) as offline:
        offline.cold = {0: offline.ask(PROMPT, NUM_TOKENS), 1: answer}
        yield offline


@contextlib.contextmanager
def _started(setup: OfflineSetup, folder: Path) -> Iterator[Offline]:
    """Start it from `folder`; at the end its memory and its process groups are given back."""
    with pytest.MonkeyPatch.context() as patch, _vllms_warnings():
        for name, value in (ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}).items():
            patch.setenv(name, value)
        from vllm import LLM, _custom_ops
        from vllm.distributed import cleanup_dist_env_and_memory

        if not setup.packs:
            from vllm.model_executor.layers import utils

            patch.setattr(_custom_ops, "_supports_onednn", False)
            patch.setattr(utils, "check_cpu_sgl_kernel", lambda *args: False)
        dtype = str(setup.dtype).removeprefix("torch.")
        options: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 64, "enable_prefix_caching": False}
        if setup.attention:
            options["attention_backend"] = setup.attention
        if setup.quantization:
            options["quantization"] = setup.quantization
        add_kernel()
        llm = LLM(str(folder), dtype=dtype, enforce_eager=True, **options)
        try:
            yield Offline(setup, llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _vllms_warnings() -> Iterator[None]:
    """They are none of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
