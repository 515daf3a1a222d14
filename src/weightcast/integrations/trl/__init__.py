"""TRL's asynchronous trainers with weightcast as their `weight_transfer`: `docs/trl.md`."""

from __future__ import annotations

from weightcast.errors import import_of_extra

with import_of_extra():
    import trl as _trl  # noqa: F401

from weightcast.integrations.trl.transfer import WeightcastMetrics, WeightcastTransfer

__all__ = ["WeightcastMetrics", "WeightcastTransfer"]
