"""A section's side: what it reports, where it runs, and weights whose every word shows tensor and version."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightcast.host import memory as host_memory

GIB = 1 << 30
MIB = 1 << 20
CYCLES_PER_MS = 1_900_000
"""Cycles of `torch.cuda._sleep` per millisecond at about the highest clock; on a slower GPU a sleep takes longer."""


class Here:
    """The place where a section runs; `dry` is a CPU, with small sizes. Reports are written to the file at once."""

    def __init__(self, results: Path, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self._results = results
        self._lock = threading.Lock()

    def size(self, real: int, dry: int) -> int:
        return dry if self.dry else real

    def fact(self, name: str, value: Any) -> None:
        """Report a measurement or finding, which can't fail."""
        self._say({"kind": "fact", "name": name, "value": value}, f"{name}{' (dry, small sizes)' * self.dry}: {value}")

    def check(self, name: str, ok: bool, found: Any = "") -> None:
        """Report a check; `found` is what was there if it failed."""
        line = {"kind": "check", "name": name, "ok": bool(ok), "found": str(found)[:2000]}
        self._say(line, f"{'ok' if ok else 'FAILED'}: {name}{'' if ok else f': {found}'}")

    def skip(self, what: str) -> None:
        """Report a part that could not run, and what it needs."""
        self._say({"kind": "skip", "name": what}, f"skipped: {what}")

    def needs(self, what: str, *, device_gib: float = 0.0, host_gib: float = 0.0) -> bool:
        """Return True if that much memory is free; otherwise report `what` as skipped."""
        free = {"device": self.free_gib(), "host": host_memory.available_bytes() / GIB}
        for kind, needed in ("device", device_gib), ("host", host_gib):
            if needed > free[kind] and not self.dry:
                self.skip(f"{what}: {needed:.3g} GiB of {kind} memory ({free[kind]:.3g} free)")
                return False
        return True

    def free_gib(self) -> float:
        """Return the free GiB of the device, including torch's cache here. A dry run always has enough."""
        if self.dry:
            return float("inf")
        gc.collect()
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(self.device)[0] / GIB)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part of the section: an exception is a failed check, and the next part runs."""
        began = time.monotonic()
        print(f"-- {name}", flush=True)
        try:
            yield
        except Exception as exc:
            traceback.print_exc()
            self.check(name, False, f"{type(exc).__name__}: {exc}")
        print(f"-- {name}: {time.monotonic() - began:.1f} s", flush=True)

    def raises(self, name: str, error: type[Exception], call: Callable[[], object], words: str = "") -> None:
        """Check that the call raises `error`, whose text contains `words`."""
        try:
            call()
        except error as exc:
            self.check(name, words in str(exc), f"{type(exc).__name__}: {exc}")
        except Exception as exc:
            self.check(name, False, f"{type(exc).__name__}: {exc}, expected {error.__name__}")
        else:
            self.check(name, False, f"nothing was raised, expected {error.__name__}")

    def _say(self, line: dict[str, Any], text: str) -> None:
        with self._lock, self._results.open("a") as results:
            results.write(json.dumps(line) + "\n")
            print(text, flush=True)


# --- weights ---


def even(num_tensors: int, tensor_bytes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of `num_tensors` bfloat16 tensors of `tensor_bytes` each."""
    return [(f"t{number}", (tensor_bytes // 2048, 1024)) for number in range(num_tensors)]


def experts(num_layers: int, num_experts: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of Qwen3-30B-A3B, in a checkpoint's form: 48, 128, 2048 are 18 867 tensors of 61 GB."""
    inner, shapes = width * 3 // 8, [("embedding", (151936 * width // 2048, width))]
    for layer in range(num_layers):
        own = {"q": (2 * width, width), "k": (width // 4, width), "v": (width // 4, width), "o": (width, 2 * width)}
        own |= {"q_norm": (128,), "k_norm": (128,), "norm": (width,), "norm_2": (width,), "gate": (num_experts, width)}
        for expert in range(num_experts):
            own |= {f"{expert}_gate": (inner, width), f"{expert}_up": (inner, width), f"{expert}_down": (width, inner)}
        shapes += [(f"layer_{layer}_{name}", shape) for name, shape in own.items()]
    return [*shapes, ("norm", (width,)), ("head", shapes[0][1])]


def module(shapes: Sequence[tuple[str, Sequence[int]]], device: torch.device) -> nn.Module:
    """Return a module with a zeroed bfloat16 parameter for each shape."""
    made = nn.Module()
    for name, shape in shapes:
        tensor = torch.zeros(tuple(shape), dtype=torch.bfloat16, device=device)
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return made


def fill(weights: nn.Module, version: int, constant: bool = False) -> None:
    """Every word counts up from a start that shows tensor and version; `constant`: every element is one number.

    Queued on the current stream. Each tensor has an even number of elements.
    """
    for number, parameter in enumerate(weights.parameters()):
        if constant:
            parameter.data.fill_(float(version % 100 + 1))
            continue
        words = parameter.data.view(-1).view(torch.int32)
        start = _start(number, version)
        torch.arange(start, start + words.numel(), dtype=torch.int32, device=words.device, out=words)


def wrong(weights: nn.Module, version: int) -> list[str]:
    """Return the names of tensors that differ in any bit from what `fill` writes; compared on the device."""
    found = []
    for number, (name, parameter) in enumerate(weights.named_parameters()):
        words = parameter.data.view(-1).view(torch.int32)
        start = _start(number, version)
        expected = torch.arange(start, start + words.numel(), dtype=torch.int32, device=words.device)
        if not torch.equal(words, expected):
            found.append(name)
    return found


def _start(number: int, version: int) -> int:
    return (version * 65537 + number * 257) % (1 << 20)


# --- the device ---


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hold(device: torch.device, milliseconds: float) -> None:
    """Queue a kernel that runs for `milliseconds` on the current stream."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))  # type: ignore[no-untyped-call]


def timed(call: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the median seconds of a call, by the device's clock if it has one, after one call to warm up."""
    call()
    synchronize(device)
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            found.append(first.elapsed_time(last) / 1e3)
        else:
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def meters(device: torch.device) -> dict[str, int]:
    """Count this process's resources of every kind that could leak, and the device's free memory."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    # These pools get a thread, up to their size, whenever calls happen to overlap.
    in_pools = [
        each for each in threading.enumerate() if each.name.startswith(("weightcast-control", "weightcast-fleet"))
    ]
    found = {
        "rss_mib": int(status["VmRSS"].split()[0]) >> 10,
        "threads": int(status["Threads"]) - len(in_pools),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(mapped),
        "shm_files": len({line.split()[-1] for line in mapped if "/dev/shm/" in line}),
    }
    if device.type == "cuda":
        synchronize(device)
        found["device_used_mib"] = used_bytes(device) // MIB
        found["reserved_mib"] = torch.cuda.memory_reserved(device) // MIB
    return found


def used_bytes(device: torch.device) -> int:
    """Return the bytes of the device that all processes use; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def python_header() -> Path:
    """Return the path of the header that compiling a Triton launcher needs besides a compiler."""
    return Path(sysconfig.get_paths()["include"], "Python.h")


def why_no_compiling() -> str | None:
    """Return what Triton and torch.compile lack here; None if nothing."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        return "a C compiler"
    return None if python_header().exists() else f"{python_header()} (install python3-dev, or python3.X-dev)"


def within(seconds: float, is_so: Callable[[], bool]) -> bool:
    """Poll `is_so` until it is True; return False if it is not after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def main(name: str, results: str) -> None:
    here = Here(Path(results), os.environ.get("WEIGHTCAST_GPU_DRY") == "1")
    tempfile.tempdir = os.environ.get("TMPDIR")
    with here.part(name):
        if not here.dry and name != "mps":  # which starts a daemon before anything of CUDA
            torch.cuda.set_device(here.device)
        importlib.import_module(f"_gpu.{name}").run(here)
    sys.stdout.flush()
    # Without the interpreter's shutdown, since abandoned threads may be inside NCCL.
    os._exit(0)
