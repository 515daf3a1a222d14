"""Copies into an object store that are killed or fail, and go on with the buckets that are there."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from publishers import publisher_of
from store.object_server import BUCKET, ObjectServer, Proxy, Request, environment
from store.remote_kit import PATIENCE_SECONDS, StoreThread, copying, ended, number_served
from store.store_kit import RUN, manifest_of, model, send, url, write

from weightcast import TensorSource
from weightcast.errors import IntegrityError, PeerError
from weightcast.format.manifest import WeightVersion
from weightcast.sources.store import StoreSource
from weightcast.store.address import StoreAddress
from weightcast.store.copying import Copied, copy_newest
from weightcast.store.objects import AttemptSlot
from weightcast.store.reading import store_status
from weightcast.transports.store import StoreSender

NUM_BUCKETS = len(manifest_of(model(0)).buckets)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with environment(), contextlib.closing(ObjectServer()) as server:
        yield server


_numbers = itertools.count()


class Target:
    """An object store behind a proxy, which notes what is put into it. `url`: through the proxy, one bucket at a time.

    `how`: a function that is called instead of passing a put on, from bucket `stop_at` on.
    """

    def __init__(self, server: ObjectServer) -> None:
        self.server = server
        self.prefix = f"copies-{next(_numbers)}"
        self.proxy = Proxy(server)
        self.proxy.spoil = self._spoil
        self.url = f"s3://{BUCKET}/{self.prefix}?endpoint={self.proxy.endpoint}&num_threads=1"
        self.sent: list[int] = []
        self.moved: list[int] = []
        self.stop_at: tuple[list[int], int] | None = None
        """The list, `sent` or `moved`, and the number of the first bucket that does not get into it."""
        self.how = failing
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def _spoil(self, request: Request) -> bool:
        if request.command != "PUT" or "/bucket." not in request.key:
            return False
        number = int(request.key.rpartition(".")[2])
        found = self.moved if request.headers.get("x-amz-copy-source") else self.sent
        if self.stop_at is not None and self.stop_at[0] is found and self.stop_at[1] <= number:
            self.stopped.set()
            return self.how(request)
        found.append(number)
        return False

    def hang(self, request: Request) -> bool:
        """The request arrives when the test says so, after its client has died."""
        self.go_on.wait(PATIENCE_SECONDS)
        request.forward()
        request.cut()
        return True

    def forget(self) -> None:
        self.stop_at = None
        self.sent.clear()
        self.moved.clear()
        self.stopped.clear()

    @property
    def slots(self) -> list[int]:
        return [slot.number for slot in store_status(StoreAddress.parse(self.url)).slots]

    def objects(self, slot: int) -> list[str]:
        found = self.server.ask("GET", f"/{BUCKET}?list-type=2&prefix={self.prefix}/slots/{slot}/")
        return [part.partition("</Key>")[0].rpartition("/")[2] for part in found.body.decode().split("<Key>")[1:]]  # type: ignore[attr-defined]

    def close(self) -> None:
        self.go_on.set()
        self.proxy.close()


def failing(request: Request) -> bool:
    request.reply(403, [], b"")
    return True


@pytest.fixture
def target(server: ObjectServer, leaves_nothing: None) -> Iterator[Target]:
    with contextlib.closing(Target(server)) as target:
        yield target


def copy(source: str, target: Target) -> Copied | None:
    return copy_newest(StoreAddress.parse(source), StoreAddress.parse(target.url), deadline_seconds=30.0)


def fail_at(source: str, target: Target, number: int) -> None:
    """A copy whose put of this bucket is refused."""
    target.stop_at = target.sent, number
    with pytest.raises(PeerError, match="403"):
        copy(source, target)
    target.forget()


def killed(command: str, source: str, target: Target, found: list[int], number: int) -> None:
    """A copy that is killed when this bucket is put."""
    target.stop_at, target.how = (found, number), target.hang
    process = copying(command, source, target.url)
    assert target.stopped.wait(PATIENCE_SECONDS), ended(process)
    process.kill()
    assert ended(process)[0] == -9


@pytest.mark.parametrize("command", ["pull", pytest.param("push", marks=pytest.mark.full)])
def test_a_copy_goes_on_after_each_of_two_deaths(target: Target, tmp_path: Path, command: str) -> None:
    """The second one is in the middle of what the server copies. Late requests of both harm nothing."""
    source = url(tmp_path / "source")
    write(tmp_path / "source", 1)
    assert copy(source, target)
    write(tmp_path / "source", 2)
    target.forget()
    killed(command, source, target, target.sent, 4)
    assert target.sent == [0, 1, 2, 3]
    assert number_served(target.url) == 1
    target.forget()
    killed(command, source, target, target.moved, 2)
    assert target.moved == [0, 1]
    assert number_served(target.url) == 1
    target.forget()
    status, copied, errors = ended(copying(command, source, target.url))
    assert status == 0, errors
    assert copied is not None
    assert (target.moved, target.sent) == ([0, 1, 2, 3], list(range(4, NUM_BUCKETS)))
    assert 0 < copied["sent_bytes"] < copied["num_bytes"] / 2  # type: ignore[operator]
    assert number_served(target.url) == 2
    target.go_on.set()
    assert number_served(target.url) == 2
    write(tmp_path / "source", 3)
    assert copy(source, target)
    assert number_served(target.url) == 3
    assert target.slots == [1, 4, 5], "what the dead ones have left is removed"


def test_a_push_to_a_server_of_an_object_store_goes_on(target: Target, tmp_path: Path) -> None:
    write(tmp_path / "source", 1)
    with contextlib.closing(StoreThread(tmp_path, target.url)) as server:
        ends = StoreAddress.parse(url(tmp_path / "source")), StoreAddress.parse(f"{server.url}?num_threads=1")
        target.stop_at = target.sent, 3
        with pytest.raises(PeerError, match="403"):
            copy_newest(*ends, deadline_seconds=30.0)
        target.forget()
        assert copy_newest(*ends, deadline_seconds=30.0)
    assert (target.moved, target.sent) == ([0, 1, 2], list(range(3, NUM_BUCKETS)))
    assert number_served(target.url) == 1


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_bucket_is_sent_again(target: Target, tmp_path: Path, damage: str) -> None:
    source, path = url(tmp_path / "source"), f"/{BUCKET}/{target.prefix}/slots/1/bucket.1"
    write(tmp_path / "source", 1)
    fail_at(source, target, 3)
    data: bytes = target.server.ask("GET", path).body  # type: ignore[attr-defined]
    if damage == "gone":
        target.server.ask("DELETE", path)
    else:
        target.server.ask("PUT", path, {"flipped": data[:-1] + b"\xaa", "short": data[:-1]}[damage])
    assert copy(source, target)
    assert target.sent == [1, *range(3, NUM_BUCKETS)]
    assert number_served(target.url) == 1


def test_a_bucket_that_is_kept_twice_at_once_is_kept() -> None:
    """The request of a push comes again while the first one still moves the bucket."""
    moved = []

    class Storage:
        def move(self, name: str, slot: int, target: int) -> None:
            moved.append((name, slot, target))
            if len(moved) == 1:
                attempt.keep(3)

    storage: Any = Storage()
    attempt = AttemptSlot(8, storage, {"bucket.3": 7})
    attempt.keep(3)
    assert moved == [("bucket.3", 7, 8)] * 2


def test_what_is_there_of_another_version_is_not_used(target: Target, tmp_path: Path) -> None:
    source = url(tmp_path / "source")
    write(tmp_path / "source", 1)
    fail_at(source, target, 3)
    write(tmp_path / "source", 2)
    assert copy(source, target)
    assert (target.moved, target.sent) == ([], list(range(NUM_BUCKETS)))
    assert number_served(target.url) == 2
    assert target.slots == [2]


def test_buckets_that_are_not_of_one_version_are_never_sealed(target: Target, tmp_path: Path) -> None:
    """Two stores that have other weights under one run and number."""
    sources = [url(tmp_path / name) for name in ("one", "other")]
    for source, values in zip(sources, (7, 2), strict=True):
        with contextlib.closing(StoreSender(source, run=RUN)) as sender:
            send(sender, manifest_of(model(0)), WeightVersion(RUN, 2), model(values))
    fail_at(sources[0], target, 3)
    with pytest.raises(IntegrityError, match="not of one version, and were dropped; copy it again"):
        copy(sources[1], target)
    assert target.moved == [0, 1, 2]
    assert not [name for slot in (1, 2) for name in target.objects(slot) if name == "seal.json"]
    target.forget()
    assert copy(sources[1], target)
    assert sorted(target.sent) == list(range(NUM_BUCKETS))
    assert number_served(target.url) == 2


@pytest.mark.parametrize(("before", "after"), [(4, 4), (1, 1), (4, 1), (1, 4)])
def test_a_copy_of_a_delta_goes_on(target: Target, tmp_path: Path, before: int, after: int) -> None:
    """Also with another `full_every` than before: a full version gets no delta that was left, a delta may get both."""
    tensors = {f"t{number}": torch.zeros(30_000, dtype=torch.bfloat16) for number in range(6)}
    source, there = url(tmp_path / "source", "?full_every=4"), target.url
    target.url = f"{there}&full_every={before}"
    with publisher_of(TensorSource(tensors), transport=source, bucket_size_bytes=64 << 10) as publisher:
        publisher.publish(1)
        assert copy(source, target)
        for tensor in tensors.values():
            tensor[:9] += 1
        publisher.publish(2)
    target.forget()
    fail_at(source, target, 3)
    target.url = f"{there}&full_every={after}"
    assert copy(source, target)
    kept = [] if (before, after) == (4, 1) else [0, 1, 2]
    assert target.moved == kept
    assert [number for number in (0, 1, 2) if number not in target.sent] == kept
    assert 3 in target.sent
    assert (store_status(StoreAddress.parse(target.url)).newest.base is not None) is (after == 4)
    found = StoreSource(target.url)
    assert found.version.number == 2
    assert all(torch.equal(found.regions()[name][0][1], tensor) for name, tensor in tensors.items())
