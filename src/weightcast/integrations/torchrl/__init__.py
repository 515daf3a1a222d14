"""TorchRL's double-buffered weight sync for vLLM, over a weightcast store: `docs/torchrl.md`.

Names, signatures and call sequences are TorchRL's; its `WeightStrategy` extracts a model's weights.
"""

from __future__ import annotations

from weightcast.errors import import_of_extra

with import_of_extra():
    import torchrl as _torchrl  # noqa: F401

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
