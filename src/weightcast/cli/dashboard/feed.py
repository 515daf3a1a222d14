"""The data of the dashboard: what engines and a publisher say, asked again and again, and what has changed since.

Invariants: each request has a deadline; engines that give no answer are asked by threads of their own, so they do not
delay the others; the history is bounded; texts of engines are on one line and cut, and are never markup.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
from msgspec import UNSET

from weightcast.cli.status import Answer, EngineStatus, ask, judged
from weightcast.control.client import HttpEngine, HttpRoutes
from weightcast.errors import ErrorRecord, WeightcastError, printable
from weightcast.format.messages import WeightInfo
from weightcast.host.deadline import GRACE_SECONDS
from weightcast.trainer.history import MAX_PUBLISHES, PATH, EngineHistory, FinishedPublish, Publishes

_TICK_SECONDS = 0.5
_LATE_SECONDS = 2 * GRACE_SECONDS
"""Longer than an update keeps an engine paused, or behind the first one that has installed it."""
_NUM_THREADS, _NUM_LATE_THREADS = 64, 16
_MAX_CHARACTERS, _MAX_LABEL_CHARACTERS = 600, 80


class EngineRow(msgspec.Struct, frozen=True):
    """One engine. `state`: that of `EngineStatus`, or "asked" before its first answer.

    `since`: Unix time at which the state began. `reason`: why it does not serve the newest version, as far as it or the
    publisher has said. `pause_seconds`, `compared` (the result of `verify="installed"`): of its last publish.
    `needs_attention`: it is torn, gives no answer, differs, or has been paused or behind for a while.
    """

    engine: str
    state: str
    since: float = 0.0
    version: str = ""
    run: str = ""
    behind: int | None = None
    reason: str = ""
    pause_seconds: float | None = None
    compared: str = ""
    needs_attention: bool = False


class PublisherState(msgspec.Struct, frozen=True):
    """The publisher. `error`: why its last answer did not come, or empty."""

    url: str
    error: str = ""


class FleetChanges(msgspec.Struct, frozen=True):
    """The data of an event. `is_all`: rows and publishes are all there are, else those that changed since the last one.

    `seen`: to be passed for the next one. `newest`: the highest version number that an engine serves or the publisher
    has published.
    """

    is_all: bool
    seen: int
    newest: int | None
    publisher: PublisherState | None
    rows: list[EngineRow]
    publishes: list[FinishedPublish]


class _Engine:
    """An engine that is asked. `was_given`: by the caller, and not by the publisher."""

    def __init__(self, client: HttpEngine, *, was_given: bool) -> None:
        self.client = client
        self.was_given = was_given
        self.answer: Answer | None = None
        self.has_left = False


_Lane: TypeAlias = "queue.SimpleQueue[tuple[float, _Engine | None]]"


class Feed:
    """Asks engines and a publisher until it is closed. Thread-safe.

    The publisher's engines that have URLs are asked, too. Others are shown in the state that the publisher reports.
    """

    def __init__(
        self,
        urls: Sequence[str],
        publisher: str | None = None,
        *,
        token: str | None = None,
        every_seconds: float = 2.0,
        deadline_seconds: float = 5.0,
    ) -> None:
        """`every_seconds`: the pause between an answer and the next request. Raises ValueError for an invalid URL."""
        self._token = token
        self._every_seconds = every_seconds
        self._deadline_seconds = deadline_seconds
        self._publisher = HttpRoutes(publisher, token=None, timeout_seconds=deadline_seconds) if publisher else None
        self._publisher_state: PublisherState | None = None
        self._fleet: dict[str, EngineHistory] = {}
        """The publisher's engines."""
        self._published: int | None = None
        """The highest version of the publisher."""
        self._newest: int | None = None
        self._seen = self._all_seen = 1
        """Count of changes, and its value when a row last disappeared."""
        self._rows: dict[str, tuple[int, EngineRow]] = {}
        self._publishes: dict[tuple[str, int], tuple[int, FinishedPublish]] = {}
        """By the publisher's id and number, as the rows with the count of changes."""
        self._engines: dict[str, _Engine] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._lanes: tuple[_Lane, _Lane] = queue.SimpleQueue(), queue.SimpleQueue()
        """Engines with the time of their next request: those that have answered, and those that gave no answer."""
        for url in urls:
            self._add(url.rstrip("/"), was_given=True)
        calls: list[Callable[[], None]] = [functools.partial(self._ask_engines, self._lanes[0])] * _NUM_THREADS
        calls += [functools.partial(self._ask_engines, self._lanes[1])] * _NUM_LATE_THREADS
        calls += [self._compare] if self._publisher is None else [self._compare, self._ask_publisher]
        for call in calls:
            # Daemons, since the process must be able to end while an engine gives no answer.
            threading.Thread(target=call, name="weightcast-dashboard", daemon=True).start()

    def changes(self, seen: int) -> FleetChanges | None:
        """Return what has changed since `seen`, which the last changes had, at first 0; None if nothing has."""
        with self._lock:
            if seen == self._seen:
                return None
            is_all = seen < self._all_seen
            since = 0 if is_all else seen
            rows = [row for changed, row in self._rows.values() if changed > since]
            publishes = [publish for changed, publish in self._publishes.values() if changed > since]
            return FleetChanges(is_all, self._seen, self._newest, self._publisher_state, rows, publishes)

    def close(self) -> None:
        """End the threads; one that waits for an answer ends at its deadline. Idempotent."""
        self._end.set()
        for lane in self._lanes:
            lane.put((0.0, None))
        with self._lock:
            for engine in self._engines.values():
                engine.client.close()
        if self._publisher is not None:
            self._publisher.close()

    def _add(self, url: str, *, was_given: bool) -> None:
        if url not in self._engines:
            client = HttpEngine(url, token=self._token, timeout_seconds=self._deadline_seconds)
            self._engines[url] = engine = _Engine(client, was_given=was_given)
            self._lanes[0].put((0.0, engine))

    def _ask_engines(self, lane: _Lane) -> None:
        while True:
            at, engine = lane.get()
            if self._end.wait(max(0.0, at - time.monotonic())) or engine is None:
                lane.put((0.0, None))  # for the next thread
                return
            if engine.has_left:
                engine.client.close()
                continue
            engine.answer = ask(engine.client)
            next_lane = self._lanes[isinstance(engine.answer, ErrorRecord)]
            next_lane.put((time.monotonic() + self._every_seconds, engine))

    def _ask_publisher(self) -> None:
        assert self._publisher is not None
        while not self._end.is_set():
            try:
                found, error = self._publisher.get(PATH, Publishes), ""
            except WeightcastError as exc:
                found, error = None, _text(f"{type(exc).__name__}: {exc}")
            with self._lock:
                state = PublisherState(self._publisher.name, error)
                self._seen += state != self._publisher_state
                self._publisher_state = state
                if found is not None:
                    self._follow(found)
            self._end.wait(self._every_seconds)

    def _follow(self, found: Publishes) -> None:
        self._fleet = found.engines
        self._published = max((p.version for p in found.publishes if p.version is not None), default=None)
        for publish in found.publishes:
            if (key := (found.publisher, publish.number)) not in self._publishes:
                self._seen += 1
                self._publishes[key] = self._seen, publish
        for key in list(self._publishes)[:-MAX_PUBLISHES]:
            del self._publishes[key]
        for name in found.engines:
            with contextlib.suppress(ValueError):  # not a URL: an engine in the publisher's process
                self._add(name, was_given=False)
        for name, engine in list(self._engines.items()):
            if not engine.was_given and name not in found.engines:
                engine.has_left = True
                del self._engines[name]

    def _compare(self) -> None:
        """Make the rows again and again, and count those that have changed."""
        while not self._end.wait(_TICK_SECONDS):
            with self._lock:
                self._make_rows(time.time())

    def _make_rows(self, now: float) -> None:
        names = dict.fromkeys((*self._engines, *self._fleet))
        answers: dict[str, Answer] = {}
        for name in names:
            engine = self._engines.get(name)
            if engine is None:
                serves = self._fleet[name].serves
                answers[name] = WeightInfo("default" if serves is None else str(serves))
            elif engine.answer is not None:
                answers[name] = engine.answer
        found = judged(answers, self._published)
        rows = {each.engine: _row(each, self._fleet.get(each.engine)) for each in found.engines}
        count = self._seen + 1
        for name in names:
            row = rows.get(name) or EngineRow(_text(name), "asked")
            changed, former = self._rows.get(name, (0, row))
            since = now if not changed or former.state != row.state else former.since
            is_late = row.state in ("behind", "paused") and now - since > _LATE_SECONDS
            row = msgspec.structs.replace(row, since=since, needs_attention=row.needs_attention or is_late)
            if not changed or row != former:
                self._seen = count
                self._rows[name] = count, row
        if gone := self._rows.keys() - names:
            for name in gone:
                del self._rows[name]
            self._seen = self._all_seen = count
        if found.newest != self._newest:
            self._newest, self._seen = found.newest, count


def _row(found: EngineStatus, known: EngineHistory | None) -> EngineRow:
    last, info, reason = None if known is None else known.last, found.info, ""
    if found.error is not None:
        reason = f"{found.error.kind}: {found.error.message}"
    elif info is not None and info.torn:
        reason = info.torn
    elif info is not None and found.state == "behind":
        has_failed = last is not None and last.error is not None and last.version > (info.version or -1)
        offered = info.offered
        if has_failed and last is not None and last.error is not None:
            reason = f"version {last.version}: {last.error.kind}: {last.error.message}"
        elif offered is UNSET or (offered.run, offered.number) == (info.run, info.version):
            reason = "no newer version was offered to it: is it in its publisher's list of engines?"
        else:
            reason = f"version {offered.number} was offered to it, and is not installed"
    compared = ""
    if last is not None and last.differs:
        compared = "differs"
    elif last is not None and last.num_compared:
        compared = f"equal, {last.num_unproven:,} not read" if last.num_unproven else "equal"
    return EngineRow(
        _text(found.engine),
        found.state,
        version="" if info is None else _text(info.weight_version, _MAX_LABEL_CHARACTERS),
        run="" if info is None else _text(info.run, _MAX_LABEL_CHARACTERS),
        behind=found.behind,
        reason=_text(reason),
        pause_seconds=None if last is None or last.error is not None else last.pause_seconds,
        compared=compared,
        needs_attention=found.state in ("torn", "no answer") or compared == "differs",
    )


def _text(text: str, limit: int = _MAX_CHARACTERS) -> str:
    """Return the text on one line, cut."""
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
