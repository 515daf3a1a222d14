"""One rank's model of a running vLLM as an engine: tries an offer, installs through vLLM's own loader, goes back.

Invariant: `load` is one whole layerwise reload, after which no layer is left on the meta device, also when it fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weightcast.integrations.plugin import undo
from weightcast.integrations.plugin.acceptance import Acceptance, acceptance
from weightcast.integrations.plugin.model import Agree, LoaderEngine, Tensors, alone
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.dry_run import dry_run
from weightcast.integrations.vllm.layerwise_load import Reload
from weightcast.integrations.vllm.reference import reference


class VllmModel(LoaderEngine):
    """Made in vLLM's worker, once its model is loaded: raises UnsupportedError if this vLLM lacks what is leant on, or
    if the model's loader can't be tried. With a feature that is `internals.unsupported`, every offer is refused.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device, *, agree: Agree = alone) -> None:
        internals.require()
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._reload = Reload(model, vllm_config)
        unsupported = internals.unsupported(vllm_config)
        super().__init__(None if unsupported else self._made_acceptance(), unsupported, agree)

    def _made_acceptance(self) -> Acceptance:
        self._reload.require_work_rounds()
        parallel = self._vllm_config.parallel_config
        return acceptance(
            self._model,
            functools.partial(dry_run, self._model, self._vllm_config),
            reference(self._vllm_config),
            is_alone=parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1,
        )

    def _install(self, tensors: Tensors, calls: Mapping[str, int]) -> list[str]:
        missing = self._reload.load(tensors, calls)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return missing

    def _copy(self) -> Callable[[], None]:
        # A reload that somebody has left half-way is ended first.
        self._reload.abort()
        restore = undo.snapshot(self._model)

        def put_back() -> None:
            restore()
            self._reload.abort()

        return put_back
