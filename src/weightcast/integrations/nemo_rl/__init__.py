"""NeMo-RL's checkpoint engine, named in its configuration as `module:ClassName`: `docs/nemo-rl.md`."""

from __future__ import annotations

from weightcast.errors import with_extra

try:
    from weightcast.integrations.nemo_rl.checkpoint_engine import NemoCheckpointEngine
except ModuleNotFoundError as exc:
    raise with_extra(exc) from exc

__all__ = ["NemoCheckpointEngine"]
