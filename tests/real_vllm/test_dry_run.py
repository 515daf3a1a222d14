"""The dry run on small modules with loaders of their own: what is followed into which tensor, and what it leaves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.dry_run import MAX_FAULTS, DryRunOutcome
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.model import dry_run

Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[nn.Module, Weights], None]


class Fused(nn.Module):
    """One weight of two halves, `a` above `b`, with a bias and a map that loaders read."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4, dtype=torch.bfloat16)
        self.inner.register_buffer("_expert_map", torch.tensor([0, 1]))
        self._load = load

    def load_weights(self, weights: Weights) -> None:
        self._load(self, weights)


def halves(model: Any, weights: Weights) -> None:
    for name, weight in weights:
        if name == "bias":
            model.inner.bias.data.copy_(weight)
        else:
            start = 2 * int(model.inner._expert_map["ab".index(name)])
            part = model.inner.weight.data.narrow(0, start, 2)
            if part.shape != weight.shape:
                raise ValueError(f"{tuple(weight.shape)} is no half")
            part.copy_(weight)


@pytest.fixture(scope="module")
def config() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.config import VllmConfig

        return VllmConfig()


def made(load: Load = halves) -> nn.Module:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Fused(load)
    record_metadata_for_reloading(model)
    return model


def specs(**shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec(name, "float32", shape) for name, shape in shapes.items()]


WHOLE = specs(a=(2, 3), b=(2, 3), bias=(4,))


def unset(outcome: DryRunOutcome) -> dict[str, int]:
    return {name: target.num_unset for name, target in outcome.targets.items() if target.is_parameter}


def test_every_element_is_accounted_for(config: Any) -> None:
    outcome = dry_run(made(), config, WHOLE)
    assert outcome.faults == {}
    assert unset(outcome) == {"inner.weight": 0, "inner.bias": 0}
    assert outcome.used == {"a": (6, {torch.bfloat16}), "b": (6, {torch.bfloat16}), "bias": (4, {torch.bfloat16})}
    assert list(outcome.targets["inner.weight"].loaded.values()) == ["a", "b"]


def test_what_does_not_come_is_unset(config: Any) -> None:
    outcome = dry_run(made(), config, specs(a=(2, 3)))
    assert unset(outcome) == {"inner.weight": 6, "inner.bias": 4}


def test_live_tensors_are_not_written(config: Any) -> None:
    model = made()
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    dry_run(model, config, [*WHOLE, *specs(c=(2, 3))])
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    assert all(id(after[name]) == key and torch.equal(after[name], value) for name, (key, value) in before.items())


def test_what_a_loader_writes_besides_parameters_stays_as_it_is_and_is_named(config: Any) -> None:
    kept = torch.zeros(2, 3)

    def aside(model: nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            kept.copy_(weight)

    outcome = dry_run(made(aside), config, specs(a=(2, 3)))
    assert not outcome.faults
    assert outcome.beside[0] is kept
    assert "outside the parameters" in outcome.opaque["a"]
    assert torch.equal(kept, torch.zeros(2, 3))


def test_every_fault_is_found_and_named(config: Any) -> None:
    outcome = dry_run(made(), config, specs(a=(2, 5), b=(2, 3), c=(1,), bias=(9,)))
    assert outcome.faults.keys() == {"a", "c", "bias"}
    assert outcome.faults["a"] == "ValueError: (2, 5) is no half"
    assert unset(outcome) == {"inner.weight": 6, "inner.bias": 4}


def test_a_fault_at_the_end_has_no_name(config: Any) -> None:
    def strict(model: nn.Module, weights: Weights) -> None:
        if "b" not in {name for name, _ in weights}:
            raise KeyError("b")

    assert dry_run(made(strict), config, specs(a=(2, 3))).faults == {"": "KeyError: 'b'"}


def test_there_is_an_end_to_faults(config: Any) -> None:
    offered = specs(**{f"x{number}": (1,) for number in range(2 * MAX_FAULTS)})
    assert len(dry_run(made(), config, offered).faults) == MAX_FAULTS


def test_what_is_computed_from_a_source_is_followed(config: Any) -> None:
    """Casts, copies, joins and turns on the way, and a buffer in between."""

    def roundabout(model: Any, weights: Weights) -> None:
        parts = dict(weights)
        between = torch.empty(4, 3, device="meta")
        between.copy_(torch.cat([parts["a"].to(torch.float16), parts["b"].t().contiguous().t().half()]).clone())
        model.inner.weight.data.copy_(between)

    outcome = dry_run(made(roundabout), config, specs(a=(2, 3), b=(2, 3)))
    assert list(outcome.targets["inner.weight"].loaded.values()) == ["a with b"]
    assert outcome.together == {"a": {"a", "b"}, "b": {"a", "b"}}


def test_padding_is_neither_loaded_nor_unset(config: Any) -> None:
    def padded(model: Any, weights: Weights) -> None:
        for _, weight in weights:
            model.inner.weight.data[:3].copy_(weight)
            model.inner.weight.data[3:].fill_(0)

    outcome = dry_run(made(padded), config, specs(a=(3, 3)))
    assert outcome.used["a"][0] == 9
    assert outcome.targets["inner.weight"].num_unset == 0


def test_what_is_used_in_part_is_told(config: Any) -> None:
    def truncating(model: Any, weights: Weights) -> None:
        for _, weight in weights:
            model.inner.weight.data.copy_(weight.narrow(0, 0, 4))

    assert dry_run(made(truncating), config, specs(a=(7, 3))).used == {"a": (12, {torch.bfloat16})}


def test_a_block_that_is_loaded_twice_has_two_names(config: Any) -> None:
    def last_wins(model: Any, weights: Weights) -> None:
        for _, weight in weights:
            model.inner.weight.data.copy_(weight)

    outcome = dry_run(made(last_wins), config, specs(a=(4, 3), b=(4, 3)))
    assert list(outcome.targets["inner.weight"].twice.values()) == [("a", "b")]


def test_a_transform_in_place_counts_once(config: Any) -> None:
    """vLLM's composed loaders write what they have loaded once more."""

    def composed(model: Any, weights: Weights) -> None:
        for _, weight in weights:
            model.inner.weight.data.copy_(weight)
            model.inner.weight.data.copy_(-torch.exp(model.inner.weight.data))

    outcome = dry_run(made(composed), config, specs(a=(4, 3)))
    assert outcome.used["a"][0] == 12
    assert len(outcome.targets["inner.weight"].loaded) == 1


def test_it_can_be_tried_while_packed_and_after_a_reload(config: Any) -> None:
    """Packed weights have other shapes; after a reload vLLM's record keeps that reload's loaders."""
    from vllm.model_executor.model_loader.reload import layerwise

    model: Any = made(through_loaders)
    with internals.require().current_config(config):
        layerwise.initialize_layerwise_reload(model)
        model.load_weights((spec.name, torch.ones(spec.shape)) for spec in WHOLE)
        layerwise.finalize_layerwise_reload(model, config.model_config)
    model.inner.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    outcome = dry_run(model, config, WHOLE)
    assert outcome.faults == {}
    assert unset(outcome) == {"inner.weight": 0, "inner.bias": 0}
    assert model.inner.weight.shape == (0,)


def through_loaders(model: Any, weights: Weights) -> None:
    """As vLLM's models do: each parameter may bring a loader."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    whole = dict(weights)
    weight, bias = model.inner.weight, model.inner.bias
    getattr(weight, "weight_loader", default_weight_loader)(weight, torch.cat([whole["a"], whole["b"]]))
    getattr(bias, "weight_loader", default_weight_loader)(bias, whole["bias"])


def test_calls_are_those_of_one_run(config: Any) -> None:
    """A loader that computes something is run again; a load fills a layer in as many calls as one run makes."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    model: Any = made(through_loaders)
    model.inner.quant_method = UnquantizedLinearMethod()
    assert dry_run(model, config, WHOLE).calls == {"inner": 1}  # vLLM leaves biases live
