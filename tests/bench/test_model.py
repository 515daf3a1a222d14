"""The bench's model: names, shapes, and contents that a mix-up would show."""

from __future__ import annotations

import torch
from publishing.model import TrainerRank, build_model, fill
from publishing.result import BenchSettings

from weightcast.format.manifest import TensorSpec

SPECS = (
    TensorSpec("model.embed.weight", "bfloat16", (100, 8)),
    TensorSpec("model.layers.0.weight", "bfloat16", (8, 8)),
    TensorSpec("model.layers.0.inner.weight", "float32", (300, 300)),
    TensorSpec("model.layers.10.weight", "bfloat16", (8, 8)),
    TensorSpec("head", "bfloat16", ()),
)


def test_parameters_are_the_specs() -> None:
    model = build_model(SPECS)
    found = {name: (str(p.dtype), tuple(p.shape)) for name, p in model.named_parameters()}
    assert found == {spec.name: (f"torch.{spec.dtype}", spec.shape) for spec in SPECS}


def test_fill_is_the_same_for_a_seed_and_differs_between_tensors() -> None:
    first, second = build_model(SPECS), build_model(SPECS)
    fill(first, seed=1)
    fill(second, seed=1)
    values = dict(first.named_parameters())
    assert all(torch.equal(values[name], p) for name, p in second.named_parameters())
    assert not torch.equal(values["model.layers.0.weight"], values["model.layers.10.weight"])


def test_change_changes_every_value_of_every_tensor() -> None:
    model = build_model(SPECS)
    fill(model, seed=1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    TrainerRank(BenchSettings(), model).change()
    assert all((before[name] != p).all() for name, p in model.named_parameters())
