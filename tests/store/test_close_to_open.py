"""A store over a filesystem that shows another host's changes as late as an NFS client may. Needs FUSE and root.

What this leaves unproven: a real server's restarts and lease losses, and kernels' own NFS clients.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store.store_kit import (
    LONG_SECONDS,
    OTHER_RUN,
    RUN,
    Holder,
    begin_shared,
    child,
    end,
    lines_of,
    manifest_of,
    model,
    number_in,
    send,
    send_origin,
    two_origins,
    url,
    write,
)

from weightcast.errors import EngineBusyError, PeerTimeoutError
from weightcast.format.manifest import WeightVersion
from weightcast.host.deadline import Deadline
from weightcast.serving.follower import Follower
from weightcast.store.address import DirectoryAddress
from weightcast.store.reading import pinned
from weightcast.transports.store import JoinedStoreSender, StoreSender

LATE_SECONDS = 0.3
Hosts = tuple[Path, Path]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="needs /dev/fuse"),
]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """One directory as two hosts see it."""
    try:
        importlib.import_module("mfusepy")
    except (ImportError, OSError) as exc:
        end_test = pytest.fail if os.environ.get("CI") else pytest.skip
        end_test(f"FUSE is not here ({exc}): install Debian's package fuse3, and mfusepy")
    (tmp_path / "server").mkdir()
    mounts = tmp_path / "trainer", tmp_path / "engine"
    with contextlib.ExitStack() as stack:
        for mount in mounts:
            stack.enter_context(mounted(tmp_path / "server", mount))
        yield mounts


@contextlib.contextmanager
def mounted(backing: Path, mount: Path) -> Iterator[None]:
    mount.mkdir()
    script = Path(__file__).with_name("close_to_open.py")
    process = subprocess.Popen([sys.executable, str(script), str(backing), str(mount), str(LATE_SECONDS)])
    try:
        for _ in Deadline(LONG_SECONDS).polls():
            if mount.is_mount() or process.poll() is not None:
                break
        if not mount.is_mount():
            pytest.skip("FUSE can't be mounted here")
        yield
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LONG_SECONDS)
        process.kill()
        process.wait()


def follow_to(follower: Follower, engine: Holder, number: int) -> None:
    """Until the engine holds this version, which its host may see late."""
    polls = (follower.poll() for _ in Deadline(LONG_SECONDS).polls())
    assert any(followed is None and engine.held and number_in(engine.held) == number for followed in polls)


@pytest.mark.parametrize("options", ["", "?num_threads=3"])
def test_versions_come_over_whole_and_in_order(hosts: Hosts, options: str) -> None:
    trainer, engine_host = hosts
    engine = Holder()
    writer = child("write", trainer / "w", options, RUN, 0, 2)
    try:
        with Follower(url(engine_host / "w", options), engine) as follower:
            found = []
            while writer.poll() is None or follower.poll() is not None or not found:
                followed = follower.wait(0.2)
                if followed is not None:
                    assert number_in(engine.held) == followed.version
                    found.append(followed.version)
            num_written = sum(1 for _ in lines_of(writer))
            follow_to(follower, engine, num_written - 1)
        assert found == sorted(set(found))
        assert len(found) > 1
    finally:
        end(writer)


def test_a_reader_on_another_host_is_never_overwritten(hosts: Hosts) -> None:
    trainer, engine_host = hosts
    sender = StoreSender(url(trainer / "w", "?max_slots=2"), run=RUN, deadline_seconds=0.2)
    try:
        manifest = manifest_of(model(0))
        send(sender, manifest, WeightVersion(RUN, 1), model(1))
        with pinned(DirectoryAddress(engine_host / "w"), label="far engine"):
            send(sender, manifest, WeightVersion(RUN, 2), model(2))
            with pytest.raises(PeerTimeoutError, match="slot 0"):
                send(sender, manifest, WeightVersion(RUN, 3), model(3))
        send(sender, manifest, WeightVersion(RUN, 4), model(4))
    finally:
        sender.close()


def test_a_second_writer_on_another_host_is_refused(hosts: Hosts) -> None:
    trainer, engine_host = hosts
    sender = StoreSender(url(trainer / "w"), run=RUN, deadline_seconds=1.0)
    try:
        send(sender, manifest_of(model(0)), WeightVersion(RUN, 1), model(1))
        with pytest.raises(EngineBusyError, match=RUN):
            StoreSender(url(engine_host / "w"), run=OTHER_RUN)
    finally:
        sender.close()
    write(engine_host / "w", 1, run=OTHER_RUN)


def test_a_version_before_that_is_seen_late_is_taken_whole_or_not(hosts: Hosts) -> None:
    """The engine's host believes names and attributes of slots that have been written twice since."""
    trainer, engine_host = hosts
    engine = Holder()
    with Follower(url(engine_host / "w"), engine) as follower:
        for number in range(1, 12):
            write(trainer / "w", number, run=f"{number:032x}")
            if follower.poll() is not None:
                assert number_in(engine.held) <= number
        follow_to(follower, engine, 11)


@pytest.mark.parametrize("options", ["", "?num_threads=2"])
def test_two_trainer_hosts_write_one_version(hosts: Hosts, options: str) -> None:
    """The second one sees new slots and files late, a follower there each version whole."""
    trainer, other_host = hosts
    manifest, engine = two_origins(), Holder()
    first = StoreSender(url(trainer / "w", options), run=RUN, deadline_seconds=LONG_SECONDS)
    second = JoinedStoreSender(url(other_host / "w", options), run=RUN, deadline_seconds=LONG_SECONDS)
    with (
        contextlib.closing(first),
        contextlib.closing(second),
        Follower(url(other_host / "w", options), engine) as follower,
    ):
        for number in range(1, 9):
            begin_shared(first, second, manifest, number)
            others = send_origin(second, manifest, 1, number)
            send_origin(first, manifest, 0, number)
            first.seal(others)
            first.commit()
            if follower.poll() is not None:
                assert number_in(engine.held) <= number
        follow_to(follower, engine, 8)


def test_a_slot_that_another_trainer_host_still_writes_is_not_taken(hosts: Hosts) -> None:
    trainer, other_host = hosts
    manifest, options = two_origins(), "?max_slots=2"
    first = StoreSender(url(trainer / "w", options), run=RUN, deadline_seconds=1.0)
    second = JoinedStoreSender(url(other_host / "w", options), run=RUN, deadline_seconds=LONG_SECONDS)
    with contextlib.closing(second):
        with contextlib.closing(first):
            send(first, manifest, WeightVersion(RUN, 1), model(1))
            begin_shared(first, second, manifest, 2)
        # The first one has ended; the second has not heard of it yet.
        next_one = StoreSender(url(trainer / "w", options), run=OTHER_RUN, deadline_seconds=0.2)
        with contextlib.closing(next_one):
            with pytest.raises(PeerTimeoutError, match="a trainer rank of an aborted publish holds slot 1"):
                send(next_one, manifest, WeightVersion(OTHER_RUN, 3), model(3))
            second.abort("its publisher has gone")
            send(next_one, manifest, WeightVersion(OTHER_RUN, 3), model(3))
    engine = Holder()
    with Follower(url(trainer / "w"), engine) as follower:
        assert follower.poll() is not None
    assert number_in(engine.held) == 3
