"""The benchmark beside other libraries: it measures real processes, sees what was lost, and its page is of its JSON."""

from __future__ import annotations

import dataclasses
import os
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from publishing import shapes

BENCH = Path(__file__).parents[2] / "bench"
SPECS = shapes.named("uniform", num_tensors=8, num_bytes=1 << 20)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def _servers_of_multiprocessing() -> None:
    """It keeps two processes of its own, from the first one that it starts on."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()


pytestmark = [pytest.mark.usefixtures("_servers_of_multiprocessing", "leaves_nothing"), pytest.mark.cluster]


def test_a_peer_and_weightcast_take_turns() -> None:
    from peers.measure import compare
    from peers.ways import WAYS

    peer = dataclasses.replace(WAYS["torch.distributed, a broadcast per tensor"], against=["weightcast ipc"])
    rows, other_cores = compare([peer], SPECS, 2)
    assert 0 <= other_cores < os.cpu_count() + 1
    assert [row.name for row in rows] == ["weightcast ipc", peer.name]
    for row in rows:
        assert row.verified
        assert len(row.turns) == 2
        for turn in row.turns:
            assert 0 < turn.pause_seconds <= turn.seconds
            assert turn.trainer_cpu_seconds > 0 < turn.engine_cpu_seconds


def test_what_an_engine_did_not_get_is_seen() -> None:
    from peers.measure import compare
    from peers.ways import Way

    ((row,), _) = compare([Way("losing", "losing_way:losing")], SPECS, 2)
    assert not row.verified


def test_a_way_that_fails_is_named_with_its_error() -> None:
    from peers.measure import compare
    from peers.ways import Way

    with pytest.raises(RuntimeError, match=r"(?s)wrong: the \w+ failed:.*AttributeError"):
        compare([Way("wrong", "losing_way:no_such_function")], SPECS, 1)


def test_the_page_is_of_the_results() -> None:
    from peers import page
    from peers.results import RESULTS, read

    found = read(RESULTS)
    assert found
    assert (page.DOCS / "benchmarks.md").read_text() == page.page(found)
    assert page.DETAILS.read_text() == page.details(found)
    before, section, after = page.readme_parts(page.README.read_text())
    assert section == page.summary(found), "run python -m peers.page"
    assert before
    assert after


def test_the_readme_has_five_lines_of_it() -> None:
    from peers import page
    from peers.results import RESULTS, read

    title, _, *lines = page.summary(read(RESULTS)).splitlines()
    assert title.startswith("## ")
    assert len(lines) <= 5


def test_every_row_that_is_ahead_has_a_reason() -> None:
    from peers.page import ahead
    from peers.results import RESULTS, read
    from peers.ways import reason

    for it in read(RESULTS):
        for peer, ours, field, ratio in ahead(it):
            assert reason(peer, ours, field) != "not looked into", (it.shapes, peer.name, ours.name, field, ratio)


def test_every_adapter_is_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in (BENCH / "peers" / "adapters").glob("*.py")}
    assert {name: number for name, number in lines.items() if number > 100} == {}


def _row(name: str, *seconds: float) -> Any:
    from peers.results import Row, Turn

    return Row(name, [Turn(it, 0.5, 1, 0, 0) for it in seconds], 0, (0, 0), True)


def _run(*peers: str, other_cores: float = 0.0, shapes: str = "s", machine: str = "m") -> Any:
    from peers.results import Comparison
    from peers.ways import WAYS

    ours = dict.fromkeys(name for peer in peers for name in WAYS[peer].against)
    return Comparison(
        boundary="process",
        shapes=shapes,
        num_tensors=1,
        num_bytes=1,
        rows=[*(_row(name, 2) for name in ours), *(_row(name, 1) for name in peers)],
        command="",
        versions={},
        machine=machine,
        other_cores=other_cores,
    )


def test_a_ratio_is_of_the_same_rounds() -> None:
    from peers.page import ratio

    assert ratio(_row("", 2, 30, 6), _row("", 1, 10, 2), "seconds") == 3


FILE, SAVE, GLOO = "safetensors file", "torch.save", "torch.distributed, a broadcast per tensor"


def test_a_new_run_of_a_peer_takes_the_place_of_its_old_rows_alone(tmp_path: Path) -> None:
    from peers.results import put, read

    path = tmp_path / "results.json"
    put(path, _run(FILE, SAVE, GLOO))
    put(path, _run(FILE, shapes="other"))
    put(path, _run(FILE, SAVE))
    found = [(it.shapes, [row.name for row in it.rows]) for it in read(path)]
    assert found == [
        ("s", ["weightcast gloo", "weightcast gloo, streaming", GLOO]),
        ("other", ["weightcast file", "weightcast ipc", FILE]),
        ("s", ["weightcast file", "weightcast ipc", FILE, SAVE]),
    ]
    put(path, _run(GLOO))
    assert [[row.name for row in it.peers] for it in read(path)] == [[FILE], [FILE, SAVE], [GLOO]]


def test_quiet_runs_and_disturbed_ones_of_a_model_are_not_mixed(tmp_path: Path) -> None:
    from peers import page
    from peers.results import put, read

    path = tmp_path / "results.json"
    put(path, _run(FILE, other_cores=1.5))
    put(path, _run(FILE, other_cores=1.5, shapes="other"))
    put(path, _run(SAVE, other_cores=0.01))
    assert [(it.shapes, it.other_cores) for it in read(path)] == [("other", 1.5), ("s", 0.01)]
    with pytest.raises(ValueError, match=r"other work took 0\.70 cores, and the file has quiet runs of s"):
        put(path, _run(FILE, other_cores=0.7))
    assert "up to 1.5 cores" in page.page(read(path))
    put(path, _run(FILE, other_cores=0.02, shapes="other"))
    assert "Nothing else ran on the machine: other work took at most 0.02 cores" in page.page(read(path))
    put(path, _run(FILE, other_cores=1.9, machine="another"))
    assert [(it.shapes, it.machine) for it in read(path)] == [("other", "m"), ("s", "another")]


def test_where_a_peer_is_ahead_the_page_says_why() -> None:
    from peers import page

    text = page.page([_run(FILE)])
    for ours in ("file", "ipc"):
        assert f"| safetensors file | 1.000 | {ours} | 2.000 | **0.50** | 1.0 | *not looked into* |" in text
    assert "| *not looked into* | Nobody has looked yet | Unknown |" in text
