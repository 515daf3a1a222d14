"""What an engine gets of a source that all trainer ranks publish together. Every rank calls it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from core.direct import DirectEngine, RecordingEngine
from publishers import publisher_of

from weightcast.seams.source import Source


def published(source: Source, **more: Any) -> dict[str, torch.Tensor]:
    """Every tensor by each of its names on rank 0, nothing on the others."""
    engines = [DirectEngine("engine", RecordingEngine())] if dist.get_rank() == 0 else []
    options: dict[str, Any] = {"transport": "memory://", "bucket_size_bytes": 4096, "deadline_seconds": 20.0}
    try:
        with publisher_of(source, engines=engines, **options, **more) as publisher:
            publisher.publish()
    finally:
        for engine in engines:
            engine.close()
    return dict(engines[0].engine.held) if engines else {}
