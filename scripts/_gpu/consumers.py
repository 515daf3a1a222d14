"""h. An engine's use of its weights during updates: CUDA graphs, torch.compile, decoding on its own stream.

The engine is in this process, the trainer in another. A version is one number in every element, so that a result of
two versions shows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from _gpu import section
from _gpu.peers import Peer
from _gpu.section import MIB, Here
from weightcast import EngineServer, ModuleEngine
from weightcast.host import device as host_device
from weightcast.process_group import ProcessGroup, serve_store

P99_RATIO = 1.5
GROUP_SECONDS = 10.0


def run(here: Here) -> None:
    shapes = section.even(8, here.size(32 * MIB, 64 << 10))
    weights = section.module(shapes, here.device)
    with Peer(here, "trainer", shapes) as trainer, EngineServer(ModuleEngine(weights)) as server:
        trainer.ready()
        with here.part("a CUDA graph over the parameters"):
            _graph(here, trainer, server, weights)
        with here.part("graphs captured beside a receiving thread"):
            _capture_beside_receiving(here, weights)
        with here.part("decoding while updates arrive"):
            _decode(here, trainer, server, weights)
        with here.part("torch.compile while updates arrive"):
            _compile(here, trainer, server, weights)
        with here.part("graphs captured beside a group that is made and aborted"):
            _capture_beside_group(here, weights)


def _extremes(weights: nn.Module) -> torch.Tensor:
    """Return the smallest and largest element of each tensor: one number if all are of one version."""
    return torch.stack([each for p in weights.parameters() for each in (p.data.min(), p.data.max())])


def _number(version: int) -> float:
    """Return the number that `fill(constant=True)` writes for a version."""
    return float(version % 100 + 1)


def _graph(here: Here, trainer: Peer, server: EngineServer, weights: nn.Module) -> None:
    addresses = [parameter.data_ptr() for parameter in weights.parameters()]
    if here.dry:
        out = _extremes(weights)

        def replay() -> None:
            out.copy_(_extremes(weights))
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                _extremes(weights)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = _extremes(weights)
        replay = graph.replay
    for install in ("staged", "streaming"):
        trainer.ask("open", engines=[server.url], install=install)
        bad = {}
        rounds = here.size(20, 2)
        for version in range(1, rounds + 1):
            trainer.ask("publish", version=version, constant=True)
            with server.step():
                replay()
                section.synchronize(here.device)
            if set(out.tolist()) != {_number(version)}:
                bad[version] = out.tolist()
        trainer.ask("close_publisher")
        here.check(f"a replay after each of {rounds} versions has its values, {install}", not bad, bad)
    now = [parameter.data_ptr() for parameter in weights.parameters()]
    here.check("every parameter is where it was", now == addresses)


def _capture_beside_receiving(here: Here, weights: nn.Module) -> None:
    """A thread allocates memory and records and queries events, as receiving threads do."""
    held = list[torch.Tensor]()

    def receive() -> None:
        # Kept for a while, so that the driver allocates and not torch's cache.
        held.append(host_device.empty(here.size(32 * MIB, 4096), here.device, "a trial", "wait").fill_(1))
        if len(held) == 128:
            held.clear()
        if here.device.type == "cuda":
            read = host_device.recorded(here.device)
            while not read.query():
                time.sleep(0.0001)

    errors, bad = _captured_beside(here, weights, receive, here.size(10, 2))
    here.check("nothing that it did failed", not errors, errors)
    here.check("and it spoiled no capture", not bad, bad)


def _capture_beside_group(here: Here, weights: nn.Module) -> None:
    """A thread makes a group, broadcasts and leaves at once, as members of nccl:// do. A dry run uses gloo."""
    if not here.dry and not torch.distributed.is_nccl_available():
        here.skip("NCCL (this torch has none)")
        return

    def take_part() -> None:
        store, _ = serve_store("127.0.0.1", GROUP_SECONDS)
        backend = "gloo" if here.dry else "nccl"
        group = ProcessGroup(
            backend, store, rank=0, size=1, timeout_seconds=GROUP_SECONDS, host="127.0.0.1", device=here.device
        )
        group.wait(group.broadcast(torch.ones(1024, device=here.device), root=0))
        group.close()

    errors, bad = _captured_beside(here, weights, take_part, 2)
    here.check("groups are made and aborted beside a capture", not errors, errors)
    here.check("and they spoiled no capture", not bad, bad)


def _captured_beside(
    here: Here, weights: nn.Module, work: Callable[[], None], num_captures: int
) -> tuple[list[Exception], list[Any]]:
    """Capture graphs in torch's own capture mode while a thread, as weightcast's are, repeats `work`.

    Returns the errors of that thread, and the captures that failed or whose replay is wrong.
    """
    over, errors, rounds, bad = threading.Event(), list[Exception](), [0], list[Any]()

    def go_on() -> None:
        with host_device.own_stream(here.device):
            while not over.is_set():
                try:
                    work()
                except Exception as exc:
                    errors.append(exc)
                    return
                rounds[0] += 1

    expected = _extremes(weights)
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        for number in range(num_captures):
            graph: Any = None if here.dry else torch.cuda.CUDAGraph()
            try:
                with contextlib.nullcontext() if here.dry else torch.cuda.graph(graph):
                    out, before = _extremes(weights), rounds[0]
                    # One was begun before it, one was made within it.
                    section.within(GROUP_SECONDS, lambda n=before: bool(errors) or rounds[0] > n + 2)
                    if not errors and rounds[0] <= before + 2:
                        errors.append(TimeoutError(f"beside capture {number} it stood still"))
                if graph is not None:
                    out.zero_()
                    graph.replay()
                    section.synchronize(here.device)
            except RuntimeError as exc:
                bad.append((number, str(exc)))
                break
            bad += [] if torch.equal(out, expected) else [(number, out.tolist())]
    finally:
        over.set()
        thread.join(GROUP_SECONDS)
    return errors, bad


@contextlib.contextmanager
def _publishing(trainer: Peer, url: str, install: str) -> Iterator[list[int]]:
    """Have the trainer publish versions during the block; yield the list, which grows, of their numbers."""
    trainer.ask("open", engines=[url], install=install)
    over, versions, errors = threading.Event(), [], list[Exception]()

    def publish() -> None:
        try:
            while not over.is_set():
                trainer.ask("publish", version=len(versions) + 1, constant=True)
                versions.append(len(versions) + 1)
        except Exception as exc:
            errors.append(exc)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    try:
        yield versions
    finally:
        over.set()
        thread.join(90.0)
        trainer.ask("close_publisher")
    if errors:
        raise errors[0]


def _decode(here: Here, trainer: Peer, server: EngineServer, weights: nn.Module) -> None:
    seconds = 0.5 if here.dry else 6.0
    quiet, mixed = _steps(here, server, weights, seconds)
    here.check("without updates each step is of one version", not mixed, mixed)
    p50, p99 = (section.quantile(quiet, share) * 1e3 for share in (0.5, 0.99))
    here.fact("step, ms, without updates", {"p50": round(p50, 3), "p99": round(p99, 3), "steps": len(quiet)})
    for install in ("staged", "streaming"):
        with _publishing(trainer, server.url, install) as versions:
            busy, mixed = _steps(here, server, weights, seconds)
        here.check(f"each step is of one version, {install}", not mixed, mixed)
        here.check(f"versions came meanwhile, {install}", len(versions) > 0)
        with_50, with_99 = (section.quantile(busy, share) * 1e3 for share in (0.5, 0.99))
        found = {"p50": round(with_50, 3), "p99": round(with_99, 3), "steps": len(busy), "versions": len(versions)}
        here.fact(f"step, ms, while updates arrive, {install}", found)
        if install == "staged" and not here.dry:
            here.check(f"p99 is below {P99_RATIO} x that without updates", with_99 < P99_RATIO * p99, found)


def _steps(
    here: Here, server: EngineServer, weights: nn.Module, seconds: float
) -> tuple[list[float], list[list[float]]]:
    """Decode for `seconds`; return the seconds of each step, from the gate to its end on the GPU, and mixed results.

    A step ends for the gate when its kernels are queued, on a stream of its own, as an engine's may.
    """
    side: Any = torch.cuda.Stream() if here.device.type == "cuda" else None
    square = torch.ones(here.size(4096, 64), here.size(4096, 64), dtype=torch.bfloat16, device=here.device)
    section.synchronize(here.device)
    took, mixed, end = [], [], time.monotonic() + seconds
    while time.monotonic() < end:
        with server.step(timeout_seconds=60.0):
            began = time.perf_counter()
            with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
                square @ square
                out = _extremes(weights)
        if side is not None:
            side.synchronize()
        took.append(time.perf_counter() - began)
        if len(set(found := out.tolist())) != 1:
            mixed.append(found)
    return took, mixed[:5]


def _compile(here: Here, trainer: Peer, server: EngineServer, weights: nn.Module) -> None:
    if not here.dry and (lacking := section.why_no_compiling()):
        here.skip(f"torch.compile: {lacking}")
        return
    first = next(weights.parameters())

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + first[0, 0]).relu().sum(dim=0)

    how: dict[str, Any] = {"backend": "eager"} if here.dry else {"mode": "reduce-overhead", "dynamic": False}
    compiled = torch.compile(function, **how)
    bad, rows = [], 1
    with _publishing(trainer, server.url, "staged") as versions, torch.no_grad():
        # Each shape is compiled and captured again, until some were captured during an update.
        while rows <= 4 or (not versions and rows < 12):
            x = torch.ones(rows, 64, dtype=torch.bfloat16, device=here.device)
            for _ in range(4):  # eagerly, recorded, replayed
                with server.step(timeout_seconds=60.0):
                    if not here.dry:
                        torch.compiler.cudagraph_mark_step_begin()
                    found, expected = compiled(x).clone(), function(x)
                    section.synchronize(here.device)
                if not torch.allclose(found.float(), expected.float(), rtol=0.02):
                    bad.append((rows, found[:2].tolist(), expected[:2].tolist()))
            rows += 1
    here.check("what was compiled and captured beside updates is right", not bad, bad[:4])
    here.fact("shapes compiled, versions meanwhile", (rows - 1, len(versions)))
