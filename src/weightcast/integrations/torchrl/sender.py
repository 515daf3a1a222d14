"""The trainer's side: extracts a model's weights by TorchRL's strategy, and writes a version."""

from __future__ import annotations

import weakref
from typing import Any

from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from weightcast.checkpoint.adapters import Merging
from weightcast.integrations.torchrl.transport import SchemeOptions, VLLMDoubleBufferTransport
from weightcast.integrations.torchrl.weights import extract


class VLLMDoubleBufferWeightSender:
    """Made by a scheme. The model is held weakly."""

    def __init__(self, scheme: SchemeOptions) -> None:
        """Raises ValueError for an unknown strategy."""
        self._scheme = scheme
        self._strategy = WeightStrategy(extract_as=scheme.strategy_name)
        self._model_ref: weakref.ref[Any] | None = None
        self._merging = Merging()
        self._transport: VLLMDoubleBufferTransport | None = None

    def register_model(self, model: Any) -> None:
        """The model that `update_weights()` takes its weights from. A call before the first update is needed."""
        self._model_ref = weakref.ref(model)
        self._connect()

    def update_weights(self, weights: Any | None = None) -> None:
        """Write a version: of the registered model, or of `weights` (a module, a TensorDict, a dict of tensors).

        Nothing is copied first, but the layers of a model with PEFT adapters, which are merged: memory of their size
        is kept from then on. Don't change the weights meanwhile. Raises RuntimeError before `register_model`, or
        if the model has gone; else as `VLLMDoubleBufferTransport.send_weights`.
        """
        if self._transport is None:
            raise RuntimeError("Transport not initialized. Call register_model first.")
        if weights is None:
            weights = self._model()
        self._transport.write(extract(self._strategy, weights, self._merging))

    def close(self) -> None:
        """Let the directory go, for another sender to write. Idempotent; the next update takes it again."""
        if self._transport is not None:
            self._transport.close()

    def _connect(self) -> None:
        if self._transport is None:
            self._transport = self._scheme.create_transport()

    @property
    def _has_model(self) -> bool:
        return self._model_ref is not None

    def _model(self) -> Any:
        if self._model_ref is None:
            raise RuntimeError("No model is registered: call register_model, or give the weights")
        model = self._model_ref()
        if model is None:
            raise RuntimeError("Model reference is dead")
        return model
