"""j. NCCL on one GPU: every wait of a process group ends by its deadline, and no stream is left waiting.

On a CPU the pretended NCCL of `tests/pretended` takes its place.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from pretended import LazyGpu, LazyNccl

from _gpu import section
from _gpu.peers import Peer
from _gpu.section import Here
from weightcast.errors import PeerError, PeerTimeoutError
from weightcast.host import device as host_device
from weightcast.process_group import ProcessGroup, join_store, serve_store

LONG_SECONDS = 20.0
SHORT_SECONDS = 3.0
SLACK_SECONDS = 3.0
MONITOR_SECONDS = 5


def run(here: Here) -> None:
    with contextlib.ExitStack() as stack:
        gpu, nccl = None, None
        if here.dry:
            gpu = stack.enter_context(LazyGpu())
            nccl = stack.enter_context(LazyNccl(gpu))
            here.device = gpu.device
        elif not torch.distributed.is_nccl_available():
            here.skip("NCCL (this torch has none)")
            return
        tensor = gpu.tensor(torch.arange(1024.0)) if gpu else torch.arange(1024.0, device=here.device)
        with here.part("a group of one"):
            _group_of_one(here, tensor)
        with here.part("what a broadcast keeps"):
            _kept(here, gpu, nccl)
        with here.part("a late broadcast beside a default group"):
            _beside_default_group(here)
        with here.part("a broadcast that is held back, and aborted from another thread"):
            _held_back(here, gpu, tensor)
        with here.part("a broadcast that fails by its deadline, and what closing takes then"):
            _failed(here, gpu, tensor)
        with here.part("two processes on one GPU"):
            _duplicate(here)
        # Last: a thread stays in NCCL, for a member that never comes.
        with here.part("a group whose second member never comes"):
            _lonely(here)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return call(), time.monotonic() - began


def _group_of_one(here: Here, tensor: torch.Tensor) -> None:
    store, _ = serve_store("127.0.0.1", LONG_SECONDS)
    environment = dict(os.environ)
    group, seconds = _timed(
        lambda: ProcessGroup("nccl", store, rank=0, size=1, timeout_seconds=LONG_SECONDS, device=here.device)
    )
    here.fact("making a group of one, s", round(seconds, 2))
    here.check("the environment is as it was", dict(os.environ) == environment, sorted(os.environ))
    if not here.dry:
        options = group._group.options
        found = options.config.max_ctas, options._timeout.total_seconds()
        here.check("8 thread blocks at most, and the deadline", found == (8, LONG_SECONDS), found)
    _, seconds = _timed(lambda: group.wait(group.broadcast(tensor, root=0)))
    here.check("a broadcast is over", tensor.cpu().tolist() == list(map(float, range(1024))))
    here.fact("the first broadcast, s", round(seconds, 4))
    _, seconds = _timed(group.close)
    here.check("close returns in time", seconds < SLACK_SECONDS, f"{seconds:.1f} s")
    here.fact("close, s", round(seconds, 2))


def _kept(here: Here, gpu: LazyGpu | None, nccl: LazyNccl | None) -> None:
    """Torch keeps no reference to the buffer of a finished broadcast, so that `Publisher.release()` frees it."""
    store, _ = serve_store("127.0.0.1", LONG_SECONDS)
    group = ProcessGroup("nccl", store, rank=0, size=1, timeout_seconds=LONG_SECONDS, device=here.device)
    before = 0 if gpu else torch.cuda.memory_allocated(here.device)
    buffer = torch.ones(here.size(256 * section.MIB, 4096), dtype=torch.uint8)
    on_device = gpu.tensor(buffer) if gpu else buffer.to(here.device)
    group.wait(group.broadcast(on_device, root=0))
    del on_device
    kept = sum(map(len, nccl.stashed)) if nccl else torch.cuda.memory_allocated(here.device) - before
    here.check("a buffer is free once its broadcast is over", kept < len(buffer), f"{kept} bytes are kept")
    group.close()


def _beside_default_group(here: Here) -> None:
    """Torch's monitor of a process's first NCCL group ends the process if an operation of any group is late."""
    if here.dry:
        here.fact("a default group beside ours", "left out in a dry run: the other parts end if a watchdog says so")
        return
    environment = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(MONITOR_SECONDS)}
    with Peer(here, "engine", section.even(1, 4096), environment) as peer:
        peer.ready()
        said = peer.ask("late_beside_default_group", seconds=SHORT_SECONDS)
        here.check("the broadcast was late", "PeerTimeoutError" in said["said"], said)
        # The monitor looks every second, and sleeps that long before it ends the process.
        time.sleep(2 * MONITOR_SECONDS + SLACK_SECONDS)
        said = peer.ask("use_default_group")
        here.check("the process and its default group live on", said["sum"] == 1.0, said)


def _held_back(here: Here, gpu: LazyGpu | None, tensor: torch.Tensor) -> None:
    """A broadcast waits on a stream that a long kernel occupies; the default stream stays free meanwhile."""
    store, _ = serve_store("127.0.0.1", LONG_SECONDS)
    group = ProcessGroup("nccl", store, rank=0, size=1, timeout_seconds=LONG_SECONDS, device=here.device)
    group.wait(group.broadcast(tensor, root=0))
    cuda, outcome, over = host_device.cuda, list[str](), threading.Event()

    def broadcast() -> None:
        side = cuda.Stream(here.device)
        with cuda.stream(side):
            if gpu is None:
                section.hold(here.device, 4000)
            else:
                threading.Timer(0.5, gpu.hold(side).set).start()
            work = group.broadcast(tensor, root=0)
            waiting.set()
            try:
                group.wait(work)
                outcome.append("over")
            except PeerError as exc:
                outcome.append(f"{type(exc).__name__}: {exc}")
        over.set()

    waiting = threading.Event()
    threading.Thread(target=broadcast, daemon=True).start()
    here.check("the broadcast is queued", waiting.wait(LONG_SECONDS))
    default_is_free = threading.Event()

    def use_default_stream() -> None:
        cuda.current_stream(here.device).synchronize()
        default_is_free.set()

    threading.Thread(target=use_default_stream, daemon=True).start()
    here.check("the default stream is free while it is held back", default_is_free.wait(2.0))
    closing = threading.Thread(target=group.close, daemon=True)
    began = time.monotonic()
    closing.start()
    here.check("the wait has ended by the deadline", over.wait(LONG_SECONDS + SLACK_SECONDS), outcome)
    closing.join(LONG_SECONDS)
    here.check("close from another thread returns", not closing.is_alive())
    here.fact("a wait that another thread aborted", f"{outcome}, {time.monotonic() - began:.2f} s after close began")


def _failed(here: Here, gpu: LazyGpu | None, tensor: torch.Tensor) -> None:
    """Closing after an error ends by the deadline; with torch's own watchdog it would wait for a minute (B1)."""
    store, _ = serve_store("127.0.0.1", LONG_SECONDS)
    group = ProcessGroup("nccl", store, rank=0, size=1, timeout_seconds=SHORT_SECONDS, device=here.device)
    group.wait(group.broadcast(tensor, root=0))
    side, over = host_device.cuda.Stream(here.device), threading.Event()
    with host_device.cuda.stream(side):
        if gpu is None:
            section.hold(here.device, 2000 * SHORT_SECONDS)
        else:
            over = gpu.hold(side)
        began = time.monotonic()
        # One expression: what holds the operation would hold the group.
        here.raises("PeerTimeoutError", PeerTimeoutError, lambda: group.wait(group.broadcast(tensor, root=0)))
        seconds = time.monotonic() - began
    here.check("by its deadline", seconds < SHORT_SECONDS + SLACK_SECONDS, f"{seconds:.1f} s")
    over.set()
    _, seconds = _timed(group.close)
    here.fact("close after an error, s", round(seconds, 2))
    # The kernel before the broadcast may have to end first.
    here.check("closing ends soon after it", seconds < SHORT_SECONDS + SLACK_SECONDS, f"{seconds:.1f} s")


def _duplicate(here: Here) -> None:
    if here.dry:
        here.fact("two processes on one GPU", "left out in a dry run: only NCCL itself finds that")
        return
    store, port = serve_store("127.0.0.1", LONG_SECONDS)
    assert store is not None
    peers = [Peer(here, "engine", section.even(1, 4096)) for _ in range(2)]
    try:
        for peer in peers:
            peer.ready()
        for rank, peer in enumerate(peers):
            peer.tell("join_nccl", port=port, rank=rank, size=2, seconds=LONG_SECONDS)
        said = [peer.hear(LONG_SECONDS * 2) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
    here.fact("two processes on one GPU", said)
    in_time = all(each["seconds"] < LONG_SECONDS + SLACK_SECONDS for each in said)
    here.check(
        "both end by the deadline, with an error", in_time and all("Error" in each["said"] for each in said), said
    )
    named = any("uplicate GPU" in each["said"] for each in said)
    here.check("the error names the cause (Duplicate GPU)", named, said)


def _lonely(here: Here) -> None:
    store, port = serve_store("127.0.0.1", LONG_SECONDS)
    began = time.monotonic()

    def make() -> None:
        ProcessGroup("nccl", store, rank=0, size=2, timeout_seconds=SHORT_SECONDS, device=here.device)

    here.raises("PeerTimeoutError", PeerTimeoutError, make, "not all members have connected")
    seconds = time.monotonic() - began
    here.check("by its deadline", seconds < SHORT_SECONDS + SLACK_SECONDS, f"{seconds:.1f} s")
    left = threading.Event()
    began = time.monotonic()
    threading.Timer(0.5, left.set).start()
    other = join_store("127.0.0.1", port, LONG_SECONDS)

    def make_and_leave() -> None:
        ProcessGroup(
            "nccl",
            torch.distributed.PrefixStore("left", other),
            rank=0,
            size=2,
            timeout_seconds=LONG_SECONDS,
            device=here.device,
            is_left=left.is_set,
        )

    here.raises("a group that is left while it is made", PeerError, make_and_leave, "was aborted before all members")
    seconds = time.monotonic() - began
    here.check("at once", seconds < SLACK_SECONDS, f"{seconds:.1f} s")
