"""The dry run of a vLLM model's loader: its layers in checkpoint form, as vLLM noted them at start-up.

Nothing of vLLM's own records is written either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin import dry_run as loader_dry_run
from weightcast.integrations.plugin.dry_run import DryRunOutcome, present
from weightcast.integrations.vllm import internals, layers


def dry_run(model: nn.Module, vllm_config: Any, specs: Sequence[TensorSpec]) -> DryRunOutcome:
    """What vLLM's loader would do with tensors of these names, shapes and dtypes, in this order.

    `calls` counts those into what `layers.Filling` fills.
    """
    names = {layer: name for name, layer in model.named_modules()}
    calls: Counter[str] = Counter()

    def form(layer: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return _checkpoint_form(layer, functools.partial(calls.update, [names[layer]]))

    with internals.require().current_config(vllm_config):
        outcome = loader_dry_run.dry_run(model, form, specs)
    passed_by = list(_passed_by(model, outcome, calls))
    faults = {"": f"without a call of their loaders it sets {', '.join(passed_by)}"} if passed_by else {}
    return dataclasses.replace(outcome, calls=calls, faults=outcome.faults | faults)


def _checkpoint_form(
    layer: nn.Module, on_call: Callable[[], None]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The layer's parameters and buffers as they were before they were packed, as vLLM noted them at start-up."""
    vllm = internals.require()
    live = present(layer._parameters), present(layer._buffers)
    if type(layer).__name__ in vllm.kept_modules:
        return live
    parameters, buffers = layers.in_checkpoint_form(layer)
    for tensor in [*parameters.values(), *buffers.values()] if layers.is_packed(layer) else []:
        tensor.weight_loader = _counted(tensor.weight_loader, on_call)  # type: ignore[attr-defined]
    kept_parameters, kept_buffers = (
        {name: _kept(tensor, layer) for name, tensor in held.items() if name in vllm.kept_tensors} for held in live
    )
    return parameters | kept_parameters, buffers | kept_buffers


def _kept(tensor: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Of what vLLM leaves live in a reload, biases are loaded; maps of experts are read by loaders."""
    return layers.without_memory(tensor, layer) if tensor.is_floating_point() else tensor


def _counted(loader: Callable[..., Any], on_call: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        on_call()
        return loader(*args, **kwargs)

    return load


def _passed_by(model: nn.Module, outcome: DryRunOutcome, calls: Mapping[str, int]) -> Iterator[str]:
    """What is set in layers that must be filled by their loaders, but by other means."""
    for target in outcome.targets.values():
        layer = target.name.rpartition(".")[0]
        if target.loaded and not calls.get(layer) and layers.is_packed(model.get_submodule(layer)):
            yield target.name
