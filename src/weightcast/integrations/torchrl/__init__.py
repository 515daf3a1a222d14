"""TorchRL's double-buffered weight sync for vLLM, over a weightcast store: `docs/torchrl.md`.

Names, signatures and call sequences are TorchRL's; its `WeightStrategy` says what a model's weights are.
"""

from __future__ import annotations

try:
    import torchrl as _torchrl  # noqa: F401
except ImportError as exc:
    raise ImportError("weightcast.integrations.torchrl needs TorchRL: pip install 'weightcast[torchrl]'") from exc

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
