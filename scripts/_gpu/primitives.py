"""b. The cost of single steps: copies and digests on the device, copies between device and host memory, waits.

Rates count bytes read and bytes written, in 1e9 a second. Nothing passes or fails by its speed.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
from collections.abc import Callable

import torch
from pretended import LazyGpu

from _gpu import section
from _gpu.peers import Peer
from _gpu.section import GIB, MIB, Here
from weightcast.format import device_digest
from weightcast.host.copy import copy_all


def run(here: Here) -> None:
    with Peer(here, "engine", section.even(1, 4096)) as peer:
        with here.part("on the device"):
            _on_device(here)
        with here.part("between device and host"):
            _host(here)
        with here.part("waits"):
            _waits(here, peer.ready())


def _rate(here: Here, name: str, num_bytes: int, call: Callable[[], object], rounds: int = 5) -> None:
    seconds = section.timed(call, here.device, rounds)
    here.fact(name, f"{num_bytes / seconds / 1e9:.1f} GB/s, {seconds * 1e3:.3f} ms")


def _on_device(here: Here) -> None:
    size = here.size(GIB, MIB)
    source = torch.randint(-(1 << 40), 1 << 40, (size // 8,), dtype=torch.int64, device=here.device)
    target = torch.zeros_like(source)
    # As a bucket of 512 MiB with 170 tensors, twice.
    parts = [tensor[: size // 8 // 340 * 340].view(340, -1) for tensor in (target, source)]
    pairs = [[row.view(torch.bfloat16) for row in part] for part in parts]
    copied = parts[0].numel() * 8
    target.zero_()
    _rate(here, "foreach copy of 340 tensors", 2 * copied, lambda: copy_all(*pairs))
    here.check("copied by foreach", torch.equal(parts[0], parts[1]))
    payload = source.view(torch.uint8)
    _rate(here, "device_digest, by torch or by the kernel", size, lambda: device_digest.device_digest(payload))
    with here.part("the fused kernel"):
        _fused(here)


def _fused(here: Here) -> None:
    """One read of each byte for copy and digest; on a CPU the kernel of the pretended GPU, if it has one."""
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(LazyGpu()) if here.dry else None
        device = gpu.device if gpu else here.device
        if device_digest.kernel(device) is None:
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
        fused = device_digest.CopyAndDigest(payload, targets, sources)
        found = fused.run().cpu()
        used = num_tensors * rows
        here.check("it copies", torch.equal(bucket[:used].cpu(), words[:used]))
        by_torch = device_digest.device_digest(payload.cpu())
        here.check("its digest is torch's", torch.equal(found, by_torch), found.tolist())
        if gpu is None:
            _rate(here, "copy and digest of 340 tensors, fused", 2 * size, fused.run)


def _host(here: Here) -> None:
    """Copies through slots of pinned memory, as a bucket's tensors take, compared with torch's own copy."""
    size = here.size(GIB, MIB)
    on_device = torch.arange(size // 4, dtype=torch.int32, device=here.device).view(torch.uint8)
    host = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    host.zero_()  # its pages are there
    _rate(here, "device to host", size, lambda: host.copy_(on_device))
    _rate(here, "host to device", size, lambda: on_device.copy_(host))
    both = list(host.view(64, -1)), list(on_device.view(64, -1))
    host.zero_()
    _rate(here, "device to host by copy_all", size, lambda: copy_all(*both))
    here.check("arrived by copy_all", torch.equal(host, on_device.cpu()))
    on_device.zero_()
    _rate(here, "host to device by copy_all", size, lambda: copy_all(*reversed(both)))
    here.check("and went back", torch.equal(host, on_device.cpu()))


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
    here.check("waits were measured", len(beside) > 0)
