"""A store in an object store: what a directory's store does, over a real server, with two publishers and retention."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from core.direct import RecordingEngine, fleet
from safetensors.torch import load_file
from server.stock_vllm import StockVllm
from store.object_server import BUCKET, ObjectServer, Proxy, Request, environment
from store.store_kit import (
    LONG_SECONDS,
    OTHER_RUN,
    RUN,
    Holder,
    begin_shared,
    manifest_of,
    model,
    number_in,
    send,
    send_origin,
    two_origins,
)

from weightcast import ModuleSource, TensorSource, cli, registry
from weightcast.cli import exits
from weightcast.errors import (
    ClosedError,
    IntegrityError,
    PeerError,
    PublishError,
    StaleVersionError,
    UnsupportedError,
    VersionNotFoundError,
)
from weightcast.format.bucket import Layout
from weightcast.format.manifest import WeightVersion
from weightcast.serving.follower import Follower
from weightcast.sources.store import StoreSource
from weightcast.store.address import ObjectStoreAddress, StoreAddress
from weightcast.store.reading import StoreReader, pinned, store_status
from weightcast.testing.transport_kit import pack_and_send
from weightcast.trainer.packer import Packer, tiling
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.rollback import rollback
from weightcast.transports.store import JoinedStoreSender, StoreReceiver, StoreSender

Options = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with environment(), contextlib.closing(ObjectServer()) as server:
        yield server


@pytest.fixture
def proxy(server: ObjectServer, leaves_nothing: None) -> Iterator[Proxy]:
    with contextlib.closing(Proxy(server)) as proxy:
        yield proxy


_numbers = itertools.count()


@pytest.fixture
def url(server: ObjectServer, leaves_nothing: None) -> Options:
    """Return the URL of this test's store, with these options; by default without the proxy."""
    prefix = f"s3://{BUCKET}/run-{next(_numbers)}"

    def url(options: str = "", endpoint: str = f"http://127.0.0.1:{server.port}") -> str:
        return f"{prefix}?endpoint={endpoint}{options}"

    return url


def write(url: str, *numbers: int, run: str = RUN) -> None:
    """Write these versions of `model`, as one writer that closes then."""
    with contextlib.closing(StoreSender(url, run=run, deadline_seconds=LONG_SECONDS)) as sender:
        for number in numbers:
            publish(sender, number)


def publish(sender: StoreSender, number: int) -> None:
    send(sender, manifest_of(model(0)), WeightVersion(sender.run, number), model(number))


def begun(sender: StoreSender, number: int, num_buckets: int) -> None:
    """Begin a version and send these first buckets of it."""
    manifest = manifest_of(model(0))
    sender.open(manifest, WeightVersion(sender.run, number), peers=[], staged=True)
    send_origin(sender, manifest, 0, number, num_buckets)


def number_held(url: str) -> int:
    """The version that a reader that begins now gets."""
    return number_in({name: regions[0][1] for name, regions in StoreSource(url).regions().items()})


def slots(url: str) -> list[int]:
    return [slot.number for slot in store_status(StoreAddress.parse(url)).slots]


# --- what a store does ---


def test_versions_are_followed_from_the_middle_rolled_back_verified_and_exported(
    url: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store = TensorSource(model(1)), url()
    with Publisher(source, transport=store) as publisher, Follower(store, Holder()) as early:
        assert early.poll() is None
        assert publisher.publish().version == 0
        assert early.poll().version == 0  # type: ignore[union-attr]
        for number in (2, 3):
            for name, tensor in model(number).items():
                source.regions()[name][0][1].copy_(tensor)
            publisher.publish()
        late = Holder()
        with Follower(store, late) as follower:
            assert follower.poll().version == 2  # type: ignore[union-attr]
            assert number_in(late.held) == 3
            assert follower.poll() is None
        assert early.poll().version == 2  # type: ignore[union-attr]
    for command in (["inspect", store], ["verify", store], ["export", store, str(tmp_path / "out")]):
        assert cli.main(command) == exits.OK
    assert f"last written by run {publisher.run}" in capsys.readouterr().out
    assert number_in(load_file(tmp_path / "out" / "model.safetensors")) == 3
    assert rollback(store).version == 3
    assert number_held(store) == 2
    assert rollback(store, version=0).version == 4
    assert number_held(store) == 1
    assert StoreSource(store, version=2).version.number == 2
    with pytest.raises(VersionNotFoundError, match=r"version 9: it has 4, 3, 2, 1, 0"):
        StoreSource(store, version=9)


def test_engines_of_a_publisher_get_a_version_before_it_is_the_newest(url: Options) -> None:
    source, engine = TensorSource(model(1)), RecordingEngine()
    with fleet(source, engine, transport=url(), deadline_seconds=LONG_SECONDS) as (publisher, _):
        for number in range(3):
            assert publisher.publish().version == number
            assert number_in(engine.held) == 1
    assert number_held(url()) == 1


def test_a_store_of_deltas_keeps_the_versions_that_others_are_deltas_on(url: Options) -> None:
    store = url("&full_every=3&num_slots=4&keep_seconds=0")
    tensors = {"a": torch.zeros(100_000, dtype=torch.bfloat16), "b": torch.zeros(64, dtype=torch.bfloat16)}
    with Publisher(TensorSource(tensors), transport=store) as publisher:
        for number in range(10):
            tensors["a"][number * 10 : number * 10 + 5] = number + 1
            publisher.publish()
            found = StoreSource(store)
            assert found.version.number == number
            assert torch.equal(found.regions()["a"][0][1], tensors["a"])
    held = {stored.number: stored for stored in StoreReader(StoreAddress.parse(store)).complete_versions()}
    assert [number for number in sorted(held) if held[number].base is None] == [3, 6, 9]
    assert sorted(held) == [3, 4, 5, 6, 7, 8, 9], "four versions, and those that they are deltas on"
    sizes = {slot.number: slot.num_bytes for slot in store_status(StoreAddress.parse(store)).slots}
    assert sizes[held[4].slot] < sizes[held[3].slot] / 4
    assert torch.count_nonzero(StoreSource(store, version=4).regions()["a"][0][1]) == 25


def test_several_origins_write_one_version(url: Options) -> None:
    first, second = StoreSender(url(), run=RUN), JoinedStoreSender(url(), run=RUN)
    manifest = two_origins()
    with contextlib.closing(first), contextlib.closing(second):
        for number in (1, 2):
            begin_shared(first, second, manifest, number)
            send_origin(first, manifest, 0, number)
            first.seal(send_origin(second, manifest, 1, number))
            first.commit()
            assert number_held(url()) == number


def test_a_version_is_published_from_one_store_into_another(url: Options, tmp_path: Path) -> None:
    directory = f"file://{tmp_path}/store"
    with Publisher(TensorSource(model(1)), transport=directory) as publisher:
        publisher.publish(7)
    assert cli.main(["publish", directory, "--transport", url()]) == exits.OK
    assert number_held(url()) == 1
    assert cli.main(["publish", url(), "--transport", directory, "--version", "9"]) == exits.OK
    assert StoreSource(directory).version.number == 9
    with pytest.raises(SystemExit):
        cli.main(["publish", directory, "--transport", url(), "--dtype", "bfloat16"])


def test_a_stock_server_is_refused(url: Options) -> None:
    """It loads versions from a directory."""
    with (
        StockVllm(backend=None).serve() as vllm,
        Publisher(ModuleSource(torch.nn.Linear(8, 8)), transport=url(), engines=[vllm.url]) as publisher,
    ):
        with pytest.raises(PublishError, match="loads versions from a directory, not from s3://") as caught:
            publisher.publish()
        assert isinstance(caught.value.failures[vllm.url], UnsupportedError)
        assert not vllm.is_paused


def test_an_empty_store_and_a_bucket_that_is_not_there(url: Options, server: ObjectServer) -> None:
    with pytest.raises(VersionNotFoundError, match=r"s3://weights/run-\d+ does not hold any version yet"):
        StoreSource(url())
    missing = f"s3://nowhere/x?endpoint=http://127.0.0.1:{server.port}"
    with pytest.raises(PeerError, match="no bucket 'nowhere': create it"):
        StoreSender(missing, run=RUN)
    server.ask("PUT", f"/{BUCKET}/taken/notes.txt", b"mine")
    with pytest.raises(ValueError, match=r"not a weightcast store, but has notes\.txt"):
        StoreSender(f"s3://{BUCKET}/taken?endpoint=http://127.0.0.1:{server.port}", run=RUN)


@pytest.mark.parametrize("data", [b"", b"some bytes"])
def test_a_bucket_that_was_truncated_is_named(url: Options, server: ObjectServer, data: bytes) -> None:
    store = url()
    write(store, 1)
    address = StoreAddress.parse(store)
    assert isinstance(address, ObjectStoreAddress)
    server.ask("PUT", f"/{BUCKET}/{address.prefix}/slots/{max(slots(store))}/bucket.0", data)
    with pytest.raises(IntegrityError, match=r"bucket\.0 ends after \d+ bytes, expected \d+: it was truncated"):
        StoreSource(store)


def test_a_reader_that_waits_is_told_that_the_publisher_has_closed(url: Options) -> None:
    write(url(), 1)
    receiver = StoreReceiver(url(), peer="engine", run=RUN, deadline_seconds=LONG_SECONDS)
    with contextlib.closing(receiver):
        receiver.open(manifest_of(model(0)), WeightVersion(RUN, 2), staged=True)
        with pytest.raises(PeerError, match=f"the publisher of run {RUN} has closed the store s3://"):
            next(iter(receiver))


# --- what goes, and what stays ---


def test_old_versions_are_removed_and_slow_readers_are_told_why(url: Options) -> None:
    store = url("&keep_seconds=0")
    with contextlib.closing(StoreSender(store, run=RUN)) as sender:
        publish(sender, 1)
        with pinned(StoreAddress.parse(store)) as version:
            for number in (2, 3, 4, 5):
                publish(sender, number)
                assert len(slots(store)) <= 3
            with pytest.raises(IntegrityError, match=r"bucket\.0 is missing: newer versions.*keep_seconds, now 0"):
                list(version.payloads())
    assert slots(store) == [3, 4, 5]
    assert number_held(store) == 5


def test_a_version_stays_for_its_time_after_it_was_replaced(url: Options) -> None:
    with contextlib.closing(StoreSender(url(), run=RUN)) as sender:
        publish(sender, 1)
        with pinned(StoreAddress.parse(url())) as version:
            for number in (2, 3, 4, 5):
                publish(sender, number)
            assert sum(1 for _ in version.payloads()) == len(version.manifest.buckets)
    assert slots(url()) == [1, 2, 3, 4, 5]


DYING = """
    import contextlib, os, signal, sys
    sys.path.insert(0, {tests!r})
    from store.test_s3 import StoreSender, begun, publish
    sender = StoreSender({url!r}, run={run!r})
    publish(sender, 1)
    begun(sender, 2, 2)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_publisher_leaves_is_removed(url: Options, caplog: pytest.LogCaptureFixture) -> None:
    program = textwrap.dedent(DYING).format(tests=str(Path(__file__).parents[1]), url=url(), run=RUN)
    died = subprocess.run([sys.executable, "-c", program], timeout=2 * LONG_SECONDS, check=False)
    assert died.returncode == -signal.SIGKILL
    assert slots(url()) == [1, 2]
    assert number_held(url()) == 1
    with Publisher(TensorSource(model(3)), transport=url()) as publisher:
        assert publisher.publish().version == 3, "the number of a version that was begun is not used again"
    assert f"was not closed by its last publisher, run {RUN}" in caplog.text
    assert slots(url()) == [1, 3]
    assert number_held(url()) == 3


# --- two publishers ---


def test_the_publisher_that_opened_the_store_last_has_it(url: Options) -> None:
    lost = rf"lost the store s3://.*: run {OTHER_RUN} \(pid \d+ on .*\) has opened it since"
    with contextlib.closing(StoreSender(url(), run=RUN)) as first:
        publish(first, 1)
        begun(first, 2, 2)
        with contextlib.closing(StoreSender(url(), run=OTHER_RUN)) as second:
            publish(second, 2)
            # The first one goes on, without a look, until it would seal.
            manifest = manifest_of(model(0))
            packer = Packer(Layout(manifest), tiling(manifest.tensors, TensorSource(model(2)).regions()))
            last = len(manifest.buckets) - 1
            for index in range(2, last):
                pack_and_send(first, packer, manifest, WeightVersion(RUN, 2), index)
            with pytest.raises(StaleVersionError, match=lost):
                pack_and_send(first, packer, manifest, WeightVersion(RUN, 2), last)
            first.abort("it was lost")
            with pytest.raises(StaleVersionError, match=lost):
                publish(first, 3)
            assert number_held(url()) == 2
            publish(second, 3)
    assert number_held(url()) == 3
    assert store_status(StoreAddress.parse(url())).newest.run == OTHER_RUN


def test_of_two_publishers_that_commit_at_once_one_loses(url: Options, proxy: Proxy) -> None:
    """The other one opens the store, publishes and is done while the first one's commit is on its way."""
    write(url(), 1)

    def overtaken(request: Request) -> bool:
        if (request.command, request.key.rpartition("/")[2]) == ("PUT", "current.json"):
            proxy.spoil = lambda request: False
            write(url(), 2, run=OTHER_RUN)
        return False

    with contextlib.closing(StoreSender(url("", proxy.endpoint), run=RUN)) as sender:
        proxy.spoil = overtaken
        with pytest.raises(StaleVersionError, match=r"current\.json was changed by another publisher right before"):
            publish(sender, 2)
        sender.abort("it lost")
        found = store_status(StoreAddress.parse(url()))
        assert found.newest.version == WeightVersion(OTHER_RUN, 2)
        with pytest.raises(StaleVersionError, match="lost the store"):
            publish(sender, 3)
    assert number_held(url()) == 2
    write(url(), 3)
    assert number_held(url()) == 3


def test_a_publisher_that_has_lost_the_store_removes_nothing_of_the_other(url: Options, proxy: Proxy) -> None:
    """It has just looked whether it has the store, when the other one opens it and begins to write."""
    others: list[StoreSender] = []
    manifest = manifest_of(model(0))

    def overtaken(request: Request) -> bool:
        if request.command == "GET" and "slots" in request.path and "list-type" in request.path:
            proxy.spoil = lambda request: False
            others.append(StoreSender(url(), run=RUN))
            begun(others[0], 2, 3)
        return False

    with contextlib.closing(StoreSender(url("&keep_seconds=0", proxy.endpoint), run=OTHER_RUN)) as sender:
        publish(sender, 1)
        proxy.spoil = overtaken
        with pytest.raises(StaleVersionError, match="lost the store"):
            publish(sender, 2)
    with contextlib.closing(others[0]) as other:
        packer = Packer(Layout(manifest), tiling(manifest.tensors, TensorSource(model(2)).regions()))
        for index in range(3, len(manifest.buckets)):
            pack_and_send(other, packer, manifest, WeightVersion(RUN, 2), index)
        other.commit()
    assert number_held(url()) == 2


def test_a_damaged_writer_record_uses_no_slot_again(url: Options, server: ObjectServer) -> None:
    write(url(), *range(1, 12))
    prefix = url().partition("?")[0].removeprefix("s3:/")
    assert server.ask("PUT", f"{prefix}/writer.json", b"not a record").status == 200
    write(url("&keep_seconds=0"), 12, 13)
    assert slots(url()) == [11, 12, 13]
    assert number_held(url()) == 13


def test_a_forked_or_closed_publisher_does_not_write(url: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(StoreSender(url(), run=RUN)) as sender:
        publish(sender, 1)
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)
            with pytest.raises(ClosedError, match="forked"):
                sender.newest_version()
        publish(sender, 2)
    assert number_held(url()) == 2


def test_the_cost_of_a_publish_does_not_grow(url: Options, proxy: Proxy) -> None:
    """In the number of small requests, while versions stay for their time."""
    costs = []
    with contextlib.closing(StoreSender(url("", proxy.endpoint), run=RUN)) as sender:
        for number in range(6):
            before = len(proxy.requests)
            publish(sender, number)
            costs.append(sum("/bucket." not in key for _, key in proxy.requests[before:]))
    assert len(slots(url())) == 6
    assert costs[2:] == costs[2:3] * 4


@pytest.mark.parametrize("header", ["if-none-match", "if-match"])
def test_a_server_without_conditional_puts_is_refused(url: Options, proxy: Proxy, header: str) -> None:
    def ignoring(request: Request) -> bool:
        request.reply(*request.forward(without=(header,)))
        return True

    proxy.spoil = ignoring
    with pytest.raises(UnsupportedError, match="(?i)" + header + " in a put, so that two publishers could both commit"):
        StoreSender(url("", proxy.endpoint), run=RUN)
    proxy.spoil = lambda request: False
    write(url("", proxy.endpoint), 1)
    assert number_held(url()) == 1


# --- addresses ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://", "write s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket/a//b", "write s3://bucket/prefix"),
        ("s3://bucket/x?endpoint=host:9000", "endpoint must be a URL"),
        ("s3://bucket/x?max_slots=5", "unknown option max_slots.*keep_seconds"),
        ("s3://bucket/x?fsync=1", "unknown option fsync"),
        ("s3://bucket/x?keep_seconds=soon", "whole number"),
        ("s3://bucket/x?keep_seconds=999999999", "whole number from 0 to 864000"),
        ("s3://bucket/x?full_every=4&num_slots=4", "full_every must be from 1 to 3"),
    ],
)
def test_wrong_addresses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreAddress.parse(text)


def test_addresses() -> None:
    parsed = StoreAddress.parse("s3://b/runs/7?endpoint=https://host:9000&region=eu&num_slots=3&keep_seconds=9")
    expected = ObjectStoreAddress(
        "b", "runs/7", num_slots=3, num_threads=3, endpoint="https://host:9000", region="eu", keep_seconds=9
    )
    assert parsed == expected


def test_keys_endpoint_and_region_come_from_the_environment_or_the_url(
    url: Options, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def look(request: Request) -> bool:
        seen.append(request.headers["Authorization"])
        return False

    proxy.spoil = look
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    for options, region in (("", "us-east-1"), ("?region=eu-west-3", "eu-west-3")):
        with pytest.raises(VersionNotFoundError):
            StoreSource(f"s3://{BUCKET}/nothing{options}")
        assert re.search(rf"Credential=key/\d+/{region}/s3/aws4_request", seen[-1])


def test_engines_connect_to_the_host_in_the_url() -> None:
    assert registry.endpoint("s3://bucket/x?host=10.0.0.5&region=eu") == ("10.0.0.5", 0)
    assert registry.endpoint("s3://bucket/x") == ("127.0.0.1", 0)


def test_without_obstore_the_message_has_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "weightcast.store.objects")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ModuleNotFoundError, match=r"extra `s3`: pip install 'PATH_TO_WEIGHTCAST\[s3\]'"):
        StoreSource("s3://bucket/x")
