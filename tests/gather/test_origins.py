"""Trainer ranks on several hosts: each host's ranks pack into an origin of their own, which a rank there sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gather.squad import MODELS, Squad, squad
from gather.test_gather import failed, published
from weightcast.format.geometry import Region, merged
from weightcast.format.manifest import TensorSpec
from weightcast.trainer.group.assignment import assign_all, leaders_of
from weightcast.trainer.group.rounds import _own_url
from weightcast.trainer.packer import HeldRegion

pytestmark = pytest.mark.cluster
NUM_RANKS = 4
GLOO: dict[str, Any] = {"transport": "gloo://127.0.0.1:0"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Squad]:
    with squad(NUM_RANKS) as members:
        yield members


def sent_by(outcomes: list[dict[str, Any]]) -> list[int]:
    """Bytes of buckets that each rank has broadcast, headers included."""
    return [outcome["counts"].get("bucket bytes", 0) for outcome in outcomes]


# --- bytes ---


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize(
    "cut", ["rows", "columns", "strided", "last_alone", "hybrid", "replicated", "transposed", "alternating"]
)
@pytest.mark.parametrize("hosts", [2, 4])
def test_every_sharding_arrives_whole(ranks: Squad, cut: str, hosts: int, install: str) -> None:
    ranks.all("make", "table", cut, hosts=hosts, install=install, **GLOO)
    for content in (1, 2):
        report = published(ranks.publish(content))
        assert report["version"] == content - 1
        assert ranks[0].ask("check", content) == []


def test_what_a_rank_digests_alone_has_no_bytes_of_former_buckets(ranks: Squad) -> None:
    """Between its tensors, where the rank that leads the origin zeroes them, too, later than this one has digested."""
    ranks.all("make", "table", "last_alone", hosts=2, late_seconds=0.02, **GLOO)
    for content in (1, 2):
        published(ranks.publish(content))
        assert ranks[0].ask("check", content) == []


def test_each_origin_gives_its_memory_back(ranks: Squad) -> None:
    ranks.all("make", "many", "rows", hosts=2, **GLOO)
    for content in (1, 2):
        published(ranks.publish(content))
        assert ranks[0].ask("check", content) == []
        for rank in range(NUM_RANKS):
            kept = ranks[rank].ask("release")
            assert len(kept) == (2 if rank in (0, 2) else 0)
            assert kept == [] or (kept[0] > 0 and kept[1] == 0)


@pytest.mark.parametrize(
    ("hosts", "is_apart", "leaders"),
    [(1, False, [0]), (2, False, [0, 2]), (4, False, [0, 1, 2, 3]), (1, True, [0, 1, 2, 3]), (2, True, [0, 1, 2, 3])],
)
@pytest.mark.parametrize("cut", ["rows", "replicated"])
def test_each_origin_sends_its_share(ranks: Squad, cut: str, hosts: int, leaders: list[int], is_apart: bool) -> None:
    ranks.all("make", "many", cut, hosts=hosts, is_apart=is_apart, **GLOO)
    num_bytes = sum(tensor.nbytes for tensor in MODELS["many"](0).values())
    for content in (1, 2):
        outcomes = ranks.publish(content)
        published(outcomes)
        assert ranks[0].ask("check", content) == []
        sent = sent_by(outcomes)
        assert [rank for rank, each in enumerate(sent) if each] == leaders
        assert sum(sent) >= num_bytes
        assert max(sent) <= 1.2 * sum(sent) / len(leaders)


def test_ranks_on_other_hosts_are_refused_where_memory_must_be_shared(ranks: Squad) -> None:
    ranks.all("make", "table", "rows", hosts=2)
    errors = failed(ranks.publish(1))
    assert {kind for kind, _ in errors} == {"UnsupportedError"}
    assert all(
        "ipc:// sends from one host, but trainer ranks 2, 3 can't map the memory of rank 0" in t for _, t in errors
    )


@pytest.mark.parametrize("cut", ["rows", "last_alone"])
def test_every_origin_proves_what_it_has_sent(ranks: Squad, cut: str) -> None:
    ranks.all("make", "table", cut, hosts=4, verify="installed", is_provable=True, **GLOO)
    for content in (1, 2):
        report = published(ranks.publish(content))
        assert report["engines"]["engine-0"]["unproven"] == {}
    ranks[0].ask("spoil_engine", "large")
    errors = failed(ranks.publish(3))
    assert all("its live memory is not what was sent" in text and "'large'" in text for _, text in errors)


@pytest.mark.parametrize(("hosts", "expected"), [(1, []), (2, [3])])
def test_workers_hear_how_many_share_their_host(ranks: Squad, hosts: int, expected: list[int]) -> None:
    """What straddles origins each puts together in memory of its own."""
    ranks.all("make", "table", "rows", hosts=hosts, num_engines=3, **GLOO)
    assert ranks[0].ask("offered_workers") == []
    published(ranks.publish(1))
    assert ranks[0].ask("offered_workers") == [expected] * 3


@pytest.mark.parametrize("transport", ["gloo://127.0.0.1:0", "ipc://"])
def test_an_engine_that_brings_its_own_sender_gets_all_of_the_bytes(ranks: Squad, transport: str) -> None:
    ranks.all("make", "table", "rows", transport=transport)
    published(ranks.publish(1))
    ranks.all("add_stock")
    for content in (2, 3):
        published(ranks.publish(content))
        assert ranks[0].ask("check", content) == []
        assert ranks[0].ask("check_stock", content) == []


def test_an_engine_that_brings_its_own_sender_is_refused_alone_where_other_hosts_send(ranks: Squad) -> None:
    """All bytes must be on one rank, also if what the engine is becomes known only in the middle of a publish."""
    ranks.all("make", "table", "rows", hosts=2, **GLOO)
    published(ranks.publish(1))
    ranks.all("add_stock")
    for content in (2, 3):
        outcomes = ranks.publish(content)
        assert [outcome["failures"] for outcome in outcomes] == [{"stock": "UnsupportedError"}] * NUM_RANKS
        assert ranks[0].ask("check", content) == []
    ranks.all("remove", "stock")
    published(ranks.publish(4))
    assert ranks[0].ask("check", 4) == []


def test_a_round_costs_at_most_three_exchanges(ranks: Squad) -> None:
    ranks.all("make", "large", "rows", hosts=2, bucket_size_bytes=1 << 20, **GLOO)
    published(ranks.publish(1))
    outcomes = ranks.publish(2)
    num_rounds = published(outcomes)["num_buckets"] // 2 + 1
    exchanges = outcomes[0]["counts"]["exchange"]
    # Besides: those in which a rank was busy with its engines.
    assert exchanges >= 2 * num_rounds
    assert all(outcome["counts"]["send"] >= exchanges for outcome in outcomes[1:])


def test_a_fleet_that_grows_and_a_publish_that_fails(ranks: Squad) -> None:
    ranks.all("make", "table", "rows", hosts=2, num_engines=2, **GLOO)
    published(ranks.publish(1))
    ranks[0].ask("fail_engine", 0)
    errors = failed(ranks.publish(2))
    assert all("engine-0" in text for _, text in errors)
    ranks[0].ask("fail_engine", None)
    published(ranks.publish(3))
    assert ranks[0].ask("check", 3) == []


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("bucket", [0, 4])
def test_a_rank_that_fails_at_a_bucket(ranks: Squad, failing: int, bucket: int) -> None:
    ranks.all("make", "table", "rows", hosts=2, **GLOO)
    published(ranks.publish(1))
    spans = ranks[0].ask("spans")
    ranks[failing].ask("fail_at", spans[failing // 2][bucket], RuntimeError("out of paper"))
    errors = [outcome["error"] for outcome in ranks.publish(2)]
    assert errors[failing] == ("RuntimeError", "out of paper")
    assert sum(f"trainer rank {failing}" in text for _, text in errors) == NUM_RANKS - 1
    published(ranks.publish(3))
    assert ranks[0].ask("check", 3) == []


def test_every_origin_brings_a_late_engine_to_the_version_of_the_others(ranks: Squad) -> None:
    ranks.all("make", "table", "rows", hosts=2, **GLOO)
    published(ranks.publish(1))
    report = published(ranks.all("sync", "late", is_new=True))
    assert (report["version"], list(report["engines"])) == (0, ["late"])
    assert ranks[0].ask("check", 1) == []
    assert published(ranks.all("sync", "late"))["version"] == 0, "it serves it already"
    # Only what the other host brings has changed.
    for rank in (2, 3):
        ranks[rank].ask("fill", 2)
    errors = failed(ranks.all("sync", "later", is_new=True))
    assert all("weights have changed since" in text for _, text in errors)
    ranks.all("fill", 2)
    assert published(ranks.publish(2))["version"] == 1
    assert ranks[0].ask("check", 2) == []
    assert ranks[0].ask("serves") == [1, 1, 1]


@pytest.mark.parametrize("group_rank", [0, 2])
@pytest.mark.parametrize(("cut", "at"), [("rows", 0), ("rows", 2), ("rows", -1), ("replicated", -1)])
def test_an_origin_that_has_lost_peers_goes_on(ranks: Squad, group_rank: int, cut: str, at: int) -> None:
    """As if an engine had been lost, at the first bucket, at another, and at the last, also of all origins."""
    ranks.all("make", "table", cut, hosts=2, num_engines=2, **GLOO)
    published(ranks.publish(1))
    spans = ranks[0].ask("spans")
    ranks[group_rank].ask("lose_nobody", spans[group_rank // 2][at] - spans[group_rank // 2][0])
    report = published(ranks.publish(2))
    assert all(result["error"] is None for result in report["engines"].values())
    assert ranks[0].ask("check", 2) == []
    published(ranks.publish(3))
    assert ranks[0].ask("check", 3) == []


def test_many_publishes_leave_nothing(ranks: Squad) -> None:
    ranks.all("make", "many", "rows", hosts=2, **GLOO)
    ranks.require_no_growth()


# --- who leads, who brings what: no processes ---


@pytest.mark.parametrize(
    ("mappable", "maps_buckets", "leading"),
    [
        ([[], [0], [0, 1]], True, [0, 0, 0]),
        ([[], [0], [0, 1]], False, [0, 1, 2]),
        ([[], [0], [], [2]], True, [0, 0, 2, 2]),
        ([[], [], [1], [0, 1, 2]], True, [0, 1, 1, 0]),
        ([[], [0], [1]], True, [0, 0, 2]),
        ([[]], True, [0]),
    ],
)
def test_who_leads_an_origin(mappable: list[list[int]], maps_buckets: bool, leading: list[int]) -> None:
    assert leaders_of(mappable, maps_buckets=maps_buckets) == leading


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("gloo://127.0.0.1:0", "gloo://127.0.0.1:0"),
        ("gloo://127.0.0.1:29501", "gloo://127.0.0.1:29501"),
        ("gloo://localhost", "gloo://127.0.0.1:0"),
        ("ipc://", "ipc://"),
    ],
)
def test_the_address_of_an_origin_on_another_host(url: str, expected: str) -> None:
    assert _own_url(url) == expected


def test_replicas_on_two_hosts_leave_whole_tensors_in_one_origin() -> None:
    specs = [TensorSpec(f"w{n}", "float32", (64, n + 1), group="pair" if n in (3, 4) else "") for n in range(16)]
    halves = [Region((32 * half, 0), (32, 0)) for half in (0, 1)]
    held = [[HeldRegion(n, Region(halves[half].offsets, (32, n + 1))) for n in range(16)] for half in (0, 1, 0, 1)]
    found = assign_all(specs, held, [0, 0, 2, 2], 1 << 20)
    manifest = found.layout.manifest
    assert len(manifest.origins) == 2
    origin_of = [origin for origin, span in enumerate(manifest.spans) for _ in span]
    origins = [{origin_of[piece.bucket] for piece in record.pieces} for record in manifest.tensors]
    assert all(len(each) == 1 for each in origins)
    assert origins[3] == origins[4]
    assert all(len(record.pieces) == 1 for record in manifest.tensors)
    loads = [sum(manifest.buckets[index] for index in span) for span in manifest.spans]
    assert max(loads) < 1.2 * min(loads)


def test_an_origin_with_nothing_to_send_is_none_but_for_the_first() -> None:
    specs = [TensorSpec("w", "float32", (4,))]
    whole, nothing = [HeldRegion(0, Region((0,), (4,)))], list[HeldRegion]()
    for held, origins in (([whole, nothing], ()), ([whole, whole], ()), ([nothing, whole], (0, 1))):
        found = assign_all(specs, held, [0, 1], 1 << 20)
        assert found.leaders == [0, 1][: max(1, len(origins))]
        assert found.layout.manifest.origins == origins


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], [((0, 0), (4, 4))]),
        ([((2, 0), (2, 2)), ((0, 2), (2, 2)), ((0, 0), (2, 2)), ((2, 2), (2, 2))], [((0, 0), (4, 4))]),
        ([((0, 0), (1, 4)), ((2, 0), (1, 4))], [((0, 0), (1, 4)), ((2, 0), (1, 4))]),
        ([((), ())], [((), ())]),
        ([], []),
    ],
)
def test_regions_that_adjoin_become_one(regions: list[Any], expected: list[Any]) -> None:
    assert merged([Region(*each) for each in regions]) == [Region(*each) for each in expected]
