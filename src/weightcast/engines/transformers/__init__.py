"""Text generation with a transformers causal language model that can take new weights between any two steps.

The embedded default behind `weightcast serve`: for laptops, tests and small models. Weights reach the same model
through a `ModuleEngine`; the gate keeps the two apart.
"""

from __future__ import annotations

from weightcast.engines.transformers.generator import QueueFullError, TextGenerator
from weightcast.engines.transformers.request import (
    Completion,
    Delta,
    Request,
    SamplingParams,
    TokenLogprobs,
    VersionSpan,
)

__all__ = [
    "Completion",
    "Delta",
    "QueueFullError",
    "Request",
    "SamplingParams",
    "TextGenerator",
    "TokenLogprobs",
    "VersionSpan",
]
