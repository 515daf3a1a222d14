"""A version that several senders write, one for each origin: who may write when, and what is sealed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from store.store_kit import (
    OTHER_RUN,
    RUN,
    SHORT_SECONDS,
    Holder,
    begin_shared,
    number_in,
    send_origin,
    two_origins,
    url,
    write,
)

from weightcast.errors import IntegrityError, ManifestError, PeerTimeoutError, UpdateAbortedError
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.serving.follower import Follower
from weightcast.store import locks, reading
from weightcast.store.address import DirectoryAddress
from weightcast.store.files import FileLayout
from weightcast.store.reading import StoreReader
from weightcast.store.records import Commit, seal
from weightcast.transports.store import JoinedStoreSender, StoreSender


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left open; a slot that never gets its version is given up soon."""
    monkeypatch.setattr(reading, "GRACE_SECONDS", 0.2)


@contextlib.contextmanager
def pair(directory: Path, options: str = "") -> Iterator[tuple[StoreSender, JoinedStoreSender]]:
    first = StoreSender(url(directory, options), run=RUN, deadline_seconds=SHORT_SECONDS)
    second = JoinedStoreSender(url(directory, options), run=RUN, deadline_seconds=SHORT_SECONDS)
    with contextlib.closing(first), contextlib.closing(second):
        yield first, second


def newest(directory: Path) -> int | None:
    commit = StoreReader(DirectoryAddress(directory)).commit()
    return None if commit is None else commit.newest.number


def held_by_a_follower(directory: Path) -> int:
    engine = Holder()
    with Follower(url(directory), engine) as follower:
        assert follower.poll() is not None
    return number_in(engine.held)


def test_where_the_buckets_of_each_origin_lie() -> None:
    """As the docstring of `weightcast.store` has it."""
    manifest = msgspec.structs.replace(two_origins(), buckets=(256, 4096, 512, 256, 8192), origins=(3, 2))
    assert [FileLayout(manifest, 2).at(index) for index in range(5)] == [
        (0, 0),
        (0, 4096),
        (0, 12288),
        (1, 0),
        (1, 4096),
    ]
    found = FileLayout(manifest, 4)
    assert [found.at(index) for index in range(5)] == [(0, 0), (1, 0), (0, 4096), (2, 0), (3, 0)]
    assert found.sizes_bytes == [8192, 8192, 4096, 12288]


@pytest.mark.parametrize("options", ["", "?num_threads=3", "?fsync=1"])
@pytest.mark.parametrize("first_to_send", [0, 1])
def test_what_all_have_sent_is_the_version(tmp_path: Path, options: str, first_to_send: int) -> None:
    manifest = two_origins()
    with pair(tmp_path, options) as (first, second):
        for number in (1, 2, 3):
            begin_shared(first, second, manifest, number)
            digests = {}
            for origin in (first_to_send, 1 - first_to_send):
                digests[origin] = send_origin((first, second)[origin], manifest, origin, number)
                assert not (tmp_path / "next.json").exists()
            first.seal(digests[1])
            assert (tmp_path / "next.json").exists()
            first.commit()
            assert newest(tmp_path) == held_by_a_follower(tmp_path) == number


def test_an_unsealed_version_is_none(tmp_path: Path) -> None:
    manifest = two_origins()
    write(tmp_path, 0, run=OTHER_RUN)
    with pair(tmp_path) as (first, second):
        begin_shared(first, second, manifest, 1)
        with pytest.raises(UpdateAbortedError, match="no version of several origins is complete"):
            first.seal([])
        send_origin(first, manifest, 0, 1)
        with pytest.raises(UpdateAbortedError, match="there is no sealed version to commit"):
            first.commit()
        first.abort("another origin was lost")
        with pytest.raises(UpdateAbortedError, match="no version of several origins is complete"):
            first.seal([])
        assert held_by_a_follower(tmp_path) == 0
        second.abort("another origin was lost")
        begin_shared(first, second, manifest, 1)
        send_origin(first, manifest, 0, 1)
        first.seal(send_origin(second, manifest, 1, 1))
        first.commit()
    assert held_by_a_follower(tmp_path) == 1


@pytest.mark.parametrize("num_sent", [0, 2])
def test_a_slot_that_an_origin_still_writes_is_not_taken(tmp_path: Path, num_sent: int) -> None:
    """Its publishing rank has died; it may have a bucket in hand, and learns that only later."""
    manifest, write_on = two_origins(), JoinedStoreSender(url(tmp_path), run=RUN, deadline_seconds=SHORT_SECONDS)
    write(tmp_path, 0)
    with contextlib.closing(write_on):
        with contextlib.closing(StoreSender(url(tmp_path, "?max_slots=2"), run=RUN)) as first:
            begin_shared(first, write_on, manifest, 1)
            send_origin(write_on, manifest, 1, 1, num_sent)
            first._writer._storage.unlock()  # what the kernel does when it dies
            first._writer._slot.close()
        other = StoreSender(url(tmp_path, "?max_slots=2"), run=OTHER_RUN, deadline_seconds=SHORT_SECONDS)
        message = "a trainer rank of an aborted publish holds slot 1"
        with contextlib.closing(other), pytest.raises(PeerTimeoutError, match=message):
            other.open(manifest, WeightVersion(OTHER_RUN, 1), peers=[], staged=True)
        write(tmp_path, 1, run=OTHER_RUN)
        send_origin(write_on, manifest, 1, 1, None if not num_sent else 0)
        assert held_by_a_follower(tmp_path) == 1
        assert sorted(path.name for path in (tmp_path / "slots").iterdir()) == ["0", "1", "2"]


def test_an_origin_that_comes_too_late_writes_nothing(tmp_path: Path) -> None:
    """It was told of an attempt; until it opens the files the publishing rank has given that up."""
    manifest, version = two_origins(), WeightVersion(RUN, 1)
    with pair(tmp_path) as (first, second):
        place = first.begin_together(manifest, version)
        first.abort("another rank has failed")
        with pytest.raises(PeerTimeoutError, match="did not name attempt 1 of run"):
            second.join(manifest, 1, place)
        with pytest.raises(UpdateAbortedError, match=r"call join\(\) first"):
            second.open(manifest.of_origin(1), version, peers=[], staged=True)
        begin_shared(first, second, manifest, 1)
        with pytest.raises(PeerTimeoutError, match="did not name attempt 1 of run"):
            second.join(manifest, 1, place)


def test_an_origin_of_another_run_writes_nothing(tmp_path: Path) -> None:
    manifest = two_origins()
    with pair(tmp_path) as (first, _):
        place = first.begin_together(manifest, WeightVersion(RUN, 1))
        other = JoinedStoreSender(url(tmp_path), run=OTHER_RUN, deadline_seconds=SHORT_SECONDS)
        with contextlib.closing(other), pytest.raises(PeerTimeoutError, match="mount the store's directory"):
            other.join(manifest, 1, place)


@pytest.mark.parametrize(
    "place", ["", "no record", '{"slot":-1,"attempt":1}', '{"slot":9223372036854775808,"attempt":1}', "[]"]
)
def test_a_place_that_is_none(tmp_path: Path, place: str) -> None:
    with pair(tmp_path) as (_, second), pytest.raises(ManifestError):
        second.join(two_origins(), 1, place)


def test_readers_are_named_while_origins_write(tmp_path: Path) -> None:
    """The locks of the writers of a slot are no readers'."""
    manifest = two_origins()
    with pair(tmp_path) as (first, second):
        begin_shared(first, second, manifest, 1)
        assert locks.readers(tmp_path / "slots" / "0" / "pins") == []
        send_origin(first, manifest, 0, 1)
        first.seal(send_origin(second, manifest, 1, 1))
        first.commit()
        held = reading.pinned(DirectoryAddress(tmp_path), label="somebody")
        with contextlib.closing(held):
            [reader] = locks.readers(tmp_path / "slots" / "0" / "pins")
            assert reader.startswith("somebody")


def test_a_seal_whose_number_of_files_is_not_that_of_the_origins(tmp_path: Path) -> None:
    manifest = two_origins()
    with pair(tmp_path) as (first, second):
        begin_shared(first, second, manifest, 1)
        send_origin(first, manifest, 0, 1)
        first.seal(send_origin(second, manifest, 1, 1))
        first.commit()
    commit = StoreReader(DirectoryAddress(tmp_path)).commit()
    assert commit is not None
    forged = seal(Commit(commit.format, msgspec.structs.replace(commit.newest, num_files=3)))
    for path in (tmp_path / "current.json", tmp_path / "slots" / "0" / "seal.json"):
        path.write_bytes(forged)
    with Follower(url(tmp_path), Holder()) as follower, pytest.raises(IntegrityError, match="has 3 data files"):
        follower.poll()


def test_more_origins_than_files_there_may_be(tmp_path: Path) -> None:
    specs = [TensorSpec("w", "int32", (1025, 64))]
    origins = [{"w": [Region((row, 0), (1, 64))]} for row in range(1025)]
    manifest = plan(specs, 256, origins=origins)
    with pair(tmp_path) as (first, _), pytest.raises(ValueError, match="publish from fewer trainer hosts"):
        first.begin_together(manifest, WeightVersion(RUN, 1))
