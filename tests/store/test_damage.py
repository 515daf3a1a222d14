"""Files that are cut short, changed, missing or foreign: a clear error each, and nothing reaches the engine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from store.store_kit import RUN, Holder, manifest_of, model, number_in, url, write

from weightcast.engines.gate import Gate
from weightcast.engines.module import ModuleEngine
from weightcast.errors import (
    IncompatibleWeightsError,
    InstallError,
    InsufficientMemoryError,
    IntegrityError,
    ManifestError,
    PeerTimeoutError,
    WeightcastError,
)
from weightcast.format.manifest import WeightVersion
from weightcast.serving.follower import Follower, follow
from weightcast.store import files, locks, reading
from weightcast.store.address import DirectoryAddress
from weightcast.store.reading import StoreReader
from weightcast.store.records import FORMAT, Commit, seal


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left open; a slot that never gets its version is given up soon."""
    monkeypatch.setattr(reading, "GRACE_SECONDS", 0.2)


def slot_of(directory: Path) -> Path:
    commit = StoreReader(DirectoryAddress(directory)).commit()
    assert commit is not None
    return directory / "slots" / str(commit.newest.slot)


def flip(path: Path, at: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 4
    path.write_bytes(data)


def cut(path: Path, keep: int = 1000) -> None:
    os.truncate(path, keep)


def edit(path: Path, name: str, value: object) -> None:
    record = json.loads(path.read_bytes())
    record[name] = value
    path.write_text(json.dumps(record))


def other_slots_data(slot: Path) -> None:
    other = next(path for path in slot.parent.iterdir() if path != slot)
    shutil.copy(other / "data.0", slot / "data.0")


def other_slots_seal(slot: Path) -> None:
    other = next(path for path in slot.parent.iterdir() if path != slot)
    shutil.copy(other / "seal.json", slot / "seal.json")


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, type[WeightcastError], str]] = {
    "data cut": (lambda s: cut(s / "data.0"), IntegrityError, r"data\.0 ends after 1000 bytes, expected \d+"),
    "data empty": (lambda s: cut(s / "data.0", 0), IntegrityError, "ends after 0 bytes"),
    "payload changed": (lambda s: flip(s / "data.0", 300), IntegrityError, "bucket 0: .*bytes were changed"),
    "header changed": (lambda s: flip(s / "data.0", 8), IntegrityError, "header says protocol 0, expected protocol 4"),
    "last byte of data": (lambda s: flip(s / "data.0", 270_000), IntegrityError, "bucket 5: "),
    "data missing": (lambda s: (s / "data.0").unlink(), IntegrityError, r"data\.0 is missing"),
    "data of another version": (other_slots_data, IntegrityError, "header says version 1, expected version 2"),
    "data is a directory": (
        lambda s: ((s / "data.0").unlink(), (s / "data.0").mkdir()),
        IntegrityError,
        r"data\.0 is a directory, expected a file",
    ),
    "manifest cut": (lambda s: cut(s / "manifest.json", 50), IntegrityError, r"digest of .*manifest\.json"),
    "manifest changed": (lambda s: flip(s / "manifest.json"), IntegrityError, r"digest of .*manifest\.json"),
    "manifest missing": (lambda s: (s / "manifest.json").unlink(), IntegrityError, "missing"),
    "seal cut": (lambda s: cut(s / "seal.json", 50), IntegrityError, "not a record"),
    "seal changed": (lambda s: edit(s / "seal.json", "newest", None), IntegrityError, "not a record"),
    "seal missing": (lambda s: (s / "seal.json").unlink(), IntegrityError, "has no whole version"),
    "seal of another version": (other_slots_seal, IntegrityError, "has version 1 .*expected version 2"),
    "pins missing": (lambda s: (s / "pins").unlink(), IntegrityError, "pins is missing"),
    "slot missing": (lambda s: shutil.rmtree(s), IntegrityError, "missing"),
    "pointer cut": (lambda s: cut(s.parents[1] / "current.json", 50), IntegrityError, r"current\.json is not a record"),
    "pointer empty": (
        lambda s: cut(s.parents[1] / "current.json", 0),
        IntegrityError,
        r"current\.json is not a record",
    ),
    "pointer changed": (
        lambda s: (p := s.parents[1] / "current.json").write_bytes(
            p.read_bytes().replace(b'"number":2', b'"number":3')
        ),
        IntegrityError,
        r"current\.json was changed",
    ),
    "pointer of a later format": (
        lambda s: edit(s.parents[1] / "current.json", "format", "weightcast-store-9"),
        IntegrityError,
        "weightcast-store-9",
    ),
    "foreign pointer": (
        lambda s: (s.parents[1] / "current.json").write_text('{"a": {"device": "cpu"}}'),
        IntegrityError,
        "not a record of a weightcast store",
    ),
    "huge pointer": (
        lambda s: (s.parents[1] / "current.json").write_bytes(b" " * (1 << 20)),
        IntegrityError,
        "more than 65536 bytes",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_an_error_and_the_next_version_heals_it(tmp_path: Path, name: str) -> None:
    damage, kind, message = DAMAGES[name]
    engine = Holder()
    write(tmp_path, 1)
    with Follower(url(tmp_path), engine) as follower:
        assert follower.poll() is not None
    write(tmp_path, 2)
    damage(slot_of(tmp_path))
    # Another one: a follower that knows the manifest does not read it again.
    with Follower(url(tmp_path), engine) as follower:
        with pytest.raises(kind, match=message):
            follower.poll()
        assert number_in(engine.held) == 1
        assert engine.num_loads == 1
        assert not follower.gate.torn
        if "pointer" in name:
            with pytest.raises(IntegrityError, match=r"current\.json"):
                write(tmp_path, 3)
            (tmp_path / "current.json").unlink()
        write(tmp_path, 3)
        assert follower.poll() is not None
        assert number_in(engine.held) == 3


def test_a_file_that_grew_is_no_harm(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with (slot_of(tmp_path) / "data.0").open("ab") as file:
        file.write(b"x" * 10_000)
    engine = Holder()
    with Follower(url(tmp_path), engine) as follower:
        assert follower.poll() is not None
    assert number_in(engine.held) == 1


def test_reading_never_grows_or_changes_a_file(tmp_path: Path) -> None:
    write(tmp_path, 1)
    data = slot_of(tmp_path) / "data.0"
    cut(data, 5000)
    before = data.read_bytes()
    with Follower(url(tmp_path), Holder()) as follower, pytest.raises(IntegrityError):
        follower.poll()
    assert data.read_bytes() == before


def test_skip_leaves_a_bad_version_out_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    flip(slot_of(tmp_path) / "data.0")
    engine = Holder()
    with Follower(url(tmp_path), engine, on_failure="report") as follower:
        assert [follower.poll() for _ in range(3)] == [None] * 3
        assert len(caplog.records) == 1
        write(tmp_path, 2)
        followed = follower.poll()
    assert followed is not None
    assert number_in(engine.held) == followed.version == 2


def test_what_an_engine_gets_is_its_own(tmp_path: Path) -> None:
    """An engine that writes into what it is given changes nothing for others, nor do later versions change it."""
    kept: list[torch.Tensor] = []

    class Scribbler(Holder):
        def load(self, tensors):  # type: ignore[no-untyped-def]
            found = dict(tensors)
            kept.append(found["t0"].clone())
            for tensor in found.values():
                tensor.mul_(7)

        def commit(self, version: WeightVersion) -> None:
            self.versions.append(version)

    engine = Holder()
    with Follower(url(tmp_path), Scribbler()) as scribbler, Follower(url(tmp_path), engine) as follower:
        for number in (1, 2, 3):
            write(tmp_path, number)
            assert scribbler.poll() is not None
            assert follower.poll() is not None
            assert number_in(engine.held) == number
    assert [int(tensor[0]) for tensor in kept] == [100, 200, 300]


# --- engines that can't take it ---


class Module(torch.nn.Module):
    def __init__(self, numel: int = 6000, num_tensors: int = 12) -> None:
        super().__init__()
        for index in range(num_tensors):
            self.register_buffer(f"t{index}", torch.zeros(numel, dtype=torch.int32))


def test_a_model_of_other_shapes_is_refused_with_every_name(tmp_path: Path) -> None:
    write(tmp_path, 1)
    module = Module(numel=6001)
    with Follower(url(tmp_path), ModuleEngine(module)) as follower:
        with pytest.raises(IncompatibleWeightsError) as caught:
            follower.poll()
        assert len(caught.value.problems) == 12
    assert all(not buffer.any() for buffer in module.buffers())


def test_a_load_that_fails_is_undone(tmp_path: Path) -> None:
    module = Module()

    class Failing(ModuleEngine):
        fails = False

        def commit(self, version: WeightVersion) -> None:
            if self.fails:
                raise RuntimeError("no")
            super().commit(version)

    engine, gate = Failing(module), Gate()
    with Follower(url(tmp_path), engine, gate=gate, undo=True) as follower:
        write(tmp_path, 1)
        assert follower.poll() is not None
        write(tmp_path, 2)
        engine.fails = True
        with pytest.raises(InstallError):
            follower.poll()
        assert (number_in(dict(module.named_buffers())), gate.torn, gate.version) == (1, "", WeightVersion(RUN, 1))
        engine.fails = False
        assert follower.poll() is not None
        assert number_in(dict(module.named_buffers())) == 2


def test_without_an_undo_the_engine_is_torn_until_a_version_heals_it(tmp_path: Path) -> None:
    class Failing(Holder):
        fails = True

        def commit(self, version: WeightVersion) -> None:
            if self.fails:
                raise RuntimeError("no")
            super().commit(version)

    engine = Failing()
    write(tmp_path, 1)
    with Follower(url(tmp_path), engine, on_failure="report") as follower:
        assert follower.poll() is None
        assert follower.gate.torn
        engine.fails = False
        write(tmp_path, 2)
        assert follower.poll() is not None
        assert not follower.gate.torn


# --- other ways of asking ---


def test_a_store_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    with Follower(url(tmp_path / "later"), Holder()) as follower:
        assert follower.poll() is None
        assert follower.wait(0.01) is None
        write(tmp_path / "later", 1)
        assert follower.poll() is not None


def test_follow_ends_at_its_deadline_with_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1)
    versions = follow(url(tmp_path), Holder(), deadline_seconds=0.05)
    assert next(versions).version == 1
    with pytest.raises(PeerTimeoutError, match="no new version"):
        next(versions)


def test_only_a_store_can_be_followed() -> None:
    with pytest.raises((ValueError, WeightcastError, TypeError)):
        Follower("ipc://", Holder())


def test_a_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    """Its digest fits, so it was made on purpose; the checks of the wire format hold."""
    write(tmp_path, 1)
    slot = slot_of(tmp_path)
    manifest = manifest_of(model(0))
    lie = msgspec.json.encode(msgspec.structs.replace(manifest, buckets=(1 << 60,) * len(manifest.buckets)))
    (slot / "manifest.json").write_bytes(lie)
    commit = StoreReader(DirectoryAddress(tmp_path)).commit()
    assert commit is not None
    stored = msgspec.structs.replace(commit.newest, manifest_digest=hashlib.sha256(lie).hexdigest())
    (slot / "seal.json").write_bytes(seal(Commit(FORMAT, stored)))
    (tmp_path / "current.json").write_bytes(seal(Commit(FORMAT, stored)))
    with Follower(url(tmp_path), Holder()) as follower, pytest.raises(ManifestError, match=r"\[size\]"):
        follower.poll()


def test_a_pointer_that_counts_other_buckets_than_its_manifest_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    commit = StoreReader(DirectoryAddress(tmp_path)).commit()
    assert commit is not None
    stored = msgspec.structs.replace(commit.newest, num_buckets=commit.newest.num_buckets + 1)
    (slot_of(tmp_path) / "seal.json").write_bytes(seal(Commit(FORMAT, stored)))
    (tmp_path / "current.json").write_bytes(seal(Commit(FORMAT, stored)))
    with Follower(url(tmp_path), Holder()) as follower, pytest.raises(IntegrityError, match="the pointer says"):
        follower.poll()


def test_a_version_without_all_of_its_data_is_closed(tmp_path: Path) -> None:
    write(tmp_path, 1, options="?num_threads=2")
    slot, reader = slot_of(tmp_path), StoreReader(DirectoryAddress(tmp_path))
    (slot / files.data_name(1)).unlink()
    commit = reader.commit()
    assert commit is not None
    with pytest.raises(IntegrityError) as caught:
        reader.pin(commit.newest.version)
    # While the error is kept, whose traceback refers to what was opened.
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    assert not [path for path in opened if path.startswith(str(slot))], caught
    assert locks.readers(slot / files.PINS) == []


def test_a_file_that_can_not_be_replaced_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "current.json"
    path.write_bytes(b"former")

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(PermissionError):
        files.replace_file(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"former"


def test_a_file_that_is_stale_when_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "current.json", os.open
    path.write_bytes(b"{}")
    errors = [OSError(errno.ESTALE, "Stale file handle", str(path))]

    def stale(*args: Any) -> int:
        if errors:
            raise errors.pop()
        return opened(*args)

    monkeypatch.setattr(files.os, "open", stale)
    assert files.read_file(path, 100) == b"{}"
    errors += [OSError(errno.ESTALE, "Stale file handle", str(path)) for _ in range(100)]
    with pytest.raises(IntegrityError, match="was replaced"):
        files.read_file(path, 100)


def test_a_full_disk_is_the_error_though_nothing_can_be_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> Any:
        def raise_it(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        return raise_it

    monkeypatch.setattr(files.os, "replace", fail(errno.ENOSPC))
    monkeypatch.setattr(Path, "unlink", fail(errno.EIO))
    with pytest.raises(InsufficientMemoryError, match="no room for"):
        files.replace_file(tmp_path / "current.json", b"{}")
