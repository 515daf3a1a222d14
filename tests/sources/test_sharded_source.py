"""Sharded modules, in real gloo processes: what all ranks hold together is every tensor, bit for bit."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import sharded_ranks
from sources.sharded_ranks import PLAYS

from weightcast.format.geometry import Region, check_tiling

pytestmark = pytest.mark.cluster


SIZES_AND_CASES = [
    pytest.param(play, size, case, id=f"{size}-{case}")
    for play, (cases_of, _) in PLAYS.items()
    for size, cases in cases_of.items()
    for case in cases
]
SCENES = [pytest.param(play, scene, id=scene.__name__) for play, (_, scenes) in PLAYS.items() for scene in scenes]


@pytest.fixture(scope="module")
def dtensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _played("dtensors", tmp_path_factory)


@pytest.fixture(scope="module")
def fsdp1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _played("fsdp1", tmp_path_factory)


def _played(play: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every rank has left what it reports. A process of its own imports, for the ranks to be forked from it."""
    path = tmp_path_factory.mktemp("ranks")
    rig = multiprocessing.get_context("spawn").Process(target=sharded_ranks.rig, args=(str(path), play))
    rig.start()
    rig.join(2 * sharded_ranks.DEADLINE_SECONDS)
    if rig.is_alive():
        rig.kill()
        rig.join()
    assert rig.exitcode == 0, "a rank failed, see its traceback in stderr"
    rig.close()
    return path


def _load(directory: Path, size: int, case: str) -> list[dict[str, Any]]:
    paths = [sharded_ranks.report_path(directory, size, case, rank) for rank in range(size)]
    return [torch.load(path, weights_only=True) for path in paths]


def _put_together(reports: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every tensor from all ranks' regions; equal regions are replicas and must be equal in value."""
    shapes = {name: shape for name, _, shape, _ in reports[0]["specs"]}
    regions: dict[str, dict[tuple[Any, Any], torch.Tensor]] = {name: {} for name in shapes}
    for report in reports:
        for name, offsets, sizes, data in report["regions"]:
            assert tuple(data.shape) == tuple(sizes)
            assert data.numel(), f"{name} has a region of nothing"
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


@pytest.mark.parametrize(("play", "size", "case"), SIZES_AND_CASES)
def test_all_ranks_together_hold_every_tensor(request: pytest.FixtureRequest, play: str, size: int, case: str) -> None:
    reports = _load(request.getfixturevalue(play), size, case)
    for report in reports:
        assert report["specs"] == report["expected_specs"]
        assert report["is_kept"]
    assert sum(report["moved"] for report in reports) >= len(reports[0]["specs"]) // 2
    found = _put_together(reports)
    assert len(found) == len(reports[0]["expected"])
    for name, expected in reports[0]["expected"].items():
        assert torch.equal(found[name], expected), name
    for name, full in ((name, full) for report in reports for name, full in report["full"].items()):
        if name in found:
            assert torch.equal(found[name], full), name


@pytest.mark.parametrize(("play", "size", "case"), SIZES_AND_CASES)
def test_an_engine_gets_every_tensor_of_what_all_ranks_publish(
    request: pytest.FixtureRequest, play: str, size: int, case: str
) -> None:
    reports = _load(request.getfixturevalue(play), size, case)
    held, expected = reports[0]["published"], reports[0]["expected"]
    assert held.keys() >= expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name
    assert not any(report["published"] for report in reports[1:])


def test_disjoint_boxes_of_a_tensor_are_regions_of_their_own(dtensors: Path) -> None:
    for report in _load(dtensors, 2, "odd/strided"):
        assert Counter(name for name, *_ in report["regions"])["head.weight"] == 3


@pytest.mark.parametrize(("size", "case", "members"), [(2, "odd/single", {0}), (4, "odd/some", {1, 3})])
def test_ranks_outside_of_a_mesh_hold_what_is_not_sharded(
    dtensors: Path, size: int, case: str, members: set[int]
) -> None:
    for rank, report in enumerate(_load(dtensors, size, case)):
        names = {name for name, *_ in report["regions"]}
        assert names > {"mean", "head.weight"} if rank in members else names == {"mean"}


@pytest.mark.parametrize(("play", "scene"), SCENES)
def test_scene(request: pytest.FixtureRequest, play: str, scene: Callable[[], None]) -> None:
    for rank in range(2):
        problem = sharded_ranks.scene_path(request.getfixturevalue(play), scene, rank).read_text()
        assert not problem, problem
