"""TRL's asynchronous trainers with weightcast as their `weight_transfer`: `docs/trl.md`."""

from __future__ import annotations

from weightcast.errors import with_extra

try:
    import trl as _trl  # noqa: F401
except ModuleNotFoundError as exc:
    raise with_extra(exc) from exc

from weightcast.integrations.trl.transfer import WeightcastMetrics, WeightcastTransfer

__all__ = ["WeightcastMetrics", "WeightcastTransfer"]
