"""The native core in C: copies, digests, deltas and fp8 of host memory, without the GIL.

Use it through `tables` and `deltas`, which check the memory that they pass to it.
"""

from __future__ import annotations

try:
    from weightcast.native import _core
except ImportError as exc:
    raise ImportError(
        f"can't load weightcast's native core ({exc}). It is built when weightcast is installed: install weightcast "
        "again, from a wheel, or on a host with a C compiler, or with WEIGHTCAST_CC=ziglang in pip's environment"
    ) from exc

__all__ = ["_core"]
