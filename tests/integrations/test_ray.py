"""Engines in the actors of a real Ray, found by their names."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Literal

import pytest

from weightcast import Publisher, PublishOptions, PublishReport, TensorSource
from weightcast.host.deadline import Deadline
from weightcast.trainer.options import PublishEvent

pytestmark = pytest.mark.cluster
DEADLINE_SECONDS = 20.0
MOST_ENGINES = 5
NUM_WARM = 3
"""Engines at the beginning and at the end; and publishes before the footprint is taken."""
KINDS = {"join": 22, "leave": 12, "drain": 10, "kill": 8, "crash": 12, "replace": 16, "pause": 5}
"""How often which change is drawn. Pause: the process stops for half a second."""
STOP = {"stop": 4}
"""Likewise; it stops for this publish, or the next one too, each of which takes a deadline."""
FAULTS = {"error": 4, "twice": 4, "empty": 3}
"""Likewise, of the directory."""
PHASES = ("offered", "packed", "received", "installed")
IN_INSTALL = ("begin", "commit")
MORE = {"descriptors": 8, "threads": 0, "rss_bytes": 16 << 20}
"""By how much a footprint may differ: Ray has connections and memory of its own in this process."""
FULL = (pytest.mark.full, pytest.mark.timeout(1500))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    """A Ray of the tests' own, and the module whose engines run in its actors."""
    ray = pytest.importorskip("ray")
    from integrations import ray_fleet

    ray.cloudpickle.register_pickle_by_value(ray_fleet)  # which Ray's workers can't import
    with tempfile.TemporaryDirectory(prefix="wc", dir="/tmp") as folder, pytest.MonkeyPatch.context() as environment:
        for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED"):
            environment.setenv(name, "0")
        environment.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False, namespace="rl")
        try:
            yield ray_fleet
        finally:
            ray.shutdown()


def test_actors_are_found_by_their_names(fleet: Any) -> None:
    """Also one under a former one's name, and one that failed when it was asked first."""
    ray = fleet.ray

    def start(name: str, url: str, num_failures: int = 0) -> Any:
        return actor_type.options(name=name).remote(url, num_failures)

    actor_type = ray.remote(num_cpus=0)(fleet.LateEngine)
    directory = fleet.ActorEngines("named-", timeout_seconds=60.0)
    assert directory.engines() == []
    first, _other, _late = start("named-0", "http://a"), start("another", "http://b"), start("named-1", "http://c", 2)
    assert directory.engines() == ["http://a"]
    assert any(directory.engines() == ["http://a", "http://c"] for _ in Deadline(60.0).polls())
    ray.kill(first)
    _second = start("named-0", "http://d")
    assert directory.engines() == ["http://c", "http://d"]


@dataclasses.dataclass(frozen=True)
class Change:
    """What is done, at which moment of a publish ("between": after it), and to which engine.

    `lasts`: what has stopped stays so for another publish. `reuses_port`: the replacement has the former one's URL.
    """

    kind: str
    moment: str
    victim: Any
    lasts: bool
    reuses_port: bool

    @property
    def stops(self) -> bool:
        return self.kind == "stop" or (self.kind == "replace" and not self.reuses_port)


class Season:
    """Publishes with one change to the fleet in each publish, and judges the reports and the router's tokens."""

    def __init__(self, fleet: ModuleType, seed: int, kinds: dict[str, int], transport: str, **options: Any) -> None:
        self._fleet, self._kinds = fleet, kinds
        self._chosen = random.Random(seed)
        self.members, self._directory = fleet.Members(), fleet.Directory()
        self.router = fleet.Router(self.members, seed)
        self._model = fleet.build_model()
        self.publisher = Publisher(
            TensorSource(dict(self._model.named_parameters())),
            transport=transport,
            engines=self._directory,
            options=PublishOptions(
                on_failure="report",
                deadline_seconds=DEADLINE_SECONDS,
                bucket_size_bytes=32 << 10,
                on_event=self._on_event,
                **options,
            ),
        )
        self.reports: list[PublishReport] = []
        self.wrong: list[str] = []
        self.counts = collections.Counter[str]()
        self.longest: dict[str, float] = {}
        self._number = 0
        self._change: Change | None = None
        self._changing_seconds = 0.0
        self._stopped: list[tuple[int, Any]] = []
        """With the number of the version after whose publish they go on."""
        self._woken: list[Any] = []
        self._calm, self._stayed = set[Any](), set[Any]()
        """Engines to which nothing is done when a publish begins, and those of them that were so at the last one."""
        for _ in range(NUM_WARM):
            self.members.start()
        self.members.start(is_spare=True)
        self.members.await_starting(0)

    def _free(self) -> list[Any]:
        return [member for member in self.members.serving if not member.is_disturbed]

    def draw(self) -> Change:
        """Two engines at least are left in peace."""
        members, chosen = self.members, self._chosen
        free = self._free()
        weights = (self._kinds if len(free) > 2 else {"join": KINDS["join"]}) | FAULTS
        if len(members.serving) + len(members.starting) >= MOST_ENGINES:
            weights.pop("join")
        (kind,) = chosen.choices(list(weights), list(weights.values()))
        moments = ("between", *PHASES, *(IN_INSTALL if kind in ("leave", "crash", "stop") else ()))
        return Change(kind, chosen.choice(moments), chosen.choice(free), *chosen.choices((True, False), k=2))

    def step(self) -> None:
        """Publish once, with one change."""
        self.members.await_starting(2 if len(self._free()) > 2 else 0)
        if not self.members.spares:
            self.members.start(is_spare=True)
        self._change = change = self.draw()
        victim = change.victim
        if change.kind in FAULTS:
            self._directory.fault = change.kind
        elif change.moment in IN_INSTALL:
            self._fleet.ray.get(victim.actor.arm.remote(change.kind, change.moment))
            self.members.disturb(victim)
            if change.kind == "stop":
                self._stopped.append((self._number + 1 + change.lasts, victim))
        if change.kind == "empty":
            with pytest.raises(ValueError, match="no engine"):
                self.publish()
            self._number -= 1
            self._directory.fault = ""
        self.publish()
        self._directory.fault = ""
        if change.moment in IN_INSTALL and change.kind == "crash":
            self.members.has_crashed(victim)
        elif change.moment in IN_INSTALL and change.kind == "leave":
            self.members.leave(victim, drains=False)
        elif change.moment == "between" and change.kind not in FAULTS:
            self._apply(change)
        for until, member in list(self._stopped):
            if until <= self._number:
                self._stopped.remove((until, member))
                self._wake(member)

    def publish(self) -> PublishReport:
        """Publish the next version and judge the report."""
        self._number += 1
        self._fleet.fill(self._model, self._number)
        self.router.offered = self._number
        self._changing_seconds = 0.0
        for member in self._woken:
            member.is_disturbed = False
        self._woken.clear()
        former, self._calm = self._calm, {member for member in self.members.known if not member.is_disturbed}
        self._stayed = self._calm & former
        report = self.publisher.publish(self._number)
        self.router.published = self._number
        self._judge(report)
        self.reports.append(report)
        return report

    def _on_event(self, event: PublishEvent) -> None:
        if self._change is not None and event.engine is None and event.phase == self._change.moment:
            change, start = self._change, time.perf_counter()
            if change.kind not in FAULTS:
                self._apply(change)
            self._changing_seconds = time.perf_counter() - start

    def _apply(self, change: Change) -> None:
        members, victim = self.members, change.victim
        match change.kind:
            case "join":
                members.open()
            case "leave" | "drain":
                members.leave(victim, drains=change.kind == "drain")
            case "kill":
                members.kill(victim)
            case "crash":
                members.crash(victim)
            case "replace" if change.reuses_port:
                members.kill(victim)
                members.start(of=victim, port=victim.port)
            case "replace":  # The former one is still there, until Ray loses its patience.
                members.stop(victim)
                members.kill(victim)
                members.start(of=victim)
            case "stop":
                members.stop(victim)
                self._stopped.append((self._number + (change.lasts or change.moment == "between"), victim))
            case "pause":
                os.kill(victim.pid, signal.SIGSTOP)
                threading.Timer(0.5, os.kill, (victim.pid, signal.SIGCONT)).start()

    def _wake(self, member: Any) -> None:
        os.kill(member.pid, signal.SIGCONT)
        self._woken.append(member)

    def _judge(self, report: PublishReport) -> None:
        """Only engines to which something is done fail or are left out, and the report says so.

        One that dies or leaves is noticed before the publish's deadline. Only one that has stopped takes one deadline.
        """
        members, change = {member.url: member for member in self.members.known}, self._change
        silent = {member.url for _, member in self._stopped}
        if change and change.stops:
            silent.add(change.victim.url)
        calm = {url for url, member in members.items() if member in self._calm and not member.is_disturbed}
        former = self.reports[-1].engines.keys() if self.reports else set()
        for name in calm & (former | report.engines.keys()):
            result = report.engines.get(name)
            # A replacement at the former one's URL may not be in the directory yet.
            if members[name] in self._stayed if result is None else not result.ok:
                self.wrong.append(f"version {report.version}: nothing was done to {name}, which has {result}")
        for name, result in report.engines.items():
            if name not in silent and result.error is not None and result.error.kind == "PeerTimeoutError":
                self.wrong.append(f"version {report.version}: {name} took a deadline, with {change}: {result}")
        # Deltas are installed before a phase has ended for the engines that get all.
        too_late = PHASES if report.delta else ("installed",)
        prevents_install = change and change.kind in ("crash", "stop") and change.moment not in ("between", *too_late)
        if change and prevents_install and report.engines[change.victim.url].ok:
            self.wrong.append(f"version {report.version} does not say what happened to {change.victim.url}: {report}")
        seconds = report.seconds.total - self._changing_seconds
        if seconds >= DEADLINE_SECONDS * (1 + len(silent)):
            self.wrong.append(f"version {report.version} took {seconds:.1f} s, with {change}: {report}")
        kind = "silent" if silent else change.kind if change else ""
        self.longest[kind] = max(self.longest.get(kind, 0.0), round(seconds, 2))
        self.counts[kind] += 1

    def end(self) -> PublishReport:
        """Publish to as many engines as there were at the beginning, none of which fails any more."""
        self._change = None
        for _, member in self._stopped:
            self._wake(member)
        self._stopped.clear()
        self.members.await_leaving()
        self.members.await_starting(0)
        while len(self.members.serving) > NUM_WARM:
            self.members.leave(self.members.serving[0], drains=True)
        self.members.await_leaving()
        for _ in range(NUM_WARM):
            report = self.publish()
        return report

    def close(self) -> None:
        self.router.close()
        self.publisher.close()
        self.members.close()


def footprint() -> dict[str, int]:
    """What this process holds that a publisher could leak. Its pool of threads grows with the number of engines."""
    with open("/proc/self/smaps_rollup") as f:
        rss_bytes = next(int(line.split()[1]) << 10 for line in f if line.startswith("Rss:"))
    names = [thread.name for thread in threading.enumerate()]
    num_threads = sum(name.startswith("weightcast") and not name.startswith("weightcast-fleet") for name in names)
    return {"descriptors": len(os.listdir("/proc/self/fd")), "threads": num_threads, "rss_bytes": rss_bytes}


def remains(ports: set[int], pids: Iterable[int]) -> set[str]:
    """Return the threads, memory and sockets of weightcast here, connections to these ports, and these processes."""
    found = {thread.name for thread in threading.enumerate() if thread.name.startswith("weightcast")}
    with open("/proc/self/maps") as f:
        found |= {line.strip() for line in f if "weightcast" in line and "memfd" in line}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if "weightcast" in target:
                found.add(target)
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as sock:
                    names = [sock.getsockname(), sock.getpeername()]
                    found |= {str(name) for name in names if "weightcast" in str(name) or ports.intersection(name)}
    return found | {f"process {pid}" for pid in pids if os.path.exists(f"/proc/{pid}")}


@pytest.mark.parametrize(
    ("seed", "num_publishes", "kinds", "transport", "delta"),
    [
        pytest.param(1, 10, KINDS, "ipc://", None, id="10"),
        pytest.param(2, 100, KINDS | STOP, "ipc://", None, id="100-ipc", marks=FULL),
        pytest.param(3, 100, KINDS | STOP, "gloo://127.0.0.1:0", "auto", id="100-gloo", marks=FULL),
    ],
)
def test_engines_join_and_leave_at_random_while_publishes_run(
    fleet: Any, seed: int, num_publishes: int, kinds: dict[str, int], transport: str, delta: Literal["auto"] | None
) -> None:
    """One change in each publish: no stale token behind an open gate, no leak, no wait beyond a publish's deadline."""
    with contextlib.closing(Season(fleet, seed, kinds, transport, delta=delta)) as season:
        for _ in range(NUM_WARM):
            assert season.publish().ok
        warm = footprint()
        for number in range(num_publishes):
            season.step()
            if number == num_publishes // 4:
                warm["rss_bytes"] = footprint()["rss_bytes"]
        report = season.end()
        assert report.ok, report
        assert set(report.engines) == {member.url for member in season.members.serving}
        for _ in Deadline(30.0).polls():
            settled = footprint()
            if all(settled[name] <= warm[name] + most for name, most in MORE.items()):
                break
        print(f"{warm=} {settled=} {season.router.counts} {season.counts} {season.longest}")
    assert season.wrong == []
    assert season.router.wrong == []
    assert season.router.counts["tokens"] > 100 * num_publishes
    assert all(settled[name] <= warm[name] + most for name, most in MORE.items()), (warm, settled)
    ports, pids = {member.port for member in season.members.known}, season.members.pids
    assert any(not remains(ports, pids) for _ in Deadline(30.0).polls()), remains(ports, pids)
