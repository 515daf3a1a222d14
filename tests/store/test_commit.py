"""When a version becomes a store's newest: once the publish has succeeded, and under a number that readers take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from core.direct import DirectEngine, RecordingEngine, fleet
from safetensors.torch import load_file
from store.store_kit import LONG_SECONDS, OTHER_RUN, RUN, Holder, manifest_of, model, number_in, send, url, write

from weightcast import TensorSource, cli
from weightcast.cli import exits
from weightcast.errors import InstallError, IntegrityError, PublishError, StaleVersionError, UpdateAbortedError
from weightcast.format.bucket import Layout
from weightcast.format.manifest import MAX_VERSION, TensorSpec, WeightVersion
from weightcast.serving.follower import Follower
from weightcast.sources.store import StoreSource
from weightcast.store.address import DirectoryAddress
from weightcast.store.reading import StoreReader, pinned
from weightcast.store.records import FORMAT, Commit, seal
from weightcast.testing.transport_kit import pack_and_send
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.packer import Packer, tiling
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.relay import Relay
from weightcast.trainer.rollback import rollback
from weightcast.transports.store import StoreReceiver, StoreSender

INSTALLS: tuple[Literal["staged", "streaming"], ...] = ("staged", "streaming")


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> None:
    """Nothing is left open."""


def newest(directory: Path) -> WeightVersion:
    commit = StoreReader(DirectoryAddress(directory)).commit()
    assert commit is not None
    return commit.newest.version


def number_held(directory: Path) -> int:
    """What the newest version's values say."""
    return number_in({name: held[0][1] for name, held in StoreSource(url(directory)).regions().items()})


def fill(source: TensorSource, number: int) -> None:
    for name, tensor in model(number).items():
        source.tensors[name].copy_(tensor)


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]


def test_a_ctrl_c_right_after_the_commit_leaves_a_whole_version_and_a_writer_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, rename = TensorSource(model(1)), os.replace

    def interrupted(path: Path, target: Path) -> None:
        rename(path, target)
        if target.name == "current.json":
            raise KeyboardInterrupt

    with Publisher(source, transport=url(tmp_path)) as publisher:
        monkeypatch.setattr("weightcast.store.writing.os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(5)
        monkeypatch.undo()
        assert newest(tmp_path).number == 5
        assert number_held(tmp_path) == 1
        fill(source, 2)
        assert publisher.publish().version == 6
        assert number_held(tmp_path) == 2


# --- what engines say of it ---


@pytest.mark.parametrize("install", INSTALLS)
@pytest.mark.parametrize("options", ["", "?num_threads=3"])
def test_what_every_engine_refused_is_not_the_newest(tmp_path: Path, install: str, options: str) -> None:
    """Half a model: the engines want a tensor that the trainer's source lacks."""
    source = TensorSource(model(1))
    engines = [RecordingEngine(), RecordingEngine()]
    follower_engine = Holder()
    with (
        fleet(source, *engines, transport=url(tmp_path, options), install=install) as (publisher, _),
        Follower(url(tmp_path, options), follower_engine) as follower,
    ):
        publisher.publish()
        assert follower.poll() is not None
        fill(source, 2)
        for engine in engines:
            engine._specs = specs_of(model(0, 13))
        for number in (1, 2, 3):
            with pytest.raises(PublishError, match="missing tensor 't12'"):
                publisher.publish()
            assert publisher.version == number
            assert newest(tmp_path) == WeightVersion(publisher.run, 0)
            assert follower.poll() is None
        for engine in engines:
            engine._specs = None
        report = publisher.publish()
        assert (report.version, newest(tmp_path)) == (4, WeightVersion(publisher.run, 4))
        assert follower.poll() is not None
        assert number_in(follower_engine.held) == 2
    assert {path.name for path in (tmp_path / "slots").iterdir()} == {"0", "1"}
    assert not (tmp_path / "next.json").exists()


@pytest.mark.parametrize("harm", ["another's", "garbage", "a link", "lost"])
def test_a_future_pointer_that_is_not_ours_any_more_is_not_committed(tmp_path: Path, harm: str) -> None:
    """The writer's lock was lost, say, and another's version is sealed, which its engines may refuse."""
    source, engine, path = TensorSource(model(1)), RecordingEngine(), tmp_path / "next.json"
    commit = engine.commit

    def spoil(version: WeightVersion) -> None:
        commit(version)
        ours = path.read_bytes()
        path.unlink()
        if harm == "a link":
            path.symlink_to(tmp_path / "current.json")
        elif harm != "lost":
            path.write_bytes(b"no record" if harm == "garbage" else ours.replace(b'"slot":1', b'"slot":0'))

    with fleet(source, engine, transport=url(tmp_path)) as (publisher, _):
        publisher.publish()
        engine.commit = spoil  # type: ignore[method-assign]
        with pytest.raises((StaleVersionError, IntegrityError), match=r"next\.json"):
            publisher.publish()
        assert newest(tmp_path) == WeightVersion(publisher.run, 0)
        assert number_held(tmp_path) == 1
    with fleet(source, RecordingEngine(), transport=url(tmp_path)) as (publisher, _):
        fill(source, 5)
        publisher.publish()
    assert number_held(tmp_path) == 5


def test_a_slow_reader_of_the_oldest_slot_does_not_cost_the_version_before(tmp_path: Path) -> None:
    source, engine, options = TensorSource(model(0)), RecordingEngine(), "?num_slots=3"
    with fleet(source, engine, transport=url(tmp_path, options)) as (publisher, _):
        fill(source, 1)
        publisher.publish()
        with pinned(DirectoryAddress(tmp_path), label="slow reader"):
            for number in (2, 3):
                fill(source, number)
                publisher.publish()
            engine.fail_after = 2
            fill(source, 4)
            with pytest.raises(PublishError):
                publisher.publish()
    rollback(url(tmp_path, options))
    assert number_held(tmp_path) == 2


@pytest.mark.parametrize("on_failure", ["raise", "report"])
def test_what_no_engine_installed_is_not_the_newest_and_its_slot_is_free(tmp_path: Path, on_failure: Any) -> None:
    source, engine = TensorSource(model(1)), RecordingEngine()
    with fleet(source, engine, transport=url(tmp_path), on_failure=on_failure) as (publisher, _):
        publisher.publish()
        engine.fail_after = 3
        for number in (2, 3, 4):
            fill(source, number)
            if on_failure == "report":
                assert not publisher.publish().ok
            else:
                with pytest.raises(PublishError, match="told to fail"):
                    publisher.publish()
            assert newest(tmp_path) == WeightVersion(publisher.run, 0)
            assert number_held(tmp_path) == 1
            assert not (tmp_path / "next.json").exists()
        engine.fail_after = None
        assert publisher.publish().version == 4
        assert number_held(tmp_path) == 4
    assert {path.name for path in (tmp_path / "slots").iterdir()} == {"0", "1"}


@pytest.mark.parametrize("on_failure", ["raise", "report"])
def test_one_engine_that_installed_it_makes_it_the_newest(tmp_path: Path, on_failure: Any) -> None:
    source, good, bad = TensorSource(model(1)), RecordingEngine(), RecordingEngine(specs_of(model(0, 13)))
    with fleet(source, good, bad, transport=url(tmp_path), on_failure=on_failure) as (publisher, _):
        if on_failure == "report":
            assert not publisher.publish().ok
        else:
            with pytest.raises(PublishError, match="engine-1"):
                publisher.publish()
        assert newest(tmp_path) == WeightVersion(publisher.run, 0)
        assert number_in(good.held) == number_held(tmp_path) == 1


@pytest.mark.parametrize("install", INSTALLS)
def test_the_pointer_moves_after_the_engines_have_read_and_installed(tmp_path: Path, install: str) -> None:
    seen: list[tuple[int, bool]] = []
    reader = StoreReader(DirectoryAddress(tmp_path))

    class Looking(RecordingEngine):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load(tensors)
            self.look()

        def commit(self, version: WeightVersion) -> None:
            super().commit(version)
            self.look()

        def look(self) -> None:
            commit = reader.commit()
            with Follower(url(tmp_path), Holder()) as follower:
                seen.append((-1 if commit is None else commit.newest.number, follower.poll() is None))

    source, engine = TensorSource(model(1)), Looking()
    with fleet(source, engine, transport=url(tmp_path), install=install) as (publisher, _):
        publisher.publish()
        assert set(seen) == {(-1, True)}
        assert newest(tmp_path).number == 0
        seen.clear()
        fill(source, 2)
        publisher.publish()
        assert set(seen) == {(0, False)}
        assert newest(tmp_path).number == 1
        assert number_in(engine.held) == 2


def test_an_interrupted_publish_is_not_the_newest(tmp_path: Path) -> None:
    class Interrupted(RecordingEngine):
        is_interrupted = False

        def commit(self, version: WeightVersion) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            super().commit(version)

    source, engine = TensorSource(model(1)), Interrupted()
    with fleet(source, engine, transport=url(tmp_path)) as (publisher, _):
        publisher.publish()
        engine.is_interrupted = True
        fill(source, 2)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish()
        assert newest(tmp_path).number == 0
        assert not (tmp_path / "next.json").exists()
        engine.is_interrupted = False
        fill(source, 3)
        assert publisher.publish().version == 2
        assert number_held(tmp_path) == 3


DYING = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from core.direct import RecordingEngine, fleet
    from weightcast import TensorSource
    from store.store_kit import model, url

    class Killing(RecordingEngine):
        def commit(self, version):
            if version.number:
                os.kill(os.getpid(), signal.SIGKILL)

    with fleet(TensorSource(model(1)), Killing(), transport=url(Path({directory!r}))) as (publisher, _):
        publisher.publish()
        publisher.publish()
"""


def test_a_trainer_that_dies_before_the_pointer_leaves_the_version_before(tmp_path: Path) -> None:
    """The number that an engine may serve is not used again, and what was left is cleared away."""
    program = textwrap.dedent(DYING).format(tests=str(Path(__file__).parents[1]), directory=str(tmp_path))
    died = subprocess.run([sys.executable, "-c", program], timeout=2 * LONG_SECONDS, check=False)
    assert died.returncode == -signal.SIGKILL
    assert (tmp_path / "next.json").exists()
    assert newest(tmp_path).number == 0
    engine = Holder()
    with Follower(url(tmp_path), engine) as follower:
        followed = follower.poll()
        assert followed is not None
        assert followed.version == 0
        with Publisher(TensorSource(model(3)), transport=url(tmp_path)) as publisher:
            assert publisher.publish().version == 2
        assert not (tmp_path / "next.json").exists()
        assert follower.poll() is not None
    assert number_in(engine.held) == 3
    assert {path.name for path in (tmp_path / "slots").iterdir()} == {"0", "1"}


def test_numbers_that_were_given_up_do_not_come_again(tmp_path: Path) -> None:
    picky = RecordingEngine(specs_of(model(0, 13)))
    with fleet(TensorSource(model(1)), picky, transport=url(tmp_path)) as (it, _), pytest.raises(PublishError):
        it.publish(6)
    # Nothing of that one was ever written; of this one it is.
    bad = RecordingEngine()
    bad.fail_after = 0
    with fleet(TensorSource(model(1)), bad, transport=url(tmp_path)) as (it, _), pytest.raises(PublishError):
        it.publish(7)
    assert StoreReader(DirectoryAddress(tmp_path)).commit() is None
    with Publisher(TensorSource(model(1)), transport=url(tmp_path)) as it:
        assert it.publish().version == 8


def test_a_relay_into_a_store_passes_on_what_its_engines_took(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    engine = RecordingEngine(specs_of(model(0, 13)))
    client = DirectEngine("engine", engine)
    relay = Relay([client], transport=url(second), options=PublishOptions(deadline_seconds=10.0))
    write(first, 4)
    try:
        with Follower(url(first), relay) as follower:
            with pytest.raises((PublishError, InstallError)):
                follower.poll()
            assert StoreReader(DirectoryAddress(second)).commit() is None
            engine._specs = None
            assert follower.poll() is not None
            assert newest(second).number == 4
            assert number_held(second) == 4
    finally:
        relay.close()
        client.close()


def test_export_writes_what_was_taken(tmp_path: Path) -> None:
    source, engine = TensorSource(model(1)), RecordingEngine()
    with fleet(source, engine, transport=url(tmp_path / "store")) as (publisher, _):
        publisher.publish()
        engine._specs = specs_of(model(0, 13))
        fill(source, 2)
        with pytest.raises(PublishError):
            publisher.publish()
    assert cli.main(["export", url(tmp_path / "store"), str(tmp_path / "out"), "--json"]) == exits.OK
    assert number_in(load_file(tmp_path / "out" / "model.safetensors")) == 1


# --- the sender alone ---


@pytest.mark.parametrize("ending", ["abort", "close", "open"])
def test_a_sealed_version_that_is_not_committed_is_given_up(tmp_path: Path, ending: str) -> None:
    write(tmp_path, 1)
    manifest, version = manifest_of(model(0)), WeightVersion(OTHER_RUN, 2)
    sender = StoreSender(url(tmp_path), run=OTHER_RUN)
    receiver = StoreReceiver(url(tmp_path), peer="engine", run=OTHER_RUN)
    try:
        receiver.open(manifest, version, staged=True)
        sender.open(manifest, version, peers=["engine"], staged=True)
        with pytest.raises(UpdateAbortedError, match="there is no sealed version to commit"):
            sender.commit()
        packer = Packer(Layout(manifest), tiling(manifest.tensors, TensorSource(model(2)).regions()))
        for index in range(len(manifest.buckets)):
            pack_and_send(sender, packer, manifest, version, index)
        assert len(list(receiver)) == len(manifest.buckets)
        receiver.end()
        assert newest(tmp_path) == WeightVersion(RUN, 1)
        match ending:
            case "abort":
                sender.abort("changed my mind")
            case "close":
                sender.close()
            case "open":
                sender.open(manifest, WeightVersion(OTHER_RUN, 3), peers=[], staged=True)
        assert newest(tmp_path) == WeightVersion(RUN, 1)
        assert not (tmp_path / "next.json").exists()
        assert StoreReader(DirectoryAddress(tmp_path)).pin(version) is None
        if ending != "close":
            with pytest.raises(UpdateAbortedError, match="there is no sealed version to commit"):
                sender.commit()
            send(sender, manifest, WeightVersion(OTHER_RUN, 4), model(4))
            assert number_held(tmp_path) == 4
    finally:
        receiver.close()
        sender.close()


# --- the end of the numbers ---


def test_at_the_last_number_a_run_ends_and_the_store_goes_on(tmp_path: Path) -> None:
    with Publisher(TensorSource(model(1)), transport=url(tmp_path)) as publisher:
        assert publisher.publish(MAX_VERSION).version == MAX_VERSION
        before = (tmp_path / "current.json").read_bytes()
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"no version number is left above {MAX_VERSION}.*another publisher"):
                publisher.publish()
        assert publisher.version == MAX_VERSION
        assert (tmp_path / "current.json").read_bytes() == before
        assert number_held(tmp_path) == 1
    engine = Holder()
    with Follower(url(tmp_path), engine) as follower:
        assert follower.poll().version == MAX_VERSION  # type: ignore[union-attr]
        with Publisher(TensorSource(model(2)), transport=url(tmp_path)) as publisher:
            assert [publisher.publish().version for _ in range(2)] == [0, 1]
        assert follower.poll().version == 1  # type: ignore[union-attr]
    assert number_in(engine.held) == 2


def test_rollback_at_the_last_number(tmp_path: Path) -> None:
    source = TensorSource(model(1))
    with Publisher(source, transport=url(tmp_path)) as publisher:
        publisher.publish(4)
        fill(source, 2)
        publisher.publish(MAX_VERSION)
    assert rollback(url(tmp_path)).version == 0
    assert number_held(tmp_path) == 1


@pytest.mark.parametrize(
    ("version", "kind"),
    [(MAX_VERSION + 1, ValueError), (1 << 64, ValueError), (1 << 200, ValueError), (-1, ValueError), (5.0, TypeError),
     ("5", TypeError)],
)  # fmt: skip
def test_a_number_beyond_the_limits_is_refused_before_anything_is_written(
    tmp_path: Path, version: Any, kind: type[Exception]
) -> None:
    store = tmp_path / "store"
    with Publisher(TensorSource(model(1)), transport=url(store)) as publisher:
        with pytest.raises(kind):
            publisher.publish(version)
        assert not store.exists()
        assert publisher.publish(np.int64(3)).version == 3  # type: ignore[arg-type]
    assert newest(store).number == 3


@pytest.mark.parametrize("number", [MAX_VERSION + 1, -1])
def test_a_sender_writes_no_number_that_readers_refuse(tmp_path: Path, number: int) -> None:
    write(tmp_path, 1)
    sender = StoreSender(url(tmp_path), run=RUN)
    try:
        with pytest.raises(ValueError, match="from 0 to"):
            sender.open(manifest_of(model(0)), WeightVersion(RUN, number), peers=[], staged=True)
    finally:
        sender.close()
    assert number_held(tmp_path) == 1


def test_a_store_that_holds_a_number_beyond_the_limit_says_how_to_go_on(tmp_path: Path) -> None:
    write(tmp_path, 1)
    commit = StoreReader(DirectoryAddress(tmp_path)).commit()
    assert commit is not None
    beyond = msgspec.structs.replace(commit.newest, number=MAX_VERSION + 1)
    (tmp_path / "current.json").write_bytes(seal(Commit(FORMAT, beyond)))
    for attempt in (lambda: write(tmp_path, 2), lambda: StoreSource(url(tmp_path))):
        with pytest.raises(Exception, match=r"current\.json .*remove this file, and publish again"):
            attempt()
    (tmp_path / "current.json").unlink()
    write(tmp_path, 2)
    assert number_held(tmp_path) == 2


def test_a_version_that_its_writer_sealed_and_did_not_commit_is_never_found_later(tmp_path: Path) -> None:
    write(tmp_path, 1, options="?num_slots=4")
    ended = textwrap.dedent(f"""
        import os, torch
        from weightcast import Publisher, TensorSource
        from weightcast.store.writing import StoreWriter
        StoreWriter.commit = lambda self: os._exit(9)
        source = TensorSource({{"a": torch.ones(4)}})
        Publisher(source, transport={url(tmp_path, "?num_slots=4")!r}).publish(2)
    """)
    assert subprocess.run([sys.executable, "-c", ended], timeout=LONG_SECONDS).returncode == 9
    write(tmp_path, 3, run=OTHER_RUN, options="?num_slots=4")
    reader = StoreReader(DirectoryAddress(tmp_path))
    assert [stored.number for stored in reader.complete_versions()] == [3, 1]
    assert reader.pin_complete(lambda stored: stored.number == 2) is None
