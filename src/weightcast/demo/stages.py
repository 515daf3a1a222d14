"""The stages of a publish as table and plots show them: names, colours, and what is left of the total."""

from __future__ import annotations

from weightcast.trainer.report import StageSeconds

STAGES = ("gather", "offer", "pack", "send", "seal", "pause")
REST = "rest"


def by_stage(seconds: StageSeconds) -> dict[str, float]:
    """Seconds of each stage, and the rest of the total, never below 0."""
    found = {stage: float(getattr(seconds, stage)) for stage in STAGES}
    return {**found, REST: max(0.0, seconds.total - sum(found.values()))}
