"""Modules that hold a payload, and their bits read without any code of weightcast's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weightcast.format.manifest import TensorSpec
from weightcast.testing.payloads import raw_bytes


def module_of(items: Sequence[tuple[TensorSpec, torch.Tensor]]) -> nn.Module:
    """Parameters under the payload's names; tied names are the same parameter."""
    root = nn.Module()
    for spec, tensor in items:
        parameter = nn.Parameter(tensor, requires_grad=False)
        for name in spec.names:
            *path, leaf = name.split(".")
            module = root
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                child = module._modules[part]
                assert child is not None
                module = child
            module.register_parameter(leaf, parameter)
    return root


def bits_of(module: nn.Module) -> Mapping[str, bytes]:
    return {name: raw_bytes(p) for name, p in module.named_parameters(remove_duplicate=False)}
