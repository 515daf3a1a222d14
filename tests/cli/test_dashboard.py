"""The data of `weightcast dashboard`, from real engine servers and publishers, and its server. The page: test_page."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from core.direct import DirectEngine, ReadableEngine
from faults.engine_actor import EngineProcess
from publishers import publisher_of
from torch import nn

from weightcast import EngineServer, ModuleEngine, TensorSource, cli
from weightcast.cli import exits
from weightcast.cli.dashboard.feed import EngineRow, Feed
from weightcast.host.deadline import Deadline
from weightcast.trainer.history import MAX_PUBLISHES, FinishedPublish

WEIGHT = {"weight": torch.ones(2, 3)}
NEVER_SECONDS = 600.0


class FailingEngine(ModuleEngine):
    fails = False

    def load(self, tensors: Any) -> None:
        if self.fails:
            raise RuntimeError("<script>alert(1)</script>\nits loader failed")
        super().load(tensors)


class Viewer:
    """Has what a page has: what the feed said last of each engine, and the publishes in order."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._seen = 0
        self.rows: dict[str, EngineRow] = {}
        self.publishes: list[FinishedPublish] = []
        self.newest: int | None = None
        self.error = ""

    def until(self, is_seen: Callable[[], bool]) -> None:
        """Follow the feed until this is true."""
        for _ in Deadline(60.0).polls():
            if (found := self._feed.changes(self._seen)) is not None:
                if found.is_all:
                    self.rows.clear()
                    self.publishes.clear()
                self._seen, self.newest = found.seen, found.newest
                self.rows |= {row.engine: row for row in found.rows}
                self.publishes += found.publishes
                self.error = "" if found.publisher is None else found.publisher.error
            if is_seen():
                return
        raise AssertionError(f"not seen: {self.rows}, {self.publishes}, {self.error}")

    def until_states(self, *states: str) -> list[EngineRow]:
        self.until(lambda: [row.state for row in self.rows.values()] == list(states))
        return list(self.rows.values())


@contextlib.contextmanager
def watched(*urls: str, publisher: str | None = None, deadline_seconds: float = 20.0) -> Iterator[Viewer]:
    feed = Feed(urls, publisher, every_seconds=0.05, deadline_seconds=deadline_seconds)
    with contextlib.closing(feed):
        yield Viewer(feed)


@pytest.fixture
def address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def deaf() -> Iterator[list[str]]:
    """URLs where a connection is made and nothing ever answers."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        yield [f"http://127.0.0.1:{server.getsockname()[1]}" for server in servers]


def test_who_is_behind_and_why(address: str) -> None:
    engines = [FailingEngine(nn.Linear(3, size, bias=False)) for size in (2, 2, 2, 2, 5)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(EngineServer(engine, port=0)) for engine in engines]
        urls = [server.url for server in servers]
        options: dict[str, Any] = {"metrics": address, "on_failure": "report", "transport": "ipc://"}
        publisher = stack.enter_context(publisher_of(TensorSource(WEIGHT), engines=urls[:4], **options))
        publisher.publish(5)
        view = stack.enter_context(watched(*urls, publisher=f"http://{address}"))
        rows = view.until_states("serves", "serves", "serves", "serves", "behind")
        assert [row.version for row in rows] == ["5", "5", "5", "5", "default"]
        assert rows[4].reason.startswith("no newer version was offered to it")
        assert not any(row.needs_attention for row in rows), "a row is behind for a moment in every publish"

        publisher.add_engine(urls[4])
        publisher.remove_engine(urls[1])
        engines[2].fails = True
        servers[3].close()
        publisher.publish(7)
        rows = view.until_states("serves", "behind", "torn", "no answer", "behind")
        view.until(lambda: len(view.publishes) == 2 and "Incompatible" in view.rows[urls[4]].reason)
        rows = list(view.rows.values())
        assert (view.newest, [row.behind for row in rows]) == (7, [0, 2, 2, None, None])
        assert rows[1].reason.startswith("no newer version was offered to it")
        assert r"<script>alert(1)</script>\nits loader failed" in rows[2].reason, "on one line"
        assert rows[3].reason.startswith("PeerDiedError: ")
        assert rows[4].reason.startswith("version 7: IncompatibleWeightsError: ")
        assert [row.needs_attention for row in rows] == [False, False, True, True, False]
        assert rows[0].pause_seconds == publisher.last_report.engines[urls[0]].pause_seconds

        first, second = view.publishes
        assert (first.version, first.num_engines, first.num_failed, first.error) == (5, 4, 0, None)
        assert (second.version, second.num_engines, second.num_failed) == (7, 4, 3)
        assert second.seconds == publisher.last_report.seconds
        assert (second.num_bytes, second.num_sent_bytes) == (24, 24)
        assert second.error is not None
        with pytest.raises(ValueError, match="not above 7"):
            publisher.publish(6)
        view.until(lambda: len(view.publishes) == 3)
        assert view.publishes[2].version is None
        assert view.publishes[2].error is not None
        assert view.publishes[2].error.kind == "ValueError"


def test_all_refuse_what_was_published(address: str) -> None:
    """The newest version is the publisher's, not the highest one that an engine serves."""
    engine = FailingEngine(nn.Linear(3, 5, bias=False))
    with EngineServer(engine, port=0) as server, watched(server.url, publisher=f"http://{address}") as view:
        options: dict[str, Any] = {"metrics": address, "on_failure": "report", "transport": "ipc://"}
        view.until(lambda: view.error.startswith("PeerDiedError: "))
        with publisher_of(TensorSource(WEIGHT), engines=[server.url], **options) as publisher:
            publisher.publish(3)
            view.until(lambda: view.newest == 3 and not view.error)
            assert view.until_states("behind")[0].reason.startswith("version 3: IncompatibleWeightsError: ")


def test_engines_that_hang_delay_no_other(deaf: list[str]) -> None:
    with (
        contextlib.closing(EngineProcess(0)) as stopped,
        EngineServer(ModuleEngine(nn.Linear(3, 2, bias=False)), port=0) as server,
    ):
        urls = [*deaf, stopped.url, server.url]
        with watched(*urls, deadline_seconds=NEVER_SECONDS) as view:
            view.until(lambda: len(view.rows) == len(urls) and view.rows[stopped.url].state == "serves")
            os.kill(stopped.pid, signal.SIGSTOP)
            with publisher_of(TensorSource(WEIGHT), transport="ipc://", engines=[server.url]) as publisher:
                for number in (1, 2, 3):
                    publisher.publish(number)
                    view.until(lambda number=number: view.rows[server.url].version == str(number))
            assert {view.rows[url].state for url in deaf} == {"asked"}, "their deadline has not passed"


def test_an_engine_that_hangs_is_said_to_give_no_answer() -> None:
    with contextlib.closing(EngineProcess(0)) as engine, watched(engine.url, deadline_seconds=0.5) as view:
        view.until_states("serves")
        os.kill(engine.pid, signal.SIGSTOP)
        (row,) = view.until_states("no answer")
        assert row.reason.startswith("PeerTimeoutError: ")
        assert row.needs_attention
        os.kill(engine.pid, signal.SIGCONT)
        assert not view.until_states("serves")[0].reason


@pytest.mark.usefixtures("leaves_nothing")
def test_the_engines_of_the_publisher_come_and_go(address: str) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(EngineServer(ModuleEngine(nn.Linear(3, 2, bias=False)))) for _ in range(2)]
        first, second = (server.url for server in servers)
        view = stack.enter_context(watched(publisher=f"http://{address}"))
        options: dict[str, Any] = {"metrics": address, "transport": "ipc://"}
        with publisher_of(TensorSource(WEIGHT), engines=[first], **options) as publisher:
            publisher.publish()
            view.until_states("serves")
            publisher.add_engine(second)
            publisher.publish()
            view.until_states("serves", "serves")
            publisher.remove_engine(first)
            view.until(lambda: list(view.rows) == [second])
        view.until(lambda: view.error.startswith("PeerDiedError: "))
        assert [publish.number for publish in view.publishes] == [1, 2], "what was published is still shown"
        with publisher_of(TensorSource(WEIGHT), engines=[first], **options) as publisher:
            publisher.publish()
            view.until(lambda: [publish.number for publish in view.publishes] == [1, 2, 1])
            view.until(lambda: list(view.rows) == [first])


def test_engines_without_urls_and_a_bounded_history(address: str) -> None:
    engines = [DirectEngine(name, ReadableEngine()) for name in ("first", "second")]
    tensors = {f"t{i}": torch.arange(40.0) + i for i in range(4)}
    options: dict[str, Any] = {"metrics": address, "verify": "installed", "on_failure": "report"}
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
        source = TensorSource(tensors)
        publisher = stack.enter_context(publisher_of(source, transport="memory://", engines=engines, **options))
        for _ in range(MAX_PUBLISHES + 5):
            publisher.publish()
        view = stack.enter_context(watched(publisher=f"http://{address}"))
        rows = view.until_states("serves", "serves")
        assert [row.compared for row in rows] == ["equal", "equal"]
        view.until(lambda: len(view.publishes) == MAX_PUBLISHES)
        assert view.publishes[-1].number == MAX_PUBLISHES + 5
        assert (view.publishes[-1].num_compared, view.publishes[-1].num_differing) == (2, 0)
        engines[0].engine.spoilt = "t2"
        publisher.publish()
        view.until(lambda: view.rows["first"].compared == "differs")
        assert view.rows["first"].needs_attention
        assert view.publishes[-1].num_differing == 1


@contextlib.contextmanager
def dashboard(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "weightcast.cli", "dashboard", "--port", "0", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().removeprefix("weightcast: dashboard at ").strip()
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_ends_at_once(number: int, deaf: list[str]) -> None:
    """With a page that listens, and engines that hang."""
    with (
        dashboard(*deaf, "--deadline", str(NEVER_SECONDS)) as (process, url),
        httpx.stream("GET", f"{url}/events", trust_env=False, timeout=60) as events,
    ):
        assert events.headers["content-type"].startswith("text/event-stream")
        said = (json.loads(line.removeprefix("data: ")) for line in events.iter_lines() if line)
        rows = next(found["rows"] for found in said if found and found["rows"])
        assert [row["state"] for row in rows] == ["asked"] * len(deaf)
        process.send_signal(number)
        assert process.wait(60) == exits.OK


def test_the_page_runs_no_script_but_its_own_and_answers_no_other_name() -> None:
    with dashboard("http://127.0.0.1:9") as (_, url):
        assert url.startswith("http://127.0.0.1:")
        page = httpx.get(url, trust_env=False, timeout=60)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'sha256-" in policy
        assert "http" not in page.text.replace("http-equiv", ""), "it loads nothing from elsewhere"
        for path in ("/", "/events"):
            other = httpx.get(f"{url}{path}", headers={"host": "rebound.example"}, trust_env=False, timeout=60)
            assert other.status_code == 400


def test_nothing_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["dashboard"])
    assert ended.value.code == exits.USAGE
    assert "at least one URL or --publisher is required" in capsys.readouterr().err
    assert cli.main(["dashboard", "localhost:8000", "--port", "0"]) == exits.USAGE
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["dashboard", "http://127.0.0.1:9", "--port", str(taken.getsockname()[1])]) == exits.NEGATIVE
