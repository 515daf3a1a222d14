"""Real processes for the fault table: an engine server and a publisher, told what to do over a pipe.

Both can be asked to stop at a phase: they say "at PHASE" and wait for a word before they go on, which gives the test
the moment to kill or stop them. The weights of version v are a function of v, so that whoever serves can be checked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

DEADLINE_SECONDS = 30.0
NUM_LAYERS = 6
WIDTH = 96
BUCKET_SIZE_BYTES = 64 << 10

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "weightcast.publisher", "weightcast.control.server", "weightcast.transports.ipc"]
)


def build_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).requires_grad_(False)


def fill(model: nn.Module, version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def expected_digests(version: int) -> dict[str, str]:
    from weightcast.tensor_digest import tensor_digest

    model = build_model()
    fill(model, version)
    return {name: tensor_digest(tensor) for name, tensor in model.state_dict().items()}


class Stops:
    """In an actor: where to stop, and how to tell. One pipe, used by one thread at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._armed: str | None = None
        self.lock = threading.Lock()
        self.go = threading.Event()

    def arm(self, phase: str | None) -> None:
        self._armed = phase
        self.go.clear()

    def reach(self, phase: str) -> None:
        if self._armed == phase:
            self._armed = None
            self._pipe.send(("at", phase))
            self.go.wait(DEADLINE_SECONDS)


class Actor:
    """The test's handle on a child process."""

    def __init__(self, main: Any, *args: Any) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=main, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, *words: Any) -> None:
        self.pipe.send(words)

    def hear(self, word: str, seconds: float = DEADLINE_SECONDS) -> Any:
        """The next message, which must begin with this word."""
        assert self.pipe.poll(seconds), f"no {word!r} from {self.pid} within {seconds} s"
        message = self.pipe.recv()
        assert message[0] == word, f"expected {word!r}, heard {message!r}"
        return message[1] if len(message) > 1 else None

    def ask(self, *words: Any, answer: str = "done") -> Any:
        self.tell(*words)
        return self.hear(answer)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(DEADLINE_SECONDS)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self.tell("end")
        self.process.join(DEADLINE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"{self.pid} did not end when asked")
        self.pipe.close()


# --- in the engine's process ---------------------------------------------------------------------


def engine_main(pipe: Connection, port: int, options: dict[str, Any]) -> None:
    from weightcast.control.server import EngineServer
    from weightcast.engines.module import ModuleEngine

    torch.set_num_threads(1)
    stops = Stops(pipe)
    model = build_model()
    fill(model, 0)

    class StoppingEngine(ModuleEngine):
        fail_load = False

        def load(self, tensors: Any) -> None:
            stops.reach("load")
            if StoppingEngine.fail_load:
                some = list(tensors)[:2]
                super().load(some)
                raise RuntimeError("the test's loader failed half-way")
            super().load(tensors)

    with EngineServer(StoppingEngine(model), port=port, **options) as server:
        pipe.send(("url", server.url))
        while (words := pipe.recv())[0] != "end":
            match words:
                case ("stop at", phase):
                    stops.arm(phase)
                    pipe.send(("done",))
                case ("go",):
                    stops.go.set()
                case ("fail load", flag):
                    StoppingEngine.fail_load = flag
                    pipe.send(("done",))
                case ("footprint",):
                    pipe.send(("footprint", footprint()))


class EngineProcess(Actor):
    def __init__(self, port: int = 0, **options: Any) -> None:
        super().__init__(engine_main, port, options)
        self.url: str = self.hear("url")

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


# --- in the publisher's process ------------------------------------------------------------------


def publisher_main(pipe: Connection, urls: list[str], options: dict[str, Any]) -> None:
    import weightcast
    from weightcast import registry
    from weightcast.control.messages import Offer, Seal

    torch.set_num_threads(1)
    stops = Stops(pipe)
    model = build_model()

    class StoppingClient(weightcast.HttpEngine):
        def init(self, info: Any) -> None:
            super().init(info)
            stops.reach("init")

        def update(self, info: Any) -> None:
            if isinstance(info, Seal):
                stops.reach("before seal")
            super().update(info)
            if isinstance(info, Offer):
                stops.reach("offer")

        def pause(self, run: str) -> None:
            super().pause(run)
            stops.reach("paused")

        def finish(self, version: int) -> None:
            super().finish(version)
            stops.reach("after commit")

    transport = registry.transport("ipc://")
    corrupt = threading.Event()

    def stopping_sender(*args: Any, **kwargs: Any) -> Any:
        sender = transport.sender(*args, **kwargs)
        send = sender.send

        def stopping_send(index: int) -> None:
            if corrupt.is_set() and index == 1:
                corrupt.clear()
                sender.buffer(index)[7] ^= 255
            send(index)
            if index == 1:
                stops.reach("mid-bucket")

        sender.send = stopping_send
        return sender

    registry.TRANSPORTS["stopping"] = f"{__name__}:stopping_transport"
    globals()["stopping_transport"] = type(transport)(
        sender=lambda url, **kwargs: stopping_sender(url.replace("stopping", "ipc"), **kwargs),
        receiver=transport.receiver,
        default_bucket_size_bytes=transport.default_bucket_size_bytes,
        same_host=True,
    )
    publisher = weightcast.Publisher(
        weightcast.ModuleSource(model),
        transport="stopping://",
        engines=[StoppingClient(url, timeout_seconds=options.get("deadline_seconds", 20.0)) for url in urls],
        bucket_size_bytes=BUCKET_SIZE_BYTES,
        **options,
    )

    def publish(content: int, version: int | None) -> None:
        fill(model, content)
        try:
            report = publisher.publish(version)
            answer = ("published", {"version": report.version, "failures": {}})
        except weightcast.PublishError as exc:
            failures = {name: (type(e).__name__, str(e)) for name, e in exc.failures.items()}
            answer = ("published", {"version": getattr(exc.report, "version", None), "failures": failures})
        except Exception as exc:
            answer = ("published", {"version": None, "error": (type(exc).__name__, str(exc))})
        pipe.send(answer)

    pipe.send(("run", publisher.run))
    while (words := pipe.recv())[0] != "end":
        match words:
            case ("publish", content, version):
                threading.Thread(target=publish, args=(content, version), daemon=True).start()
            case ("stop at", phase):
                stops.arm(phase)
                pipe.send(("done",))
            case ("go",):
                stops.go.set()
            case ("corrupt",):
                corrupt.set()
                pipe.send(("done",))
            case ("add", url):
                publisher.add_engine(StoppingClient(url))
                pipe.send(("done",))
            case ("footprint",):
                pipe.send(("footprint", footprint()))
    publisher.close()


class PublisherProcess(Actor):
    def __init__(self, urls: list[str], **options: Any) -> None:
        super().__init__(publisher_main, urls, options)
        self.run: str = self.hear("run")

    def publish(self, content: int, version: int | None = None) -> dict[str, Any]:
        self.tell("publish", content, version)
        return self.hear("published")  # type: ignore[no-any-return]


def footprint() -> dict[str, int]:
    """What this process holds that could leak."""
    with open("/proc/self/smaps_rollup") as f:
        rss = next(int(line.split()[1]) << 10 for line in f if line.startswith("Rss:"))
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "rss_bytes": rss}
