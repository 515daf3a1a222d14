"""Deltas in any order of events: an engine has the bits of one version, and never a delta on another one's.

Engines have one rank or two, which share a base.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from publishers import publisher_of
from torch import nn

from core.direct import RecordingEngine
from core.parallel import ParallelEngine
from weightcast import ModuleEngine, TensorSource
from weightcast.errors import PublishError
from weightcast.format.manifest import WeightVersion
from weightcast.serving.worker import Worker
from weightcast.testing.leftovers import nothing_left
from weightcast.trainer.options import PublishEvent

NAMES = [f"t{number}" for number in range(6)]


class StopsHere(Exception):
    """Raised by the trainer's own callback."""


class RevisedWeights(TensorSource):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.numbers: dict[str, int] = {}

    def revisions(self) -> dict[str, int]:
        return self.numbers


class CopiedEngine(ModuleEngine):
    """A module that gets copies of what changed: one parameter is tied, one strided."""

    def __init__(self) -> None:
        module = nn.Module()
        for name in NAMES:
            module.register_parameter(name, nn.Parameter(torch.zeros(640), requires_grad=False))
        module.t1 = nn.Parameter(torch.zeros(1280)[::2], requires_grad=False)
        module.tied = module.t3
        module.t5 = nn.Parameter(torch.zeros(640, dtype=torch.float64), requires_grad=False)
        super().__init__(module)
        self.module = module
        self.versions: list[WeightVersion] = []
        self.fail_after: int | None = None

    @property
    def held(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self.module, name).data for name in NAMES}

    def begin(self, copied: Collection[str]) -> None:
        if self.fail_after is not None and self.fail_after % 2:
            raise RuntimeError("this engine was told to fail before it is written")
        super().begin(copied)

    def commit(self, version: WeightVersion) -> None:
        if self.fail_after is not None:
            raise RuntimeError("this engine was told to fail after it was written")
        super().commit(version)
        self.versions.append(version)


class Schedule:
    """A publisher with up to two engines, of each of which this knows the tensors that it must have."""

    def __init__(self, random: random.Random, url: str) -> None:
        self.random = random
        self.make, self.undo = random.choice([(RecordingEngine, False), (CopiedEngine, False), (CopiedEngine, True)])
        self.weights = {name: torch.arange(640.0) for name in NAMES}
        self.weights["t5"] = torch.arange(640, dtype=torch.float64)
        self.engines: dict[str, list[Any]] = {}
        """By engine, one for each of its ranks."""
        self.clients: dict[str, ParallelEngine] = {}
        self.served: dict[str, dict[str, torch.Tensor]] = {}
        self.last: dict[str, torch.Tensor] = {}
        """The last version that was sent to an engine."""
        self.num_made = self.num_deltas = 0
        self.stops_at = ""
        self.source = RevisedWeights(self.weights)
        if random.random() < 0.5:
            self.source.numbers = dict.fromkeys(random.sample(NAMES, 5), 0)
        self.publisher = publisher_of(
            self.source,
            transport=url,
            delta="always",
            verify=random.choice(["installed", None]),
            verify_every=random.randrange(1, 4),
            undo=self.undo,
            bucket_size_bytes=4096,
            deadline_seconds=10.0,
            on_failure="report",
            on_event=self.on_event,
        )
        self.add_an_engine()

    def on_event(self, event: PublishEvent) -> None:
        if event.phase == self.stops_at and event.engine is None:
            raise StopsHere

    def add_an_engine(self) -> None:
        if len(self.engines) == 2:
            return
        name = f"engine-{self.num_made}"
        self.num_made += 1
        self.engines[name] = ranks = [self.make() for _ in range(self.random.randrange(1, 3))]
        self.clients[name], self.served[name] = ParallelEngine(name, ranks), {}
        self.publisher.add_engine(self.clients[name])

    def remove_an_engine(self) -> None:
        if len(self.engines) == 1:
            return
        name = self.any_engine()
        self.publisher.remove_engine(self.clients[name])
        self.clients.pop(name).close()
        del self.engines[name], self.served[name]

    def any_engine(self) -> str:
        return self.random.choice(sorted(self.engines))

    def change_something(self) -> None:
        names = self.random.sample(NAMES, self.random.choice([1, 6]))
        for _ in range(self.random.randrange(1, 20)):
            name = self.random.choice(names)
            self.weights[name][self.random.randrange(640)] += self.random.random()
            self.revise(name)

    def change_everything(self) -> None:
        for name, tensor in self.weights.items():
            tensor.mul_(-1.5).add_(0.1)
            self.revise(name)

    def revise(self, name: str) -> None:
        if name in self.source.numbers:
            self.source.numbers[name] += 1

    def publish(self) -> None:
        report = self.publisher.publish()
        assert report.ok, [result.error for result in report.engines.values()]
        assert report.delta is not None
        self.num_deltas += report.delta.num_engines
        self.note(self.engines)

    def publish_the_last_again(self) -> None:
        name = self.any_engine()
        with contextlib.suppress(ValueError, PublishError):
            if self.publisher.sync(self.clients[name]).ok:
                self.served[name] = {key: tensor.clone() for key, tensor in self.last.items()}

    def publish_to_an_engine_that_fails(self) -> None:
        name = self.any_engine()
        first = self.engines[name][0]
        first.fail_after = self.random.randrange(6)
        report = self.publisher.publish()
        first.fail_after = None
        assert not report.engines[name].ok
        if not self.undo:
            self.served[name] = {}  # torn
        self.last = {key: tensor.clone() for key, tensor in self.weights.items()}
        self.note(engine for engine in self.engines if engine != name)

    def publish_and_stop(self) -> None:
        before = {name: len(ranks[0].versions) for name, ranks in self.engines.items()}
        self.stops_at = self.random.choice(["offered", "packed", "received"])
        with pytest.raises(StopsHere):
            self.publisher.publish()
        self.stops_at = ""
        self.note(name for name, ranks in self.engines.items() if len(ranks[0].versions) > before[name])

    def lose_a_base(self) -> None:
        session = self.any_worker()._session
        if session is not None:
            session.base = None

    def end_a_session(self) -> None:
        self.any_worker().shutdown()

    def any_worker(self) -> Worker:
        return self.random.choice(self.clients[self.any_engine()].workers)

    def release(self) -> None:
        self.publisher.release()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            self.served[name] = self.last = {key: tensor.clone() for key, tensor in self.weights.items()}

    def run(self, num_steps: int) -> None:
        often = [self.publish, self.change_something]
        rarely = [
            self.add_an_engine,
            self.remove_an_engine,
            self.change_everything,
            self.publish_the_last_again,
            self.publish_to_an_engine_that_fails,
            self.publish_and_stop,
            self.lose_a_base,
            self.end_a_session,
            self.release,
        ]
        for _ in range(num_steps):
            self.random.choice(often if self.random.random() < 0.6 else rarely)()
            for name, tensors in self.served.items():
                for key, tensor in tensors.items():
                    for rank in self.engines[name]:
                        assert torch.equal(rank.held[key], tensor), (name, key)
        self.publish()

    def close(self) -> None:
        self.publisher.close()
        for client in self.clients.values():
            client.close()


SEEDS = [
    *((url, first, 4) for url in ("memory://", "ipc://", "gloo://127.0.0.1:0") for first in (0, 4)),
    *(pytest.param("memory://", first, 100, marks=pytest.mark.full) for first in range(100, 2100, 100)),
]


@pytest.mark.parametrize(("url", "first", "num_schedules"), SEEDS)
def test_schedules(url: str, first: int, num_schedules: int) -> None:
    num_deltas = 0
    for seed in range(first, first + num_schedules):
        with nothing_left():
            schedule = Schedule(random.Random(seed), url)
            try:
                schedule.run(30)
            except BaseException as exc:
                exc.add_note(f"seed {seed}")
                raise
            finally:
                schedule.close()
            num_deltas += schedule.num_deltas
    assert num_deltas > num_schedules
