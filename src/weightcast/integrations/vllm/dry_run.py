"""The dry run of a vLLM model's loader: its layers in checkpoint form, as vLLM noted them at start-up.

Nothing of vLLM's own records is written either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weightcast.guest import dry_run as guest
from weightcast.guest.dry_run import Outcome, present
from weightcast.integrations.vllm import internals
from weightcast.manifest import TensorSpec


def dry_run(model: nn.Module, vllm_config: Any, specs: Sequence[TensorSpec]) -> Outcome:
    """What vLLM's loader would do with tensors of these names, shapes and dtypes, in this order."""
    with internals.require().current_config(vllm_config):
        return guest.dry_run(model, _checkpoint_form, specs)


def _checkpoint_form(layer: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The layer's parameters and buffers as they were before they were packed, as vLLM noted them at start-up."""
    vllm = internals.require()
    live = present(layer._parameters), present(layer._buffers)
    if type(layer).__name__ in vllm.kept_modules:
        return live
    recorded = vllm.layer_info(layer).restore_metadata
    parameters, buffers = (
        {name: _private(tensor, layer) for name, tensor in noted.items() if name not in vllm.kept_tensors}
        | {name: _kept(tensor, layer) for name, tensor in held.items() if name in vllm.kept_tensors}
        for noted, held in zip(recorded, live, strict=True)
    )
    return parameters, buffers


def _kept(tensor: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Of what vLLM leaves live in a reload, biases are loaded; maps of experts are read by loaders."""
    return _private(tensor, layer) if tensor.is_floating_point() else tensor


def _private(tensor: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """A tensor without memory, of the same class and attributes, with the loader that it had at start-up."""
    vllm = internals.require()
    with torch.device("meta"):
        made = vllm.made_of(tensor)
    made = vllm.with_layer(made, layer)
    if hasattr(made, "weight_loader"):
        # After a reload vLLM's record keeps the loader of that reload, which would load nothing.
        made.weight_loader = vllm.original_loader(made)
    return made
