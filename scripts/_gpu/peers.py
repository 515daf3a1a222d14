"""Processes beside a section, both ends of them: engines that serve, trainers that publish; they can be killed.

A command is a JSON line on the process's stdin, its answer one on its stdout. It ends with its stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from _gpu import section
from _gpu.forked import ADDRESS, Forked
from _gpu.section import Here

START_SECONDS = 90.0
ANSWER_SECONDS = 60.0


class Peer:
    """The section's end. `role`: "engine", "sink" (an engine that takes any tensors) or "trainer"."""

    def __init__(
        self, here: Here, role: str, shapes: list[Any], environment: Mapping[str, str] = {}, **options: Any
    ) -> None:
        """Start the process; `ready` waits for it. `environment` is added to the section's own."""
        job = {"role": role, "shapes": shapes, "device": str(here.device), **options}
        command = [sys.executable, "-u", "-c", "import sys, _gpu.peers; _gpu.peers.main(sys.argv[1])", json.dumps(job)]
        self.role = role
        self._received = b""
        environment = {**os.environ, **environment}
        self.process: Any
        if ADDRESS in environment:
            self.process = Forked("_gpu.peers", [json.dumps(job)], environment, 2)
        else:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def ready(self) -> Peer:
        self.url = str(self.hear(START_SECONDS).get("url", ""))
        return self

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Return the next answer. Raises TimeoutError, EOFError, or RuntimeError if the command failed there."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError(f"the {self.role} (pid {self.process.pid}) did not answer within {seconds:g} s")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError(f"the {self.role} (pid {self.process.pid}) has ended: {self.process.poll()}")
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"in the {self.role}: {answer['error']}")
        return answer

    def ask(self, do: str, *, seconds: float = ANSWER_SECONDS, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.hear(seconds)

    def wrong(self, version: int) -> list[str]:
        """Return the names of tensors that differ from `fill` with that version."""
        found: list[str] = self.ask("wrong", version=version)["wrong"]
        return found

    def info(self, seconds: float = 10.0) -> dict[str, Any]:
        """Return the answer of the engine's /weight_info."""
        with urllib.request.urlopen(f"{self.url}/weight_info", timeout=seconds) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        status = Path(f"/proc/{self.process.pid}/status")
        section.within(10.0, lambda: "State:\tT" in status.read_text())

    def wake(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ask the process to end; kill it if it does not. Idempotent."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(15.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


# --- in the process ---


class SlowCuda:
    """`torch.cuda`, but that each stream begins late, and each event is late: orders that nothing keeps show.

    It is what `weightcast.host.device` asks, in place of torch.cuda.
    """

    def __init__(self, milliseconds: float) -> None:
        self._milliseconds = milliseconds

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        with torch.cuda.stream(stream):
            section.hold(torch.device("cuda"), self._milliseconds)
            yield

    def Event(self, *args: Any, **kwargs: Any) -> Any:
        section.hold(torch.device("cuda"), self._milliseconds / 10)
        return torch.cuda.Event(*args, **kwargs)


def slow_down(milliseconds: float) -> None:
    """Delay weightcast's streams in this process; 0 ends that. No effect without a GPU."""
    from weightcast.host import device as host_device

    host_device.cuda = SlowCuda(milliseconds) if milliseconds else torch.cuda


class Commands:
    """The commands of every peer process, a method each. `weights` is its model."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.device = torch.device(job["device"])
        self.weights: nn.Module = section.module(job["shapes"], self.device)
        self._eaten: list[torch.Tensor] = []
        self._profile: Any = None

    def wrong(self, version: int) -> dict[str, Any]:
        return {"wrong": section.wrong(self.weights, version)[:20]}

    def kernel(self) -> dict[str, Any]:
        """Run a kernel on the default stream, from another thread; answer the seconds until it is over."""
        began, over = time.perf_counter(), threading.Event()

        def run() -> None:
            torch.ones(1 << 20, device=self.device).sum().item()
            over.set()

        threading.Thread(target=run, daemon=True).start()
        return {"ok": over.wait(10.0), "seconds": time.perf_counter() - began}

    def busy(self, for_seconds: float) -> dict[str, Any]:
        """Keep the device busy that long, with kernels of a millisecond one after the other. Answers at once."""
        end = time.monotonic() + for_seconds

        def work() -> None:
            while time.monotonic() < end:
                for _ in range(8):
                    section.hold(self.device, 1.0)
                section.synchronize(self.device)
                if self.device.type == "cpu":
                    time.sleep(0.01)

        threading.Thread(target=work, daemon=True).start()
        return {}

    def join_nccl(self, port: int, rank: int, size: int, seconds: float) -> dict[str, Any]:
        """Make a group with the other members of that store; answer how that ended, and when."""
        from weightcast.process_group import ProcessGroup, join_store

        began = time.monotonic()
        try:
            store = join_store("127.0.0.1", port, seconds)
            device = torch.device(self.device)
            group = ProcessGroup("nccl", store, rank=rank, size=size, timeout_seconds=seconds, device=device)
            group.close()
            said = "made"
        except Exception as exc:
            said = f"{type(exc).__name__}: {exc}"
        return {"said": said, "seconds": round(time.monotonic() - began, 2)}

    def late_beside_default_group(self, seconds: float) -> dict[str, Any]:
        """Make a default NCCL group, then one of weightcast's with a late broadcast; answer how that ended."""
        from weightcast.process_group import ProcessGroup, serve_store

        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.use_default_group()
        store, _ = serve_store("127.0.0.1", seconds)
        device = torch.device(self.device)
        group = ProcessGroup("nccl", store, rank=0, size=1, timeout_seconds=seconds, device=device)
        said = "in time"
        with torch.cuda.stream(torch.cuda.Stream(device)):
            section.hold(device, 3000 * seconds)
            try:
                group.wait(group.broadcast(torch.ones(8, device=device), root=0))
            except Exception as exc:
                said = f"{type(exc).__name__}: {exc}"
        group.close()
        return {"said": said}

    def use_default_group(self) -> dict[str, Any]:
        """Run an all-reduce in the default group."""
        one = torch.ones(1, device=self.device)
        torch.distributed.all_reduce(one)
        return {"sum": one.item()}

    def meters(self) -> dict[str, Any]:
        return section.meters(self.device)

    def eat(self, leave_mib: int) -> dict[str, Any]:
        """Allocate all of the device's memory except about `leave_mib`."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            num_bytes = 1 << 40
            while num_bytes > section.MIB:
                free, _ = torch.cuda.mem_get_info(self.device)
                num_bytes = min(num_bytes, free - leave_mib * section.MIB)
                try:
                    self._eaten.append(torch.empty(max(num_bytes, 0), dtype=torch.uint8, device=self.device))
                except torch.OutOfMemoryError:
                    num_bytes //= 2
        return {}

    def give_back(self) -> dict[str, Any]:
        """Free what `eat` allocated, and torch's cache."""
        self._eaten.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def use_and_free(self, mib: int) -> dict[str, Any]:
        """Leave a large free block in torch's cache."""
        torch.empty(mib << 20, dtype=torch.uint8, device=self.device)
        return {}

    def empty_cache(self) -> dict[str, Any]:
        return self.give_back() | section.meters(self.device)

    def slow(self, milliseconds: float) -> dict[str, Any]:
        slow_down(milliseconds)
        return {}

    def profile_start(self) -> dict[str, Any]:
        self._profile = start_profile(self.device)
        return {}

    def profile_stop(self) -> dict[str, Any]:
        return stop_profile(self._profile, self.device)


class EngineCommands(Commands):
    """Serves `weights` by a ModuleEngine, or whatever comes by a TensorSink."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        from weightcast import EngineServer, ModuleEngine
        from weightcast.engines.tensors import TensorSink

        self.engine: Any = TensorSink() if job["role"] == "sink" else ModuleEngine(self.weights)
        self.server = EngineServer(self.engine).start()

    def greeting(self) -> dict[str, Any]:
        return {"url": self.server.url}

    def hold_next_load(self, milliseconds: float) -> dict[str, Any]:
        """The next bucket is copied, then "held" is said, and after a kernel of that length it is copied once more.

        So it is in the model, and its load is not over.
        """
        from weightcast.serving.install import BlockCopies

        run = BlockCopies.run

        def held(copies: BlockCopies, **options: bool) -> None:
            BlockCopies.run = run  # type: ignore[method-assign]
            run(copies, **options)
            section.hold(self.device, milliseconds)
            print(json.dumps({"held": True}), flush=True)
            if self.device.type == "cpu":
                time.sleep(milliseconds / 1e3)
            run(copies, **options)

        BlockCopies.run = held  # type: ignore[method-assign]
        return {}

    def held(self) -> dict[str, Any]:
        """Of each tensor of a sink: the number of elements, the smallest and the largest."""
        tensors = self.engine.held.items()
        return {"held": {name: [t.numel(), t.min().item(), t.max().item()] for name, t in tensors}}

    def close(self) -> None:
        self.server.close()


class TrainerCommands(Commands):
    """Publishes `weights`."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.publisher: Any = None

    def greeting(self) -> dict[str, Any]:
        return {}

    def open(self, engines: list[str], transport: str = "ipc://", **options: Any) -> dict[str, Any]:
        from weightcast import ModuleSource, Publisher, PublishOptions

        self.publisher = Publisher(
            ModuleSource(self.weights),
            transport=transport,
            engines=engines,
            trainer_group=None,
            options=PublishOptions(**options),
        )
        return {}

    def publish(
        self, version: int, constant: bool = False, spoil: bool = True, hold_after: int = 0, hold_ms: float = 0
    ) -> dict[str, Any]:
        """Fill on the default stream, publish, and fill with other values at once, as an optimizer's next step does.

        `hold_after`: after so many reports of progress say "held" and have the packing stream run a long kernel.
        """
        section.fill(self.weights, version, constant)
        answer = self.publish_filled(hold_after, hold_ms)
        if spoil:
            section.fill(self.weights, version + 5037, constant)
        return answer

    def publish_filled(self, hold_after: int = 0, hold_ms: float = 0) -> dict[str, Any]:
        """Publish the weights as they are, which gives the GPU nothing else to do."""
        num_reports = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal num_reports
            num_reports += 1
            if hold_ms and num_reports == hold_after:
                section.hold(self.device, hold_ms)
                print(json.dumps({"held": done}), flush=True)
                if self.device.type == "cpu":
                    time.sleep(hold_ms / 1e3)

        report = self.publisher.publish(on_progress=on_progress)
        return {"report": json.loads(report.to_json()), "ok": report.ok}

    def close_publisher(self) -> dict[str, Any]:
        if self.publisher is not None:
            self.publisher.close()
        return {}

    def close(self) -> None:
        self.close_publisher()


def start_profile(device: torch.device) -> Any:
    made = profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])
    made.__enter__()
    return made


def stop_profile(made: Any, device: torch.device) -> dict[str, Any]:
    """Return the trace's launches, waits of the host, seconds in which kernels or copies ran, and gaps between."""
    import tempfile

    section.synchronize(device)
    made.__exit__(None, None, None)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        made.export_chrome_trace(file.name)
        with open(file.name) as text:
            events = [event for event in json.load(text)["traceEvents"] if event.get("ph") == "X"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [(float(e["ts"]), float(e["dur"])) for e in on_device]
    calls = [str(e.get("name")) for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    return {
        "launches": len(on_device),
        "waits": sum("Synchronize" in name for name in calls),
        "busy_seconds": round(union_seconds(spans), 6),
        "gap_seconds": [round(seconds, 6) for seconds in gaps_seconds(spans)],
        "events": len(events),
    }


def union_seconds(spans: list[tuple[float, float]]) -> float:
    """Return the seconds that at least one span, (begin, length) in microseconds, covers."""
    total, end = 0.0, float("-inf")
    for begin, length in sorted(spans):
        total += max(begin + length - max(begin, end), 0.0)
        end = max(end, begin + length)
    return total / 1e6


def gaps_seconds(spans: list[tuple[float, float]]) -> list[float]:
    """Return the seconds of each gap between the first and the last span that no span covers, in order."""
    found, spans = list[float](), sorted(spans)
    end = spans[0][0] if spans else 0.0
    for begin, length in spans:
        if begin > end:
            found.append((begin - end) / 1e6)
        end = max(end, begin + length)
    return found


def main(text: str) -> None:
    """Run commands from stdin until it ends."""
    # Only answers go to stdout; what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = answers
    job = json.loads(text)
    if job["device"] != "cpu":
        torch.cuda.set_device(torch.device(job["device"]))
    commands: Any = (TrainerCommands if job["role"] == "trainer" else EngineCommands)(job)
    print(json.dumps(commands.greeting()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(commands, command.pop("do"))(**command)
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"[:4000]}
        print(json.dumps(answer), flush=True)
    with contextlib.suppress(Exception):
        commands.close()
    os._exit(0)
