from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from torch.distributed import TCPStore

from faults.actors import DEADLINE_SECONDS, LARGE_WIDTH, WIDTH, expected_digests
from faults.engine_actor import EngineProcess
from faults.publisher_actor import PublisherProcess, Rank


class Wire(NamedTuple):
    """What a test's publisher publishes over, and how wide a model."""

    url: str
    width: int = WIDTH

    def __str__(self) -> str:
        return self.url.partition(":")[0] + ("-large" if self.width > WIDTH else "")


IPC = Wire("ipc://")
GLOO = Wire("gloo://127.0.0.1:0")
LARGE_GLOO = Wire("gloo://127.0.0.1:0", LARGE_WIDTH)
_SETTLE_SECONDS = 45.0


def on(wire: Wire, *case: Any, full: bool = False) -> Any:
    """A test's parameters (wire, *case). What goes by a network is run with the cluster's tests."""
    marks = [mark for mark, is_set in ((pytest.mark.full, full), (pytest.mark.cluster, wire != IPC)) if is_set]
    return pytest.param(wire, *case, id="-".join(map(str, (wire, *case))), marks=marks)


def over(wires: dict[Wire, Iterable[Any]], *, full: dict[Wire, Iterable[Any]] | None = None) -> list[Any]:
    """Parameters (wire, case) of a test: those that always run, and those that only `--full` runs besides."""
    always = [on(wire, case) for wire, cases in wires.items() for case in cases]
    return always + [on(wire, case, full=True) for wire, cases in (full or {}).items() for case in cases]


over_both = pytest.mark.parametrize("wire", [on(IPC), on(GLOO)])
over_both_if_full = pytest.mark.parametrize("wire", [on(IPC), on(GLOO, full=True)])


class Stage:
    """The actors of one test, ended whatever happens; what survives is checked against the version's own weights."""

    def __init__(self, wire: Wire) -> None:
        self._connections = wire
        self._actors: list[EngineProcess | PublisherProcess] = []
        self._stores: list[TCPStore] = []

    def engine(self, port: int = 0, **options: object) -> EngineProcess:
        actor = EngineProcess(port, width=self._connections.width, **options)
        self._actors.append(actor)
        return actor

    def engines(self, number: int) -> list[EngineProcess]:
        return [self.engine() for _ in range(number)]

    def publisher(self, *engines: EngineProcess, **options: object) -> PublisherProcess:
        return self._start_publisher(engines, options).wait()

    def trainer_ranks(
        self, number: int, *engines: EngineProcess, hosts: str = "", **options: object
    ) -> list[PublisherProcess]:
        """A publisher of that many trainer ranks. Their store is served here, as torchrun's agent does.

        `hosts`: the name of each rank's host, one character each; without one, all are on this host.
        """
        timeout = datetime.timedelta(seconds=DEADLINE_SECONDS)
        store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        self._stores.append(store)
        ranks = [Rank(index, number, store.port) for index in range(number)]
        labelled = [{"rank": rank} | ({"host_label": hosts[rank.number]} if hosts else {}) for rank in ranks]
        actors = [self._start_publisher(engines, options | each) for each in labelled]
        return [actor.wait() for actor in actors]

    def _start_publisher(self, engines: Sequence[EngineProcess], options: dict[str, object]) -> PublisherProcess:
        urls = [engine.url for engine in engines]
        actor = PublisherProcess(urls, transport=self._connections.url, width=self._connections.width, **options)
        self._actors.append(actor)
        return actor

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for actor in self._actors:
                if actor.process.is_alive():
                    stack.callback(actor.close)


def eventually(check: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def served(engine: EngineProcess) -> tuple[str, dict[str, str]]:
    """The version an engine says it serves and the digests of what it really holds."""
    reply = httpx.get(f"{engine.url}/weight_digests", timeout=DEADLINE_SECONDS, trust_env=False)
    reply.raise_for_status()
    return reply.json()["weight_version"], reply.json()["digests"]


def weight_info(engine: EngineProcess) -> dict[str, object]:
    return httpx.get(f"{engine.url}/weight_info", timeout=DEADLINE_SECONDS, trust_env=False).json()  # type: ignore[no-any-return]


def is_free(engine: EngineProcess) -> bool:
    info = weight_info(engine)
    return not info["holder"] and not info["paused"]


def assert_serves(engine: EngineProcess, version: str, content: int) -> None:
    """The engine serves exactly the weights of `content` under the label `version`, and is not paused or torn."""
    found, digests = served(engine)
    assert found == version
    assert digests == expected_digests(content, engine.width)
    info = weight_info(engine)
    assert not info["paused"], info
    assert not info["torn"], info


def assert_one_whole_version(engine: EngineProcess, contents: dict[str, int]) -> None:
    found, digests = served(engine)
    assert found in contents
    assert digests == expected_digests(contents[found], engine.width)


class Footprints:
    """What actors hold now; `assert_settled` once they hold no more than then."""

    def __init__(self, *actors: EngineProcess | PublisherProcess) -> None:
        self._before = {actor: actor.footprint() for actor in actors}

    def assert_settled(self) -> None:
        """Old groups, links and threads may still be on their way out; they are gone before long."""
        seen: dict[str, Any] = {}

        def is_settled() -> bool:
            for actor, before in self._before.items():
                now = actor.footprint()
                seen.update(pid=actor.pid, of=type(actor).__name__, before=before, now=now)
                if now["fds"] > before["fds"] or now["threads"] > before["threads"]:
                    return False
            return True

        try:
            eventually(is_settled, "descriptors and threads are as before", _SETTLE_SECONDS)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {seen}") from None


@pytest.fixture
def wire() -> Wire:
    """Tests name others with `over`."""
    return IPC


@pytest.fixture
def stage(wire: Wire) -> Iterator[Stage]:
    stage = Stage(wire)
    yield stage
    stage.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What goes over a network plays several hosts, and so do several trainer ranks."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        wire = getattr(getattr(item, "callspec", None), "params", {}).get("wire", IPC)
        if wire != IPC or item.path.name in ("test_trainer_ranks.py", "test_origins.py"):
            item.add_marker(pytest.mark.cluster)
