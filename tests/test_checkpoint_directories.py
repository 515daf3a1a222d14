"""Which checkpoint directory of a loop is the newest complete one: markers, order, half-written and removed ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast.checkpoint.directories import MAX_CANDIDATES, CheckpointDirectories
from weightcast.checkpoint.files import INDEX_FILE, SINGLE_FILE
from weightcast.sources.safetensors import SafetensorsSource


def save(directory: Path, value: float, *, marker: str = "DONE", written_at: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.full((256,), value)}, directory / SINGLE_FILE)
    if marker:
        (directory / marker).touch()
    return stamp(directory, written_at or int(value))


def stamp(directory: Path, written_at: int) -> Path:
    """As if all was written in that second."""
    for path in directory.iterdir():
        os.utime(path, (written_at, written_at))
    return directory


def of(root: Path, *markers: str) -> CheckpointDirectories:
    return CheckpointDirectories(root, markers or ["DONE"])


@pytest.mark.parametrize("name", ["step_7", "weight_v000007", "weight_update_v7", "checkpoint-7", "7", "a3-b7"])
def test_names_end_with_the_number(tmp_path: Path, name: str) -> None:
    found = of(tmp_path).newest(None)
    assert found is None
    save(tmp_path / name, 1)
    found = of(tmp_path).newest()
    assert found is not None
    assert (found.path, found.number, found.completed_ns) == (tmp_path / name, 7, 10**9)


@pytest.mark.parametrize("name", [".step_7", "tmp-checkpoint-7", "final", "step_7.bak", "step_7-tmp"])
def test_other_names_are_not_looked_at(tmp_path: Path, name: str) -> None:
    save(tmp_path / name, 1)
    (tmp_path / "step_8").touch()
    assert of(tmp_path).newest() is None


def test_the_root_may_come_later_and_go(tmp_path: Path) -> None:
    directories = of(tmp_path / "broadcasts")
    assert directories.newest() is None
    save(tmp_path / "broadcasts" / "step_1", 1)
    assert directories.newest() is not None
    shutil.rmtree(tmp_path / "broadcasts")
    assert directories.newest() is None


def test_shards_count_with_the_index_and_the_marker(tmp_path: Path) -> None:
    directory, directories = tmp_path / "weight_v000001", of(tmp_path)
    directory.mkdir()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        save_file({f"t{i}": torch.ones(8)}, directory / name)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}))
    assert directories.newest() is None
    (directory / "DONE").touch()
    found = directories.newest()
    assert found is not None
    assert [name for name, *_ in found.files] == [*sorted([INDEX_FILE, *names]), "DONE"]


@pytest.mark.parametrize("marker", ["STABLE", ".finished"])
def test_a_marker_says_what_is_complete(tmp_path: Path, marker: str) -> None:
    directories = of(tmp_path, "STABLE", ".finished")
    directory = save(tmp_path / "step_3", 1, marker=".started")
    assert directories.newest() is None
    (directory / marker).touch()
    assert directories.newest() is not None


def test_a_marked_directory_that_is_written_again_is_not_complete(tmp_path: Path) -> None:
    """As by a loop that resumed from an earlier step: the marker is there still, of the former content."""
    directory, directories = save(tmp_path / "step_3", 1), of(tmp_path)
    known = directories.newest()
    assert known is not None
    os.utime(directory / SINGLE_FILE, (2, 2))
    assert directories.newest(known) is None
    os.utime(directory / "DONE", (2, 2))
    assert directories.newest(known) is not None


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    directories = of(tmp_path)
    save(tmp_path / "step_9", 1)
    save(tmp_path / "step_10", 2)
    known = directories.newest()
    assert known is not None
    assert known.number == 10
    assert directories.newest(known) is None
    shutil.rmtree(known.path)
    assert directories.newest(known) is None, "what is left is older"
    save(tmp_path / "step_9", 1, written_at=3)
    resumed = directories.newest(known)
    assert resumed is not None
    assert resumed.number == 9


def test_a_directory_that_is_written_again_is_another(tmp_path: Path) -> None:
    directories = of(tmp_path)
    save(tmp_path / "step_1", 1)
    known = directories.newest()
    assert known is not None
    assert directories.is_unchanged(known)
    save(tmp_path / "step_1", 1, written_at=2)
    assert not directories.is_unchanged(known)
    assert directories.newest(known) is not None


def test_of_many_directories_the_one_that_was_written_last_is_looked_into(tmp_path: Path) -> None:
    """Not those that something was removed from, as loops do with the optimizer's states of older ones."""
    paths = [save(tmp_path / f"step_{number}", number) for number in range(1, MAX_CANDIDATES + 4)]
    for second, path in enumerate(paths):
        os.utime(path, (100 - second, 100 - second))
    directories = of(tmp_path)
    known = directories.newest()
    assert known is not None
    assert known.path == paths[-1]
    stamp(paths[0], 50)
    os.utime(paths[0], (1, 1))
    again = directories.newest(known)
    assert again is not None
    assert again.path == paths[0], "written again in place, by a loop that resumed from an earlier step"


def test_what_is_left_out_comes_back_when_it_has_changed(tmp_path: Path) -> None:
    directories = of(tmp_path)
    older, damaged = save(tmp_path / "step_1", 1), save(tmp_path / "step_2", 2)
    found = directories.newest()
    assert found is not None
    assert found.path == damaged
    directories.leave_out(found)
    found = directories.newest()
    assert found is not None
    assert found.path == older
    save(damaged, 2, written_at=3)
    found = directories.newest()
    assert found is not None
    assert found.path == damaged


def test_a_root_that_is_none(tmp_path: Path) -> None:
    save(tmp_path / "step_1", 1)
    with pytest.raises(ValueError, match=r"is a checkpoint itself, it has model.safetensors.*`weightcast publish`"):
        of(tmp_path / "step_1")
    with pytest.raises(ValueError, match="is not a directory"):
        of(tmp_path / "step_1" / SINGLE_FILE)


def test_a_copied_source_keeps_its_values_when_the_files_are_cut_short(tmp_path: Path) -> None:
    """A mapped file's pages can't be read any more then, which ends the process."""
    directory = save(tmp_path, 5)
    source = SafetensorsSource(directory, copied=True)
    os.truncate(directory / SINGLE_FILE, 0)
    ((_, tensor),) = source.regions()["weight"]
    assert torch.equal(tensor, torch.full((256,), 5.0))
