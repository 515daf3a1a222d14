"""TorchRL's double-buffered weight sync for vLLM, over a weightcast store: `docs/torchrl.md`.

Names, signatures and call sequences are TorchRL's; its `WeightStrategy` extracts a model's weights.
"""

from __future__ import annotations

from weightcast.errors import with_extra

try:
    import torchrl as _torchrl  # noqa: F401
except ModuleNotFoundError as exc:
    raise with_extra(exc) from exc

from weightcast.integrations.torchrl.scheme import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
)
from weightcast.integrations.torchrl.transport import VLLMDoubleBufferTransport

__all__ = [
    "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferTransport",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
]
