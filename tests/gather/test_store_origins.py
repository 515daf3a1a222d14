"""A store that trainer ranks on several hosts write at once: data files of its own for each origin, one version."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from store.store_kit import Holder, number_in, url, write

from gather.squad import MODELS, Squad, squad
from gather.test_gather import failed, published
from gather.test_origins import sent_by
from weightcast import cli
from weightcast.errors import IntegrityError
from weightcast.serving.follower import Follower
from weightcast.sources.store import StoreSource
from weightcast.store.address import DirectoryAddress
from weightcast.store.reading import StoreReader
from weightcast.trainer.rollback import rollback

NUM_RANKS = 4
RUN = "5c" * 16


@pytest.fixture(scope="module")
def ranks() -> Iterator[Squad]:
    with squad(NUM_RANKS) as members:
        yield members


def slot_of(directory: Path) -> Path:
    commit = StoreReader(DirectoryAddress(directory)).commit()
    assert commit is not None
    return directory / "slots" / str(commit.newest.slot)


def data_files(directory: Path) -> list[str]:
    return sorted(path.name for path in slot_of(directory).glob("data.*"))


def wrong(directory: Path, model: str, content: int) -> list[str]:
    """The tensors of the newest version that are not those of this content, bit for bit."""
    held = {name: each[0][1] for name, each in StoreSource(url(directory)).regions().items()}
    expected = MODELS[model](content)
    assert held.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if not torch.equal(held[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
    ]


# --- bytes ---


WAYS = [(2, "", "staged"), (2, "?num_threads=3", "streaming"), (4, "?num_threads=2&fsync=1", "staged")]
CUTS = ["rows", "columns", "strided", "last_alone", "hybrid", "replicated", "transposed", "alternating"]


@pytest.mark.parametrize(
    ("cut", "hosts", "options", "install"),
    [
        pytest.param(cut, *way, marks=[pytest.mark.full] * ((i + j) % len(WAYS) > 0))
        for i, cut in enumerate(CUTS)
        for j, way in enumerate(WAYS)
    ],
)
def test_every_sharding_arrives_whole(
    ranks: Squad, tmp_path: Path, cut: str, hosts: int, options: str, install: str
) -> None:
    ranks.all("make", "table", cut, hosts=hosts, install=install, transport=url(tmp_path, options))
    for content in (1, 2, 3):
        report = published(ranks.publish(content))
        assert report["version"] == content - 1
        assert ranks[0].ask("check", content) == []
        assert wrong(tmp_path, "table", content) == []
    assert cli.main(["verify", url(tmp_path)]) == 0


@pytest.mark.parametrize(("hosts", "leaders"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3])])
@pytest.mark.parametrize("num_engines", [0, 2])
def test_each_host_writes_its_share_into_files_of_its_own(
    ranks: Squad, tmp_path: Path, hosts: int, leaders: list[int], num_engines: int
) -> None:
    ranks.all("make", "many", "rows", hosts=hosts, num_engines=num_engines, transport=url(tmp_path))
    for content in (1, 2):
        outcomes = ranks.publish(content)
        published(outcomes)
        sent = sent_by(outcomes)
        assert [rank for rank, each in enumerate(sent) if each] == leaders
        assert max(sent) <= 1.2 * sum(sent) / hosts
        assert data_files(tmp_path) == [f"data.{number}" for number in range(hosts)]
        assert wrong(tmp_path, "many", content) == []


@pytest.mark.parametrize("hosts", [2, 4])
def test_fsdp2(ranks: Squad, tmp_path: Path, hosts: int) -> None:
    ranks.all("make", "linears", "fsdp2", hosts=hosts, transport=url(tmp_path))
    for content in (1, 2):
        published(ranks.publish(content))
        assert len(ranks[0].ask("spans")) == hosts
        assert ranks[0].ask("check", content) == []
        assert wrong(tmp_path, "linears", content) == []


@pytest.mark.cluster
def test_fsdp2_over_two_ranks(tmp_path: Path) -> None:
    with squad(2) as two:
        two.all("make", "linears", "fsdp2", hosts=2, transport=url(tmp_path, "?num_threads=2"))
        for content in (1, 2):
            published(two.publish(content))
            assert two[0].ask("check", content) == []
            assert wrong(tmp_path, "linears", content) == []
        assert data_files(tmp_path) == ["data.0", "data.1", "data.2", "data.3"]


def test_the_number_of_origins_may_change(ranks: Squad, tmp_path: Path) -> None:
    """Files that are of no use any more are removed; a follower goes on."""
    store, engine = url(tmp_path), Holder(len(MODELS["many"](0)))
    with Follower(store, engine) as follower:
        for content, hosts in enumerate([4, 1, 2, 2, 1, 4]):
            ranks.all("make", "many", "rows", hosts=hosts, transport=store)
            published(ranks.publish(content))
            assert len(data_files(tmp_path)) == hosts
            assert follower.poll() is not None
            assert all(torch.equal(engine.held[name], tensor) for name, tensor in MODELS["many"](content).items())
            ranks.all("unmake")


def test_an_engine_that_brings_its_own_sender_beside_a_store(ranks: Squad, tmp_path: Path) -> None:
    ranks.all("make", "table", "rows", transport=url(tmp_path))
    published(ranks.publish(1))
    ranks.all("add_stock")
    for content in (2, 3):
        published(ranks.publish(content))
        assert ranks[0].ask("check_stock", content) == []
        assert wrong(tmp_path, "table", content) == []
    ranks.all("remove", "stock")
    published(ranks.publish(4))
    assert ranks[0].ask("check", 4) == wrong(tmp_path, "table", 4) == []


def test_a_late_engine_reads_what_all_origins_wrote(ranks: Squad, tmp_path: Path) -> None:
    ranks.all("make", "table", "rows", hosts=2, transport=url(tmp_path))
    published(ranks.publish(1))
    report = published(ranks.all("sync", "late", is_new=True))
    assert (report["version"], list(report["engines"])) == (0, ["late"])
    assert ranks[0].ask("check", 1) == []


def test_the_version_before_is_published_again_by_one_process(ranks: Squad, tmp_path: Path) -> None:
    ranks.all("make", "table", "rows", hosts=4, transport=url(tmp_path))
    for content in (1, 2):
        published(ranks.publish(content))
    ranks.all("unmake")
    rollback(url(tmp_path))
    assert wrong(tmp_path, "table", 1) == []


def test_many_publishes_leave_nothing(ranks: Squad, tmp_path: Path) -> None:
    ranks.all("make", "many", "rows", hosts=2, transport=url(tmp_path, "?num_threads=2"))
    ranks.require_no_growth()
    assert sorted(path.name for path in (tmp_path / "slots").iterdir()) == ["0", "1"]


# --- what goes wrong ---


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("after", [0, 3])
def test_a_full_disk_on_one_host(ranks: Squad, tmp_path: Path, rank: int, after: int) -> None:
    ranks.all("make", "many", "rows", hosts=2, transport=url(tmp_path))
    published(ranks.publish(1))
    ranks[rank].ask("fill_disk", after)
    errors = failed(ranks.publish(2))
    assert all("No space left on device" in text for _, text in errors)
    assert {kind for kind, _ in errors} <= {"InsufficientMemoryError", "PeerError"}
    assert wrong(tmp_path, "many", 1) == []
    assert not (tmp_path / "next.json").exists()
    published(ranks.publish(3))
    assert ranks[0].ask("check", 3) == wrong(tmp_path, "many", 3) == []


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_rank_that_fails_at_a_bucket(ranks: Squad, tmp_path: Path, failing: int) -> None:
    ranks.all("make", "table", "rows", hosts=2, transport=url(tmp_path))
    published(ranks.publish(1))
    spans = ranks[0].ask("spans")
    ranks[failing].ask("fail_at", spans[failing // 2][4], RuntimeError("out of paper"))
    errors = [outcome["error"] for outcome in ranks.publish(2)]
    assert errors[failing] == ("RuntimeError", "out of paper")
    assert wrong(tmp_path, "table", 1) == []
    published(ranks.publish(3))
    assert wrong(tmp_path, "table", 3) == []


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_lost_while_it_writes(tmp_path: Path, victim: int, number: int) -> None:
    """The other one fails, the version before stays; a new publisher writes what the lost one can't harm."""
    with squad(2) as two:
        two.all("make", "many", "rows", hosts=2, num_engines=0, deadline_seconds=6.0, transport=url(tmp_path))
        for content in (1, 2):
            published(two.publish(content))
        two[victim].ask("stop_at", two[0].ask("spans")[victim][2])
        two.all("fill", 3)
        for rank in (0, 1):
            two[rank].tell("publish")
        two[victim].hear("at")
        two[victim].signal(number)
        kind, text = two[1 - victim].hear()["error"]
        assert kind in ("PeerDiedError", "PeerTimeoutError")
        assert f"trainer rank {victim}" in text
        assert wrong(tmp_path, "many", 2) == []
        two[1 - victim].ask("unmake")

        def go_on() -> None:
            two[victim].signal(signal.SIGCONT)
            two[victim].pipe.send(("go", None))
            assert two[victim].hear()["error"] is not None
            two[victim].ask("unmake")

        # The publishing rank has the store as long as it lives.
        if number == signal.SIGSTOP and victim == 0:
            go_on()
        write(tmp_path, 7, 8)
        if number == signal.SIGSTOP and victim == 1:
            go_on()
        held = Holder()
        with Follower(url(tmp_path), held) as follower:
            assert follower.poll() is not None
        assert number_in(held.held) == 8
        assert cli.main(["verify", url(tmp_path)]) == 0


@pytest.mark.cluster
def test_a_host_that_has_another_directory_there(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with squad(2) as two:
        two[1].ask("mount_elsewhere", str(elsewhere))
        two.all("make", "many", "rows", hosts=2, deadline_seconds=5.0, transport=url(tmp_path / "w"))
        errors = failed(two.publish(1))
        assert all("mount the store's directory under this path on every trainer host" in text for _, text in errors)
        assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda path: path.unlink(), r"data\.1 is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), r"data\.1 ends after 1000 bytes"),
        (
            lambda path: path.write_bytes(path.with_name("data.0").read_bytes()),
            "header says origin 0, index 0, expected origin 1",
        ),
    ],
)
def test_one_origins_file_is_damaged(ranks: Squad, tmp_path: Path, harm: Any, text: str) -> None:
    ranks.all("make", "many", "rows", hosts=2, num_engines=0, transport=url(tmp_path))
    published(ranks.publish(1))
    harm(slot_of(tmp_path) / "data.1")
    engine = Holder(len(MODELS["many"](0)))
    with Follower(url(tmp_path), engine) as follower, pytest.raises(IntegrityError, match=text):
        follower.poll()
    assert not engine.held
    ranks.all("unmake")
