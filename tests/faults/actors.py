"""Real processes for the fault table: an engine server and a publisher, told what to do over a pipe.

Both can be asked to stop at a phase: they say "at PHASE" and wait for a word before they go on, which gives the test
the moment to kill or stop them. The weights of version v are a function of v, so that whoever serves can be checked.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import forking
import torch
from network.namespaces import enter
from stopping import send_signal
from torch import nn

DEADLINE_SECONDS = 60.0
NUM_LAYERS = 6
WIDTH = 96
STEPS = 1000
LARGE_WIDTH = 1024
"""Buckets of a model of this width fit into no socket's buffer: whoever takes none holds the sender up."""

_context = forking.preloaded(
    "torch",
    "weightcast.trainer.publisher",
    "weightcast.control.server.app",
    "weightcast.transports.ipc",
    "weightcast.transports.collective",
    "faults.engine_actor",
    "faults.publisher_actor",
)


class Layer(nn.Module):
    """Like nn.Linear, with no time spent on first values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))


def build_model(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(Layer(width) for _ in range(NUM_LAYERS))).requires_grad_(False)


def bucket_size_bytes(width: int) -> int:
    """Four to seven buckets in all."""
    return max(64 << 10, 4 * width**2)


def fill(model: nn.Module, version: int) -> None:
    """Versions from `STEPS` on have the weights of version 0 but for a few, so that their deltas are short."""
    is_step = version >= STEPS
    generator = torch.Generator().manual_seed(0 if is_step else version)
    for parameter in model.parameters():
        parameter.uniform_(-1, 1, generator=generator)
        if is_step:
            parameter.view(-1)[version % 7 :: 97] += version


@functools.cache
def expected_digests(version: int, width: int = WIDTH) -> dict[str, str]:
    model = build_model(width)
    fill(model, version)
    return digests(model)


def digests(model: nn.Module) -> dict[str, str]:
    from weightcast.format.tensor_digest import tensor_digest

    return {name: tensor_digest(tensor) for name, tensor in model.state_dict().items()}


def settle_in(options: dict[str, Any]) -> None:
    """Move to the network that the option `namespace` names, and to the host that `host_label` names.

    Without the option `collects`, for tests of memory, the garbage collector is off: what has ended frees its sockets
    and threads by itself, and not some time later.
    """
    if not options.pop("collects", False):
        gc.disable()
    torch.set_num_threads(1)
    if namespace := options.pop("namespace", None):
        enter(namespace)
    if label := options.pop("host_label", None):
        from weightcast.trainer.group import rank

        rank.host_identity = lambda: label


class Stops:
    """In an actor: where to stop, and how to tell. One pipe, used by one thread at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._armed: str | None = None
        self._has_told = False
        self._telling = threading.Lock()
        self.lock = threading.Lock()
        self.go = threading.Event()

    def arm(self, phase: str | None) -> None:
        self._armed, self._has_told = phase, False
        self.go.clear()

    def is_armed(self, phase: str) -> bool:
        return self._armed == phase and not self.go.is_set()

    def reach(self, phase: str) -> None:
        """Stop here until `go`: every thread that comes here meanwhile, so that none does to a victim what follows."""
        if self.is_armed(phase):
            with self._telling:
                is_first, self._has_told = not self._has_told, True
            if is_first:
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

    def footprint(self) -> dict[str, int]:
        return self.ask("footprint", answer="footprint")  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(DEADLINE_SECONDS)

    def signal(self, number: int) -> None:
        send_signal(self.pid, number)

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


def arenas(pid: int, owner: str = "") -> set[str]:
    """The arenas in shared memory that a process has mapped, by what is the same for all who share them.

    `owner`: only those of the process of this id.
    """
    with open(f"/proc/{pid}/maps") as f:
        return {line.split()[4] for line in f if f"memfd:weightcast-buckets-{owner}" in line}


_POOLS = ("weightcast-control", "weightcast-fleet", "AnyIO worker")
"""Threads that are started when there are several calls at a time, and kept."""


def footprint() -> dict[str, int]:
    """What this process holds that could leak. `threads`: native ones too, but of no pool."""
    with open("/proc/self/smaps_rollup") as f:
        rss = next(int(line.split()[1]) << 10 for line in f if line.startswith("Rss:"))
    num_pooled = sum(thread.name.startswith(_POOLS) for thread in threading.enumerate())
    num_threads = len(os.listdir("/proc/self/task")) - num_pooled
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": num_threads, "rss_bytes": rss}
