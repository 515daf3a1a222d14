"""a. The machine: driver, runtime, features of CUDA and the kernel; two processes on the GPU at once."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path

import torch

from _gpu import section, visible_gpu
from _gpu.peers import Peer
from _gpu.section import MIB, Here

ATTRIBUTES = {
    "virtual address management": 102,
    "memory handles as file descriptors": 103,
    "interprocess events": 125,
    "MPS": 133,
    "compute mode (0: shared)": 20,
}
"""Name -> number of the attribute in CUdevice_attribute of cuda.h."""


def run(here: Here) -> None:
    with here.part("facts"):
        here.fact("kernel", f"{platform.release()}, {platform.machine()}, {platform.version()}")
        here.fact("torch", torch.__version__)
        here.fact("CUDA", torch.version.cuda or "none")
        here.fact("CPUs", len(os.sched_getaffinity(0)))
        memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        here.fact("host memory, MiB", {n: int(memory[n].split()[0]) >> 10 for n in ("MemTotal", "MemAvailable")})
        here.fact("memlock", resource.getrlimit(resource.RLIMIT_MEMLOCK))
        shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
        here.fact("/dev/shm, MiB", shm.total // MIB if shm else "none")
        here.fact("what Triton lacks to compile", section.why_no_compiling() or "nothing")
        here.fact("MPS daemon", shutil.which("nvidia-cuda-mps-control") or "none")
    with here.part("two processes at once"):
        # The other one begins while this one has a context.
        if not here.dry:
            _device_facts(here)
        torch.ones(1, device=here.device)
        with Peer(here, "engine", section.even(1, 4096)) as peer:
            peer.ready()
            found = peer.ask("kernel")
            here.check("a second process runs a kernel beside this one", found["ok"], found)
            here.check("its engine answers", "version" in str(peer.info()), "no version in its weight_info")


def _device_facts(here: Here) -> None:
    properties = torch.cuda.get_device_properties(here.device)
    here.fact("GPU", f"{properties.name}, {properties.total_memory // MIB} MiB")
    here.fact("device memory used, MiB", section.used_bytes(here.device) // MIB)
    command = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
    command.append(f"--id={visible_gpu()}")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        here.fact("driver", asked.split(",")[0])
        here.fact("compute mode, MIG", asked.partition(", ")[2])
    except (OSError, subprocess.TimeoutExpired) as exc:
        here.fact("driver", f"nvidia-smi: {exc}")
    here.fact(
        "NCCL", ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    )
    here.fact("allocator", torch.cuda.get_allocator_backend())
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(value))
    here.fact("CUDA of the driver", f"{value.value // 1000}.{value.value % 1000 // 10}")
    for name, number in ATTRIBUTES.items():
        status = driver.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(number), ctypes.c_int(0))
        here.fact(name, value.value if status == 0 else f"error {status}")
