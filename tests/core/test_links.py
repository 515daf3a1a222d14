"""Links: one that can't be opened leaves nothing behind; one that the publisher ends is closed for the worker too; a
thread that waits reads by itself, and what nobody waits for is read, and beaten, by the link's own thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any

import pytest

from weightcast.errors import PeerDiedError
from weightcast.format.manifest import PROTOCOL
from weightcast.format.messages import Accepted, Heartbeat, Hello, ReleaseMemory
from weightcast.host.deadline import Deadline
from weightcast.links import link
from weightcast.links.link import Frames, LinkListener, ReadingCondition, WorkerLink, frame
from weightcast.testing.transport_kit import PATIENCE_SECONDS, RUN, Background


def test_a_hello_that_fails_closes_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(link, "connect", lambda address, timeout_seconds: ours)
    worker = WorkerLink("unix:@gone", lease_seconds=1.0, deadline_seconds=1.0)
    with contextlib.closing(worker), pytest.raises(PeerDiedError):
        worker.open(Hello("5a" * 16, "engine", 0, "s" * 64))
    assert ours.fileno() == -1


def test_a_link_that_the_publisher_ends_is_closed_at_once(leaves_nothing: None) -> None:
    """Not only with the listener, whose other links go on."""
    ended = threading.Event()
    with contextlib.closing(LinkListener(RUN)) as listener, _worker(listener, on_end=lambda reason: ended.set()):
        (publishers,) = listener.wait("engine", 1, PATIENCE_SECONDS)
        publishers.end("the test ends it")
        assert ended.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_worker_knows_whether_the_run_goes_on_without_it(leaves_nothing: None, goes_on: bool) -> None:
    """Also one that reads nothing until it is asked, and after the link has ended."""
    with contextlib.closing(LinkListener(RUN)) as listener, _worker(listener) as worker:
        (publishers,) = listener.wait("engine", 1, PATIENCE_SECONDS)
        assert not worker.is_dropped
        publishers.end("the test ends it", goes_on=goes_on)
        publishers.end("a second end changes nothing", goes_on=not goes_on)
        assert worker.is_dropped is goes_on
        assert worker.has_ended
    assert worker.is_dropped is goes_on


def test_a_worker_that_has_stopped_reading_still_learns_that_the_run_goes_on(leaves_nothing: None) -> None:
    """Though its socket's buffer is full."""
    with contextlib.closing(LinkListener(RUN)) as listener, _worker(listener) as worker:
        (publishers,) = listener.wait("engine", 1, PATIENCE_SECONDS)
        with worker.condition:  # so that nothing reads
            while publishers.put(frame(Heartbeat())):
                pass
            publishers.end("the test ends it", goes_on=True)
        assert worker.is_dropped


def test_strangers_keep_no_worker_out(leaves_nothing: None) -> None:
    with contextlib.closing(LinkListener(RUN, host="127.0.0.1")) as listener, contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            for _ in range(link._MAX_STRANGERS + 1)
        ]
        with _worker(listener):
            assert len(listener.wait("engine", 1, PATIENCE_SECONDS)) == 1
        strangers[0].settimeout(PATIENCE_SECONDS)
        assert strangers[0].recv(1) == b"", "the oldest one was let go"


def test_a_publisher_of_another_user_is_not_connected_to(leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    another = os.geteuid() + 1
    with contextlib.closing(LinkListener(RUN)) as listener:
        monkeypatch.setattr(os, "geteuid", lambda: another)
        with pytest.raises(PermissionError, match="the peer runs as user"):
            link.connect(listener.address, PATIENCE_SECONDS)


@pytest.fixture
def nobody_else_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a thread has waited, the links' own threads leave all reading to threads that wait."""
    monkeypatch.setattr(link, "POLL_SECONDS", 600.0)


def _worker(listener: LinkListener, engine: str = "engine", **options: Any) -> contextlib.closing[WorkerLink]:
    options = {"lease_seconds": 600.0, "deadline_seconds": PATIENCE_SECONDS, **options}
    worker = WorkerLink(listener.address, **options)
    worker.open(Hello(RUN, engine, 0, listener.secret))
    return contextlib.closing(worker)


def _wait_once(condition: ReadingCondition) -> None:
    """Wait in this thread, after which the background thread polls no more."""
    with condition:
        while not condition._waited_at or condition._is_polled:
            condition.wait(0.01)


def test_a_worker_that_waits_reads_its_link_itself(leaves_nothing: None, nobody_else_reads: None) -> None:
    readers = list[int]()
    with (
        contextlib.closing(LinkListener(RUN)) as listener,
        _worker(listener, on_release=lambda: readers.append(threading.get_ident())) as worker,
    ):
        condition = worker.condition
        (publishers,) = listener.wait("engine", 1, PATIENCE_SECONDS)
        for num_read in range(1, 4):
            _wait_once(condition)
            publishers.send(ReleaseMemory())
            with condition:
                assert condition.wait_for(lambda expected=num_read: len(readers) == expected, PATIENCE_SECONDS)
    assert set(readers) == {threading.get_ident()}


def test_of_several_that_wait_one_reads_and_another_when_it_leaves(
    leaves_nothing: None, nobody_else_reads: None
) -> None:
    """The order in which they are answered is not that in which they wait."""
    names = [f"engine{number}" for number in range(6)]
    with contextlib.closing(LinkListener(RUN)) as listener, contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(listener, name)) for name in names}
        links = {name: listener.wait(name, 1, PATIENCE_SECONDS)[0] for name in names}
        for version in range(1, 9):
            until = Deadline(PATIENCE_SECONDS)
            waits = {name: Background(links[name].wait, Accepted, version, until) for name in names}
            for name in names[version % 6 :] + names[: version % 6]:
                workers[name].send(Accepted(version))
                assert waits[name].result() == Accepted(version)


def test_a_wait_that_is_interrupted_lets_another_read(leaves_nothing: None, nobody_else_reads: None) -> None:
    with contextlib.closing(LinkListener(RUN)) as listener, _worker(listener) as worker:
        (publishers,) = listener.wait("engine", 1, PATIENCE_SECONDS)
        condition, is_waiting = listener.condition, threading.Event()
        _wait_once(condition)

        def stop_at_a_message() -> None:
            """Wait, as the one that polls, and raise from the first notice on."""
            with condition:
                is_waiting.set()
                condition.wait(PATIENCE_SECONDS)
                raise KeyboardInterrupt

        interrupted = Background(stop_at_a_message)
        assert is_waiting.wait(PATIENCE_SECONDS)
        waiting = Background(publishers.wait, Accepted, 2, Deadline(PATIENCE_SECONDS))
        worker.send(Accepted(1))
        with pytest.raises(KeyboardInterrupt):
            interrupted.result()
        worker.send(Accepted(2))
        assert waiting.result() == Accepted(2)


def test_an_end_from_another_thread_wakes_those_that_wait(leaves_nothing: None, nobody_else_reads: None) -> None:
    with contextlib.closing(LinkListener(RUN)) as listener, _worker(listener) as worker, _worker(listener, "other"):
        links = [listener.wait(name, 1, PATIENCE_SECONDS)[0] for name in ("engine", "other")]
        waits = [Background(each.wait, Accepted, 1, Deadline(PATIENCE_SECONDS * 2)) for each in links]
        links[0].end("the test ends it")
        with pytest.raises(PeerDiedError, match="the test ends it"):
            waits[0].result()
        with worker.condition:
            assert worker.condition.wait_for(lambda: worker.over, PATIENCE_SECONDS)
        listener.close()
        with pytest.raises(PeerDiedError, match="the publisher was closed"):
            waits[1].result()


def test_heartbeats_are_sent_while_nobody_reads(leaves_nothing: None, nobody_else_reads: None) -> None:
    with contextlib.closing(LinkListener(RUN, lease_seconds=0.08)) as listener:
        _wait_once(listener.condition)
        with link.connect(listener.address, PATIENCE_SECONDS) as sock:
            sock.sendall(frame(Hello(RUN, "engine", 0, listener.secret, protocol=PROTOCOL)))
            listener.wait("engine", 1, PATIENCE_SECONDS)
            frames, beats = Frames(), list[object]()
            while len(beats) < 5:
                beats += frames.feed(sock.recv(1 << 16))
            assert set(beats) <= {Heartbeat(), Heartbeat(waits=True)}


def test_what_comes_after_the_last_wait_is_read_in_the_background(leaves_nothing: None) -> None:
    readers, is_read = list[str](), threading.Event()

    def on_release() -> None:
        readers.append(threading.current_thread().name)
        is_read.set()

    with contextlib.closing(LinkListener(RUN)) as listener, _worker(listener, on_release=on_release) as worker:
        (publishers,) = listener.wait("engine", 1, PATIENCE_SECONDS)
        _wait_once(worker.condition)
        publishers.send(ReleaseMemory())
        assert is_read.wait(PATIENCE_SECONDS)
    assert readers == ["weightcast-link"]


def test_a_publisher_that_falls_silent_ends_the_link_also_while_a_thread_waits(leaves_nothing: None) -> None:
    ended = threading.Event()
    with contextlib.closing(LinkListener(RUN, lease_seconds=2400.0)) as listener:
        worker = _worker(listener, lease_seconds=0.3, on_end=lambda reason: ended.set())
        with worker as held:
            with held.condition:
                assert held.condition.wait_for(lambda: held.over, PATIENCE_SECONDS)
            assert ended.wait(PATIENCE_SECONDS)


def test_what_was_not_read_yet_is_no_silence(
    leaves_nothing: None, nobody_else_reads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's own thread looks at what has come before it ends a link whose lease is over."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(link, "connect", lambda address, timeout_seconds: ours)
    ended, silent_seconds = threading.Event(), list[float]()

    def on_end(reason: str) -> None:
        silent_seconds.append(worker.silent_seconds)
        ended.set()

    worker = WorkerLink("unix:@pair", lease_seconds=0.2, deadline_seconds=PATIENCE_SECONDS, on_end=on_end)
    with contextlib.closing(theirs), contextlib.closing(worker):
        theirs.sendall(frame(Heartbeat()))
        # As after a wait: the link's own thread reads nothing before the lease is over.
        worker.condition._waited_at = time.monotonic()
        worker.open(Hello(RUN, "engine", 0, "5a" * 32))
        assert ended.wait(PATIENCE_SECONDS)
        assert worker._is_welcome, "the heartbeat was not read"
    assert silent_seconds[0] >= 0.2, "the lease did not begin again with the heartbeat"


def test_heartbeats_say_that_the_publisher_waits_only_while_one_of_its_threads_does(leaves_nothing: None) -> None:
    """By these a worker knows a publisher that waits for another peer from one that hangs."""
    with contextlib.closing(LinkListener(RUN, lease_seconds=0.2)) as listener, _worker(listener) as worker:
        (publishers,) = listener.wait("engine", 1, PATIENCE_SECONDS)
        waiting = Background(publishers.wait, Accepted, 1, Deadline(PATIENCE_SECONDS))
        for is_waited in (True, False):
            start = worker._heard_at
            for _ in Deadline(PATIENCE_SECONDS).polls():
                with worker.condition:
                    if worker._heard_at > start and (worker.worked_at == worker._heard_at) is is_waited:
                        break
            else:
                pytest.fail(f"no heartbeat with waits={is_waited} came")
            worker.send(Accepted(1))
            waiting.result()


def test_a_link_that_was_closed_before_it_was_opened_is_never_opened(leaves_nothing: None) -> None:
    with contextlib.closing(LinkListener(RUN)) as listener:
        worker = WorkerLink(listener.address, lease_seconds=600.0, deadline_seconds=PATIENCE_SECONDS)
        worker.close()
        with pytest.raises(PeerDiedError, match="the link was closed in this process"):
            worker.open(Hello(RUN, "engine", 0, listener.secret))
        assert not listener.links()


def test_a_publisher_that_is_dropped_while_its_link_is_read_leaves_no_thread_that_fails(
    leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection in the reading thread ends the links, which reads them, while the worker leaves."""
    is_dropped = threading.Event()
    with contextlib.closing(LinkListener(RUN)) as listener:
        worker = WorkerLink(listener.address, lease_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS)
        worker.open(Hello(RUN, "engine", 0, listener.secret))
        (read,) = listener.wait("engine", 1, PATIENCE_SECONDS)
        feed = read._frames.feed

        def drop(data: bytes) -> Any:
            monkeypatch.undo()
            worker.close()
            listener.end_links("the publisher was garbage-collected without close()")
            yield from feed(data)
            is_dropped.set()

        monkeypatch.setattr(read._frames, "feed", drop)
        worker.send(Accepted(0))
        assert is_dropped.wait(PATIENCE_SECONDS)
        for _ in Deadline(PATIENCE_SECONDS).polls():
            if not listener._open_links:
                break
        listener._thread.join(0.2)
        assert listener._thread.is_alive()
