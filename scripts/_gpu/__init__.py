"""The twelve sections of `scripts/gpu`, each a module with `run(here)`, in the order of `LIMITS`.

The standard library, weightcast and torch only. The program itself (`__main__`) imports neither torch nor weightcast:
a section runs in a child process of its own, which may hang or crash.
"""

from __future__ import annotations

import os

LIMITS = {
    "machine": 60,
    "primitives": 85,
    "bytes": 75,
    "end_to_end": 120,
    "nccl": 125,
    "memory": 140,
    "faults": 150,
    "allocators": 90,
    "consumers": 125,
    "sleep": 60,
    "speed": 215,
    "mps": 75,
}
"""Section -> its time limit in seconds. `--seconds` limits all of them together."""
LETTERS = dict(zip("abcdjefghikl", LIMITS, strict=True))


def visible_gpu() -> str:
    """Return nvidia-smi's name of this process's first GPU: its UUID or index in CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
