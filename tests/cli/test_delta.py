"""`weightcast delta`: counts and sizes of a delta between two checkpoints; what it says where there can't be one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast import cli
from weightcast.cli import exits
from weightcast.native.deltas import encode

Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        **{f"model.layers.{i}.w": torch.randn(300, 100, generator=generator).bfloat16() for i in range(3)},
        "model.norm": torch.randn(64, generator=generator),
        "steps": torch.arange(1000),
        "scalar": torch.tensor(1.0, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


def changed() -> Tensors:
    found = tensors()
    found["model.layers.1.w"].view(torch.int16)[::10, ::10] += 1
    found["steps"][3], found["steps"][4] = 1 << 40, -1
    return found


def written(path: Path, found: Tensors) -> str:
    path.mkdir()
    save_file(found, path / "model.safetensors")
    return str(path)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return written(tmp_path / "a", tensors()), written(tmp_path / "b", changed())


def test_its_json_has_the_sizes_of_the_deltas(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["delta", *pair, "--json"]) == exits.OK
    found = json.loads(capsys.readouterr().out)
    layers, steps = found["groups"]["model.layers.*.w"], found["groups"]["steps"]
    assert (layers["num_tensors"], layers["num_elements"], layers["num_changed"]) == (3, 90_000, 300)
    assert layers["num_bytes"] == 180_000
    for field, by_classes in (("delta_bytes", False), ("classes_bytes", True)):
        sizes = []
        for i in range(3):
            a, b = (each[f"model.layers.{i}.w"].view(-1).view(torch.uint8) for each in (tensors(), changed()))
            delta, _ = encode(a, b, 2, by_classes=by_classes)
            assert delta is not None
            sizes.append(delta.nbytes)
        assert layers[field] == sum(sizes)
    assert (steps["num_elements"], steps["num_changed"], steps["num_bytes"]) == (1000, 2, 8000)
    assert found["groups"]["model.norm"]["num_changed"] == found["groups"]["empty"]["num_elements"] == 0
    assert found["groups"]["scalar"]["delta_bytes"] == 8  # itself
    assert found["total"] == {key: sum(group[key] for group in found["groups"].values()) for key in found["total"]}


def test_it_prints_a_line_for_each_group(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["delta", f"{pair[0]}/model.safetensors", pair[1]]) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "91,065 elements in 7 tensors, 188 kB; 302 changed"
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in lines if line.startswith("│")}
    assert list(rows) == ["model.layers.*.w", "steps", "model.norm", "scalar", "empty", "all"]
    assert [cell.strip() for cell in rows["model.layers.*.w"]][:4] == ["90,000", "300", "0.333", "180 kB"]
    assert lines[-1].startswith("a delta is ")


def test_checkpoints_of_other_tensors_are_refused_by_name(
    tmp_path: Path, pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tensors() | {"model.norm": torch.zeros(65), "more": torch.zeros(1), "steps": torch.zeros(1000)}
    del other["scalar"]
    assert cli.main(["delta", pair[0], written(tmp_path / "c", other), "--json"]) == exits.NEGATIVE
    said = capsys.readouterr()
    problems = [
        "model.norm is float32[64] in the first, float32[65] in the second",
        "more is only in the second",
        "scalar is only in the first",
        "steps is int64[1000] in the first, float32[1000] in the second",
    ]
    assert json.loads(said.out)["error"]["problems"] == problems
    text = f"a delta is between checkpoints of the same tensors, and these differ: {'; '.join(problems)}"
    assert f"IncompatibleWeightsError: {text}" in said.err


def test_what_is_no_checkpoint_is_a_wrong_call(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["delta", pair[0], f"{pair[0]}-gone"]) == exits.USAGE
    assert "a-gone" in capsys.readouterr().err
