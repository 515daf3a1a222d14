"""PEFT adapters in layers that are sharded over real gloo processes: what is published is what peft merges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forking import preloaded
from sources import adapter_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

preloaded(
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor", "peft", "transformers", "sources.adapter_ranks"
)

SCENES = [(2, name) for name in adapter_ranks.SCENES] + [(4, scene.__name__) for scene in adapter_ranks.ON_FOUR]


@pytest.mark.parametrize(("size", "scene"), SCENES, ids=lambda value: str(value))
def test_ranks(tmp_path: Path, size: int, scene: str) -> None:
    arguments = (size, str(tmp_path / "meet"), scene)
    torch.multiprocessing.start_processes(adapter_ranks.run, arguments, nprocs=size, start_method="forkserver")
