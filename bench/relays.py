"""The seconds that `weightcast plan --relays` computes, beside those of the relays that it picks, over links of a rate.

Run it with `PYTHONPATH=bench:src:tests python bench/relays.py`.

Trainer and engines are processes in network namespaces of their own, whose links `tc` shapes: it needs root and
iproute2. The commands are the plan's own, with addresses and paths in the place of its names. A publish without relays
is timed from its call until it returns; one with relays from its commit in the trainer's store until the last relay
says that its engines have the version. Figures are medians of the publishes after the first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from network.namespaces import Network, enter, network

from weightcast import EngineServer, Publisher, PublishOptions, TensorSource
from weightcast.cli.planned_bytes import Deployment, Estimate, equal, estimate
from weightcast.cli.planned_relays import plan_relays
from weightcast.engines.tensors import TensorSink

TOKEN = "secret"
PORT = 8000
DEADLINE_SECONDS = 300.0
NUM_TENSORS = 48


@dataclasses.dataclass(frozen=True)
class Case:
    """A fleet: a host for each engine. `num_relays`: 0 for a publish by the trainer. Rates in Mbit/s."""

    num_engines: int
    num_relays: int
    link_mbit: int
    trainer_mbit: int


CASES = {
    "direct-4": Case(4, 0, 50, 50),
    "direct-8": Case(8, 0, 50, 50),
    "1x4": Case(4, 1, 50, 12),
    "4x1": Case(4, 4, 50, 50),
    "2x4": Case(8, 2, 50, 50),
    "2x4, far": Case(8, 2, 50, 12),
}


def planned(case: Case, megabytes: int) -> Estimate:
    """The estimate of a case, with its relays."""
    it = Deployment(
        transport="gloo",
        num_engines=case.num_engines,
        engine_hosts=case.num_engines,
        colocated=False,
        link_gbit=case.link_mbit / 1000,
        trainer_gbit=case.trainer_mbit / 1000,
    )
    specs = equal(megabytes * 500_000, NUM_TENSORS, "bfloat16")
    found = estimate(specs, it)
    relays = plan_relays(specs, it, found, num_relays=case.num_relays or None)
    return Estimate(**{**{n: getattr(found, n) for n in found.__struct_fields__}, "relays": relays})


def serve(namespace: str, host: str, megabytes: int) -> None:
    enter(namespace)
    engine = TensorSink(equal(megabytes * 500_000, NUM_TENSORS, "bfloat16"))
    with EngineServer(engine, host=host, port=PORT, token=TOKEN):
        print("serving", flush=True)
        sys.stdin.read()


def train(namespace: str, url: str, engines: list[str], megabytes: int) -> None:
    """Publish once for each line of stdin, and print when it began and ended."""
    enter(namespace)
    specs = equal(megabytes * 500_000, NUM_TENSORS, "bfloat16")
    weights = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs}
    options = PublishOptions(deadline_seconds=DEADLINE_SECONDS)
    with Publisher(TensorSource(weights), transport=url, engines=engines, token=TOKEN, options=options) as publisher:
        for _ in sys.stdin:
            for tensor in weights.values():
                tensor.add_(1)
            start = time.time()
            publisher.publish()
            print(json.dumps([start, time.time()]), flush=True)


class Processes:
    """Processes that this benchmark has started; `close` ends them."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        pipe, one = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}  # there are more processes than cores
        self._started.append(process := subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=one))
        return process

    def role(self, *words: str) -> subprocess.Popen[str]:
        return self.start(sys.executable, __file__, "--role", *words)

    def close(self) -> None:
        for process in self._started:
            process.kill()
        for process in self._started:
            process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} has ended")
    return line


def publish(trainer: subprocess.Popen[str]) -> tuple[float, float]:
    assert trainer.stdin is not None
    trainer.stdin.write("publish\n")
    trainer.stdin.flush()
    start, end = json.loads(line_of(trainer))
    return start, end


def measure(case: Case, found: Estimate, megabytes: int, runs: int) -> Iterator[float]:
    names = [f"host-{number}" for number in range(1, case.num_engines + 1)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "token").write_text(TOKEN)
        net = stack.enter_context(network("trainer", *names))
        net.limit("trainer", case.trainer_mbit)
        for name in names:
            net.limit(name, case.link_mbit)
        processes = Processes()
        stack.callback(processes.close)
        engines = [processes.role("serve", net.namespace(name), net.address(name), str(megabytes)) for name in names]
        for engine in engines:
            line_of(engine)
        urls = [f"http://{net.address(name)}:{PORT}" for name in names]
        where = net.namespace("trainer")
        if not case.num_relays:
            gloo = f"gloo://{net.address('trainer')}:0"
            trainer = processes.role("train", where, gloo, " ".join(urls), str(megabytes))
            for _ in range(1 + runs):
                start, end = publish(trainer)
                yield end - start
            return
        trainer = processes.role("train", where, f"file://{folder}/trainer", "", str(megabytes))
        relays = []
        assert found.relays is not None
        for each in found.relays.commands:
            words = shlex.split(substituted(each.command, each.host, net, folder))
            command = ["ip", "netns", "exec", net.namespace(each.host), sys.executable, "-m", "weightcast.cli"]
            process = processes.start(*command, *words[1:], *(["--json"] if words[1] == "follow" else []))
            if words[1] == "follow":
                relays.append(process)
            elif words[1] == "serve-store":
                line_of(process)
        for _ in range(1 + runs):
            _, committed = publish(trainer)
            for relay in relays:
                line_of(relay)
            yield time.time() - committed


def substituted(command: str, host: str, net: Network, folder: Path) -> str:
    """A command of the plan with this network's addresses and this folder's paths."""
    command = command.replace("file:///STORE", f"file://{folder}/{host}").replace("TOKEN", f"{folder}/token")
    command = command.replace("0.0.0.0", net.address(host))
    command = re.sub(r"http://engine-(\d+):8000", lambda m: f"http://{net.address(f'host-{m[1]}')}:{PORT}", command)
    return re.sub(r"(?<=://)(trainer|host-\d+)(?=:)", lambda m: net.address(m[1]), command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--megabytes", type=int, default=24, help="of a version (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="timed publishes (%(default)s)")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    match args.role:
        case ["serve", namespace, host, megabytes]:
            serve(namespace, host, int(megabytes))
            return
        case ["train", namespace, url, engines, megabytes]:
            train(namespace, url, engines.split(), int(megabytes))
            return
    # A process that ends closes the others.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    print(f"{'case':10} {'trainer':>9} {'levels':>8} {'planned':>9} {'measured':>9} {'ratio':>6}")
    for name in args.case:
        case = CASES[name]
        found = planned(case, args.megabytes)
        assert found.relays is not None
        seconds = found.relays.seconds if case.num_relays else found.relays.seconds_without
        levels = str(found.relays.levels) if case.num_relays else "direct"
        measured = list(measure(case, found, args.megabytes, args.runs))
        median = statistics.median(measured[1:])
        all_runs = ", ".join(f"{each:.2f}" for each in measured)
        rate = f"{case.trainer_mbit} Mbit/s"
        figures = f"{seconds:8.2f}s {median:8.2f}s {median / seconds:6.3f}   ({all_runs})"
        print(f"{name:10} {rate:>9} {levels:>8} {figures}", flush=True)


if __name__ == "__main__":
    main()
