"""The undo copy of a module: its values, its tensors and how its layers were put together."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from weightcast.integrations.plugin.model import undo_copy


def test_tensors_attributes_and_addresses_are_put_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    first, second = model
    second.weight = first.weight
    first.quant_method, first.impl = SimpleNamespace(kernel="old"), torch.nn.Linear  # type: ignore[assignment]
    weight, address, values = first.weight, first.weight.data_ptr(), first.weight.detach().clone()
    restore = undo_copy(model)
    for _ in range(2):
        with torch.no_grad():
            weight.add_(1.0)
        first.weight = torch.nn.Parameter(torch.zeros(3, 3))
        first.quant_method.kernel = "new"  # type: ignore[assignment]
        del second._parameters["bias"]
        restore()
        assert first.weight is second.weight is weight
        assert (weight.data_ptr(), first.quant_method.kernel) == (address, "old")
        assert torch.equal(weight, values)
        assert second.bias is not None
