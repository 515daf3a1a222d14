"""The Ray example on two nodes: an engine is killed, restarted and catches up; engines are added and removed."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from examples.program import Program
from safetensors.torch import load_file

from weightcast.format.tensor_digest import tensor_digest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("ray_two_nodes.py")
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or Ray takes the host's address in place of 127.0.0.1
    "RAY_AUTH_MODE": "disabled",  # or it writes a token to the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture
def short_directory() -> Iterator[str]:
    """Ray puts sockets deep into it, and their paths must have less than 108 characters: not in tmp_path."""
    with tempfile.TemporaryDirectory(prefix="wc", dir="/tmp") as directory:
        yield directory


@pytest.fixture
def story(short_directory: str, tmp_path: Path) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    environment = {**ENVIRONMENT, "RAY_TMPDIR": short_directory, "HOME": str(tmp_path / "home")}
    with Program(command, environment, directory=short_directory) as program:
        found: dict[str, Any] = json.loads(program.end(200).splitlines()[-1])
    return found


@pytest.mark.usefixtures("leaves_nothing")
def test_engines_are_lost_restarted_added_and_removed_while_it_trains(story: dict[str, Any], tmp_path: Path) -> None:
    reports, before, after = story["reports"], story["places_before"], story["places_after"]
    every = reports + story["reports_out"] + story["reports_in"]
    assert [report["version"] for report in every] == list(range(len(every)))

    killed, survivor = before[0]["url"], before[1]["url"]
    assert reports[1]["engines"] == {killed: True, survivor: True}
    assert reports[2]["engines"] == {killed: False, survivor: True}, "training went on without it"
    assert reports[-1]["engines"] == {after[0]["url"]: True, survivor: True}
    assert after[0]["pid"] != before[0]["pid"]
    lost, kept = story["caught_up"]
    assert (lost["url"], lost["version"]) == (after[0]["url"], str(reports[2]["version"])), "before the next step"
    assert lost["digests"] == kept["digests"]
    assert after[1] == before[1]
    assert len({place["node"] for place in before}) == len(set(story["trainer_nodes"])) == 2, "both nodes have both"

    out, back = story["reports_out"], story["reports_in"]
    both = {after[0]["url"]: True, survivor: True}
    assert [report["engines"] for report in out[:2]] == [both, both], "steps wait for no node"
    assert out[-1]["engines"].items() > both.items()
    assert all(all(report["engines"].values()) for report in back)
    assert back[-1]["engines"] == {after[0]["url"]: True}

    saved = {name: tensor_digest(tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    for engine in story["served"]:
        assert engine["version"] == str(every[-1]["version"])
        assert engine["digests"] == saved
    assert len({engine["run"] for engine in story["served"]}) == 1
    assert not (tmp_path / "home").exists(), "Ray writes nothing there"
