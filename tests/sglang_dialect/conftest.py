"""A model in a checkpoint, and stand-ins of stock SGLang that were started from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forking
import pytest
import torch
from safetensors.torch import save_file

from sglang_dialect.stock_sglang import StockSglang
from weightcast.integrations.sglang.stock.route_tensor import shared

BUCKET_BYTES = 1 << 10
"""Small: the model below travels in several flattened buckets."""

Start = Callable[..., StockSglang]


def tensors(value: float) -> dict[str, torch.Tensor]:
    """A model whose every element is `value`: matrices, vectors of odd sizes, one tensor without elements."""
    held = {}
    for layer in range(8):
        held[f"layers.{layer}.weight"] = torch.full((32, 32), value)
        held[f"layers.{layer}.scale"] = torch.full((7,), value, dtype=torch.bfloat16)
        held[f"layers.{layer}.mask"] = torch.full((3,), int(value), dtype=torch.uint8)
    return held | {"nothing": torch.empty(0, 4)}


@pytest.fixture(autouse=True, scope="session")
def _helpers_are_up() -> None:
    """torch's first shared memory with a name, and the first process that is forked, start others that stay until this
    one ends: no leak of any test."""
    shared(1)
    child = forking.preloaded().Process(target=int)
    child.start()
    child.join()
    child.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file(tensors(0), str(folder / "model.safetensors"))
    return folder


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Start]:
    """start(num_ranks=1): a running stand-in, which ends with the test."""
    with contextlib.ExitStack() as running:

        def make(**options: Any) -> StockSglang:
            return running.enter_context(StockSglang(checkpoint, **options))

        yield make
