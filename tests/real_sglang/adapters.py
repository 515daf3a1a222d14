"""The answers of SGLang servers with LoRA adapters, and of those that were started with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
from real_vllm.adapters import AdapterOf
from real_vllm.oracle import PROMPT, Answer

from real_sglang.servers import Server, Setup
from weightcast.format.adapters import LoraConfig

NUM_TOKENS = 16
NUM_STREAMED = 300


class Cold(NamedTuple):
    """Answers of a server that was started with adapters from directories: alone, and with the adapter of each seed.

    `streamed`: a long one with the adapter of seed 0.
    """

    checksums: Any
    alone: Answer
    adapted: list[Answer]
    streamed: Answer


@pytest.fixture(scope="session")
def cold_with(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Cold]:
    """cold_with(setup, seed=0): from a server with the model of that seed."""
    found: dict[tuple[Setup, int], Cold] = {}

    def of(setup: Setup, seed: int = 0) -> Cold:
        if (setup, seed) not in found:
            folder = tmp_path_factory.mktemp("adapters")
            adapters = {f"cold-{each}": AdapterOf(setup.family, each).save(folder / str(each)) for each in range(3)}
            stock = dataclasses.replace(setup, plugin=False)
            with Server(stock, checkpoint(setup.family, seed, setup.dtype), adapters=adapters) as server:
                found[setup, seed] = Cold(
                    server.checksums(),
                    answer(server),
                    [answer(server, name) for name in adapters],
                    answer(server, "cold-0", num_tokens=NUM_STREAMED),
                )
        return found[setup, seed]

    return of


def answer(server: Server, adapter: str | None = None, *, num_tokens: int = NUM_TOKENS, **options: Any) -> Answer:
    return server.answer(PROMPT, num_tokens, lora_path=adapter, **options).answer


def named(server: Server) -> set[str]:
    return {model["id"] for model in server.get("/v1/models")["data"]} - {str(server.folder)}


def uneven(adapter: AdapterOf) -> dict[str, tuple[Any, LoraConfig]]:
    """An update whose layers differ in alpha, by what is said of it."""
    module = "model.layers.1.mlp.down_proj"
    config = msgspec.structs.replace(adapter.config, alpha_pattern={module: 3.0})
    return {f"'{module}' has another rank or alpha than": (adapter.tensors, config)}


def num_loaded(server: Server) -> int:
    """Number of versions that all ranks together have loaded."""
    loads, unloads = ("from tensors completes: LoRARef", "LoRA adapter unloading completes: LoRARef")
    return len(server.log_lines(loads)) - len(server.log_lines(unloads))
