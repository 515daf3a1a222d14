"""Starts the trainer's ranks and the engines as processes, yields the trainer's events, and ends all processes.

Invariants: all files of a run are in one directory, which is removed after the last process has ended. Every process
has a session of its own, so that Ctrl-C on the terminal reaches the supervisor only, and a pipe as stdin, whose end
means that the supervisor is gone. A signal, a process that ends too early, or silence for too long ends the run.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from rl_demo.messages import DemoSettings, Event, RunEnded, Saved, decoder
from weightcast.host.deadline import Deadline

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SILENCE_SECONDS = 120.0
DEATH_SECONDS = 1.0
TERMINATION_SECONDS = 8.0
NUM_LOG_LINES = 15
_SERVING = re.compile(rb"weightcast: serving .* at (http://\S+)\n")

_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

_FOLDER = str(Path(__file__).parents[1])
"""Where a process finds this package."""

Inbox: TypeAlias = "queue.SimpleQueue[signal.Signals | tuple[str, bytes | int]]"
"""Signals that were received; and from each process its name with a line of its stdout, or at last its exit status."""


class Interrupted(Exception):
    """The run was ended by this signal."""


def run(settings: DemoSettings, num_engines: int) -> Generator[Event]:
    """Run the demo in processes of its own; yield each of the trainer's events, the last is a RunEnded.

    When this generator is exhausted or closed, all processes have ended and the run directory is removed. Raises
    Interrupted for SIGINT, SIGTERM or SIGHUP. For the main thread.
    """
    inbox: Inbox = queue.SimpleQueue()
    with catch_signals(inbox) as received:
        with (
            tempfile.TemporaryDirectory(prefix="weightcast-demo-") as directory,
            contextlib.closing(Processes(directory, inbox)) as processes,
        ):
            yield from _supervise(settings, num_engines, directory, inbox, processes)
        if received:
            raise Interrupted(received[0])


@contextlib.contextmanager
def catch_signals(inbox: Inbox) -> Iterator[list[signal.Signals]]:
    """Put signals into `inbox` and into the list. No exception interrupts what starts or ends a process."""
    received: list[signal.Signals] = []

    def note(number: int, frame: object) -> None:
        received.append(signal.Signals(number))
        inbox.put(received[-1])

    with contextlib.ExitStack() as stack:
        for number in SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, note))
        yield received


def _supervise(
    settings: DemoSettings, num_engines: int, directory: str, inbox: Inbox, processes: Processes
) -> Iterator[Event]:
    """Start the trainer, whose rank 0 writes the model directory, then the engines; send their URLs to every rank."""
    num_ranks, urls = settings.num_trainer_ranks, dict[str, str]()
    trainer = ["trainer"] if num_ranks == 1 else [f"trainer rank {rank}" for rank in range(num_ranks)]
    for rank, name in enumerate(trainer):
        arguments = msgspec.json.encode(settings).decode(), directory, str(rank)
        processes.start(name, "rl_demo.trainer", *arguments)
    while True:
        try:
            message = inbox.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            yield RunEnded(problem=f"nothing was heard of trainer or engines for {SILENCE_SECONDS:.0f} s")
            return
        if isinstance(message, signal.Signals):
            return
        name, output = message
        if isinstance(output, int):
            if output != 0 or name not in trainer[1:]:  # the other ranks may end before rank 0
                yield RunEnded(problem=processes.describe_end(name, output))
                return
        elif name == trainer[0]:
            event = decoder.decode(output)
            if isinstance(event, Saved):
                for index in range(num_engines):
                    # Random weights: an engine can only equal the trainer afterwards by way of a publish.
                    weights = f"{directory}/model", "--random-weights", str(settings.seed + 1 + index)
                    options = "--port", "0", "--threads", "1", "--exit-with-parent"
                    processes.start(f"engine {index}", "weightcast.cli", "serve", *weights, *options)
            if isinstance(event, RunEnded):
                # An engine that died is what the trainer failed on, whichever of both is noticed first.
                died = processes.died("engine ") if event.problem else None
                yield msgspec.structs.replace(event, problem=processes.describe_end(*died)) if died else event
                return
            yield event
        elif match := _SERVING.match(output):
            urls[name] = match.group(1).decode()
            if len(urls) == num_engines:
                for name in trainer:
                    processes.send(name, msgspec.json.encode(sorted(urls.values())) + b"\n")


class Processes:
    """Python processes by name."""

    def __init__(self, directory: str, inbox: Inbox) -> None:
        self._directory = directory
        self._inbox = inbox
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *arguments: str) -> None:
        """Run a module; its stdout goes to the inbox, its stderr to a log file."""
        path = os.pathsep.join(filter(None, [_FOLDER, os.environ.get("PYTHONPATH")]))
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT, "TMPDIR": self._directory, "PYTHONPATH": path},
                start_new_session=True,
            )
        threading.Thread(target=self._read, args=(name, self._processes[name]), daemon=True).start()

    def send(self, name: str, line: bytes) -> None:
        """Write to a process's stdin, unless the process has ended."""
        stdin = self._processes[name].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            os.write(stdin.fileno(), line)

    def describe_end(self, name: str, status: int) -> str:
        """The exit status, -n after signal n, in words, with the end of the process's log."""
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = self._log(name).read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "\n  | ".join([f"{name} {how}" + (", the end of its log:" if lines else ""), *lines])

    def died(self, prefix: str) -> tuple[str, int] | None:
        """The name and status of a process that failed by now, or does within DEATH_SECONDS."""
        for _ in Deadline(DEATH_SECONDS).polls(0.01, 0.1):
            for name, process in self._processes.items():
                if name.startswith(prefix) and process.poll():
                    return name, process.returncode
        return None

    def _log(self, name: str) -> Path:
        return Path(self._directory, f"{name.replace(' ', '-')}.log")

    def _read(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._inbox.put((name, line))
        self._inbox.put((name, process.wait()))

    def close(self) -> None:
        """End all processes: SIGTERM, and SIGKILL after TERMINATION_SECONDS."""
        for process in self._processes.values():
            process.terminate()
        deadline = Deadline(TERMINATION_SECONDS)
        for process in self._processes.values():
            try:
                process.wait(deadline.remaining_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
