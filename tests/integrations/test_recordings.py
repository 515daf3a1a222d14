"""Loaders made at random: what a map copies is what the loader makes, whatever it cuts, fuses, turns and pads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from integrations.loader_model import specs, without_memory
from weightcast.format.geometry import Region, whole
from weightcast.format.tensor_digest import tensor_digest
from weightcast.integrations.plugin.dry_run import DryRunOutcome, dry_run
from weightcast.serving.install import BlockCopies
from weightcast.serving.install_map import RecordedMap, whole_digest

DTYPES = (torch.float32, torch.bfloat16)


class Step(NamedTuple):
    """Rows `start` to `stop` of `name` to the same number of rows of `target`, from `at` on; `turned`: columns."""

    name: str
    start: int
    stop: int
    target: str
    at: int
    turned: bool


class Program(nn.Module):
    """A loader that does these steps."""

    def __init__(self, shapes: dict[str, tuple[int, int, torch.dtype, bool]], steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        for name, (rows, columns, dtype, is_turned) in shapes.items():
            layer = nn.Module()
            data = torch.zeros(columns, rows, dtype=dtype).t() if is_turned else torch.zeros(rows, columns, dtype=dtype)
            layer.weight = nn.Parameter(data, requires_grad=False)
            self.add_module(name, layer)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            for step in self.steps:
                if step.name == name:
                    weight = self.get_parameter(f"{step.target}.weight").data
                    part = tensor[:, step.start : step.stop].t() if step.turned else tensor[step.start : step.stop]
                    weight[step.at : step.at + step.stop - step.start].copy_(part)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, dict[str, torch.Tensor]]:
    """Each target is filled from parts of one or several tensors, one under another; the rest of it is padding."""
    shapes: dict[str, tuple[int, int, torch.dtype, bool]] = {}
    steps: list[Step] = []
    tensors: dict[str, torch.Tensor] = {}
    for number in range(draw(st.integers(1, 3))):
        target, columns, dtype = f"target{number}", draw(st.integers(1, 5)), draw(st.sampled_from(DTYPES))
        at = 0
        for part in range(draw(st.integers(1, 3))):
            name, rows, turned = f"{target}.{part}", draw(st.integers(1, 6)), draw(st.booleans())
            start = draw(st.integers(0, rows - 1))
            stop = draw(st.integers(start + 1, rows))
            shape = (columns, rows) if turned else (rows, columns)
            tensors[name] = torch.randn(shape).to(dtype)
            steps.append(Step(name, start, stop, target, at, turned))
            at += stop - start
        shapes[target] = (at + draw(st.integers(0, 2)), columns, dtype, draw(st.booleans()))
    return Program(shapes, steps), tensors


def recorded(model: Program, tensors: dict[str, torch.Tensor]) -> RecordedMap:
    outcome = dry_run(model, without_memory, specs(tensors))
    assert not outcome.faults
    assert not outcome.opaque
    forms = {copy.target: outcome.targets[copy.target].form for copy in outcome.copies}
    return RecordedMap(model, specs(tensors), outcome.copies, forms, outcome.opaque)


def prove(install_map: RecordedMap, tensors: dict[str, torch.Tensor]) -> None:
    install_map.prove(
        (name, install_map.block_digests(name, install_map.source_blocks(name, tensor)))
        for name, tensor in tensors.items()
    )


@given(programs(), st.data())
def test_copies_are_what_the_loader_makes(
    program: tuple[Program, dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    model, tensors = program
    install_map = recorded(model, tensors)
    assert install_map.bind()
    model.load_weights(tensors.items())
    prove(install_map, tensors)
    assert set(install_map.proven) == tensors.keys()
    new = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
    pieces: list[tuple[str, Region | None]] = []
    sources: list[torch.Tensor] = []
    for name, tensor in new.items():
        rows = len(tensor)
        cut = data.draw(st.integers(0, rows))
        for start, stop in ((0, cut), (cut, rows)):
            if start < stop:
                assert install_map.can_copy_pieces(name)
                piece = Region((start, 0), (stop - start, tensor.shape[1]))
                pieces.append((name, piece))
                sources += install_map.source_blocks(name, tensor[start:stop].contiguous(), piece)
    BlockCopies(install_map, pieces, sources).run()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_weights(new.items())
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())


@given(programs())
def test_what_is_held_is_read_back_as_regions(program: tuple[Program, dict[str, torch.Tensor]]) -> None:
    model, tensors = program
    install_map = recorded(model, tensors)
    model.load_weights(tensors.items())
    prove(install_map, tensors)
    held, following = install_map.held(0, 1 << 30)
    assert following == -1
    by_name = {step.name: step for step in model.steps}
    for tensor in held:
        step = by_name[tensor.spec.name]
        (placed,) = tensor.regions
        part = tensors[tensor.spec.name]
        region = placed.region
        taken = part[:, step.start : step.stop] if step.turned else part[step.start : step.stop]
        assert region.sizes == tuple(taken.shape)
        assert placed.digest == tensor_digest(taken.contiguous(), region, part.shape)
        if region == whole(part.shape):
            assert whole_digest({0: tensor}) == tensor_digest(part)


class Loader(nn.Module):
    """Parameters `0` to `n - 1` of one shape, and a loader."""

    def __init__(self, num_tensors: int, load: Callable[[Loader, Iterable[tuple[str, torch.Tensor]]], None]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(2, 3) for _ in range(num_tensors))
        self._load = load

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._load(self, tensors)


def tried(load: Callable[[Loader, Iterable[tuple[str, torch.Tensor]]], None], num_tensors: int = 40) -> DryRunOutcome:
    offered = {f"weights.{number}": torch.zeros(2, 3) for number in range(num_tensors)}
    return dry_run(Loader(num_tensors, load), without_memory, specs(offered))


def test_a_loader_that_asks_for_nothing_uses_nothing() -> None:
    outcome = tried(lambda model, tensors: None)
    assert set(outcome.used.values()) == {(0, frozenset())}
    assert len(outcome.used) == 40
    assert all(target.num_unset == 6 for target in outcome.targets.values())


def test_memory_of_the_loaders_own_is_not_taken_for_a_source_that_it_has_dropped() -> None:
    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for number, (name, tensor) in enumerate(tensors):
            made = tensor if number < 8 else torch.empty(2, 3, device="meta")
            model.get_parameter(name).data.copy_(made)

    outcome = tried(load)
    assert [(copy.name, copy.target) for copy in outcome.copies] == [(f"weights.{n}",) * 2 for n in range(8)]
    assert [name for name, (num_used, _) in outcome.used.items() if num_used] == [f"weights.{n}" for n in range(8)]


def test_memory_of_the_loaders_own_is_not_taken_for_a_parameter_that_it_has_exchanged() -> None:
    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            parameter = model.get_parameter(name)
            parameter.data = torch.empty(3, 2, device="meta").t()
            torch.empty(2, 3, device="meta").copy_(tensor)

    outcome = tried(load)
    assert not outcome.copies
    assert all(not target.loaded for target in outcome.targets.values())


def test_data_is_another_tensor_of_the_same_memory() -> None:
    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            parameter = model.get_parameter(name)
            data, source = parameter.data, tensor.data
            assert not isinstance(data, nn.Parameter)
            assert not data.requires_grad
            data.t_()
            assert (parameter.shape, data.shape) == ((2, 3), (3, 2))
            data.copy_(source.t())

    outcome = tried(load, 3)
    assert not outcome.faults
    assert [(copy.name, copy.target) for copy in outcome.copies] == [(f"weights.{n}",) * 2 for n in range(3)]


def test_methods_record_as_functions_do() -> None:
    def by_methods(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            data = model.get_parameter(name).data
            data.narrow(0, 0, 1).copy_(tensor.narrow(dim=0, start=-1, length=1), non_blocking=True)
            data.narrow(0, torch.tensor(1), 1).copy_(tensor.narrow(0, torch.tensor(0), 1))

    def by_functions(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            data = model.get_parameter(name).detach()
            torch.ops.aten.copy_(torch.narrow(data, 0, 0, 1), torch.narrow(tensor, 0, -1, 1))
            torch.ops.aten.copy_(torch.narrow(data, 0, 1, 1), torch.narrow(tensor, 0, 0, 1))

    outcomes = tried(by_methods, 3), tried(by_functions, 3)
    assert outcomes[0].copies == outcomes[1].copies
    assert len(outcomes[0].copies) == 6
    assert not any(outcome.opaque or outcome.faults for outcome in outcomes)


def test_a_write_that_autograd_refuses_is_a_fault() -> None:
    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            with torch.enable_grad():
                model.get_parameter(name).requires_grad_().copy_(tensor)

    outcome = tried(load, 2)
    assert outcome.faults.keys() == {"weights.0", "weights.1"}
    assert all("leaf Variable that requires grad" in fault for fault in outcome.faults.values())


def test_nothing_of_a_trial_is_kept() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            kept.append(weakref.ref(tensor))
            model.get_parameter(name).data.copy_(tensor)

    assert not tried(load).opaque
    gc.collect()
    assert len(kept) == 40
    assert all(of_one() is None for of_one in kept)


def test_sources_are_told_apart_when_all_are_taken_first() -> None:
    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in reversed(list(tensors)):
            model.get_parameter(name).data.copy_(tensor)

    outcome = tried(load)
    assert {(copy.name, copy.target) for copy in outcome.copies} == {(f"weights.{n}",) * 2 for n in range(40)}
    assert all(target.num_unset == 0 for target in outcome.targets.values())


def test_a_block_that_is_set_twice_counts_once() -> None:
    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            weight = model.get_parameter(name).data
            weight[:1].zero_()
            weight[:1].copy_(tensor[:1])
            weight[:1].copy_(tensor[:1])

    assert all(target.num_unset == 3 for target in tried(load).targets.values())


def test_what_a_source_was_changed_with_goes_with_it() -> None:
    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        (_, first), (_, second) = tensors
        first.add_(second)
        for weight in model.weights:
            weight.data.copy_(first * 2)

    outcome = tried(load, 2)
    both = {"weights.0", "weights.1"}
    assert outcome.together == {"weights.0": both, "weights.1": both}
    assert set(outcome.opaque) == both


def test_a_view_that_had_to_be_a_copy_is_no_block_of_a_source() -> None:
    """In inference mode `reshape` is one operation, which returns a view where it can."""

    def load(model: Loader, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.inference_mode():
            for (name, tensor), turns in zip(tensors, (False, True), strict=True):
                part = tensor.t().reshape(2, 3) if turns else tensor.reshape(3, 2).reshape(2, 3)
                model.get_parameter(name).data.copy_(part)

    outcome = tried(load, 2)
    assert not outcome.faults
    assert outcome.opaque.keys() == {"weights.1"}
    assert [(copy.name, copy.source.strides) for copy in outcome.copies] == [("weights.0", (3, 1))]


def test_only_what_is_installed_to_is_looked_up_again() -> None:
    """An engine may put other children, and the same ones again, while it serves."""
    shapes = dict.fromkeys(("a", "b"), (4, 3, torch.float32, False))
    steps = [Step(name, 0, 4, name, 0, turned=False) for name in shapes]
    tensors = {name: torch.randn(4, 3) for name in shapes}
    model = Program(shapes, steps)
    install_map = recorded(model, tensors)
    model.load_weights(tensors.items())
    prove(install_map, tensors)
    assert install_map.bind()
    revision = install_map.revision
    model.add_module("graph", nn.Identity())
    layer = model.a
    del model.a
    model.a = layer
    assert install_map.bind()
    assert install_map.revision == revision
    model.b.weight.data = torch.zeros(4, 3)
    assert install_map.bind()
    assert install_map.revision == revision + 1
    model.b.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
    assert install_map.bind()
    assert install_map.revision == revision + 2
    (block,) = install_map.target_blocks("b")
    assert block.data_ptr() == model.b.weight.data_ptr()
    del model.b.weight
    assert not install_map.bind()
    assert install_map.is_stale
