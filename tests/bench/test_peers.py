"""The benchmark beside other libraries: it measures real processes, sees what was lost, and its page is of its JSON."""

from __future__ import annotations

import dataclasses
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

from weightcast.bench import shapes

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
    rows = compare(peer, SPECS, 2)
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

    (row,) = compare(Way("losing", "losing_way:losing"), SPECS, 2)
    assert not row.verified


def test_a_way_that_fails_is_named_with_its_error() -> None:
    from peers.measure import compare
    from peers.ways import Way

    with pytest.raises(RuntimeError, match=r"(?s)wrong: the \w+ failed:.*AttributeError"):
        compare(Way("wrong", "losing_way:no_such_function"), SPECS, 1)


def test_the_page_is_of_the_results() -> None:
    from peers import page
    from peers.results import RESULTS, read

    found = read(RESULTS)
    assert found
    assert (page.DOCS / "benchmarks.md").read_text() == page.page(found)


def test_every_adapter_is_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in (BENCH / "peers" / "adapters").glob("*.py")}
    assert {name: number for name, number in lines.items() if number > 100} == {}


def test_a_ratio_is_of_the_same_rounds() -> None:
    from peers.page import ratio
    from peers.results import Row, Turn

    def row(*seconds: float) -> Any:
        return Row("", [Turn(it, 0, 1, 0, 0) for it in seconds], 0, (0, 0), True)

    assert ratio(row(2, 30, 6), row(1, 10, 2), "seconds") == 3
