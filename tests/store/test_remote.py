"""A store behind a server of its own process: read over HTTP, and copied by push and pull, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from starlette.requests import Request as ServedRequest
from store.object_server import Request, Spoil
from store.remote_kit import (
    PATIENCE_SECONDS,
    StoreProcess,
    StoreThread,
    Wire,
    copying,
    cut,
    cut_at,
    damaged,
    ended,
    newest,
    number_served,
)
from store.store_kit import (
    LONG_SECONDS,
    OTHER_RUN,
    RUN,
    SHORT_SECONDS,
    Holder,
    can_mount,
    manifest_of,
    model,
    number_in,
    send,
    small_filesystem,
    url,
    write,
)

from weightcast import cli, rollback
from weightcast.control.server import connections
from weightcast.control.server import store as store_server
from weightcast.control.server.store import StoreServer
from weightcast.errors import (
    ControlError,
    EngineBusyError,
    InsufficientMemoryError,
    IntegrityError,
    PeerDiedError,
    StaleVersionError,
    UnsupportedError,
    UpdateAbortedError,
    VersionNotFoundError,
)
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, payload_digest, write_header
from weightcast.format.manifest import WeightVersion
from weightcast.host.deadline import Deadline
from weightcast.serving.follower import Follower
from weightcast.sources.store import StoreSource
from weightcast.store import remote
from weightcast.store.address import StoreAddress
from weightcast.store.copying import Copied, LocalCopy, RemoteCopy, copy_newest
from weightcast.store.reading import PinnedVersion, StoreReader, pinned, store_status
from weightcast.store.remote import RemoteStorage
from weightcast.transports.store import StoreSender

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NUM_BUCKETS = len(manifest_of(model(0)).buckets)


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> None:
    """Nothing is left open."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreThread]:
    with contextlib.closing(StoreThread(tmp_path / "far")) as server:
        yield server


@pytest.fixture
def wire(server: StoreThread) -> Iterator[Wire]:
    with contextlib.closing(Wire(server)) as wire:
        yield wire


@pytest.fixture
def near(tmp_path: Path) -> str:
    return url(tmp_path / "near")


def copy(source: str, target: str, deadline_seconds: float = 2.0) -> Copied | None:
    return copy_newest(StoreAddress.parse(source), StoreAddress.parse(target), deadline_seconds=deadline_seconds)


def test_a_pull_is_a_version_as_a_writer_makes_it(server: StoreThread, near: str) -> None:
    with pytest.raises(VersionNotFoundError, match="does not hold any version yet: publish one first"):
        copy(server.url, near)
    for number in (3, 4):
        write(server.directory, number)
        copied = copy(server.url, near)
        assert copied is not None
        assert (copied.version, copied.run) == (number, RUN)
        assert number_served(near) == number
    assert copy(server.url, near) is None
    far, here = newest(url(server.directory)), newest(near)
    assert (here.run, here.number, here.root, here.manifest_digest) == (RUN, 4, far.root, far.manifest_digest)
    assert here.committed_at > far.committed_at
    info = store_status(StoreAddress.parse(near))
    assert info.previous is not None
    assert info.previous.number == 3
    assert not info.is_written
    assert rollback(near).version == 5
    assert torch.equal(StoreSource(near).regions()["t1"][0][1], model(3)["t1"])


def test_a_push_is_the_same(server: StoreThread, tmp_path: Path, near: str) -> None:
    for number in (3, 4):
        write(tmp_path / "near", number)
        copied = copy(near, server.url)
        assert copied is not None
        assert number_served(server.url) == number
        assert number_served(url(server.directory)) == number
    assert copy(near, server.url) is None
    write(tmp_path / "other", 1, run=OTHER_RUN)
    assert copy(url(tmp_path / "other"), server.url)
    assert newest(server.url).version == WeightVersion(OTHER_RUN, 1)
    write(server.directory, 9)  # the server has released the store
    with pytest.raises(StaleVersionError, match="version 4 is not above 9"):
        copy(near, server.url)


def test_a_remote_store_is_read_as_any_other(
    server: StoreThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(server.directory, 3, 4)
    assert cli.main(["inspect", server.url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["store"]["newest"]["number"] == 4 if "store" in shown else shown
    assert cli.main(["verify", server.url]) == 0
    assert cli.main(["export", server.url, str(tmp_path / "out")]) == 0
    assert cli.main(["publish", server.url, "--transport", url(tmp_path / "published")]) == 0
    assert torch.equal(StoreSource(url(tmp_path / "published")).regions()["t1"][0][1], model(4)["t1"])
    assert torch.equal(StoreSource(server.url, version=3).regions()["t1"][0][1], model(3)["t1"])
    with Follower(server.url, engine := Holder()) as follower:
        for number in (4, 5, 6):
            write(server.directory, number) if number > 4 else None
            followed = follower.poll()
            assert followed is not None
            assert number_in(engine.held) == number
            assert follower.poll() is None
    assert cli.main(["rollback", server.url]) == 2
    assert "is only read" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown option num_slots"):
        StoreAddress.parse(f"{server.url}?num_slots=3")


def test_a_reader_elsewhere_pins_a_slot_until_it_closes_it(server: StoreThread) -> None:
    write(server.directory, 1, options="?max_slots=2")
    slot = newest(url(server.directory)).slot
    info = lambda: store_status(StoreAddress.parse(url(server.directory))).slots  # noqa: E731
    with pinned(StoreAddress.parse(server.url), label="far away") as version:
        write(server.directory, 2, 3, options="?max_slots=3")
        assert any("far away" in reader for each in info() if each.number == slot for reader in each.readers)
        buffer = BucketBuffer.of(torch.empty(HEADER_BYTES + max(version.manifest.buckets), dtype=torch.uint8))
        version.read(0, buffer)
        assert sum(1 for _ in version.payloads()) == NUM_BUCKETS
    assert not any(each.readers for each in info())


def test_idle_clients_lose_their_pin_and_their_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: str) -> None:
    def wait_until_idle() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(store_server, "IDLE_SECONDS", 0.05)
            assert any(not server.store._leases for _ in Deadline(LONG_SECONDS).polls())

    monkeypatch.setattr(store_server, "GRACE_SECONDS", 0.05)
    write(tmp_path / "far", 1)
    write(tmp_path / "near", 2)
    with contextlib.closing(StoreThread(tmp_path / "far")) as server:
        with pinned(StoreAddress.parse(server.url)) as version:
            wait_until_idle()
            with pytest.raises(IntegrityError, match="this reader's pin has ended"):
                version.read_raw(0)
        reader = StoreReader(StoreAddress.parse(server.url))
        assert isinstance(reader.storage, RemoteStorage)
        with (
            contextlib.closing(reader),
            pinned(StoreAddress.parse(near)) as version,
            RemoteCopy(reader.storage.calls, version.stored, version.manifest) as begun,
        ):
            begun.write(0, version.read_raw(0))
            wait_until_idle()
            with pytest.raises(StaleVersionError, match="this push has ended"):
                begun.write(1, version.read_raw(1))
        write(tmp_path / "far", 5)  # the store is free again


def test_a_pin_is_kept_while_its_reader_is_busy_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PIN_SECONDS", 0.01)
    write(tmp_path / "far", 1)
    with contextlib.closing(StoreThread(tmp_path / "far")) as server:
        with pinned(StoreAddress.parse(server.url)) as version:
            (lease,) = server.store._leases.values()
            former = lease.used_at
            for _ in Deadline(LONG_SECONDS).polls():
                if lease.used_at > former:
                    break
            else:
                pytest.fail("nothing was asked of the server for a pinned version")
            assert sum(1 for _ in version.payloads()) == NUM_BUCKETS
        assert not server.store._leases
        for thread in threading.enumerate():
            if thread.name == "weightcast-pins":
                thread.join(LONG_SECONDS)
                assert not thread.is_alive()


# --- who may do what ---


def test_the_token(tmp_path: Path, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"{name}-token\n")
    write(tmp_path / "far", 1)
    options = "--allow-push", "--token-file", str(tmp_path / "right")
    with contextlib.closing(StoreProcess(tmp_path / "far", *options)) as server:
        right, wrong = (f"{server.url}?token_file={tmp_path / name}" for name in ("right", "wrong"))
        for source, target in ((server.url, near), (near, server.url)):
            with pytest.raises(ControlError, match="answered 401: the token is missing; name a file that has it"):
                copy(source, target)
        with pytest.raises(ControlError, match="answered 401: the token does not match"):
            copy(wrong, near)
        assert not (tmp_path / "near").exists()
        assert cli.main(["pull", wrong, near]) == 1
        assert "401" in capsys.readouterr().err
        assert copy(right, near)
        write(tmp_path / "near", 2)
        assert copy(near, right)
        with pytest.raises(ControlError, match="401"):
            copy(near, wrong)
        with pytest.raises(ValueError, match=r"token_file .*nowhere can't be read"):
            copy(f"{server.url}?token_file=/nowhere", near)
    assert cli.main(["serve-store", near, "--host", "0.0.0.0"]) == 2
    assert "can be reached from other machines" in capsys.readouterr().err


def test_a_server_that_only_lets_read_and_a_store_that_is_written(tmp_path: Path, near: str) -> None:
    write(tmp_path / "near", 1)
    with contextlib.closing(StoreProcess(tmp_path / "far")) as server:
        with pytest.raises(UnsupportedError, match="--allow-push"):
            copy(near, server.url)
        assert not (tmp_path / "far").exists()
    with contextlib.closing(StoreProcess(tmp_path / "far", "--allow-push")) as server:
        sender = StoreSender(url(tmp_path / "far"), run=OTHER_RUN, deadline_seconds=SHORT_SECONDS)
        with contextlib.closing(sender), pytest.raises(EngineBusyError, match=OTHER_RUN):
            copy(near, server.url)
        assert copy(near, server.url)


def test_foreign_servers_and_requests(server: StoreThread, wire: Wire, near: str) -> None:
    with pytest.raises(PeerDiedError, match="can't be reached"):
        copy("store+http://127.0.0.1:1", near)
    with pytest.raises(ControlError, match=r"answered 404.*check the URL"):
        copy(f"{server.url}/elsewhere", near)
    with pytest.raises(ControlError, match="use store\\+http://"):
        copy(server.url.replace("store+http", "store+https"), near)
    write(server.directory, 1)
    ones = "1" * 32
    for method, path, body, wanted in (
        ("GET", "/store/records/..%2Fsecret", b"", 404),
        ("GET", "/store/records/pins?slot=0", b"", 404),
        ("GET", "/store/records/seal.json?slot=x", b"", 400),
        ("GET", "/store/records/seal.json?slot=77", b"", 204),
        ("PUT", f"/store/pins/{ones}/0", b"no json", 400),
        ("PUT", f"/store/pins/{ones}/0", b" " * (1 << 17), 413),
        ("PUT", "/store/pins/short/0", b"{}", 400),
        ("GET", f"/store/pins/{ones}/0/buckets/0", b"", 400),
        ("PUT", f"/store/copies/{ones}", b"{}", 400),
        ("PUT", f"/store/copies/{ones}/buckets/0", b"", 409),
        ("POST", f"/store/copies/{ones}", b"", 409),
        ("DELETE", f"/store/copies/{ones}", b"", 204),
        ("DELETE", f"/store/pins/{ones}/0", b"", 204),
    ):
        status, _ = asked(server.port, method, path, body)
        assert status == wanted, (method, path, status)
    reader = json.dumps({"host": "h", "pid": 1, "label": ""}).encode()
    assert asked(server.port, "PUT", f"/store/pins/{ones}/{newest(server.url).slot}", reader)[0] == 200
    bucket = f"/store/pins/{ones}/{newest(server.url).slot}/buckets"
    for path, given, wanted in (
        ("0", "bytes=0-255", 206),
        ("0", "bytes=0-99999999999", 400),
        ("0", "bytes=9-1", 400),
        ("99", "bytes=0-255", 400),
        ("x", "bytes=0-255", 400),
    ):
        assert asked(server.port, "GET", f"{bucket}/{path}", b"", {"Range": given})[0] == wanted
    assert copy(server.url, near)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'"\xff"', b"[]", b'{"error": 1}', b'{"error": {"record": {"kind": 1}, "message": "no"}}']
)
def test_an_error_that_is_no_record_is_one_of_a_foreign_server(wire: Wire, near: str, body: bytes) -> None:
    def refuse(request: Request) -> bool:
        request.reply(500, [], body)
        return True

    with wire.spoilt("GET", "/store/records", refuse), pytest.raises(ControlError, match=r"it answered 500: .*the URL"):
        copy(wire.url, near)


def asked(
    port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()


# --- deltas ---


@pytest.mark.parametrize("is_push", [False, True])
@pytest.mark.parametrize("full_every", [1, 4])
def test_deltas_stay_deltas_where_the_base_is(tmp_path: Path, is_push: bool, full_every: int) -> None:
    """Whether the target keeps deltas is its own choice."""
    there, here = tmp_path / "far", tmp_path / "near"
    source, target = (here, there) if is_push else (there, here)
    options = f"?full_every={full_every}"
    sender = StoreSender(url(source, "?full_every=4&by_classes=1"), run=RUN, deadline_seconds=SHORT_SECONDS)
    tensors = {f"t{i}": torch.arange(60_000, dtype=torch.int32) for i in range(4)}
    manifest = manifest_of(tensors)
    served = url(there, options if is_push else "")
    with contextlib.closing(sender), contextlib.closing(StoreThread(there, served)) as server:
        ends = (url(source), server.url) if is_push else (server.url, url(target, options))
        sent = []
        for number in range(1, 7):
            tensors["t1"][number * 7] += 1
            send(sender, manifest, WeightVersion(RUN, number), tensors)
            if number == 4:
                continue  # the target misses it, and with it the base of 5
            copied = copy(*ends)
            assert copied is not None
            sent.append(copied.sent_bytes)
            found = StoreSource(url(target))
            assert found.version.number == number
            assert all(torch.equal(found.regions()[name][0][1], tensor) for name, tensor in tensors.items())
            is_delta = newest(url(target)).base is not None
            # 1 and 5 are full in the source; the base of 6 is 5.
            assert is_delta == (full_every == 4 and number in (2, 3, 6))
    full = sum(manifest.buckets)
    assert [amount < full // 10 for amount in sent] == [False, True, True, False, True]


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_a_copy_goes_on_with_another_full_every(tmp_path: Path, before: int, after: int) -> None:
    """What the first attempt has left is of the other kind."""
    tensors = {f"t{i}": torch.arange(60_000, dtype=torch.int32) for i in range(4)}
    manifest, source, target = manifest_of(tensors), tmp_path / "source", tmp_path / "target"
    sender = StoreSender(url(source, "?full_every=4"), run=RUN, deadline_seconds=SHORT_SECONDS)
    with contextlib.closing(sender):
        send(sender, manifest, WeightVersion(RUN, 1), tensors)
        assert copy(url(source), url(target))
        for tensor in tensors.values():
            tensor[:9] += 1
        send(sender, manifest, WeightVersion(RUN, 2), tensors)
    with pinned(StoreAddress.parse(url(source))) as version:
        address = StoreAddress.parse(url(target, f"?full_every={before}"))
        with LocalCopy(address, version.stored, version.manifest, deadline_seconds=SHORT_SECONDS) as begun:
            for index in (0, 1):
                begun.write(index, version.read_stored(index))
    copied = copy(url(source), url(target, f"?full_every={after}"))
    assert copied is not None
    assert (newest(url(target)).base is not None) is (after == 4)
    assert cli.main(["verify", url(target)]) == 0
    found = StoreSource(url(target))
    assert found.version.number == 2
    assert all(torch.equal(found.regions()[name][0][1], tensor) for name, tensor in tensors.items())


# --- a commit that comes twice ---


@contextlib.contextmanager
def all_but_committed(tmp_path: Path, number: int) -> Iterator[LocalCopy]:
    """A copy into the synced store `target`, whose buckets are all there."""
    write(tmp_path / "source", number)
    with pinned(StoreAddress.parse(url(tmp_path / "source"))) as version:
        address = StoreAddress.parse(url(tmp_path / "target", "?fsync=1"))
        with LocalCopy(address, version.stored, version.manifest, deadline_seconds=SHORT_SECONDS) as begun:
            for index in range(NUM_BUCKETS):
                begun.write(index, version.read_raw(index))
            yield begun


def test_a_commit_that_comes_again_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a client to whom a proxy has said 504."""
    sync, order = os.fdatasync, list[str]()
    with ThreadPoolExecutor(1) as pool, all_but_committed(tmp_path, 5) as begun:

        def again() -> None:
            begun.commit()
            order.append("again")

        def slow(descriptor: int) -> None:
            monkeypatch.setattr(os, "fdatasync", sync)
            second.append(pool.submit(again))
            wait(second, 0.5)
            sync(descriptor)
            order.append("synced")

        second = list[Future[None]]()
        monkeypatch.setattr(os, "fdatasync", slow)
        begun.commit()
        second[0].result(LONG_SECONDS)
    assert order == ["synced", "again"]
    assert number_served(url(tmp_path / "target")) == 5


def test_a_commit_that_failed_is_not_made_of_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with all_but_committed(tmp_path, 5) as begun:

        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(OSError, match="Input/output error"):
                begun.commit()
        with pytest.raises(UpdateAbortedError, match="the commit of version 5 has failed: copy it again"):
            begun.commit()
    assert copy(url(tmp_path / "source"), url(tmp_path / "target"))
    assert number_served(url(tmp_path / "target")) == 5


# --- two pushes ---


@contextlib.contextmanager
def begun_push(source: str, target: str) -> Iterator[tuple[RemoteCopy, PinnedVersion]]:
    """A push that has sent no bucket."""
    reader = StoreReader(StoreAddress.parse(target), deadline_seconds=2.0)
    assert isinstance(reader.storage, RemoteStorage)
    with (
        contextlib.closing(reader),
        pinned(StoreAddress.parse(source)) as version,
        RemoteCopy(reader.storage.calls, version.stored, version.manifest) as begun,
    ):
        yield begun, version


@contextlib.contextmanager
def bucket_under_way(server: StoreThread, begun: RemoteCopy, num_bytes: int) -> Iterator[http.client.HTTPConnection]:
    """The request with bucket 0, whose body is sent by the test."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONG_SECONDS)
    with contextlib.closing(connection):
        connection.putrequest("PUT", f"{begun._path}/buckets/0")
        connection.putheader("Content-Length", str(num_bytes))
        connection.endheaders()
        yield connection


def test_the_later_push_wins_over_one_that_stops_inside_a_bucket(
    server: StoreThread, tmp_path: Path, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose host has lost its power: nothing closes its connection."""
    write(tmp_path / "near", 1)
    write(tmp_path / "other", 2)
    is_reading, read_body = threading.Event(), store_server.read_body

    async def read(request: ServedRequest, *given: object, **options: object) -> bytes:
        is_reading.set()
        return await read_body(request, *given, **options)  # type: ignore[arg-type]

    with begun_push(near, server.url) as (begun, version):
        data = version.read_raw(0)
        monkeypatch.setattr(store_server, "read_body", read)
        with bucket_under_way(server, begun, len(data)) as connection:
            connection.send(data[:1000])
            assert is_reading.wait(LONG_SECONDS)
            assert copy(url(tmp_path / "other"), server.url)
            connection.send(data[1000:])
            assert connection.getresponse().status == 409
    assert number_served(url(server.directory)) == 2


def test_a_push_is_not_idle_while_a_bucket_comes_slowly(server: StoreThread, tmp_path: Path, near: str) -> None:
    write(tmp_path / "near", 1)
    with begun_push(near, server.url) as (begun, version):
        (lease,) = server.store._leases.values()
        data = version.read_raw(0)
        with bucket_under_way(server, begun, len(data)) as connection:
            for start in range(0, 3000, 1000):
                used_at = lease.used_at
                connection.send(data[start : start + 1000])
                assert any(lease.used_at > used_at for _ in Deadline(LONG_SECONDS).polls())
            connection.send(data[3000:])
            assert connection.getresponse().status == 204


def test_of_two_pushes_that_begin_together_one_wins(
    server: StoreThread, tmp_path: Path, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "near", 1)
    meeting, end_others = threading.Barrier(2), StoreServer._end_other_copies

    def meet(store: StoreServer) -> None:
        end_others(store)
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)

    monkeypatch.setattr(StoreServer, "_end_other_copies", meet)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        begin = lambda: stack.enter_context(begun_push(near, server.url))  # noqa: E731
        begun = [future.result() for future in [pool.submit(begin) for _ in range(2)]]
        failures = []
        for push, version in begun:
            try:
                push.write(0, version.read_raw(0))
            except StaleVersionError as exc:
                failures.append(str(exc))
        assert len(failures) == 1
        assert "this push has ended: another one has begun" in failures[0]


# --- broken lines ---


@pytest.mark.parametrize(
    "part", ["records/current", "records/seal", "records/manifest", "/pins/", "/buckets/0", "/buckets/5"]
)
@pytest.mark.parametrize("how", [cut, cut_at(1)])
def test_a_pull_outlives_broken_connections(wire: Wire, server: StoreThread, near: str, part: str, how: Spoil) -> None:
    write(server.directory, 1)
    method = "PUT" if part == "/pins/" else "GET"
    assert asked(wire.proxy.server_port, "GET", "/health")[0] == 200
    newest(wire.url)  # a server that never answered is not waited for
    with wire.spoilt(method, part, how, last=1):
        assert copy(f"{wire.url}?num_threads=1", near) if "current" not in part else pull(wire, near)
    assert number_served(near) == 1


def pull(wire: Wire, near: str) -> bool:
    """By a reader that has had an answer."""
    reader = StoreReader(StoreAddress.parse(wire.url), deadline_seconds=2.0)
    with contextlib.closing(reader):
        reader.storage.slot_numbers()
        assert reader.commit() is not None
    wire.proxy.spoil = lambda request: False
    return copy(wire.url, near) is not None


@pytest.mark.parametrize("part", ["PUT /copies/", "PUT /buckets/0", "PUT /buckets/5", "POST /copies/"])
@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_push_outlives_broken_connections(
    wire: Wire, server: StoreThread, tmp_path: Path, near: str, part: str, has_arrived: bool
) -> None:
    """Also if only the answer was lost."""
    write(tmp_path / "near", 1)
    method, part = part.split()

    def lose(request: Request) -> bool:
        if has_arrived:
            request.forward()
        return cut(request)

    with wire.spoilt(method, part, lose, last=0):
        assert copy(near, wire.url)
    assert number_served(url(server.directory)) == 1
    write(server.directory, 2)


def test_half_an_answer_to_a_push_is_asked_for_again(
    wire: Wire, server: StoreThread, tmp_path: Path, near: str
) -> None:
    write(tmp_path / "near", 1)
    with wire.spoilt("PUT", "/copies/", cut_at(5), last=0):
        assert copy(near, wire.url)
    assert number_served(url(server.directory)) == 1


def test_a_bucket_goes_on_from_the_byte_that_came_last(wire: Wire, server: StoreThread, near: str) -> None:
    write(server.directory, 1)
    ranges = []

    def spoil(request: Request) -> bool:
        if not request.path.endswith("/buckets/2"):
            return False
        ranges.append(request.headers["Range"])
        return len(ranges) < 4 and cut_at(1000)(request)

    wire.proxy.spoil = spoil
    assert copy(wire.url, near)
    end = ranges[0].partition("-")[2]
    assert ranges == [f"bytes={start}-{end}" for start in (0, 1000, 2000, 3000)]
    assert number_served(near) == 1


def test_a_server_that_stays_away_is_named_and_the_rest_comes_later(wire: Wire, server: StoreThread, near: str) -> None:
    write(server.directory, 1)
    with (
        wire.spoilt("GET", "/buckets/4", cut),
        pytest.raises(PeerDiedError, match=r"/buckets/4 gave no answer for 0.5"),
    ):
        copy(f"{wire.url}?num_threads=1", near, 0.5)
    with pytest.raises(VersionNotFoundError):
        StoreSource(near)
    wire.proxy.requests.clear()
    copied = copy(wire.url, near)
    assert copied is not None
    sent = {key.rpartition("/")[2] for _, key in wire.proxy.requests if "/buckets/" in key}
    assert {"4"} <= sent <= {"4", "5"}  # the thread may have gone on to the next one
    assert copied.sent_bytes < copied.num_bytes / 2
    assert number_served(near) == 1


@pytest.mark.parametrize("index", [0, 5])
def test_damaged_bytes_are_refused_by_name(wire: Wire, server: StoreThread, near: str, index: int) -> None:
    write(server.directory, 1)
    assert copy(server.url, near)
    write(server.directory, 2)
    with wire.spoilt("GET", f"/buckets/{index}", damaged):
        with pytest.raises(IntegrityError, match=f"copying from http://127.*bucket {index}: the digest of its"):
            copy(wire.url, near)
        with Follower(wire.url, Holder()) as follower, pytest.raises(IntegrityError, match=f"bucket {index}"):
            follower.poll()
    assert number_served(near) == 1
    assert copy(wire.url, near)
    assert number_served(near) == 2


def test_damaged_bytes_of_a_push_are_refused(wire: Wire, server: StoreThread, tmp_path: Path, near: str) -> None:
    write(tmp_path / "near", 1)

    def damage(request: Request) -> bool:
        request.body = request.body[:-1] + bytes([request.body[-1] ^ 1])
        return False

    with (
        wire.spoilt("PUT", "/buckets/3", damage),
        pytest.raises(IntegrityError, match=r"to http://127.*bucket 3: the digest of its"),
    ):
        copy(near, wire.url)
    with pytest.raises(VersionNotFoundError):
        StoreSource(server.url)
    assert copy(near, wire.url)
    assert number_served(server.url) == 1


def test_a_server_that_lies_is_refused_and_what_it_sent_is_dropped(wire: Wire, server: StoreThread, near: str) -> None:
    """A bucket of other values with a digest of its own, as only a server could make it, is not kept for later."""
    write(server.directory, 1)

    def lie(request: Request) -> bool:
        status, headers, body = request.forward()
        buffer = BucketBuffer.of(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        buffer.payload[0] += 1
        digest = payload_digest(buffer.payload)
        write_header(buffer.header, WeightVersion(RUN, 1), 2, digest, raw_bytes=buffer.payload.nbytes)
        request.reply(status, headers, buffer.flat(len(body)).numpy().tobytes())
        return True

    with (
        wire.spoilt("GET", "/buckets/2", lie),
        pytest.raises(IntegrityError, match="not of one version, and were dropped"),
    ):
        copy(wire.url, near)
    with pytest.raises(VersionNotFoundError):
        StoreSource(near)
    assert copy(wire.url, near)
    assert number_served(near) == 1


# --- dead processes, full disks ---


@pytest.mark.parametrize(
    ("is_push", "dies"),
    [
        (False, "server"),
        (True, "client"),
        pytest.param(False, "client", marks=pytest.mark.full),
        pytest.param(True, "server", marks=pytest.mark.full),
    ],
)
def test_what_has_come_is_not_sent_again_after_a_death(tmp_path: Path, near: str, is_push: bool, dies: str) -> None:
    source = tmp_path / ("near" if is_push else "far")
    write(source, 1)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(StoreProcess(tmp_path / "far", "--allow-push")))
        die_and_go_on(server, stack.enter_context(contextlib.closing(Wire(server))), near, is_push, dies)
    assert number_served(url(tmp_path / "far") if is_push else near) == 1


def die_and_go_on(server: StoreProcess, wire: Wire, near: str, is_push: bool, dies: str) -> None:
    ends = ("push", near, f"{wire.url}?num_threads=1") if is_push else ("pull", f"{wire.url}?num_threads=1", near)
    reached, go_on = threading.Event(), threading.Event()

    def hang(request: Request) -> bool:
        reached.set()
        go_on.wait(PATIENCE_SECONDS)
        return cut(request)

    with wire.spoilt("PUT" if is_push else "GET", "/buckets/4", hang):
        process = copying(*ends)
        assert reached.wait(PATIENCE_SECONDS)
        if dies == "client":
            process.kill()
            go_on.set()
        else:
            server.kill()
            server.restart()
            go_on.set()
        status, _, errors = ended(process)
    assert status == (-9 if dies == "client" else 1)
    assert dies == "client" or "again" in errors or "newest" in errors, errors
    wire.proxy.requests.clear()
    status, _, errors = ended(copying(*ends))
    assert status == 0, errors
    method = "PUT" if is_push else "GET"
    sent = {key.rpartition("/")[2] for found, key in wire.proxy.requests if found == method and "/buckets/" in key}
    assert {"4"} <= sent <= {"4", "5"}


@pytest.mark.skipif(not can_mount(), reason="mounting a small filesystem needs root")
@pytest.mark.parametrize("is_push", [False, True])
def test_a_full_disk_at_the_target(tmp_path: Path, is_push: bool) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    with small_filesystem(small, 600 << 10):
        there = small / "store" if is_push else large
        with contextlib.closing(StoreThread(there)) as server:
            source = large
            ends = (url(large), server.url) if is_push else (server.url, url(small / "store"))
            write(source, 1)
            assert copy(*ends)
            write(source, 2)
            with pytest.raises(InsufficientMemoryError, match="no room for"):
                copy(*ends)
            assert number_served(url(small / "store")) == 1
            shutil.rmtree(small / "store" / "slots")
            (small / "store" / "current.json").unlink()
            assert copy(*ends)
            assert number_served(url(small / "store")) == 2


@pytest.mark.parametrize(
    ("is_push", "num_rounds"),
    [
        (False, 2),
        pytest.param(False, 12, marks=pytest.mark.full),
        pytest.param(True, 12, marks=pytest.mark.full),
    ],
)
def test_killed_at_any_moment_and_run_again(tmp_path: Path, near: str, is_push: bool, num_rounds: int) -> None:
    """The seconds at which a process is killed are those of a whole copy, in steps."""
    far, source = tmp_path / "far", tmp_path / ("near" if is_push else "far")
    target = far if is_push else tmp_path / "near"
    with contextlib.closing(StoreProcess(far, "--allow-push")) as server:
        ends = ("push", near, server.url) if is_push else ("pull", server.url, near)
        write(source, 1)
        start = time.monotonic()
        assert ended(copying(*ends))[0] == 0
        seconds = time.monotonic() - start
        with Follower(url(target), engine := Holder()) as follower:
            assert follower.poll() is not None
            for number in range(2, 2 + num_rounds):
                write(source, number)
                process = copying(*ends)
                time.sleep(seconds * (0.6 + 0.4 * (number - 1) / num_rounds))
                if number % 2:
                    server.kill()
                    server.restart()
                else:
                    process.kill()
                ended(process)
                if follower.poll() is not None:
                    assert number_in(engine.held) == number
                status, _, errors = ended(copying(*ends))
                assert status == 0, errors
                follower.poll()
                assert number_in(engine.held) == number


# --- commands ---


@pytest.mark.parametrize("command", ["pull", "push"])
def test_following_goes_on_until_sigterm(server: StoreThread, tmp_path: Path, near: str, command: str) -> None:
    source = server.directory if command == "pull" else tmp_path / "near"
    ends = (server.url, near) if command == "pull" else (near, server.url)
    process = subprocess.Popen(
        [sys.executable, "-m", "weightcast.cli", command, *ends, "--follow", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    wanted = "does not hold any version yet: publish one first"
    if command == "push":
        wanted = "near is not there: no such directory; check the path, or publish first"
    assert process.stderr.readline().endswith(f"{wanted}; waiting\n")
    for number in (1, 2, 3):
        write(source, number)
        assert json.loads(process.stdout.readline())["version"] == number
    process.terminate()
    assert process.communicate(timeout=PATIENCE_SECONDS) == ("", "")
    assert process.returncode == 0


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of this host, beside its `key.pem`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    subprocess.run([*made, *names], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "cert.pem"


def test_the_servers_own_tls(tmp_path: Path, near: str, certificate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("a-token")
    options = ("--allow-push", "--token-file", str(tmp_path / "token"), "--tls-certificate", str(certificate))
    write(tmp_path / "near", 1)
    with contextlib.closing(StoreProcess(tmp_path / "far", *options, "--tls-key", str(tmp_path / "key.pem"))) as server:
        assert server.url.startswith("store+https://")
        far = f"{server.url}?token_file={tmp_path / 'token'}"
        with pytest.raises(ControlError, match=r"the certificate of https://127.* is not accepted.*ca_file=FILE"):
            copy(near, far)
        far += f"&ca_file={certificate}"
        assert copy(near, far)
        assert number_served(far) == 1
        write(tmp_path / "near", 2)
        assert copy(near, far)
        assert copy(far, url(tmp_path / "another"))
        assert number_served(url(tmp_path / "another")) == 2
        with pytest.raises(PeerDiedError):
            copy(near, far.replace("https", "http"))
        with pytest.raises(ValueError, match="ca_file /nowhere can't be used"):
            copy(near, f"{server.url}?ca_file=/nowhere")
    for unfit in (certificate, tmp_path / "token", tmp_path / "nowhere"):
        assert cli.main(["serve-store", near, "--port", "0", "--tls-certificate", str(unfit)]) == 2
        assert f"the certificate {unfit} can't be used for TLS" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["serve-store", near, "--tls-key", str(tmp_path / "key.pem")])
    assert "--tls-key needs --tls-certificate" in capsys.readouterr().err


def test_a_client_that_never_shakes_hands_is_let_go(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the limit of a request's header, not within asyncio's 60 s."""
    monkeypatch.setattr(connections, "GRACE_SECONDS", 0.05)
    tls = {"certificate": certificate, "key": tmp_path / "key.pem"}
    with contextlib.closing(StoreThread(tmp_path / "far", **tls)) as server:
        client = socket.create_connection(("127.0.0.1", server.port), LONG_SECONDS)
        with contextlib.closing(client), contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_half_sent_requests_keep_no_reader_out_of_a_server_with_few_descriptors(tmp_path: Path, near: str) -> None:
    write(tmp_path / "far", 1)
    with contextlib.closing(StoreProcess(tmp_path / "far")) as server, contextlib.ExitStack() as stack:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        for _ in range(400):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET /store/slots HTTP/1.1\r\nX: ")
        assert copy(server.url, near)
        assert number_served(near) == 1
        stack.close()  # it would wait for the rest of these requests
        assert len(server.close().splitlines()) <= 2


def test_tls_is_checked_by_the_systems_authorities(
    server: StoreThread, tmp_path: Path, near: str, certificate: Path
) -> None:
    """A proxy speaks it, as one before the server would."""
    write(server.directory, 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "key.pem")
    with contextlib.closing(Wire(server)) as wire:
        wire.proxy.socket = context.wrap_socket(wire.proxy.socket, server_side=True)
        far = f"store+https://localhost:{wire.proxy.server_port}"
        status, _, errors = ended(copying("pull", far, near))
        assert (status, "the certificate of https://localhost" in errors) == (1, True), errors
        status, copied, errors = ended(copying("pull", far, near, {"SSL_CERT_FILE": str(certificate)}))
        assert status == 0, errors
        assert copied is not None
    assert number_served(near) == 1
