"""What `scripts/gpu` runs: twelve sections, each a module with `run(here)`, in the order of `LIMITS`.

The standard library, weightcast and torch only. The program itself (`__main__`) imports neither torch nor weightcast:
a section runs in a child process of its own, which may hang or crash.
"""

from __future__ import annotations

LIMITS = {
    "machine": 60,
    "primitives": 85,
    "bytes": 75,
    "end_to_end": 120,
    "memory": 140,
    "faults": 150,
    "allocators": 90,
    "consumers": 125,
    "sleep": 60,
    "nccl": 95,
    "speed": 215,
    "mps": 75,
}
"""The sections -> seconds after which one is ended. All together have `--seconds`."""
LETTERS = dict(zip("abcdefghijkl", LIMITS, strict=True))
