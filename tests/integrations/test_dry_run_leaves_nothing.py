"""A dry run changes nothing of torch, of the model or of the process, while it runs and afterwards."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from integrations.loader_model import Model, checkpoint, specs, without_memory
from weightcast.integrations.plugin.dry_run import DryRunOutcome, dry_run

Weights = Iterable[tuple[str, torch.Tensor]]
WAIT_SECONDS = 240.0


def fake_tensors() -> None:
    with FakeTensorMode():
        made = torch.empty(3, 4)
        made.add_(made).mul_(2).masked_fill_(torch.empty(3, 4, dtype=torch.bool), 1).clamp_(min=0).zero_().fill_(1)
        made.copy_(torch.empty(4))
        made[torch.zeros(2, dtype=torch.long)] = 1.0
        assert torch.mm(torch.empty(3, 4), torch.empty(4, 5), out=torch.empty(3, 5)).shape == (3, 5)


def traced() -> None:
    graph = make_fx(lambda x: x.clone().add_(1).mul_(3).sigmoid_(), tracing_mode="fake")(torch.ones(9))
    assert torch.equal(graph(torch.ones(9)), torch.full((9,), 6.0).sigmoid())


def compiled() -> None:
    """A function of its own, which nothing was compiled for; `fullgraph` fails where torch would leave it as it is."""
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        calls.append(1)
        return graph.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.clone().add_(1).masked_fill_(x > 3, 0.0)

    run = torch.compile(function, backend=backend, fullgraph=True)
    assert torch.equal(run(torch.tensor([1.0, 5.0])), torch.tensor([2.0, 0.0]))
    assert calls


def without_data() -> None:
    out = torch.empty(0, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.mm(torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta"), out=out).shape == (3, 5)
    with pytest.raises(RuntimeError):
        torch.empty(3, device="meta").copy_(torch.empty(4, device="meta"))


USES = pytest.mark.parametrize("use", [fake_tensors, traced, compiled, without_data])


def in_a_thread(function: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result(WAIT_SECONDS)


class OneWeight(nn.Module):
    def __init__(self, load: Callable[[OneWeight, torch.Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.inner = nn.Linear(2, 2)
        self.seen, self.by_name, self.kept = [1], {"a": 1}, torch.ones(3)
        self.names = {"x"}
        self._load = load

    def load_weights(self, weights: Weights) -> None:
        for _, tensor in weights:
            self._load(self, tensor)


def tried(load: Callable[[OneWeight, torch.Tensor], object]) -> DryRunOutcome:
    return dry_run(OneWeight(load), without_memory, specs({"weight": torch.zeros(8, 8)}))


@USES
def test_torch_is_as_before_afterwards(use: Callable[[], None]) -> None:
    """Also after a loader that computes, which looks at more operations."""
    for _ in range(2):
        assert not dry_run(Model(), without_memory, specs(checkpoint(0))).faults
        assert tried(lambda model, tensor: model.weight.data.copy_(tensor).mul_(3)).opaque
    use()


@USES
def test_torch_is_as_before_in_other_threads_while_it_runs(use: Callable[[], None]) -> None:
    def load(model: OneWeight, tensor: torch.Tensor) -> None:
        model.weight.data.copy_(tensor)
        in_a_thread(use)

    outcome = tried(load)
    assert not outcome.faults
    assert [(each.name, each.target) for each in outcome.copies] == [("weight", "weight")]
    assert not outcome.opaque


@pytest.mark.parametrize(
    "load",
    [
        lambda model, tensor: in_a_thread(lambda: model.weight.data.copy_(tensor)),
        lambda model, tensor: [in_a_thread(model.weight.data[4:].zero_), model.weight.data.copy_(tensor)],
        lambda model, tensor: [
            model.weight.data[:4].copy_(in_a_thread(lambda: tensor[:4])),
            in_a_thread(lambda: model.weight.data[4:].copy_(tensor[4:])),
        ],
    ],
    ids=["copy", "constant before", "parts"],
)
def test_copies_of_other_threads_are_recorded(load: Callable[[OneWeight, torch.Tensor], object]) -> None:
    outcome = tried(load)
    assert not outcome.faults
    assert not outcome.opaque
    assert outcome.targets["weight"].num_unset == 0
    assert outcome.used["weight"] == (64, {torch.float32})


@pytest.mark.parametrize(
    "load",
    [
        lambda model, tensor: in_a_thread(lambda: model.weight.data.copy_(tensor * 2)),
        lambda model, tensor: model.weight.data.copy_(in_a_thread(lambda: tensor.float().exp())),
        lambda model, tensor: in_a_thread(lambda: model.weight.data.copy_(tensor).add_(1)),
    ],
    ids=["computed and copied", "computed", "changed"],
)
def test_what_other_threads_compute_is_opaque(load: Callable[[OneWeight, torch.Tensor], object]) -> None:
    outcome = tried(load)
    assert not outcome.faults
    assert outcome.opaque.keys() == {"weight"}
    assert outcome.targets["weight"].num_unset == 0


def test_what_goes_through_a_tensor_of_the_loaders_own_is_opaque_and_used() -> None:
    """Whatever is made from that tensor, which nobody sees."""

    def load(model: OneWeight, tensor: torch.Tensor) -> None:
        between = torch.empty(8, 8, device=tensor.device)
        between[:4] = tensor[4:]
        between[4:] = tensor[:4]
        model.weight.data.copy_((between * 2).t().contiguous())

    outcome = tried(load)
    assert outcome.opaque.keys() == {"weight"}
    assert outcome.used["weight"] == (64, {torch.float32})
    assert outcome.targets["weight"].num_unset == 0


def replaces(model: OneWeight, tensor: torch.Tensor) -> None:
    """All that a loader may do to what a module holds."""
    model.weight.data.copy_(tensor)
    model.weight.was_loaded = True  # type: ignore[attr-defined]
    model.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
    model.absorbed = tensor * 2  # type: ignore[assignment]
    model.inner.register_buffer("made", torch.zeros(2), persistent=False)
    model.inner.bias = None
    model.add_module("added", nn.Linear(1, 1))
    model.seen.append(2)
    model.by_name["b"] = 2
    model.names.add("y")
    model.kept = torch.zeros(3)
    del model.inner


def held(model: nn.Module) -> dict[str, Any]:
    """All that its modules hold, by identity, and what its containers contain."""
    found: dict[str, Any] = {}
    for name, layer in model.named_modules():
        for attribute, value in vars(layer).items():
            contents = copy.copy(value) if isinstance(value, (dict, list, set)) else None
            found[f"{name}.{attribute}"] = id(value), contents
        for parameter_name, parameter in layer.named_parameters(recurse=False):
            found[f"{name}.{parameter_name}.__dict__"] = dict(vars(parameter)), parameter.tolist()
    return found


class StoppedError(BaseException):
    """As KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize("end", [None, ValueError("bad"), StoppedError()], ids=["succeeds", "fails", "is interrupted"])
def test_all_that_the_model_holds_is_as_before(end: BaseException | None) -> None:
    def load(model: OneWeight, tensor: torch.Tensor) -> None:
        replaces(model, tensor)
        if end is not None:
            raise end

    model = OneWeight(load)
    vars(model.weight)["weight_loader"] = print
    before = held(model)
    for _ in range(2):
        if isinstance(end, StoppedError):
            with pytest.raises(StoppedError):
                dry_run(model, without_memory, specs({"weight": torch.zeros(8, 8)}))
        else:
            outcome = dry_run(model, without_memory, specs({"weight": torch.zeros(8, 8)}))
            assert outcome.faults == ({} if end is None else {"weight": "ValueError: bad"})
        after = held(model)
        assert list(after) == list(before)
        assert all(after[name] == value for name, value in before.items())
    assert gc.isenabled()


def test_two_at_once_do_not_disturb_each_other() -> None:
    """Two models, as of two engines in one process; each one's loader waits for the other's."""
    barrier = threading.Barrier(2)

    def load(model: OneWeight, tensor: torch.Tensor) -> None:
        barrier.wait(WAIT_SECONDS)
        model.weight.data[:4].copy_(tensor[4:])
        barrier.wait(WAIT_SECONDS)
        model.weight.data[4:].copy_(tensor[:4])

    with ThreadPoolExecutor(2) as executor:
        outcomes = [each.result(WAIT_SECONDS) for each in [executor.submit(tried, load) for _ in range(2)]]
    assert outcomes[0].copies == outcomes[1].copies
    assert len(outcomes[0].copies) == 2
    compiled()
