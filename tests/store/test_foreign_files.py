"""What is lost, damaged or put in the place of a store's files while it is in use: refused by name, or made again."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from core.direct import RecordingEngine, fleet
from forking import in_child
from store.store_kit import (
    OTHER_RUN,
    RUN,
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

from weightcast import TensorSource
from weightcast.errors import (
    ClosedError,
    EngineBusyError,
    InsufficientMemoryError,
    IntegrityError,
    ManifestError,
)
from weightcast.format.bucket import HEADER_BYTES
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.serving.follower import Follower
from weightcast.sources.module import ModuleSource
from weightcast.sources.store import StoreSource
from weightcast.store import reading
from weightcast.store.address import DirectoryAddress
from weightcast.store.files import room_for
from weightcast.store.reading import StoreReader, store_status
from weightcast.trainer.publisher import Publisher
from weightcast.transports.store import StoreSender

Place = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left open; a slot that never gets its version is given up soon."""
    monkeypatch.setattr(reading, "GRACE_SECONDS", 0.2)


@contextlib.contextmanager
def sender_of(directory: Path, options: str = "", run: str = RUN) -> Iterator[StoreSender]:
    sender = StoreSender(url(directory, options), run=run, deadline_seconds=1.0)
    try:
        yield sender
    finally:
        sender.close()


def publish(sender: StoreSender, number: int) -> None:
    send(sender, manifest_of(model(0)), WeightVersion(RUN, number), model(number))


def slot_of(directory: Path) -> Path:
    commit = StoreReader(DirectoryAddress(directory)).commit()
    assert commit is not None
    return directory / "slots" / str(commit.newest.slot)


def number_held(directory: Path) -> int:
    return number_in({name: held[0][1] for name, held in StoreSource(url(directory)).regions().items()})


# --- lost or damaged while a sender lives ---

DAMAGES: dict[str, Place] = {
    "manifest missing": lambda s: (s / "manifest.json").unlink(),
    "manifest cut": lambda s: os.truncate(s / "manifest.json", 50),
    "manifest empty": lambda s: os.truncate(s / "manifest.json", 0),
    "manifest of another model": lambda s: (s / "manifest.json").write_bytes(manifest_of(model(0, 3)).encode()),
    "manifest is a link": lambda s: (
        shutil.copy(s / "manifest.json", s.parents[1] / "elsewhere"),
        (s / "manifest.json").unlink(),
        (s / "manifest.json").symlink_to(s.parents[1] / "elsewhere"),
    ),
    "seal missing": lambda s: (s / "seal.json").unlink(),
    "pins missing": lambda s: (s / "pins").unlink(),
    "data missing": lambda s: (s / "data.0").unlink(),
    "data cut": lambda s: os.truncate(s / "data.0", 1000),
    "slot missing": shutil.rmtree,
    "slots missing": lambda s: shutil.rmtree(s.parent),
    "lock missing": lambda s: (s.parents[1] / "writer.lock").unlink(),
    "store missing": lambda s: shutil.rmtree(s.parents[1]),
    "store renamed": lambda s: s.parents[1].rename(s.parents[1].with_name("renamed-" + secrets.token_hex(4))),
    "store emptied": lambda s: (shutil.rmtree(s.parents[1]), s.parents[1].mkdir()),
    "writer missing": lambda s: (s.parents[1] / "writer.json").unlink(),
    "writer garbage": lambda s: (s.parents[1] / "writer.json").write_bytes(b"{}"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("options", ["", "?num_threads=3"])
def test_a_living_sender_makes_again_what_was_lost(tmp_path: Path, name: str, options: str) -> None:
    """In every slot, in turn; the next version can be read, whatever became of the one before."""
    directory = tmp_path / "store"
    with sender_of(directory, options) as sender:
        for number in range(3):
            publish(sender, number)
        for number in range(3, 9):
            DAMAGES[name](slot_of(directory))
            publish(sender, number)
            assert number_held(directory) == number
            with pytest.raises(EngineBusyError, match=RUN):
                StoreSender(url(directory), run=OTHER_RUN)


def test_engines_of_a_publish_go_on_when_the_lock_file_was_removed(tmp_path: Path) -> None:
    source, engine = TensorSource(model(1)), RecordingEngine()
    with fleet(source, engine, transport=url(tmp_path)) as (publisher, _):
        publisher.publish()
        (tmp_path / "writer.lock").unlink()
        assert publisher.publish().ok


def test_a_lock_that_somebody_else_has_got_is_not_taken(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        publish(sender, 1)
        (tmp_path / "writer.lock").unlink()
        with sender_of(tmp_path, run=OTHER_RUN) as other:
            with pytest.raises(EngineBusyError, match=OTHER_RUN):
                publish(sender, 2)
            send(other, manifest_of(model(0)), WeightVersion(OTHER_RUN, 3), model(3))
        assert number_held(tmp_path) == 3


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b"\0" * 700], ids=["empty", "text", "json", "zeros"])
def test_a_pointer_that_is_no_record_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, 1)
    (tmp_path / "current.json").write_bytes(content)
    for attempt in (write, lambda directory, _: StoreSource(url(directory))):
        with pytest.raises(IntegrityError, match=rf"{tmp_path}/current\.json .*remove this file, and publish again"):
            attempt(tmp_path, 2)
    (tmp_path / "current.json").unlink()
    write(tmp_path, 2)
    assert number_held(tmp_path) == 2


# --- what is no file of a store ---


def _kept(path: Path) -> Path:
    """Where that is which was in a path's place."""
    return path.with_name(f".kept-{path.name}")


def _link(path: Path) -> None:
    """To what was there, which somebody else needs."""
    victims = next(parent for parent in path.parents if (parent / "victim").exists()) / "victim"
    path.symlink_to(shutil.copy(_kept(path), victims / path.name))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(path.parent)  # its address must be short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)


INTRUDERS: dict[str, tuple[Place, str]] = {
    "link": (_link, "a symbolic link"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "a symbolic link"),
    "FIFO": (os.mkfifo, "a FIFO"),
    "socket": (_socket, "a socket"),
    "directory": (lambda path: path.mkdir(), "a directory"),
    "device": (lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5)), "a device"),
}


def replace(path: Path, intruder: str) -> None:
    """Put something else in its place. What was there is what a link shows."""
    if intruder == "device" and os.geteuid():
        pytest.skip("making a device needs root")
    path.rename(_kept(path))
    INTRUDERS[intruder][0](path)


def content_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("intruder", INTRUDERS)
@pytest.mark.parametrize("name", ["current.json", "seal.json", "manifest.json", "pins", "data.0"])
def test_readers_refuse_what_is_no_file(tmp_path: Path, name: str, intruder: str) -> None:
    store = tmp_path / "store"
    (tmp_path / "victim").mkdir()
    write(store, 1)
    path = store / name if name == "current.json" else slot_of(store) / name
    replace(path, intruder)
    before = content_of(tmp_path / "victim")
    engine = Holder()
    with Follower(url(store), engine) as follower:
        with pytest.raises(IntegrityError, match=rf"{path} is {INTRUDERS[intruder][1]}, expected a file.*remove"):
            follower.poll()
        assert not engine.num_loads
    assert content_of(tmp_path / "victim") == before


@pytest.mark.parametrize("intruder", INTRUDERS)
@pytest.mark.parametrize("name", ["current.json", "writer.lock", "pins", "data.0"])
def test_writers_refuse_what_is_no_file(tmp_path: Path, name: str, intruder: str) -> None:
    store = tmp_path / "store"
    (tmp_path / "victim").mkdir()
    write(store, 1, 2)
    (other,) = (path for path in (store / "slots").iterdir() if path != slot_of(store))
    path = other / name if name in ("pins", "data.0") else store / name
    replace(path, intruder)
    before = content_of(tmp_path / "victim")
    with pytest.raises(IntegrityError, match=rf"{path} is {INTRUDERS[intruder][1]}, expected a file.*remove"):
        write(store, 3)
    assert content_of(tmp_path / "victim") == before
    if name != "current.json":
        assert number_held(store) == 2
    path.rmdir() if intruder == "directory" else path.unlink()
    _kept(path).rename(path)
    write(store, 3)
    assert number_held(store) == 3


@pytest.mark.parametrize("intruder", INTRUDERS)
@pytest.mark.parametrize("name", ["seal.json", "manifest.json", "writer.json", "next.json"])
def test_what_is_replaced_as_a_whole_is_replaced_and_nothing_is_followed(
    tmp_path: Path, name: str, intruder: str
) -> None:
    store = tmp_path / "store"
    (tmp_path / "victim").mkdir()
    write(store, 1, 2)
    (other,) = (path for path in (store / "slots").iterdir() if path != slot_of(store))
    path = store / name if name in ("writer.json", "next.json") else other / name
    if name == "next.json":
        path.write_bytes(b"{}")
    replace(path, intruder)
    before = content_of(tmp_path / "victim")
    if intruder == "directory":
        with pytest.raises(IntegrityError, match=rf"{path} is a directory, expected a file.*remove"):
            write(store, 3)
        path.rmdir()
    write(store, 3)
    assert number_held(store) == 3
    assert content_of(tmp_path / "victim") == before


@pytest.mark.parametrize("intruder", [name for name in INTRUDERS if name != "directory"])
@pytest.mark.parametrize("depth", ["slots", "slot"])
def test_a_folder_that_is_something_else_is_refused(tmp_path: Path, depth: str, intruder: str) -> None:
    """Also a link to a folder that would do."""
    store = tmp_path / "store"
    write(store, 1, 2)
    path = slot_of(store) if depth == "slot" else store / "slots"
    elsewhere = path.rename(tmp_path / "elsewhere")
    before = content_of(elsewhere)
    path.symlink_to(elsewhere) if intruder == "link" else INTRUDERS[intruder][0](path)
    expected = rf"{path} is {INTRUDERS[intruder][1]}, expected a directory.*remove"
    for attempt in (
        lambda: StoreSource(url(store)),
        lambda: write(store, 3),
        lambda: store_status(DirectoryAddress(store)),
    ):
        with pytest.raises(IntegrityError, match=expected):
            attempt()
    assert content_of(elsewhere) == before


@pytest.mark.parametrize("name", ["01", "1024", "2000", "9" * 23, "\u00b2", "\u0663", "lost+found"])
def test_a_folder_that_no_pointer_could_name_is_no_slot(tmp_path: Path, name: str) -> None:
    write(tmp_path, 1)
    (tmp_path / "slots" / name).mkdir()
    for number in range(2, 6):
        write(tmp_path, number)
        assert number_held(tmp_path) == number
        assert store_status(DirectoryAddress(tmp_path)).newest.version.number == number
    assert not any((tmp_path / "slots" / name).iterdir())


def test_a_store_may_itself_be_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    engine = Holder()
    with Follower(url(tmp_path / "store"), engine) as follower:
        for number in (1, 2, 3):
            write(tmp_path / "store", number)
            assert follower.poll() is not None
            assert number_in(engine.held) == number
    assert store_status(DirectoryAddress(tmp_path / "store")).newest.number == 3
    assert number_held(tmp_path / "disk") == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("name", ["current.json", "seal.json", "manifest.json", "pins", "data.0"])
def test_a_file_without_permission_is_named(name: str) -> None:
    store = Path("/dev/shm") / f"store-tests-permission-{os.getpid()}"
    try:
        write(store, 1)
        path = store / name if name == "current.json" else slot_of(store) / name
        path.chmod(0)
        os.seteuid(65534)
        try:
            with pytest.raises(IntegrityError, match=rf"{path} can't be read: Permission denied"):
                StoreSource(url(store))
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(store)


# --- a forked child ---


def test_a_forked_child_can_not_publish(tmp_path: Path) -> None:
    with Publisher(TensorSource(model(1)), transport=url(tmp_path, "?num_threads=2")) as publisher:
        publisher.publish()
        before = content_of(tmp_path)

        def in_the_child() -> str:
            try:
                publisher.publish()
            except ClosedError as exc:
                return str(exc)
            finally:
                publisher.close()
            return "published"

        said = in_child(in_the_child)
        assert f"this publisher is of pid {os.getpid()}, which this process (pid " in said
        assert content_of(tmp_path) == before
        assert publisher.publish().version == 1


def test_a_child_that_was_forked_in_the_middle_leaves_the_update_alone(tmp_path: Path) -> None:
    with sender_of(tmp_path, "?num_threads=2") as sender:
        publish(sender, 1)
        manifest = manifest_of(model(2))
        sender.open(manifest, WeightVersion(RUN, 2), peers=[], staged=True)
        sender.buffer(0)
        sender.send(0, HEADER_BYTES)
        before = {path: data for path, data in content_of(tmp_path).items() if not path.name.startswith("data")}

        def in_the_child() -> str:
            sender.abort("I am the child")
            sender.close()
            return "done"

        assert in_child(in_the_child) == "done"
        after = {path: data for path, data in content_of(tmp_path).items() if not path.name.startswith("data")}
        assert after == before
        publish(sender, 3)
    assert number_held(tmp_path) == 3


# --- no room for another file ---


@pytest.mark.skipif(not can_mount(), reason="mounting a small filesystem needs root")
def test_a_filesystem_without_inodes_is_told_from_a_full_one(tmp_path: Path) -> None:
    place = tmp_path / "small"
    with small_filesystem(place, 64 << 20, "nr_inodes=40"):
        store, outcomes = place / "store", set()
        write(store, 1)
        for number_left in range(12):
            for path in place.glob("filler-*"):
                path.unlink()
            while (left := os.statvfs(place).f_favail) > number_left:
                (place / f"filler-{left}").touch()
            held, slot = number_held(store), slot_of(store)
            for other in (store / "slots").iterdir():
                if other != slot:
                    shutil.rmtree(other)
            refusal = ""
            try:
                write(store, held + 1)
            except InsufficientMemoryError as exc:
                refusal = str(exc)
            outcomes.add(bool(refusal))
            assert not refusal or ("no inodes left" in refusal and str(store) in refusal)
            assert number_held(store) == held + (not refusal)
        assert outcomes == {True, False}
        while (left := os.statvfs(place).f_favail) > 0:
            (place / f"filler-{left}").touch()
        with pytest.raises(InsufficientMemoryError, match="no inodes left"):
            write(place / "new", 1)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device; the former version stays. Free space"),
        (errno.EDQUOT, r"Disk quota exceeded \(of bytes or of files\)"),
        (errno.EFBIG, "File too large"),
    ],
)
def test_what_is_exhausted_is_told(tmp_path: Path, number: int, words: str) -> None:
    with (
        pytest.raises(InsufficientMemoryError, match=words),
        room_for(tmp_path / "slots" / "0" / "data.0"),
    ):
        raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="Input/output"), room_for(tmp_path):
        raise OSError(errno.EIO, "Input/output error")


# --- names that are not text ---

NO_TEXT = "layer.\udcff.weight"


class Oddly(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(NO_TEXT.replace(".", "_"), torch.nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("transport", ["store", "ipc"])
def test_a_module_with_a_name_that_is_not_text_is_refused_by_name(tmp_path: Path, transport: str) -> None:
    address = url(tmp_path / "store") if transport == "store" else "ipc://"
    with (
        Publisher(ModuleSource(Oddly()), transport=address) as publisher,
        pytest.raises(ManifestError, match=r"'layer_\\udcff_weight' can't be UTF-8.*rename the tensor.*\[name\]"),
    ):
        publisher.publish()
    assert not (tmp_path / "store" / "current.json").exists()


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(NO_TEXT, "int8", (1,)),
        TensorSpec("fine", "int8", (1,), aliases=(NO_TEXT,)),
        TensorSpec("fine", "int8", (1,), group=NO_TEXT),
    ],
    ids=["name", "alias", "group"],
)
def test_a_plan_has_no_name_that_is_not_text(spec: TensorSpec) -> None:
    with pytest.raises(ManifestError, match=r"'layer\.\\udcff\.weight' can't be UTF-8"):
        plan([spec], 4096)


def test_a_reason_and_a_label_that_are_not_text_do_no_harm(tmp_path: Path) -> None:
    with sender_of(tmp_path) as sender:
        publish(sender, 1)
        sender.open(manifest_of(model(2)), WeightVersion(RUN, 2), peers=[], staged=True)
        sender.abort(NO_TEXT)
        assert StoreReader(DirectoryAddress(tmp_path)).writer().aborted == r"layer.\udcff.weight"  # type: ignore[union-attr]
        with Follower(url(tmp_path), Holder(), label=NO_TEXT) as follower:
            assert follower.poll() is not None
