"""Engines in Ray actors that join, leave, die, stop and are replaced; a router that judges each of their tokens.

The weights of version v are a function of v. All sums are of whole numbers below 2^53 in float64, so a token has the
same bits in whatever order a machine adds up, and is of one version only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import ray
import torch
from ports import free_port
from stopping import send_signal

from weightcast import EngineServer, ModuleEngine
from weightcast.format.manifest import WeightVersion
from weightcast.host.deadline import Deadline
from weightcast.integrations.ray import ActorEngines

PREFIX = "engine-"
WIDTH = 64
NUM_LAYERS = 6
NUM_TOKENS = 24
PROMPTS = range(1, 7)
PATIENCE_SECONDS = 120.0
"""For what Ray does: it starts processes, on a machine that does other things too."""


def build_model() -> torch.nn.Sequential:
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(NUM_LAYERS))
    return torch.nn.Sequential(*layers).requires_grad_(False)


def fill(model: torch.nn.Module, version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))


def token_of(model: torch.nn.Module, prompt: int, position: int) -> bytes:
    """Return a digest of the bits of what the model makes of a prompt at a position."""
    with torch.inference_mode():
        values = model((torch.arange(WIDTH) * prompt + position).remainder(7).double())
    return hashlib.blake2b(bytes(values.numpy()), digest_size=16).digest()


@functools.cache
def expected_tokens(version: int) -> dict[tuple[int, int], bytes]:
    """What a version answers, by prompt and position."""
    model = build_model()
    fill(model, version)
    asked = itertools.product(PROMPTS, range(NUM_TOKENS))
    return {(prompt, position): token_of(model, prompt, position) for prompt, position in asked}


class ArmedEngine(ModuleEngine):
    """Does to itself what it is armed with in its next install, before the copies ("begin") or after ("commit")."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.armed: dict[str, Callable[[], object]] = {}

    def begin(self, copied: Collection[str]) -> None:
        self.armed.pop("begin", int)()
        super().begin(copied)

    def commit(self, version: WeightVersion) -> None:
        self.armed.pop("commit", int)()
        super().commit(version)


class RayEngine:
    """An engine server in an actor. `url` answers only after `open`."""

    def __init__(self, port: int) -> None:
        torch.set_num_threads(1)
        self._model, self._opening, self._is_open = build_model(), threading.Lock(), threading.Event()
        self._engine = ArmedEngine(self._model)
        self._server = EngineServer(self._engine, port=port)

    def open(self) -> None:
        with self._opening:
            if not self._is_open.is_set():
                self._server.start()
                self._is_open.set()

    def pid(self) -> int:
        return os.getpid()

    def url(self) -> str:
        self._is_open.wait()
        return self._server.url

    def arm(self, kind: str, moment: str) -> None:
        def act() -> None:
            if kind == "leave":
                threading.Thread(target=self._server.close).start()
            else:  # To this very thread: others may go on for a while.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

        self._engine.armed[moment] = act

    def generate(self, prompt: int) -> list[tuple[int, bytes]]:
        """The tokens of an answer, each with the version under which it was made."""
        tokens = []
        for position in range(NUM_TOKENS):
            with self._server.step(timeout_seconds=60) as version:
                tokens.append((-1 if version is None else version.number, token_of(self._model, prompt, position)))
        return tokens

    def close(self) -> None:
        self._server.close()


class LateEngine:
    """An actor that can't say its URL yet when it is asked first."""

    def __init__(self, url: str, num_failures: int = 0) -> None:
        self._url, self._num_failures = url, num_failures

    def url(self) -> str:
        self._num_failures -= 1
        if self._num_failures >= 0:
            raise RuntimeError("the server is not up yet")
        return self._url


@dataclasses.dataclass(eq=False)
class Member:
    """An engine. `is_disturbed`: it may fail, since it starts or something is done to it; so often that has begun.

    `num_requests`: that run.
    """

    name: str
    port: int
    actor: Any
    pid: int = 0
    is_disturbed: bool = True
    num_disturbances: int = 0
    num_requests: int = 0
    num_tokens: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Members:
    """Starts and ends engines. `serving`: those that a router may ask, under `changed`.

    `spares`: an engine whose process is up, or nearly, and has no server yet. `known`, `pids`: all there ever were.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.serving: list[Member] = []
        self.starting: list[Member] = []
        self.spares: list[Member] = []
        self.known: list[Member] = []
        self.pids: list[int] = []
        self._actor_type = ray.remote(num_cpus=0, max_concurrency=16, max_restarts=-1)(RayEngine)
        self._pool = ThreadPoolExecutor(8)
        self._leaving: list[Future[None]] = []

    def start(self, *, of: Member | None = None, port: int = 0, is_spare: bool = False) -> None:
        """Start an engine, under a new name or that `of` another one. Ray starts it again if its process dies."""
        name, port = f"{PREFIX}{len(self.known)}" if of is None else of.name, port or free_port()
        member = Member(name, port, self._actor_type.options(name=name).remote(port))
        self.known.append(member)
        (self.spares if is_spare else self.starting).append(member)
        if not is_spare:
            member.actor.open.remote()

    def open(self) -> None:
        """Have the spare engine listen, at this moment."""
        spare = self.spares.pop()
        ray.get(spare.actor.open.remote(), timeout=PATIENCE_SECONDS)
        self.starting.append(spare)
        self.await_starting(0)

    def await_starting(self, most: int) -> None:
        """Let engines that are up serve; wait until at most so many are not yet."""
        for member in list(self.starting):
            seconds = 0.01 if len(self.starting) <= most else PATIENCE_SECONDS
            for _ in Deadline(seconds).polls():
                with contextlib.suppress(ray.exceptions.RayError):  # It is being restarted, or takes longer.
                    actor = member.actor
                    calls = [actor.open.remote(), actor.url.remote(), actor.pid.remote()]
                    _, url, member.pid = ray.get(calls, timeout=seconds)
                    assert url == member.url
                    self.pids.append(member.pid)
                    self.starting.remove(member)
                    with self.changed:
                        member.is_disturbed = False
                        self.serving.append(member)
                    break
        assert len(self.starting) <= most, "engines don't start"

    def forget(self, member: Member) -> None:
        """Send it no new requests."""
        with self.changed:
            if member in self.serving:
                self.serving.remove(member)

    def disturb(self, member: Member) -> None:
        member.is_disturbed = True
        member.num_disturbances += 1

    def kill(self, member: Member) -> None:
        """End it for good."""
        self.disturb(member)
        self.forget(member)
        ray.kill(member.actor)

    def stop(self, member: Member) -> None:
        """Stop its process, and wait until it stands still."""
        self.disturb(member)
        send_signal(member.pid, signal.SIGSTOP)

    def crash(self, member: Member) -> None:
        """Ray starts it again under its name."""
        self.disturb(member)
        os.kill(member.pid, signal.SIGKILL)
        self.has_crashed(member)

    def has_crashed(self, member: Member) -> None:
        self.forget(member)
        self.starting.append(member)

    def leave(self, member: Member, *, drains: bool) -> None:
        """Close its server, then end the actor, in the background. `drains`: first let its requests end."""

        def leave() -> None:
            if drains:
                with self.changed:
                    assert self.changed.wait_for(lambda: not member.num_requests, PATIENCE_SECONDS)
                self.disturb(member)
            ray.get(member.actor.close.remote(), timeout=PATIENCE_SECONDS)
            self.kill(member)

        if not drains:
            self.disturb(member)
        self.forget(member)
        self._leaving.append(self._pool.submit(leave))

    def await_leaving(self) -> None:
        for future in self._leaving:
            future.result(PATIENCE_SECONDS)
        self._leaving.clear()

    def close(self) -> None:
        self._pool.shutdown()
        for member in self.known:
            ray.kill(member.actor)


class Directory:
    """The actors of Ray, by their names. `fault`: what is wrong with the answers."""

    def __init__(self) -> None:
        self._actors = ActorEngines(PREFIX, timeout_seconds=0.3)
        self.fault = ""

    def engines(self) -> Sequence[str]:
        found = self._actors.engines()
        match self.fault:
            case "error":
                raise OSError("the test's directory is out of order")
            case "empty":
                return []
            case "twice":
                return [*found, *(f"{url}/" for url in found)]
        return found


class Router:
    """Threads that send requests to engines that say that they are ready, and judge each token.

    `published`: number of the last version whose publish has ended. `offered`: of that which may be under way.
    """

    def __init__(self, members: Members, seed: int) -> None:
        self._members = members
        self.published = self.offered = -1
        self.wrong: list[str] = []
        self.counts = collections.Counter[str]()
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed + n),)) for n in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self, chosen: random.Random) -> None:
        try:
            with httpx.Client(trust_env=False, timeout=30.0) as client:
                while not self._ends.wait(0.002):
                    with self._members.changed:
                        if not self._members.serving:
                            continue
                        member = chosen.choice(self._members.serving)
                        member.num_requests += 1
                    try:
                        self._request(client, member, chosen.choice(PROMPTS), chosen.choice((0, 1)))
                    finally:
                        with self._members.changed:
                            member.num_requests -= 1
                            self._members.changed.notify_all()
        except BaseException as exc:
            self.wrong.append(f"the router failed: {exc!r}")

    def _request(self, client: httpx.Client, member: Member, prompt: int, max_behind: int) -> None:
        oldest, num_disturbances = self.published - max_behind, member.num_disturbances
        is_disturbed = member.is_disturbed  # it may go on, and the request fail right after that
        try:
            reply = client.get(f"{member.url}/weight_ready", params={"max_behind": max_behind})
            if not reply.is_success:
                self.counts["refused"] += 1
                return
            tokens = ray.get(member.actor.generate.remote(prompt), timeout=PATIENCE_SECONDS)
        except (httpx.TransportError, ray.exceptions.RayError) as exc:
            self.counts["failed"] += 1
            if not (is_disturbed or member.is_disturbed) and member.num_disturbances == num_disturbances:
                self.wrong.append(f"{member.name} failed, and nothing was done to it: {exc!r:.500}")
            return
        self.counts["crossing"] += tokens[0][0] != tokens[-1][0]
        self.counts["tokens"] += len(tokens)
        member.num_tokens += len(tokens)
        for position, (version, token) in enumerate(tokens):
            if not oldest <= version <= self.offered:
                self.wrong.append(f"{member.name}: version {version}, expected {oldest} to {self.offered}")
            elif token != expected_tokens(version)[prompt, position]:
                self.wrong.append(f"{member.name}: token {position} of prompt {prompt} is not of version {version}")
            oldest = version

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
