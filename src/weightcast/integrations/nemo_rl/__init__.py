"""NeMo-RL's checkpoint engine, named in its configuration as `module:ClassName`: `docs/nemo-rl.md`."""

from __future__ import annotations

from weightcast.integrations.nemo_rl.checkpoint_engine import NemoCheckpointEngine

__all__ = ["NemoCheckpointEngine"]
