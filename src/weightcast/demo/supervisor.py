"""Runs the trainer's ranks and the engines to their end, and whatever happens leaves nothing of them behind.

Invariants: everything lives in one run directory, which is removed after the last process has ended; a signal, a child
that ends too early or a silence that lasts too long ends the run; nothing waits for anything but the selector.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from weightcast.demo.children import Child, Children
from weightcast.demo.events import Event, EventReader, RunEnded, Saved
from weightcast.demo.interrupts import Interrupts
from weightcast.demo.settings import MODEL_DIRECTORY, DemoSettings

PREFIX = "weightcast-demo-"
TRAINER = "weightcast.demo.trainer"
SILENCE_SECONDS = 120.0
_READ_BYTES = 1 << 16
_READY = re.compile(rb"^weightcast: serving .* at (http://\S+)\n", re.MULTILINE)

Watch = Callable[[Event], None]


class Interrupted(Exception):
    """The run was ended by a signal; `status` is the exit status that says so."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.status = 128 + received


class _Failed(Exception):
    """A process did not do its part; the text says which and how."""


def run(settings: DemoSettings, num_engines: int, watch: Watch) -> None:
    """Run the demo in processes of its own; `watch` is told each of the trainer's events, the last is an Ended.

    Blocks until every process has ended and the run directory is gone. Raises Interrupted for SIGINT, SIGTERM or
    SIGHUP. For the main thread.
    """
    with Interrupts() as interrupts:
        with (
            tempfile.TemporaryDirectory(prefix=PREFIX) as directory,
            Children(Path(directory), _environment(directory)) as children,
            _Loop(interrupts) as loop,
        ):
            _Run(settings, num_engines, watch, Path(directory), children, loop).run()
        if interrupts.received is not None:
            raise Interrupted(interrupts.received)


class _Loop:
    """Calls back when something can be read; ends when it is told to, or by a signal."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts, selectors.EVENT_READ, lambda: None)
        self.is_over = False

    def add(self, source: int | Child, call: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, call)

    def remove(self, source: int | Child) -> None:
        """Idempotent."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def run(self, silence_seconds: Callable[[], float]) -> None:
        """Raises _Failed once `silence_seconds()` has reached SILENCE_SECONDS, and what a call raises."""
        while not self.is_over and self._interrupts.received is None:
            left = SILENCE_SECONDS - silence_seconds()
            if left <= 0:
                raise _Failed(f"nothing was heard of trainer or engines for {SILENCE_SECONDS:.0f} s")
            for key, _ in self._selector.select(left):
                if not self.is_over:
                    key.data()

    def __enter__(self) -> _Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()


class _Run:
    """The trainer first, whose rank 0 writes the model directory; then the engines, of which every rank is told."""

    def __init__(
        self, settings: DemoSettings, num_engines: int, watch: Watch, directory: Path, children: Children, loop: _Loop
    ) -> None:
        self._settings = settings
        self._num_engines = num_engines
        self._watch = watch
        self._directory = directory
        self._children = children
        self._loop = loop
        self._events = EventReader()
        self._trainer: list[Child] = []
        self._urls: dict[str, str] = {}
        self._heard = time.monotonic()

    def run(self) -> None:
        try:
            with self._started_leader():
                self._start_followers()
                self._loop.run(lambda: time.monotonic() - self._heard)
        except _Failed as exc:
            self._watch(RunEnded(problem=str(exc)))

    @contextlib.contextmanager
    def _started_leader(self) -> Iterator[None]:
        reader, writer = os.pipe()
        try:
            try:
                leader = self._start_trainer(0, writer)
            finally:
                os.close(writer)
            self._loop.add(reader, lambda: self._read_events(reader))
            self._loop.add(leader, lambda: self._leader_ended(leader, reader))
            yield
        finally:
            os.close(reader)

    def _start_followers(self) -> None:
        for trainer_rank in range(1, self._settings.num_trainer_ranks):
            follower = self._start_trainer(trainer_rank)
            self._loop.add(follower, partial(self._follower_ended, follower))

    def _start_trainer(self, trainer_rank: int, events_descriptor: int | None = None) -> Child:
        settings = msgspec.json.encode(self._settings).decode()
        passed = () if events_descriptor is None else (events_descriptor,)
        command = [sys.executable, "-m", TRAINER, settings, str(self._directory), *map(str, (trainer_rank, *passed))]
        name = "trainer" if self._settings.num_trainer_ranks == 1 else f"trainer rank {trainer_rank}"
        child = self._children.start(name, command, pass_descriptors=passed)
        self._trainer.append(child)
        return child

    def _engine_command(self, index: int) -> list[str]:
        serve = [sys.executable, "-m", "weightcast.cli", "serve", str(self._directory / MODEL_DIRECTORY)]
        # Weights of their own: what an engine answers with afterwards can only have come through a publish.
        weights = ["--random-weights", str(self._settings.seed + 1 + index)]
        return [*serve, "--port", "0", "--threads", "1", "--exit-with-parent", *weights]

    def _read_events(self, reader: int) -> bool:
        """Read once; whether there was anything."""
        data = os.read(reader, _READ_BYTES)
        if not data:
            self._loop.remove(reader)
        for event in self._events.feed(data):
            self._heard = time.monotonic()
            if isinstance(event, Saved):
                self._start_engines()
            self._watch(event)
            self._loop.is_over |= isinstance(event, RunEnded)
        return bool(data)

    def _leader_ended(self, leader: Child, reader: int) -> None:
        while not self._loop.is_over and self._read_events(reader):
            pass
        if not self._loop.is_over:
            raise _Failed(leader.last_words())

    def _follower_ended(self, follower: Child) -> None:
        """It has done its part if its status is 0; rank 0 may go on."""
        self._loop.remove(follower)
        if follower.status() != 0:
            raise _Failed(follower.last_words())

    def _start_engines(self) -> None:
        for index in range(self._num_engines):
            engine = self._children.start(f"engine {index}", self._engine_command(index), read_stdout=True)
            self._watch_engine(engine)

    def _watch_engine(self, engine: Child) -> None:
        stdout, output = engine.stdout.fileno(), bytearray()

        def read() -> None:
            data = os.read(stdout, _READ_BYTES)
            if not data:
                self._loop.remove(stdout)
            if engine.name not in self._urls:
                output.extend(data)
                self._look_for_url(engine, bytes(output))

        def ended() -> None:
            raise _Failed(engine.last_words())

        self._loop.add(stdout, read)
        self._loop.add(engine, ended)

    def _look_for_url(self, engine: Child, output: bytes) -> None:
        found = _READY.search(output)
        if found is None:
            return
        self._heard = time.monotonic()
        self._urls[engine.name] = found.group(1).decode()
        if len(self._urls) == self._num_engines:
            for trainer in self._trainer:
                trainer.tell(msgspec.json.encode(sorted(self._urls.values())))


def _environment(directory: str) -> dict[str, str]:
    """The children's: temporary files go to the run directory, trainer ranks meet on loopback, nothing asks a hub,
    nothing forks a tokenizer's pool."""
    return {
        **os.environ,
        "TMPDIR": directory,
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
