"""Real processes over one store: free-running, killed at any moment, stopped, out of space."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stopping import send_signal
from store.store_kit import (
    LONG_SECONDS,
    OTHER_RUN,
    RUN,
    Holder,
    await_ready,
    can_mount,
    end,
    launched,
    lines_of,
    manifest_of,
    model,
    number_in,
    send,
    small_filesystem,
    url,
    write,
)

from weightcast.errors import EngineBusyError, InsufficientMemoryError, PeerTimeoutError
from weightcast.format.manifest import WeightVersion
from weightcast.serving.follower import Follower
from weightcast.sources.store import StoreSource
from weightcast.store import files, reading
from weightcast.transports.store import StoreSender

SECONDS = float(os.environ.get("WEIGHTCAST_STORE_SECONDS", "2"))
"""How long writers and readers run freely; the long run is done by hand."""

LONGEST_LIFE_SECONDS = 0.006
"""How long a writer writes on after its last word, before it is killed; a version takes it less."""

NUM_FULL_DISKS = 50


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> None:
    """Nothing is left open."""


@pytest.fixture
def children() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def launch(children: contextlib.ExitStack, role: str, *args: object) -> subprocess.Popen[str]:
    process = launched(role, *args)
    children.callback(end, process)
    return process


def start(children: contextlib.ExitStack, role: str, *args: object) -> subprocess.Popen[str]:
    process = launch(children, role, *args)
    await_ready(process)
    return process


@pytest.fixture(params=["tmpfs", "disk"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    shared = Path("/dev/shm") / f"store-tests-{os.getpid()}"
    shared.mkdir()
    try:
        yield shared
    finally:
        shutil.rmtree(shared)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("directory", "num_threads"),
    [
        ("tmpfs", 1),
        ("disk", 4),
        pytest.param("tmpfs", 4, marks=pytest.mark.full),
        pytest.param("disk", 1, marks=pytest.mark.full),
    ],
    indirect=["directory"],
)
def test_every_read_of_a_free_running_writer_is_one_whole_version(
    directory: Path, num_threads: int, children: contextlib.ExitStack
) -> None:
    options = f"?num_threads={num_threads}"
    followers = [launch(children, "follow", directory, options) for _ in range(4)]
    for follower in followers:
        await_ready(follower)
    writer = start(children, "write", directory, options, RUN, 0, SECONDS)
    num_written = sum(1 for _ in lines_of(writer))
    assert writer.wait(LONG_SECONDS) == 0
    num_read = []
    for follower in followers:
        out, _ = follower.communicate("stop\n", timeout=LONG_SECONDS)
        assert follower.returncode == 0
        num_read.append(len(out.split()))
    print(f"{num_written} versions written, {num_read} read")
    assert num_written > 10
    assert all(num_read)


@pytest.mark.parametrize(
    ("directory", "num_kills"),
    [
        ("tmpfs", 10),
        ("disk", 10),
        pytest.param("disk", 80, marks=pytest.mark.cluster),
        pytest.param("disk", 200, marks=[pytest.mark.cluster, pytest.mark.full]),
        pytest.param("tmpfs", 200, marks=[pytest.mark.cluster, pytest.mark.full]),
    ],
    indirect=["directory"],
)
def test_the_last_committed_version_outlives_a_writer_killed_at_any_moment(
    directory: Path, num_kills: int, children: contextlib.ExitStack
) -> None:
    first, last_read, moments = 0, -1, random.Random(num_kills)
    engine, delay = Holder(), threading.Event()
    writers = start(children, "writers", directory, "")
    assert writers.stdin is not None
    lines = lines_of(writers)
    with Follower(url(directory), engine) as follower:
        for attempt in range(num_kills):
            print(f"{attempt:032x} {first}", file=writers.stdin, flush=True)
            pid = int(next(lines).removeprefix("pid "))
            assert next(lines) == "ready"
            committed = first - 1
            for line in itertools.islice(lines, 1 + attempt % 3):
                committed = int(line)
            delay.wait(moments.uniform(0, LONGEST_LIFE_SECONDS))
            os.kill(pid, signal.SIGKILL)
            # What it said before it died counts too.
            committed = max([committed, *(int(line) for line in itertools.takewhile(str.isdigit, lines))])
            follower.poll()
            found = number_in(engine.held)
            # It may have died between a commit and saying so.
            assert found in (committed, committed + 1)
            assert found > last_read
            first, last_read = found + 1, found
    write(directory, first, run=OTHER_RUN)
    names = {path.name for path in directory.rglob("*") if path.is_file()}
    assert names <= {"current.json", "writer.json", "writer.lock", "seal.json", "manifest.json", "pins", "data.0"}


def test_a_killed_reader_holds_nothing(tmp_path: Path, children: contextlib.ExitStack) -> None:
    write(tmp_path, 1)
    sender = StoreSender(url(tmp_path, "?max_slots=2"), run=OTHER_RUN, deadline_seconds=0.2)
    children.callback(sender.close)
    reader = start(children, "hold", tmp_path, "engine-7")
    manifest = manifest_of(model(0))
    send(sender, manifest, WeightVersion(OTHER_RUN, 2), model(2))
    with pytest.raises(PeerTimeoutError, match=rf"engine-7 \(pid {reader.pid} on "):
        send(sender, manifest, WeightVersion(OTHER_RUN, 3), model(3))
    reader.kill()
    reader.wait(LONG_SECONDS)
    send(sender, manifest, WeightVersion(OTHER_RUN, 3), model(3))
    assert StoreSource(url(tmp_path)).version.number == 3


@pytest.mark.cluster
def test_a_stopped_reader_makes_a_writer_grow_and_then_is_named(tmp_path: Path, children: contextlib.ExitStack) -> None:
    sender = StoreSender(url(tmp_path, "?max_slots=3"), run=RUN, deadline_seconds=0.2)
    children.callback(sender.close)
    manifest = manifest_of(model(0))
    readers = []
    for number in (1, 2):
        send(sender, manifest, WeightVersion(RUN, number), model(number))
        readers.append(start(children, "hold", tmp_path, f"engine-{number}"))
        send_signal(readers[-1].pid, signal.SIGSTOP)
    send(sender, manifest, WeightVersion(RUN, 3), model(3))
    assert len(list((tmp_path / "slots").iterdir())) == 3
    with pytest.raises(PeerTimeoutError, match=r"engine-1 .*engine-2 "):
        send(sender, manifest, WeightVersion(RUN, 4), model(4))
    readers[0].send_signal(signal.SIGCONT)
    readers[0].communicate("\n", timeout=LONG_SECONDS)
    send(sender, manifest, WeightVersion(RUN, 5), model(5))
    assert StoreSource(url(tmp_path)).version.number == 5


def test_two_processes_can_not_both_write(tmp_path: Path, children: contextlib.ExitStack) -> None:
    writer = start(children, "write", tmp_path, "", RUN, 0, 60)
    next(lines_of(writer))
    with pytest.raises(EngineBusyError, match=rf"run {RUN} \(pid {writer.pid} on "):
        StoreSender(url(tmp_path), run=OTHER_RUN)
    writer.kill()
    writer.wait(LONG_SECONDS)
    write(tmp_path, 0, run=OTHER_RUN)


def test_a_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """As a DataLoader's worker does, it lives on when the trainer has gone."""
    sender = StoreSender(url(tmp_path), run=RUN)
    ready, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        sender.close()
        write(tmp_path, 1, run=OTHER_RUN)
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(pid, 0)
        for descriptor in (*ready, *go_on):
            os.close(descriptor)


# --- no room ---


@pytest.mark.skipif(not can_mount(), reason="mounting a small filesystem needs root")
@pytest.mark.cluster
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_full_disk_is_an_error_and_the_version_before_stays(tmp_path: Path, num_threads: int) -> None:
    place = tmp_path / "small"
    size = manifest_of(model(0)).num_bytes
    with small_filesystem(place, 3 * size):
        store = place / "store"
        options = f"?num_threads={num_threads}"
        write(store, 1, options=options)
        filler, outcomes = place / "filler", set()
        for keep in range(0, 2 * size, 2 * size // (NUM_FULL_DISKS - 1)):
            filler.unlink(missing_ok=True)
            free = os.statvfs(place).f_bavail * os.statvfs(place).f_bsize
            filler.write_bytes(b"x" * max(0, free - keep))
            number = StoreSource(url(store)).version.number
            has_failed = False
            try:
                write(store, number + 1, options=options)
            except InsufficientMemoryError:
                has_failed = True
            found = StoreSource(url(store))
            assert found.version.number == number + (not has_failed)
            outcomes.add(has_failed)
            number_in({name: held[0][1] for name, held in found.regions().items()})
        assert outcomes == {True, False}
        filler.unlink()
        write(store, 100, options=options)
        assert StoreSource(url(store)).version.number == 100


def test_a_limit_on_file_sizes_is_an_error_too(tmp_path: Path) -> None:
    """In a child, whose limit it is."""
    write(tmp_path, 1)
    script = (
        "import resource, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from pathlib import Path\n"
        "from store.store_kit import write\n"
        "from weightcast.errors import InsufficientMemoryError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        f"    write(Path({str(tmp_path)!r}), 2)\n"
        "except InsufficientMemoryError as exc:\n"
        "    print('refused:', exc)\n"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert outcome.stdout.startswith("refused: no room for "), outcome
    assert StoreSource(url(tmp_path)).version.number == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


# --- speed ---


def test_a_poll_without_news_reads_the_pointer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    records: list[str] = []

    def noted(storage: Any, name: str, kind: Any) -> Any:
        records.append(name)
        return read_record(storage, name, kind)

    read_record = reading.read_record
    with Follower(url(tmp_path), Holder()) as follower:
        follower.poll()
        monkeypatch.setattr(reading, "read_record", noted)
        assert follower.poll() is None
    assert records == [files.POINTER]


def test_an_idle_wait_backs_off(tmp_path: Path) -> None:
    """It starts at a millisecond and comes to a quarter of a second."""
    pauses: list[float] = []

    class Stop(threading.Event):
        """Waits no time, and is set after twelve pauses."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            if len(pauses) == 12:
                self.set()
            return self.is_set()

    write(tmp_path, 1)
    with Follower(url(tmp_path), Holder()) as follower:
        follower.poll()
        assert follower.wait(600.0, stop=Stop()) is None
    assert pauses == [min(0.001 * 2**number, 0.25) for number in range(12)]
