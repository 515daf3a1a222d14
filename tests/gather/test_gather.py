"""What several trainer ranks publish, bit for bit, what it costs, and how an error on one becomes everyone's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gather.squad import MODELS, Squad, squad

NUM_RANKS = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Squad]:
    with squad(NUM_RANKS) as members:
        yield members


def published(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """The report, which is the same on every rank."""
    assert [outcome["error"] for outcome in outcomes] == [None] * len(outcomes)
    for key in ("report", "version", "run"):
        assert len({outcome[key] for outcome in outcomes}) == 1, key
    report: dict[str, Any] = json.loads(outcomes[0]["report"])
    return report


def failed(outcomes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Every rank's error; all are of one type and none has a version of its own."""
    errors = [outcome["error"] for outcome in outcomes]
    assert None not in errors
    assert len({kind for kind, _ in errors}) == 1, errors
    assert len({outcome["version"] for outcome in outcomes}) == 1
    return errors


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize(
    "cut", ["rows", "columns", "strided", "last_alone", "hybrid", "replicated", "transposed", "alternating"]
)
def test_every_sharding_arrives_whole(ranks: Squad, cut: str, is_apart: bool) -> None:
    ranks.all("make", "table", cut, is_apart=is_apart)
    for content in (1, 2):
        report = published(ranks.publish(content))
        assert report["version"] == content - 1
        assert ranks[0].ask("check", content) == []


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_size_bytes": 512},
        {"bucket_size_bytes": 512, "is_apart": True, "install": "streaming"},
        {"install": "streaming"},
        {"transport": "memory://"},
        {"transport": "memory://", "install": "streaming"},
    ],
    ids=str,
)
def test_other_buckets_and_ways(ranks: Squad, options: dict[str, Any]) -> None:
    ranks.all("make", "table", "rows", **options)
    published(ranks.publish(3))
    assert ranks[0].ask("check", 3) == []


@pytest.mark.parametrize(("apart", "num_origins"), [([1], 2), ([2], 2), ([1, 2], 3)])
@pytest.mark.parametrize("transport", ["ipc://", "gloo://127.0.0.1:0"])
def test_a_rank_in_another_container_is_an_origin_of_its_own(
    ranks: Squad, transport: str, apart: list[int], num_origins: int
) -> None:
    for rank in range(NUM_RANKS):
        options = {"bucket_size_bytes": 3 << 20, "transport": transport}
        ranks[rank].tell("make", "large", "rows", is_apart=rank in apart, **options)
    for rank in range(NUM_RANKS):
        ranks[rank].hear()
    for content in (1, 2):
        published(ranks.publish(content))
        assert len(ranks[0].ask("spans")) == num_origins
        assert ranks[0].ask("check", content) == []


def test_one_process_sends_over_memory(ranks: Squad) -> None:
    """Other ranks pack into its buckets, or nobody publishes."""
    ranks.all("make", "table", "rows", transport="memory://", is_apart=True)
    errors = failed(ranks.publish(1))
    assert {kind for kind, _ in errors} == {"UnsupportedError"}
    assert all("trainer ranks 1, 2 can't map the memory of rank 0" in text for _, text in errors)


@pytest.mark.parametrize("transport", ["ipc://", "gloo://127.0.0.1:0", "store"])
@pytest.mark.parametrize("cut", ["rows", "replicated"])
def test_ranks_of_a_host_pack_and_digest_together(ranks: Squad, cut: str, transport: str, tmp_path: Path) -> None:
    transport = f"file://{tmp_path}" if transport == "store" else transport
    ranks.all("make", "large", cut, bucket_size_bytes=3 << 20, transport=transport)
    for content in (1, 2):
        outcomes = ranks.publish(content)
        published(outcomes)
        assert len(ranks[0].ask("spans")) == 1
        assert ranks[0].ask("check", content) == []


def test_masters_are_cast_before_they_travel(ranks: Squad) -> None:
    ranks.all("make", "many", "rows", masters=True, is_apart=True)
    published(ranks.publish(4))
    assert ranks[0].ask("check", 4) == []
    num_bytes = sum(t.nbytes for t in MODELS["many"](0).values())
    spans = ranks[0].ask("spans")
    assert len(spans) == NUM_RANKS
    assert published(ranks.publish(5))["num_bytes"] == num_bytes


def test_two_exchanges_for_each_bucket_and_a_message_for_each_exchange(ranks: Squad) -> None:
    ranks.all("make", "table", "rows")
    published(ranks.publish(10))
    outcomes = ranks.publish(11)
    num_buckets = published(outcomes)["num_buckets"]
    assert num_buckets > 8
    for rank, outcome in enumerate(outcomes):
        counts = outcome["counts"]
        # The report of the publish is longer than a row: it goes in a second broadcast.
        assert counts["exchange"] <= 2 * num_buckets + 4
        assert counts["broadcast"] == counts["exchange"] + 1
        assert counts.get("send", 0) == (counts["exchange"] if rank else 0)
        assert counts.get("receive", 0) == (0 if rank else (NUM_RANKS - 1) * counts["exchange"])


def test_a_sender_that_has_lost_buckets_begins_again(ranks: Squad) -> None:
    ranks.all("make", "table", "rows")
    published(ranks.publish(12))
    for at in (0, 3, 5):
        ranks[0].ask("rewind", at)
        published(ranks.publish(13 + at))
        assert ranks[0].ask("check", 13 + at) == []


def test_buckets_that_other_ranks_can_not_map_are_an_error_on_every_rank(ranks: Squad) -> None:
    ranks.all("make", "table", "rows")
    published(ranks.publish(1))
    ranks[0].ask("keep_buckets_private")
    errors = failed(ranks.publish(2))
    assert all("need buckets in memory that all of them can map" in text for _, text in errors)
    assert ranks[0].ask("check", 1) == []


def test_the_last_bucket_may_be_lost(ranks: Squad) -> None:
    ranks.all("make", "table", "rows")
    last = published(ranks.publish(20))["num_buckets"] - 1
    ranks[0].ask("rewind", last)
    published(ranks.publish(21))
    assert ranks[0].ask("check", 21) == []


def test_every_rank_brings_a_late_engine_to_the_version_of_the_others(ranks: Squad) -> None:
    ranks.all("make", "table", "rows", transport="gloo://127.0.0.1:0")
    published(ranks.publish(1))
    report = published(ranks.all("sync", "late", is_new=True))
    assert (report["version"], list(report["engines"])) == (0, ["late"])
    assert ranks[0].ask("check", 1) == []
    assert published(ranks.all("sync", "late"))["version"] == 0, "it serves it already"
    ranks.all("fill", 2)
    for name in ("later", "unknown"):
        is_new = name == "later"
        errors = failed(ranks.all("sync", name, is_new=is_new))
        assert all(("weights have changed since" if is_new else "is not in the fleet") in text for _, text in errors)
    assert published(ranks.publish(2))["version"] == 1
    assert ranks[0].ask("check", 2) == []
    assert ranks[0].ask("serves") == [1, 1, 1]


def test_a_streamed_version_that_is_asked_for_again_is_an_error_on_every_rank(ranks: Squad) -> None:
    ranks.all("make", "table", "rows", install="streaming", transport="gloo://127.0.0.1:0")
    published(ranks.publish(1))
    errors = failed(ranks.all("sync", "late", is_new=True))
    assert all("version 0 can't be sent again" in text for _, text in errors)
    assert published(ranks.publish(2))["version"] == 1
    assert ranks[0].ask("check", 2) == []


def test_a_follower_leaves_the_engines_to_the_publishing_rank_before_its_first_publish_too(ranks: Squad) -> None:
    ranks.all("make", "many", "rows")
    for _ in range(2):
        assert [outcome["error"] for outcome in ranks.all("change_fleet", "late")] == [None] * NUM_RANKS
        for rank in range(1, NUM_RANKS):
            assert ranks[rank].ask("change_fleet", "late", is_known=False)["error"] is None
        assert ranks[0].ask("change_fleet", "late", is_known=False)["error"][0] == "ValueError"
        published(ranks.publish(1))


def test_all_ranks_report_the_same_of_which_publish_is_verified(ranks: Squad) -> None:
    ranks.all("make", "many", "rows", verify="installed", verify_every=3)
    found = []
    for version in (5, 15, 25, 35, 45):
        outcomes = [ranks[rank].tell("publish", version + rank) or ranks[rank] for rank in range(NUM_RANKS)]
        report = published([rank.hear() for rank in outcomes])
        found.append(bool(report["engines"]["engine-0"]["unproven"]))  # an engine that can't be read says so when asked
    assert found == [True, False, False, True, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_publish_inside_a_step_of_its_thread_fails_at_once_on_every_rank(ranks: Squad, rank: int) -> None:
    ranks.all("make", "many", "rows")
    for other in range(NUM_RANKS):
        ranks[other].tell("publish", in_step=other == rank)
    errors = failed([ranks[other].hear() for other in range(NUM_RANKS)])
    assert {kind for kind, _ in errors} == {"ValueError"}
    assert all("was called inside `with step():` of this thread" in text for _, text in errors)
    published(ranks.publish(1))


def test_versions_are_those_of_the_publishing_rank(ranks: Squad) -> None:
    ranks.all("make", "many", "rows")
    ranks.all("fill", 1)
    ranks[1].tell("publish", 3)
    ranks[2].tell("publish")
    outcomes = [ranks[0].ask("publish", 40), ranks[1].hear(), ranks[2].hear()]
    assert published(outcomes)["version"] == 40
    assert published(ranks.publish(2))["version"] == 41


def test_some_of_the_trainer_ranks(ranks: Squad) -> None:
    ranks.all("make", "table", "columns", group=[1, 2])
    ranks.all("fill", 1)
    for content in (1, 2):
        for rank in (1, 2):
            ranks[rank].ask("fill", content)
            ranks[rank].tell("publish")
        published([ranks[1].hear(), ranks[2].hear()])
        assert ranks[1].ask("check", content) == []
    assert ranks[0].ask("publish")["error"][0] == "ValueError"


def test_one_rank_alone(ranks: Squad) -> None:
    ranks.all("make", "table", "replicated", trainer_group=None)
    ranks[0].ask("fill", 1)
    outcome = ranks[0].ask("publish")
    assert (outcome["error"], outcome["counts"]) == (None, {})
    assert ranks[0].ask("check", 1) == []


def test_many_publishes_leave_nothing(ranks: Squad) -> None:
    ranks.all("make", "many", "rows")
    ranks.all("publish_often", 100)  # allocators of all threads have what they keep then
    before = ranks.all("footprint")
    ranks.all("publish_often", 20)
    for former, now in zip(before, ranks.all("footprint"), strict=True):
        assert (now["fds"], now["threads"]) == (former["fds"], former["threads"])
        assert now["rss_bytes"] - former["rss_bytes"] < 1 << 20


# --- errors ---------------------------------------------------------------------------------------


def test_specs_that_differ_are_everybodys_error(ranks: Squad) -> None:
    ranks.all("make", "many", "rows")
    ranks[2].ask("rename", "layer.7", "layer.seven")
    errors = failed(ranks.all("publish"))
    assert len(set(errors)) == 1
    kind, text = errors[0]
    assert kind == "IncompatibleWeightsError"
    for part in ("tensor 7", "'layer.7'", "'layer.seven'", "trainer rank 0", "trainer rank 2"):
        assert part in text
    ranks[2].ask("rename", "layer.seven", "layer.7")
    published(ranks.publish(1))
    assert ranks[0].ask("check", 1) == []


@pytest.mark.parametrize(("cut", "word"), [("gapped", "missing or doubled"), ("overlapping", "overlap")])
def test_regions_that_do_not_tile_name_the_tensor(ranks: Squad, cut: str, word: str) -> None:
    ranks.all("make", "many", cut)
    errors = failed(ranks.publish(1))
    assert errors[0][0] == "IncompatibleWeightsError"
    assert "'layer.0' of shape [16, 16]" in errors[0][1]
    assert len(set(errors)) == 1, "every rank finds the same"


SPOILED = {
    "smaller": "found a view of [1, 16], torch.bfloat16 on cpu, expected {sizes}, bfloat16 in memory, for the region",
    "of_another_dtype": "found a view of {sizes}, torch.int64 on cpu, expected {sizes}, bfloat16 in memory",
    "on_meta": "found a view of {sizes}, torch.bfloat16 on meta, expected {sizes}, bfloat16 in memory",
    "freed": "found a view of {sizes}, torch.bfloat16 on cpu without memory, expected {sizes}, bfloat16",
    "moved": "found a view at 0x",
}


@pytest.mark.parametrize(("kind", "words"), SPOILED.items(), ids=SPOILED)
@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_view_that_is_not_what_was_declared(ranks: Squad, failing: int | None, kind: str, words: str) -> None:
    """Everybody is told which tensor of which rank it is, and no byte has moved. None: of a rank that is alone."""
    is_alone = failing is None
    ranks.all("make", "many", "replicated" if is_alone else "rows", **{"trainer_group": None} if is_alone else {})
    members = [ranks[rank] for rank in range(1 if is_alone else NUM_RANKS)]

    def publish() -> list[dict[str, Any]]:
        for member in members:
            member.tell("publish")
        return [member.hear() for member in members]

    ranks.all("fill", 1)
    published(publish())
    ranks[failing or 0].ask("spoil", kind, "layer.7")
    for _ in range(2):
        outcomes = publish()
        assert all(outcome["counts"].get("exchange", 0) <= 1 for outcome in outcomes)
        for rank, (name, text) in enumerate(failed(outcomes)):
            assert name == "IncompatibleWeightsError"
            assert text.startswith(
                "the source's" if rank == (failing or 0) else f"trainer rank {failing}: the source's"
            )
            assert f"do not fit: 'layer.7': {words.format(sizes='[16, 16]' if is_alone else '[6, 16]')}" in text
            assert "Remedy: " in text
            assert "have regions() return" in text
    assert ranks[0].ask("check", 1) == []
    ranks.all("fill", 2)
    published(publish())
    assert ranks[0].ask("check", 2) == []


def test_a_rank_that_holds_a_part_and_is_alone(ranks: Squad) -> None:
    ranks.all("make", "many", "rows", trainer_group=None)
    kind, text = ranks[0].ask("publish")["error"]
    assert kind == "IncompatibleWeightsError"
    assert "'layer.0' of shape [16, 16] from the regions [0, 0]+[6, 16]" in text
    assert "FSDP" in text
    assert "trainer_group='auto'" in text


@pytest.mark.parametrize("failing", range(NUM_RANKS))
@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_a_source_that_raises_on_one_rank(ranks: Squad, failing: int, kind: type[Exception]) -> None:
    ranks.all("make", "many", "rows")
    published(ranks.publish(1))
    ranks[failing].ask("fail_source", kind("no weights today"))
    errors = [outcome["error"] for outcome in ranks.publish(2)]
    told = "ValueError" if kind is ValueError else "WeightcastError"
    for rank, (name, text) in enumerate(errors):
        assert name == (kind.__name__ if rank == failing else told)
        assert text.endswith("no weights today")
        assert rank == failing or text.startswith(f"trainer rank {failing}: ")
    ranks[failing].ask("fail_source", None)
    published(ranks.publish(3))
    assert ranks[0].ask("check", 3) == []


def test_a_rank_that_fails_at_a_bucket(ranks: Squad) -> None:
    ranks.all("make", "table", "rows")
    published(ranks.publish(1))
    last = published(ranks.publish(2))["num_buckets"] - 1
    for rank, bucket in ((1, 0), (2, 3), (0, 4), (1, last)):
        serves = ranks[0].ask("serves")
        ranks[rank].ask("fail_at", bucket, TypeError("a shard went away"))
        assert {kind for kind, _ in failed(ranks.publish(3))} == {"TypeError"}
        assert ranks[0].ask("serves") == serves
    published(ranks.publish(4))
    assert ranks[0].ask("check", 4) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_on_one_rank_ends_it_for_all(ranks: Squad, rank: int) -> None:
    ranks.all("make", "table", "rows")
    published(ranks.publish(1))
    ranks[rank].ask("fail_at", 2, KeyboardInterrupt("stop"))
    kinds = [outcome["error"][0] for outcome in ranks.publish(2)]
    assert [kind == "KeyboardInterrupt" for kind in kinds] == [number == rank for number in range(NUM_RANKS)]
    assert ranks[0].ask("serves") == [0]
    published(ranks.publish(3))
    assert ranks[0].ask("check", 3) == []


def test_a_version_that_does_not_grow_is_a_value_error_everywhere(ranks: Squad) -> None:
    ranks.all("make", "many", "rows")
    published(ranks.publish(1, 5))
    errors = failed(ranks.publish(2, 5))
    message = "version 5 is not above 5, the last one of this publisher: leave `version` out, or pass a higher number"
    assert errors[0] == ("ValueError", message)
    assert errors[1] == ("ValueError", f"trainer rank 0: {message}")
    published(ranks.publish(2, 6))


@pytest.mark.parametrize("on_failure", ["raise", "report"])
def test_a_failed_engine_is_the_same_news_on_every_rank(ranks: Squad, on_failure: str) -> None:
    ranks.all("make", "many", "rows", num_engines=2, on_failure=on_failure)
    published(ranks.publish(1))
    ranks.all("fail_engine", 3)
    outcomes = ranks.publish(2)
    assert len({outcome["report"] for outcome in outcomes}) == 1
    results = json.loads(outcomes[0]["report"])["engines"]
    assert [results[name]["ok"] for name in ("engine-0", "engine-1")] == [False, True]
    if on_failure == "raise":
        assert {kind for kind, _ in failed(outcomes)} == {"PublishError"}
        assert [outcome["failures"] for outcome in outcomes] == [{"engine-0": "InstallError"}] * NUM_RANKS
    ranks.all("fail_engine", None)
    published(ranks.publish(3))
    assert ranks[0].ask("check", 3) == []


def test_a_transport_that_fails_on_the_publishing_rank(ranks: Squad) -> None:
    ranks.all("make", "many", "rows", transport="gloo://192.0.2.1:0")
    errors = [outcome["error"] for outcome in ranks.publish(1)]
    assert all(text.startswith("trainer rank 0: ") for _, text in errors[1:])
