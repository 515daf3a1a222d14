"""b. What single steps cost: copies and sums on the device, ways between device and host memory, waits.

Rates count bytes read and bytes written, in 1e9 a second. Nothing passes or fails by its speed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import importlib
import importlib.util
import mmap
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pretended import LazyGpu

from _gpu import section
from _gpu.peers import Peer
from _gpu.section import GIB, MIB, Here
from weightcast.format.device_digest import device_digest
from weightcast.host import device as host_device
from weightcast.host.copy import copy_all

RING_SLOTS, SLOT_BYTES = 4, 64 * MIB
PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE."""


def run(here: Here) -> None:
    with Peer(here, "engine", section.even(1, 4096)) as peer:
        with here.part("on the device"):
            _on_device(here)
        with here.part("between device and host"):
            _host(here)
        with here.part("a ring of pinned memory"):
            _ring(here)
        with here.part("waits"):
            _waits(here, peer.ready())


def _rate(here: Here, name: str, num_bytes: int, call: Callable[[], object], rounds: int = 5) -> None:
    seconds = section.timed(call, here.device, rounds)
    here.fact(name, f"{num_bytes / seconds / 1e9:.1f} GB/s, {seconds * 1e3:.3f} ms")


def _on_device(here: Here) -> None:
    size = here.size(GIB, MIB)
    source = torch.randint(-(1 << 40), 1 << 40, (size // 8,), dtype=torch.int64, device=here.device)
    target = torch.zeros_like(source)
    _rate(here, "copy of 1 GiB", 2 * size, lambda: target.copy_(source))
    here.check("copied", torch.equal(source, target))
    # As a bucket of 512 MiB with 170 tensors, twice.
    parts = [tensor[: size // 8 // 340 * 340].view(340, -1) for tensor in (target, source)]
    pairs = [[row.view(torch.bfloat16) for row in part] for part in parts]
    copied = parts[0].numel() * 8
    target.zero_()
    _rate(here, "foreach copy of 340 tensors", 2 * copied, lambda: copy_all(*pairs))
    here.check("copied by foreach", torch.equal(parts[0], parts[1]))
    words = source.view(-1, 4096)
    _rate(here, "sum(dim=0)", size, lambda: words.sum(dim=0))
    _rate(here, "sum(dim=1)", size, lambda: words.sum(dim=1))
    payload = source.view(torch.uint8)
    _rate(here, "device_digest, by torch or by the kernel", size, lambda: device_digest(payload))
    with here.part("the fused kernel"):
        _fused(here)


def _fused(here: Here) -> None:
    """One read of each byte for copy and digest; on a CPU the kernel of the pretended GPU, if it has one."""
    if importlib.util.find_spec("weightcast.format.device_digest") is None:
        here.skip("the fused kernel that copies and digests (weightcast.format.device_digest)")
        return
    module: Any = importlib.import_module("weightcast.format.device_digest")
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(LazyGpu()) if here.dry else None
        device = gpu.device if gpu else here.device
        if module.kernel(device) is None:
            here.skip("the fused kernel that copies and digests (no Triton that works here: see the log)")
            return
        size, num_tensors = here.size(GIB, MIB), 340
        words = torch.arange(size // 8, dtype=torch.int64) * -(2**40 + 1)
        made = torch.zeros(size, dtype=torch.uint8)
        source, payload = (each.to(device) if gpu is None else gpu.tensor(each) for each in (words, made))
        rows = size // 8 // num_tensors
        sources = [source[row * rows : (row + 1) * rows] for row in range(num_tensors)]
        bucket = payload.view(torch.int64)
        targets = [bucket[row * rows : (row + 1) * rows] for row in range(num_tensors)]
        fused = module.CopyAndDigest(payload, targets, sources)
        found = fused.run().cpu()
        used = num_tensors * rows
        here.check("it copies", torch.equal(bucket[:used].cpu(), words[:used]))
        here.check("its digest is torch's", torch.equal(found, device_digest(payload.cpu())), found.tolist())
        if gpu is None:
            _rate(here, "copy and digest of 340 tensors, fused", 2 * size, fused.run)


def _host(here: Here) -> None:
    size = here.size(GIB, MIB)
    on_device = torch.arange(size // 4, dtype=torch.int32, device=here.device).view(torch.uint8)
    for name, flags, registers in (
        ("pageable", mmap.MAP_SHARED, False),
        ("registered, MAP_SHARED", mmap.MAP_SHARED, True),
        ("registered, MAP_PRIVATE", mmap.MAP_PRIVATE, True),
    ):
        descriptor = os.memfd_create("weightcast-gpu")
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as filled:
            filled.write(bytes(size))
        before = _status_mib("VmRSS")
        mapping = mmap.mmap(descriptor, size, flags=flags)
        os.close(descriptor)
        host = torch.frombuffer(mapping, dtype=torch.uint8)
        began = time.perf_counter()
        if registers and not here.dry:
            if not _register(here, host, name):
                continue
            here.fact(f"{name}: 1 GiB in ms", round((time.perf_counter() - began) * 1e3, 1))
            here.fact(f"{name}: RSS grew by MiB", _status_mib("VmRSS") - before)
        _rate(here, f"device to host, {name}", size, lambda host=host: host.copy_(on_device))
        here.check(f"arrived, {name}", torch.equal(host[-4096:], on_device[-4096:].cpu()))
        _rate(here, f"host to device, {name}", size, lambda host=host: on_device.copy_(host))
        if registers and not here.dry:
            _unregister(here, host)
            continue
        # As a bucket's tensors go, through slots of pinned memory.
        both = list(host.view(64, -1)), list(on_device.view(64, -1))
        host.zero_()
        _rate(here, f"device to host by copy_all, {name}", size, lambda both=both: copy_all(*both))
        here.check(f"arrived by copy_all, {name}", torch.equal(host, on_device.cpu()))
        on_device.zero_()
        _rate(here, f"host to device by copy_all, {name}", size, lambda both=both: copy_all(*reversed(both)))
        here.check(f"and went back, {name}", torch.equal(host, on_device.cpu()))
    size = here.size(8 * GIB, MIB)
    _register_much(here, size)
    if not here.needs("8 GiB of pinned memory", host_gib=16):
        return
    began = time.perf_counter()
    large = torch.empty(size, dtype=torch.uint8, pin_memory=not here.dry)
    here.fact("8 GiB of pinned memory, s", round(time.perf_counter() - began, 2))
    del large


def _register_much(here: Here, size: int) -> None:
    """Page-lock memory that is there, as much as a small model has: the pages' tables cost, not the bytes."""
    if not here.needs("registering 8 GiB", host_gib=16):
        return
    host = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    host.zero_()  # its pages are there
    began = time.perf_counter()
    if not _register(here, host, "8 GiB"):
        return
    here.fact("registering 8 GiB, s", round(time.perf_counter() - began, 3))
    on_device = torch.full((MIB,), 7, dtype=torch.uint8, device=here.device)
    host[-MIB:].copy_(on_device, non_blocking=True)
    section.synchronize(here.device)
    here.check("its last pages can be written by the device", bool((host[-MIB:] == 7).all()))
    began = time.perf_counter()
    _unregister(here, host)
    here.fact("and giving it back, s", round(time.perf_counter() - began, 3))


def _register(here: Here, host: torch.Tensor, name: str) -> bool:
    """Whether it is page-locked now; a dry run has nothing that could."""
    if here.dry:
        return True
    # By the driver: an error of the runtime's stays, and the next kernel that torch launches would raise it.
    address, size = ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(host.numel())
    error = int(host_device.driver().cuMemHostRegister_v2(address, size, ctypes.c_uint(PORTABLE)))
    if error:
        here.fact(f"{name}: cuMemHostRegister", f"error {error}")
    return error == 0


def _unregister(here: Here, host: torch.Tensor) -> None:
    if not here.dry:
        host_device.driver().cuMemHostUnregister(ctypes.c_void_p(host.data_ptr()))


def _ring(here: Here) -> None:
    """Device -> pinned slots -> shared host memory, by 1 to 8 threads: what a staged publish could do."""
    slot_bytes = here.size(SLOT_BYTES, 64 << 10)
    num_pieces = here.size(64, 8)
    on_device = torch.arange(num_pieces * slot_bytes // 4, dtype=torch.int32, device=here.device).view(torch.uint8)
    host = torch.frombuffer(mmap.mmap(-1, on_device.numel()), dtype=torch.uint8)
    host.zero_()  # its pages are there
    slots = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=not here.dry) for _ in range(RING_SLOTS)]
    side = None if here.dry else torch.cuda.Stream()

    def through(num_threads: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
            written: list[list[concurrent.futures.Future[None]]] = [[] for _ in slots]
            for number in range(num_pieces):
                slot = slots[number % RING_SLOTS]
                for future in written[number % RING_SLOTS]:
                    future.result()
                piece = slice(number * slot_bytes, (number + 1) * slot_bytes)
                arrived = None
                if side is None:
                    slot.copy_(on_device[piece])
                else:
                    with torch.cuda.stream(side):
                        slot.copy_(on_device[piece], non_blocking=True)
                        arrived = torch.cuda.Event()
                        arrived.record()

                def write(
                    target: torch.Tensor, source: torch.Tensor, arrived: torch.cuda.Event | None, start: int, size: int
                ) -> None:
                    if arrived is not None:
                        arrived.synchronize()
                    copy_all([target[start : start + size]], [source[start : start + size]])

                share = slot_bytes // num_threads
                written[number % RING_SLOTS] = [
                    pool.submit(write, host[piece], slot, arrived, each * share, share) for each in range(num_threads)
                ]
            for futures in written:
                for future in futures:
                    future.result()

    for num_threads in (1, 2, 4, 8):
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        host.zero_()
        began = time.perf_counter()
        through(num_threads)
        seconds = time.perf_counter() - began
        here.fact(f"pinned ring, {num_threads} threads", f"{on_device.numel() / seconds / 1e9:.1f} GB/s")
        same = torch.equal(host, on_device.cpu())
        here.check(f"arrived through the ring, {num_threads} threads", same)


def _waits(here: Here, peer: Peer) -> None:
    small = torch.ones(1024, device=here.device)

    def wait() -> float:
        began = time.perf_counter()
        small.add_(1)
        section.synchronize(here.device)
        return time.perf_counter() - began

    def described(found: list[float]) -> dict[str, float]:
        quantiles = {"median": statistics.median(found), "p99": section.quantile(found, 0.99)}
        return {name: round(seconds * 1e6, 1) for name, seconds in quantiles.items()}

    rounds = here.size(500, 20)
    here.fact("a small kernel and a wait, us", described([wait() for _ in range(rounds)]))
    peer.ask("busy", for_seconds=here.size(6, 1))
    time.sleep(0.2)
    beside = [wait() for _ in range(rounds if here.dry else 100)]
    here.fact("the same while another process is busy, us", described(beside))
    first, second = socket.socketpair()
    with first, second:
        thread = threading.Thread(target=_echo, args=(second, rounds), daemon=True)
        thread.start()
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            wait()
            first.send(b"x")
            first.recv(1)
            times.append(time.perf_counter() - began)
        thread.join(10.0)
    here.fact("a kernel, a wait and a message there and back, us", described(times))
    times = []
    for _ in range(here.size(100, 10)):
        began = time.perf_counter()
        peer.ask("ping")
        times.append(time.perf_counter() - began)
    here.fact("a message to another process and back (JSON over pipes), us", described(times))
    here.check("waits were measured", len(times) > 0)


def _echo(connection: socket.socket, rounds: int) -> None:
    for _ in range(rounds):
        connection.send(connection.recv(1))


def _status_mib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(f"{field}:"))
