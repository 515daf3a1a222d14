"""What a store promises of its versions: whole, newest, kept while they are read, written by one."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from store.store_kit import (
    LONG_SECONDS,
    OTHER_RUN,
    RUN,
    SHORT_SECONDS,
    Holder,
    manifest_of,
    model,
    number_in,
    send,
    url,
    write,
)

from weightcast import LocalEngine, ModuleEngine, ModuleSource, TensorSource
from weightcast.errors import (
    EngineBusyError,
    InsufficientMemoryError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
    VersionNotFoundError,
    WeightcastError,
)
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, Layout
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.host import memory as host_memory
from weightcast.seams.transport import Portion
from weightcast.serving.follower import Follower
from weightcast.sources.store import StoreSource
from weightcast.store import writing
from weightcast.store.address import DirectoryAddress, StoreAddress
from weightcast.store.reading import PinnedVersion, StoreReader, pinned
from weightcast.testing.transport_kit import Background, pack_and_send
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.packer import Packer, tiling
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.rollback import rollback
from weightcast.transports.store import StoreReceiver, StoreSender


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> None:
    """Nothing is left open."""


@contextlib.contextmanager
def sender_of(
    directory: Path, options: str = "", run: str = RUN, deadline_seconds: float = SHORT_SECONDS
) -> Iterator[StoreSender]:
    sender = StoreSender(url(directory, options), run=run, deadline_seconds=deadline_seconds)
    try:
        yield sender
    finally:
        sender.close()


def publish(sender: StoreSender, number: int, run: str = RUN) -> None:
    send(sender, manifest_of(model(0)), WeightVersion(run, number), model(number))


def pack_all(sender: StoreSender, manifest: Manifest, version: WeightVersion) -> None:
    """Make a version whole, and do not commit it."""
    sender.open(manifest, version, peers=[], staged=True)
    packer = Packer(Layout(manifest), tiling(manifest.tensors, TensorSource(model(version.number)).regions()))
    for index in range(len(manifest.buckets)):
        pack_and_send(sender, packer, manifest, version, index)


def slots(directory: Path) -> set[str]:
    return set(os.listdir(directory / "slots"))


# --- publish and read ---


@pytest.mark.parametrize("options", ["", "?num_threads=4", "?num_slots=3", "?fsync=1"])
def test_a_publisher_needs_no_engines(tmp_path: Path, options: str) -> None:
    tensors = model(1)
    engine = Holder()
    with (
        Publisher(TensorSource(tensors), transport=url(tmp_path, options)) as publisher,
        Follower(url(tmp_path, options), engine) as follower,
    ):
        assert follower.poll() is None
        for number in range(1, 6):
            for name, tensor in model(number).items():
                tensors[name].copy_(tensor)
            report = publisher.publish()
            assert (report.ok, report.engines, report.version) == (True, {}, number - 1)
            followed = follower.poll()
            assert followed is not None
            assert (followed.version, followed.run) == (number - 1, publisher.run)
            assert number_in(engine.held) == number
            assert follower.poll() is None
    assert engine.num_loads == 5


def test_numbers_go_on_from_run_to_run(tmp_path: Path) -> None:
    for expected in (0, 1, 2):
        with Publisher(TensorSource(model(0)), transport=url(tmp_path)) as publisher:
            assert publisher.publish().version == expected
    with Publisher(TensorSource(model(0)), transport=url(tmp_path)) as publisher:
        assert publisher.publish(40).version == 40
        with pytest.raises(ValueError, match="not above 40"):
            publisher.publish(40)


def test_a_number_does_not_come_twice_in_a_run(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with sender_of(tmp_path) as sender, pytest.raises(StaleVersionError, match="not above 5"):
        publish(sender, 5)


def test_a_late_joiner_gets_the_newest_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    engine = Holder()
    with Follower(url(tmp_path), engine) as follower:
        assert follower.wait(LONG_SECONDS).version == 3  # type: ignore[union-attr]
        assert follower.wait(0.0) is None
    assert [version.number for version in engine.versions] == [3]


@pytest.mark.parametrize("options", ["", "?num_threads=3"])
@pytest.mark.parametrize("staged", [True, False])
def test_an_update_ends_while_the_filesystem_answers_no_read(
    tmp_path: Path, options: str, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network filesystem may take minutes, and `end` is called in the engine's own loop."""
    write(tmp_path, 1, 2)
    read, has_begun, answers, answered = PinnedVersion.read, threading.Event(), threading.Event(), list[bool]()

    def slow(pinned: PinnedVersion, index: int, buffer: BucketBuffer, *, only_header: bool = False) -> None:
        has_begun.set()
        answered.append(answers.wait(LONG_SECONDS))
        read(pinned, index, buffer, only_header=only_header)

    receiver = StoreReceiver(url(tmp_path, options), peer="engine")
    with contextlib.closing(receiver), monkeypatch.context() as patch:
        patch.setattr(PinnedVersion, "read", slow)
        newest = receiver.newest(None)
        assert newest is not None
        receiver.open(newest.manifest, newest.version, staged=staged)
        reader = Background(list, receiver)
        assert has_begun.wait(LONG_SECONDS)
        receiver.end()
        patch.undo()
        write(tmp_path, 3)
        newest = receiver.newest(None)
        assert newest is not None
        receiver.open(newest.manifest, newest.version, staged=staged)
        held = [bucket.buffer.payload.clone() for bucket in receiver]
        answers.set()
        with pytest.raises(UpdateAbortedError, match="this worker ended version"):
            reader.result()
        assert set(answered) == {True}
        assert newest.version.number == 3
        assert len(held) == len(newest.manifest.buckets)


def test_a_late_read_into_memory_that_ranks_share_never_reaches_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor would the next one's check find it: a bucket is checked by one rank, and read by all of them later."""
    write(tmp_path, 1, 2)
    read, has_begun, answers = PinnedVersion.read, threading.Event(), threading.Event()

    def slow(pinned: PinnedVersion, index: int, buffer: BucketBuffer, *, only_header: bool = False) -> None:
        has_begun.set()
        assert answers.wait(LONG_SECONDS)
        read(pinned, index, buffer, only_header=only_header)

    receiver = StoreReceiver(url(tmp_path), peer="engine")
    with contextlib.closing(receiver), monkeypatch.context() as patch:
        patch.setattr(PinnedVersion, "read", slow)
        patch.setattr("weightcast.transports.store.GRACE_SECONDS", 0.01)
        newest = receiver.newest(None)
        assert newest is not None
        whole = Portion(frozenset(range(len(newest.manifest.buckets))), receiver.common_memory())
        assert receiver.read_together(newest.manifest, whole)
        receiver.open(newest.manifest, newest.version, staged=True)
        reader = Background(list, receiver)
        assert has_begun.wait(LONG_SECONDS)
        receiver.end()
        with pytest.raises(WeightcastError, match="has not finished, and would overwrite the next one"):
            receiver.read_together(newest.manifest, whole)
        answers.set()
        with pytest.raises(UpdateAbortedError, match="this worker ended version"):
            reader.result()
        assert receiver.read_together(newest.manifest, whole)


def test_models_of_other_shapes_may_follow_one_another(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        for number, sizes in enumerate([(4, 100), (20, 9000), (2, 7), (20, 9000)]):
            tensors = model(number, *sizes)
            send(sender, manifest_of(tensors), WeightVersion(RUN, number), tensors)
            held = {n: r[0][1] for n, r in StoreSource(url(tmp_path)).regions().items()}
            assert held.keys() == tensors.keys()
            assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


def test_a_model_without_tensors_is_a_version(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        sender.open(plan([], 4096), WeightVersion(RUN, 1), peers=[], staged=True)
        sender.commit()
    assert StoreSource(url(tmp_path)).specs() == ()


@pytest.mark.parametrize("options", ["", "?num_threads=3"])
def test_odd_tensors_and_names_come_back_whole(tmp_path: Path, options: str) -> None:
    tensors = {
        "a/b/../../../etc/passwd": torch.arange(5),
        "..": torch.ones(3),
        "shape": torch.zeros(2, 2),
        "device": torch.ones(1, dtype=torch.int8),
        "_type": torch.tensor(3.5),
        "x" * 300: torch.arange(300),
        "fp8": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "e8m0": torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "zero dims": torch.tensor(7, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(100).view(10, 10).t(),
        "large": torch.arange(1 << 20),
        "tied": torch.arange(1000.0),
    }
    source = TensorSource(tensors, aliases={"tied": ("lm_head", "a/alias")})
    with Publisher(
        source, transport=url(tmp_path, options), options=PublishOptions(bucket_size_bytes=1 << 16)
    ) as publisher:
        publisher.publish()
    read = StoreSource(url(tmp_path))
    assert {spec.name: spec.aliases for spec in read.specs()}["tied"] == ("lm_head", "a/alias")
    for name, ((_, tensor),) in read.regions().items():
        assert tensor.dtype == tensors[name].dtype
        assert tensor.shape == tensors[name].shape
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8), tensors[name].contiguous().view(-1).view(torch.uint8)
        )
    entries = {path.name for path in tmp_path.iterdir()}
    assert entries == {"current.json", "slots", "writer.json", "writer.lock"}
    held = sum(path.stat().st_size for path in tmp_path.rglob("data.*"))
    assert held < 2 * sum(tensor.nbytes for tensor in tensors.values())


# --- slots ---


def test_slots_are_reused_not_made_anew(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    files = {path: path.stat().st_ino for path in tmp_path.rglob("data.*")}
    write(tmp_path, *range(3, 9))
    assert {path: path.stat().st_ino for path in tmp_path.rglob("data.*")} == files
    assert len(files) == 2


def test_what_is_pinned_is_never_touched(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pinned(DirectoryAddress(tmp_path), label="slow reader") as held, sender_of(tmp_path) as sender:
        for number in range(2, 8):
            publish(sender, number)
        assert sum(1 for _ in held.payloads()) == len(held.manifest.buckets)
    assert slots(tmp_path) == {"0", "1", "2"}
    assert number_in({n: r[0][1] for n, r in StoreSource(url(tmp_path)).regions().items()}) == 7


def test_with_every_slot_held_the_error_names_the_readers_and_the_next_publish_goes_on(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(sender_of(tmp_path, "?num_slots=2&max_slots=3"))
        for number in (1, 2):
            publish(sender, number)
            stack.enter_context(pinned(DirectoryAddress(tmp_path), label=f"engine-{number}"))
        publish(sender, 3)
        with pytest.raises(PeerTimeoutError, match=rf"engine-1 \(pid {os.getpid()} on .*engine-2 .*max_slots=3"):
            publish(sender, 4)
        assert StoreReader(DirectoryAddress(tmp_path)).commit().newest.number == 3  # type: ignore[union-attr]
        stack.pop_all().close()
    write(tmp_path, 5)
    assert StoreSource(url(tmp_path)).version.number == 5


def test_a_publish_that_waits_for_a_slot_goes_on_when_one_is_let_go(tmp_path: Path) -> None:
    with sender_of(tmp_path, "?num_slots=2&max_slots=2", deadline_seconds=LONG_SECONDS) as sender:
        publish(sender, 1)
        held = pinned(DirectoryAddress(tmp_path))
        publish(sender, 2)
        timer = threading.Timer(0.1, held.close)
        timer.start()
        publish(sender, 3)
        timer.join()
    assert slots(tmp_path) == {"0", "1"}


def test_readers_without_permission_to_write_pin_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    opened = os.open

    def read_only(path: object, flags: int, *args: int) -> int:
        if str(path).endswith("pins") and flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *args)  # type: ignore[arg-type]

    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(sender_of(tmp_path, "?max_slots=2"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", read_only)
            stack.enter_context(pinned(DirectoryAddress(tmp_path), label="guest"))
        publish(sender, 2)
        with pytest.raises(PeerTimeoutError, match="could not write its name"):
            publish(sender, 3)


# --- one writer ---


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        publish(sender, 1)
        with pytest.raises(EngineBusyError, match=rf"run {RUN} \(pid {os.getpid()} on .*requested by run {OTHER_RUN}"):
            StoreSender(url(tmp_path), run=OTHER_RUN)
        publish(sender, 2)
    write(tmp_path, 1, run=OTHER_RUN)
    assert StoreSource(url(tmp_path)).version == WeightVersion(OTHER_RUN, 1)


def test_a_writer_that_lost_its_lock_does_not_commit(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        publish(sender, 1)
        (tmp_path / "writer.lock").unlink()  # as on a filesystem that forgets locks
        write_other = StoreSender(url(tmp_path), run=OTHER_RUN, deadline_seconds=SHORT_SECONDS)
        publish(write_other, 9, OTHER_RUN)
        write_other.close()
        with pytest.raises(StaleVersionError, match="two writers"):
            publish(sender, 2)
    assert StoreSource(url(tmp_path)).version == WeightVersion(OTHER_RUN, 9)


def test_a_writer_that_lost_its_lock_removes_nothing_of_the_others(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        publish(sender, 1)
        pack_all(sender, manifest := manifest_of(model(0)), WeightVersion(RUN, 2))
        (tmp_path / "writer.lock").unlink()
        with sender_of(tmp_path, run=OTHER_RUN) as other:
            publish(other, 9, OTHER_RUN)
            with pytest.raises(StaleVersionError, match="two writers"):
                sender.commit()
            pack_all(other, manifest, WeightVersion(OTHER_RUN, 10))
            sender.abort("it was changed")
            assert StoreSource(url(tmp_path)).version == WeightVersion(OTHER_RUN, 9)
            other.commit()
            record = StoreReader(DirectoryAddress(tmp_path)).writer()
            assert record is not None
            assert (record.run, record.aborted) == (OTHER_RUN, "")
    assert StoreSource(url(tmp_path)).version == WeightVersion(OTHER_RUN, 10)


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        write(tmp_path, 1)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_aborted_version_leaves_the_one_before(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        publish(sender, 1)
        manifest = manifest_of(model(2))
        sender.open(manifest, WeightVersion(RUN, 2), peers=[], staged=True)
        sender.buffer(0)
        sender.send(0, HEADER_BYTES)
        sender.abort("changed my mind")
        with pytest.raises(UpdateAbortedError):
            sender.buffer(1)
        assert StoreSource(url(tmp_path)).version.number == 1
        publish(sender, 3)
    assert StoreSource(url(tmp_path)).version.number == 3


# --- rollback ---


def test_rollback_publishes_the_version_before_as_a_new_one(tmp_path: Path) -> None:
    write(tmp_path, 4, 5)
    report = rollback(url(tmp_path))
    assert report.version == 6
    source = StoreSource(url(tmp_path))
    assert source.version == WeightVersion(report.run, 6)
    assert number_in({n: r[0][1] for n, r in source.regions().items()}) == 4


def test_rollback_by_number(tmp_path: Path) -> None:
    write(tmp_path, 4, 5, 6, options="?num_slots=3")
    with pytest.raises(VersionNotFoundError, match=r"does not hold version 3: it has 6, 5, 4$"):
        rollback(url(tmp_path), version=3)
    assert rollback(url(tmp_path, "?num_slots=3"), version=4).version == 7
    source = StoreSource(url(tmp_path))
    assert (source.version.number, number_in({n: r[0][1] for n, r in source.regions().items()})) == (7, 4)
    with pytest.raises(VersionNotFoundError, match=r"does not hold version 4: it has 7, 6, 5$"):
        StoreSource(url(tmp_path), version=4)
    with pytest.raises(VersionNotFoundError, match="no such directory"):
        rollback(url(tmp_path / "elsewhere"), version=4)


def test_a_former_runs_version_is_found_after_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, run, seconds in ((1, RUN, 2000.0), (2, OTHER_RUN, 1000.0)):
        with monkeypatch.context() as patched:
            patched.setattr(writing, "time", SimpleNamespace(time=lambda seconds=seconds: seconds))
            write(tmp_path, number, run=run)
    reader = StoreReader(DirectoryAddress(tmp_path))
    assert [stored.number for stored in reader.complete_versions()] == [2, 1]
    assert StoreSource(url(tmp_path), version=1).version.run == RUN


def test_versions_are_found_after_the_writers_clock_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, sender_of(tmp_path, "?num_slots=3") as sender:
        for number, seconds in ((4, 2000.0), (5, 3000.0), (6, 1000.0)):
            patched.setattr(writing, "time", SimpleNamespace(time=lambda seconds=seconds: seconds))
            publish(sender, number)
    assert StoreSource(url(tmp_path), version=5).version.number == 5
    assert rollback(url(tmp_path, "?num_slots=3"), version=4).version == 7


def test_a_version_that_is_sealed_and_not_committed_is_no_aim_of_a_rollback(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        publish(sender, 1)
        publish(sender, 2)
        pack_all(sender, manifest_of(model(0)), WeightVersion(RUN, 3))
        assert (tmp_path / "next.json").exists()
        with pytest.raises(VersionNotFoundError, match=r"does not hold version 3: it has 2$"):
            StoreSource(url(tmp_path), version=3)
        sender.abort("no engine wants it")


def test_a_publisher_rolls_its_engine_back_and_goes_on_from_its_own_source(tmp_path: Path) -> None:
    trained, live = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    engine = LocalEngine(ModuleEngine(live))
    store = url(tmp_path, "?num_slots=3")
    with contextlib.closing(engine), Publisher(ModuleSource(trained), transport=store, engines=[engine]) as publisher:
        weights = []
        for _ in range(3):
            trained.weight.data.add_(1)
            weights.append(trained.weight.detach().clone())
            publisher.publish()
        report = publisher.rollback(0)
        assert (report.version, torch.equal(live.weight, weights[0])) == (3, True)
        assert publisher.rollback().version == 4, "what was the newest before it"
        assert torch.equal(live.weight, weights[2])
        publisher.sync(engine)
        with pytest.raises(VersionNotFoundError, match="does not hold version 1: it has 4, 3, 2"):
            publisher.rollback(1)
        trained.weight.data.add_(1)
        assert publisher.publish().version == 5
        assert torch.equal(live.weight, trained.weight)
    with Publisher(ModuleSource(trained), transport=store, engines=[]) as publisher:
        assert publisher.rollback(4).version == 6, "the first call of a publisher that was started again"
        assert publisher.publish().version == 7


def test_rollback_without_a_version_before(tmp_path: Path) -> None:
    write(tmp_path, 4)
    with pytest.raises(VersionNotFoundError, match="does not hold the version before"):
        rollback(url(tmp_path))
    assert StoreSource(url(tmp_path)).version.number == 4


def test_rollback_is_refused_while_a_publisher_has_the_store(tmp_path: Path) -> None:
    write(tmp_path, 4, 5)
    with sender_of(tmp_path), pytest.raises(EngineBusyError, match=RUN):
        rollback(url(tmp_path))
    assert StoreSource(url(tmp_path)).version.number == 5


# --- room ---


def test_memory_for_a_store_in_memory_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path("/dev/shm") / f"store-tests-{os.getpid()}"
    try:
        monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
        with pytest.raises(InsufficientMemoryError, match="1000 left"):
            write(shared, 1)
        monkeypatch.undo()
        write(shared, 1)
    finally:
        shutil.rmtree(shared)


def test_memory_of_a_reader_is_checked_before_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    engine = Holder()
    with Follower(url(tmp_path), engine) as follower:
        monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
        with pytest.raises(InsufficientMemoryError, match="1000 left"):
            follower.poll()
        monkeypatch.undo()
        assert follower.poll() is not None
    assert engine.num_loads == 1


# --- addresses ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ipc://", "file:///absolute"),
        ("file://relative", "file:///absolute"),
        ("file:///mnt/a%00b", "file:///absolute"),
        ("/mnt/a 100%", "write file:///mnt/a%20100%25"),
        ("file:///d?threads=2", "unknown option threads"),
        ("file:///d?num_slots=1", "num_slots"),
        ("file:///d?num_slots=5&max_slots=4", "num_slots"),
        ("file:///d?num_threads=0", "num_threads"),
        ("file:///d?num_threads=two", "whole number"),
        ("file:///d?fsync=2", "fsync"),
    ],
)
def test_wrong_addresses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreAddress.parse(text)


def test_addresses() -> None:
    parsed = StoreAddress.parse("file:///mnt/with%20space%3F?num_slots=3&num_threads=8&fsync=1")
    assert parsed == DirectoryAddress(Path("/mnt/with space?"), num_slots=3, max_slots=5, num_threads=8, fsync=True)


def test_specs_keep_their_groups(tmp_path: Path) -> None:
    source = TensorSource(model(1), groups={"t0": "g", "t3": "g"})
    with Publisher(source, transport=url(tmp_path)) as publisher:
        publisher.publish()
    groups: dict[str, list[str]] = {}
    for spec in StoreSource(url(tmp_path)).specs():
        assert isinstance(spec, TensorSpec)
        groups.setdefault(spec.group, []).append(spec.name)
    assert groups["g"] == ["t0", "t3"]


# --- tensors that are larger than a bucket ---


@pytest.mark.parametrize(
    ("options", "num_columns", "is_view"), [("", 16, True), ("", 5, False), ("?num_threads=3", 16, True)]
)
def test_a_cut_tensor_is_whole_and_where_it_was_read_if_it_can_be(
    tmp_path: Path, options: str, num_columns: int, is_view: bool
) -> None:
    """Rows of 64 bytes leave no gap between two buckets, rows of 20 do."""
    tensors = {
        "small": torch.arange(1000, dtype=torch.int32),
        "cut": torch.arange(100_000 * num_columns, dtype=torch.int32).view(-1, num_columns),
        "last": torch.arange(10, dtype=torch.int32),
    }
    manifest = manifest_of(tensors)
    assert len(manifest.tensors[1].pieces) > 10
    sender = StoreSender(url(tmp_path, options), run=RUN)
    found: dict[str, int] = {}

    class Looking(Holder):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            pairs = list(tensors)
            found.update((name, tensor.untyped_storage().data_ptr()) for name, tensor in pairs)
            super().load(pairs)

    engine = Looking(expected=len(tensors))
    try:
        with Follower(url(tmp_path, options), engine) as follower:
            for number in (1, 2):
                tensors["cut"] += number
                send(sender, manifest, WeightVersion(RUN, number), tensors)
                assert follower.poll() is not None
                assert torch.equal(engine.held["cut"], tensors["cut"])
                assert (found["cut"] == found["small"] == found["last"]) == is_view
    finally:
        sender.close()
