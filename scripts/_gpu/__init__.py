"""What `scripts/gpu` runs: twelve sections, each a module with `run(here)`, in the order of `LIMITS`.

The standard library, weightcast and torch only. The program itself (`__main__`) imports neither torch nor weightcast:
a section runs in a child process of its own, which may hang or crash.
"""

from __future__ import annotations

LIMITS = {
    "machine": 60,
    "primitives": 75,
    "bytes": 75,
    "end_to_end": 110,
    "memory": 130,
    "faults": 150,
    "allocators": 90,
    "consumers": 110,
    "sleep": 60,
    "nccl": 75,
    "speed": 200,
    "mps": 75,
}
"""The sections -> seconds after which one is ended. All together have `--seconds`."""
LETTERS = dict(zip("abcdefghijkl", LIMITS, strict=True))
