"""A publish to many engines: its seconds, the publisher's memory and threads, and the requests that each engine gets.

`python bench/fleet.py [--engines 1 64 256 1000] [--processes N] [--kill PHASE]`. Engines are stand-ins, many in one
process: each is the reference server's application with a real worker and link, over a model that keeps no copy of its
weights but compares all values that it is given. `--kill` ends a part of these processes in the
middle of a last publish: the engines of the others must have that version, and the report must name each that has not.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import gc
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import uvicorn
from publishing.meters import ProcessMeter

from weightcast import Publisher, PublishOptions, TensorSource
from weightcast.control.server.app import EngineServer
from weightcast.control.server.connections import KEEP_ALIVE_SECONDS, LimitedConnection
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.host.closing import on_failure
from weightcast.trainer.options import PublishEvent

NUM_TENSORS, SIZE = 16, 32768
"""1 MiB of bf16 in all."""
KILLED_SHARE = 0.3
SPECS = [TensorSpec(f"layers.{number}.weight", "bfloat16", (SIZE,)) for number in range(NUM_TENSORS)]


class StandInEngine:
    """Takes weights that all have one value, and keeps only this value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._loaded: dict[str, float] = {}

    def specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            first = tensor[0]
            if not torch.equal(tensor, first.expand_as(tensor)):
                raise ValueError(f"{name} has different values")
            self._loaded[name] = float(first)

    def commit(self, version: WeightVersion) -> None:
        (self.value,) = {self._loaded[spec.name] for spec in SPECS}

    def discard(self) -> None:
        self._loaded.clear()


class StandIns:
    """Several engines in one process: one HTTP server, with the reference server's application at /0, /1, ..."""

    def __init__(self, number: int) -> None:
        self._engines = [StandInEngine() for _ in range(number)]
        self._servers = [EngineServer(engine) for engine in self._engines]
        self._apps: list[Any] = [server._uvicorn.config.app for server in self._servers]
        self._num_requests = [0] * number
        self._connections: list[set[Any]] = [set() for _ in self._engines]
        """The addresses from which each engine got requests."""
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        config = uvicorn.Config(self._answer, log_config=None, log_level="warning", lifespan="off", interface="asgi3")
        config.http, config.timeout_keep_alive = LimitedConnection, KEEP_ALIVE_SECONDS
        self._server = uvicorn.Server(config)
        run = functools.partial(asyncio.run, self._server.serve(sockets=[self._socket]))
        threading.Thread(target=run, daemon=True).start()
        self.urls = [f"http://127.0.0.1:{self._socket.getsockname()[1]}/{index}" for index in range(number)]

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        index = int(scope["path"].split("/")[1])
        self._num_requests[index] += 1
        self._connections[index].add(scope["client"])
        await self._apps[index]({**scope, "root_path": f"/{index}"}, receive, send)

    def state(self) -> list[State]:
        states = map(State, (engine.value for engine in self._engines), self._num_requests, map(len, self._connections))
        return list(states)


class State(NamedTuple):
    """An engine's value, its requests so far, and the connections over which they came."""

    value: float | None
    num_requests: int
    num_connections: int


def serve(number: int) -> None:
    """Serve engines, as this process's only task: for each line of stdin, write the state of each to stdout."""
    torch.set_num_threads(1)
    stand_ins = StandIns(number)
    print(json.dumps(stand_ins.urls), flush=True)
    for _ in sys.stdin:
        print(json.dumps(stand_ins.state()), flush=True)


class StandInProcess:
    def __init__(self, number: int) -> None:
        command = [sys.executable, __file__, "--serve", str(number)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with on_failure(self.close):
            self.urls: list[str] = self._read()

    def state(self) -> dict[str, State]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(zip(self.urls, itertools.starmap(State, self._read()), strict=True))

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with self._process:
            self._process.kill()


@contextlib.contextmanager
def started(num_engines: int, num_processes: int) -> Iterator[list[StandInProcess]]:
    num_processes = min(num_processes, num_engines)
    shares = [num_engines // num_processes + (n < num_engines % num_processes) for n in range(num_processes)]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(StandInProcess(share))) for share in shares]


class MostThreads(threading.Thread):
    """Counts this process's threads and descriptors every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.num_threads = self.num_descriptors = 0
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.02):
            self.num_threads = max(self.num_threads, threading.active_count() - 1)
            self.num_descriptors = max(self.num_descriptors, len(os.listdir("/proc/self/fd")))

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()

    def __enter__(self) -> MostThreads:
        self.start()
        return self


def measure(num_engines: int, args: argparse.Namespace) -> None:
    tensors = {spec.name: torch.zeros(SIZE, dtype=torch.bfloat16) for spec in SPECS}
    with started(num_engines, args.processes) as processes:
        urls = [url for process in processes for url in process.urls]
        meter = ProcessMeter(os.getpid())
        gc.collect()
        meter.begin()
        victims: list[StandInProcess] = []

        def on_event(event: PublishEvent) -> None:
            if event.phase == args.kill and event.engine is None:
                while victims:
                    victims.pop().kill()

        options = PublishOptions(on_failure="report", on_event=on_event, deadline_seconds=args.deadline)
        with (
            MostThreads() as most,
            Publisher(TensorSource(tensors), transport=args.transport, engines=urls, options=options) as publisher,
        ):

            def publish(number: int) -> tuple[Any, float, float]:
                for tensor in tensors.values():
                    tensor.fill_(number)
                start, cpu = time.perf_counter(), time.process_time()
                report = publisher.publish()
                return report, time.perf_counter() - start, time.process_time() - cpu

            def states() -> dict[str, State]:
                return {url: state for process in processes for url, state in process.state().items()}

            first, first_seconds, first_cpu = publish(1)
            require_all(first, states(), 1)
            before, found = states(), []
            for number in range(2, 2 + args.runs):
                found.append(publish(number))
                require_all(found[-1][0], states(), number)
            after = states()
            requests = collections.Counter(
                (after[url].num_requests - before[url].num_requests) / args.runs for url in urls
            )
            seconds = statistics.median(each[1] for each in found)
            stages, cpu = found[-1][0].seconds, statistics.median(each[2] for each in found)
            connections = collections.Counter(state.num_connections for state in after.values())
            print(
                f"{num_engines:5} engines: first {first_seconds:.2f} s (CPU {first_cpu:.2f}), then {seconds:.3f} s "
                f"(CPU {cpu:.3f}; offer {stages.offer:.2f}, send {stages.send:.2f}, seal {stages.seal:.2f}, pause "
                f"{stages.pause:.3f}); at most {most.num_threads} threads and {most.num_descriptors} descriptors, "
                f"{meter.extra_bytes() / 1e6:.0f} MB more; requests per engine and publish: {dict(requests)}; "
                f"connections per engine: {dict(connections)}",
                flush=True,
            )
            if args.kill:
                doomed = processes[: round(len(processes) * KILLED_SHARE)]
                lost = {url for process in doomed for url in process.urls}
                victims += doomed
                number = 2 + args.runs
                report, seconds, _ = publish(number)
                named = {name for name, result in report.engines.items() if result.error is not None}
                survivors = [process for process in processes if process not in doomed]
                values = {url: state.value for process in survivors for url, state in process.state().items()}
                wrong = [url for url, value in values.items() if value != number]
                print(
                    f"      {len(lost)} killed after {args.kill!r}: {seconds:.2f} s; {len(named)} named, "
                    f"{len(named - lost)} of them living; {len(wrong)} survivors without the version; causes "
                    f"{dict(collections.Counter(report.engines[name].error.kind for name in named))}",
                    flush=True,
                )
                assert named == lost, sorted(named ^ lost)[:5]
                assert not wrong, wrong[:5]


def require_all(report: Any, states: dict[str, State], number: int) -> None:
    assert report.ok, next(result.error for result in report.engines.values() if result.error)
    assert {state.value for state in states.values()} == {float(number)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 64, 256, 1000])
    parser.add_argument("--processes", type=int, default=10, help="that the engines are in (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="timed publishes after the first one (%(default)s)")
    parser.add_argument("--transport", default="ipc://")
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--kill", choices=("offered", "packed", "received"), help="the phase after which to kill")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for num_engines in args.engines:
        measure(num_engines, args)


if __name__ == "__main__":
    main()
