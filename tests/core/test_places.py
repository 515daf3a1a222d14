"""One look at many tensors or modules notices whatever of them is not as it was."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightcast.checkpoint.live import TensorChangeDetector
from weightcast.host.copy import PreparedCopies
from weightcast.native.tables import places, same_places


def swap_memory(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def swap_tensors(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.zeros_like(tensor))


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "other memory": swap_memory,
    "of another tensor": swap_tensors,
    "its storage set": lambda tensor: tensor.set_(torch.zeros(6, 6).untyped_storage(), 0, (6, 6), (6, 1)),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "transposed in place": lambda tensor: tensor.t_(),
    "another view of its memory": lambda tensor: setattr(tensor, "data", tensor.data.t()),
    "another start": lambda tensor: tensor.set_(tensor.untyped_storage(), 1, (5, 7), (7, 1)),
    "fewer elements": lambda tensor: tensor.resize_(5, 6),
    "as many in another shape": lambda tensor: setattr(tensor, "data", tensor.data.view(9, 4)),
    "read in another dtype": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1999])
def test_a_tensor_that_has_moved_is_seen(change: str, which: int) -> None:
    tensors = [torch.zeros(6, 6) for _ in range(2000)]
    former = places(tensors)
    assert same_places(tensors, former)
    CHANGES[change](tensors[which])
    assert not same_places(tensors, former)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 1, 2, 1, 2, 1, 3),
        lambda: torch.zeros(0, 4),
        lambda: torch.zeros(()),
        lambda: torch.zeros(8, device="meta"),
        lambda: torch.zeros(64)[3:50:2],
        lambda: torch.zeros(3, 4, 5, dtype=torch.complex128).conj().permute(2, 0, 1),
        lambda: torch.zeros(16, dtype=torch.float8_e4m3fn),
        lambda: nn.Parameter(torch.zeros(3, 5)),
        lambda: torch.zeros(5).as_subclass(nn.parameter.Buffer),
    ],
    ids=["7 dims", "no elements", "a number", "meta", "strided", "conjugate", "float8", "parameter", "buffer"],
)
def test_any_tensor_stays_as_it_is_until_it_moves(make: Callable[[], torch.Tensor]) -> None:
    tensors = [torch.zeros(3), make(), torch.zeros(4)]
    former = places(tensors)
    if not tensors[1].is_meta:
        tensors[1].detach().zero_()
    gc.collect()
    assert same_places(tensors, former)
    tensors[1].data = torch.zeros(3, 3, device=tensors[1].device, dtype=tensors[1].dtype)
    assert not same_places(tensors, former)


@pytest.mark.parametrize("which", ["target", "source"])
def test_kept_copies_are_looked_at_from_both_ends(which: str) -> None:
    target, source = torch.zeros(6, 6), torch.ones(6, 6)
    copies = PreparedCopies([target], [source])
    copies.run()
    assert copies.are_in_place()
    (target if which == "target" else source).untyped_storage().resize_(0)
    assert not copies.are_in_place()
    with pytest.raises(ValueError, match="resized or freed"):
        PreparedCopies([target], [source])


def test_seven_dims_are_seen_in_another_order() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, 2, 2, 2, 2, 2, 3), torch.zeros(4)]
    former = places(tensors)
    tensors[1].transpose_(0, 6)
    assert not same_places(tensors, former)


def test_no_tensors_have_not_moved() -> None:
    assert same_places([], places([]))
    assert not TensorChangeDetector(nn.Identity(), with_buffers=True).has_changed()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(40))
        self.register_buffer("seen", torch.zeros(2))


def rename(model: Model) -> None:
    parameters = model.layers[5]._parameters
    parameters["weight2"] = parameters.pop("weight")
    parameters["bias"] = parameters.pop("bias")


def exchange_names(model: Model) -> None:
    first = model.layers[3]
    first.bias, first.weight = first.weight, first.bias


MEMBERS: dict[str, Callable[[Model], object]] = {
    "a parameter": lambda model: setattr(model.layers[7], "weight", nn.Parameter(model.layers[7].weight.detach())),
    "a parameter to none": lambda model: setattr(model.layers[0], "bias", None),
    "a parameter gone": lambda model: delattr(model.layers[39], "bias"),
    "a parameter more": lambda model: setattr(model, "more", nn.Parameter(torch.zeros(1))),
    "a buffer": lambda model: setattr(model, "seen", torch.zeros(2)),
    "a layer": lambda model: model.layers.__setitem__(1, nn.Linear(3, 2)),
    "a layer more": lambda model: model.layers.append(nn.Linear(3, 2)),
    "a layer in a leaf": lambda model: model.layers[2].add_module("inner", nn.Identity()),
    "names": exchange_names,
    "a name": rename,
}


@pytest.mark.parametrize("member", MEMBERS)
def test_members_that_are_exchanged_are_seen(member: str) -> None:
    model = Model()
    detector = TensorChangeDetector(model, with_buffers=True)
    assert not detector.has_changed()
    MEMBERS[member](model)
    assert detector.has_changed()
    assert detector.has_changed()


@pytest.mark.parametrize("change", [swap_memory, swap_tensors])
def test_memory_that_is_exchanged_is_seen(change: Callable[[torch.Tensor], object]) -> None:
    model = Model()
    detector = TensorChangeDetector(model, with_buffers=True)
    with torch.no_grad():
        model.layers[9].weight.add_(1)
    assert not detector.has_changed()
    change(model.layers[9].weight)
    assert detector.has_changed()


def test_what_is_as_it_was_is_no_change() -> None:
    """A functional call puts other parameters there, and the former ones back."""
    model = Model()
    detector = TensorChangeDetector(model, with_buffers=True)
    layer = model.layers[4]
    for _ in range(3):
        torch.func.functional_call(layer, {"weight": torch.ones(2, 3)}, (torch.ones(1, 3),))
        assert not detector.has_changed()
    layer.weight = nn.Parameter(torch.ones(2, 3))
    assert detector.has_changed()


def test_registers_of_another_class_are_looked_at() -> None:
    model = Model()
    model.layers[4]._parameters = OrderedDict(model.layers[4]._parameters)
    detector = TensorChangeDetector(model, with_buffers=True)
    assert not detector.has_changed()
    model.layers[30].weight = nn.Parameter(torch.ones(2, 3))
    assert detector.has_changed()
