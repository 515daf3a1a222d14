"""Sharded modules, in real gloo processes: what all ranks hold together is every tensor, bit for bit."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import sharded_ranks

from weightcast.manifest import Region, check_tiling

TIMEOUT_SECONDS = 100.0
CASES = {
    2: ["odd/fsdp", "odd-tied/fsdp", "odd/offload", "odd/tp", "odd/cols", "qwen3/fsdp", "qwen3-tied/fsdp", "qwen3/tp",
        "qwen3-moe/fsdp"],
    4: ["odd/fsdp", "odd/fsdp+tp", "odd/hsdp", "odd/hsdp+tp", "odd/cols", "qwen3/fsdp+tp", "qwen3-tied/hsdp",
        "qwen3-moe/fsdp", "qwen3-moe/fsdp+tp"],
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """What every rank reports, by number of ranks and case."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sources.sharded_ranks", "transformers"])
    for size, cases in CASES.items():
        directory = tmp_path_factory.mktemp(f"ranks{size}")
        ranks = [
            context.Process(target=sharded_ranks.main, args=(rank, size, str(directory), cases), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_SECONDS)
            assert process.exitcode == 0
        for case in cases:
            found[size, case] = [_load(directory, case, rank) for rank in range(size)]
    return found


def _load(directory: Path, case: str, rank: int) -> dict[str, Any]:
    return torch.load(directory / f"{case.replace('/', '.')}.{rank}.pt", weights_only=True)  # type: ignore[no-any-return]


def _put_together(reports: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every tensor from all ranks' regions; equal regions are replicas and must be equal in value."""
    shapes = {name: shape for name, _, shape, _ in reports[0]["specs"]}
    regions: dict[str, dict[tuple[Any, Any], torch.Tensor]] = {name: {} for name in shapes}
    for report in reports:
        for name, offsets, sizes, data in report["regions"]:
            assert tuple(data.shape) == tuple(sizes)
            known = regions[name].setdefault((tuple(offsets), tuple(sizes)), data)
            assert torch.equal(known, data), f"replicas of {name} differ"
    whole: dict[str, torch.Tensor] = {}
    for name, parts in regions.items():
        check_tiling([Region(*place) for place in parts], shapes[name], name)
        tensor = torch.empty(shapes[name], dtype=next(iter(parts.values())).dtype)
        for (offsets, sizes), data in parts.items():
            tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = data
        whole[name] = tensor
    return whole


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in CASES.items() for case in cases])
def test_all_ranks_together_hold_every_tensor(
    reports: dict[tuple[int, str], list[dict[str, Any]]], size: int, case: str
) -> None:
    mine = reports[size, case]
    assert all(report["specs"] == report["expected_specs"] for report in mine)
    assert all(report["is_kept"] for report in mine)
    found = _put_together(mine)
    for name, expected in mine[0]["expected"].items():
        assert torch.equal(found[name], expected), name
    for name, full in mine[0]["full"].items():
        if name in found:
            assert torch.equal(found[name], full), name
