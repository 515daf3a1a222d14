"""The native core: copies and digests of host memory at its speed, without the GIL. `tables` is the way to it."""

from __future__ import annotations

try:
    from weightcast.native import _core
except ImportError as exc:
    raise ImportError(
        f"weightcast's native core can't be loaded ({exc}): it is built when weightcast is installed. Install it "
        "again, from a wheel, or where there is a C compiler, or with WEIGHTCAST_CC=ziglang before pip"
    ) from exc

__all__ = ["_core"]
