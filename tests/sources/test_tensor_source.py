"""TensorSource: tensors by name, cast on the way where that is asked for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from weightcast import EngineServer, LocalEngine, Publisher, PublishError, PublishOptions, TensorSource
from weightcast.engines.tensors import TensorSink
from weightcast.format.manifest import WeightVersion


def test_floating_point_is_cast_while_it_is_packed_and_the_rest_stays() -> None:
    tensors = {"a": torch.randn(33, 3), "b": torch.randn(5, dtype=torch.float64), "steps": torch.tensor([3, 4])}
    sink = TensorSink()
    source = TensorSource(tensors, torch.bfloat16)
    with Publisher(source, transport="memory://", engines=[LocalEngine(sink)]) as publisher:
        publisher.publish()
    assert torch.equal(sink.held["a"], tensors["a"].bfloat16())
    assert torch.equal(sink.held["b"], tensors["b"].bfloat16())
    assert torch.equal(sink.held["steps"], tensors["steps"])
    assert source.tensors["a"] is tensors["a"]
    with pytest.raises(TypeError):
        source.tensors["a"] = torch.zeros(33, 3)  # type: ignore[index]


class Wrong(TensorSink):
    """Holds something else than was sent, but for version 0."""

    def commit(self, version: WeightVersion) -> None:
        super().commit(version)
        self.held["a"][0] += version.number


@pytest.mark.parametrize("served", [False, True], ids=["here", "over http"])
def test_what_a_sink_holds_is_compared_with_what_was_sent(served: bool) -> None:
    source = TensorSource({"a": torch.ones(4), "b": torch.ones(3)})
    with contextlib.ExitStack() as exits:
        engine: Any = EngineServer(Wrong()).start() if served else LocalEngine(Wrong())
        exits.callback(engine.close)
        engines = [engine.url if served else engine]
        with Publisher(source, engines=engines, options=PublishOptions(verify="installed")) as publisher:
            assert publisher.publish(0).ok
            with pytest.raises(PublishError, match="'a'"):
                publisher.publish(1)


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", TypeError), (torch.int8, ValueError)])
def test_a_dtype_that_weights_can_t_be_cast_to_is_refused(dtype: torch.dtype, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="dtype is "):
        TensorSource(dtype=dtype)


def test_tensors_of_one_memory_travel_once_and_reach_engines_under_all_their_names() -> None:
    shared, sink = torch.randn(20, 3), TensorSink()
    tensors = {"a": shared, "b": torch.randn(5), "c": shared.detach(), "d": shared[:10], "e": shared.t()}
    source = TensorSource(tensors, aliases={"c": ["f"]}, groups={"b": "g"})
    assert [spec.names for spec in source.specs()] == [("a", "c", "f"), ("b",), ("d",), ("e",)]
    with Publisher(source, transport="memory://", engines=[LocalEngine(sink)]) as publisher:
        assert publisher.publish().num_bytes == 4 * (60 + 5 + 30 + 60)
        source.replace(tensors | {"c": torch.ones(20, 3)})
        publisher.publish()
    assert all(torch.equal(sink.held[name], tensor) for name, tensor in tensors.items() if name != "c")
    assert torch.equal(sink.held["c"], torch.ones(20, 3))
    assert torch.equal(sink.held["f"], torch.ones(20, 3))


def test_tied_tensors_of_other_groups_travel_with_their_groups() -> None:
    shared = torch.ones(3)
    source = TensorSource({"a": shared, "b": shared, "c": shared}, groups={"b": "g", "c": "g"})
    assert [(spec.names, spec.group) for spec in source.specs()] == [(("a",), ""), (("b", "c"), "g")]


def test_regions_are_the_same_object_while_the_memory_is_the_same() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    source = TensorSource({"a": tensor, "b": torch.ones(2)})
    specs, regions = source.specs(), source.regions()
    source.replace({"a": tensor.detach(), "b": source.tensors["b"]})
    assert source.regions() is regions
    for other in (tensor.clone(), tensor.t(), tensor.view(torch.int32), tensor[:2]):
        source.replace({"a": other, "b": source.tensors["b"]})
        assert source.regions() is not regions
        assert source.regions()["a"][0][1].data_ptr() == other.data_ptr()
        regions = source.regions()
    source.replace({"a": tensor.clone(), "b": torch.zeros(2)})
    assert source.specs() == specs


def test_a_tensor_in_memory_that_a_former_one_has_left_is_published() -> None:
    memory = torch.zeros(8)
    former = torch.nn.Parameter(memory.view(8))
    source = TensorSource({"a": former})
    former.data = torch.full((8,), 5.0)  # as module.to() does; the memory is free for other tensors
    source.replace({"a": memory.fill_(7.0)})
    assert source.tensors["a"] is memory
    assert source.regions()["a"][0][1].tolist() == [7.0] * 8


def test_a_conjugate_or_negative_view_is_not_the_tensor_whose_memory_it_has() -> None:
    tensor, engine = torch.tensor([1 + 2j, 3 - 1j]), TensorSink()
    negative = tensor.conj().imag
    assert negative.is_neg()
    source = TensorSource({"a": tensor, "b": tensor.conj(), "c": tensor.imag, "d": negative})
    with Publisher(source, engines=[LocalEngine(engine)]) as publisher:
        publisher.publish()
        assert {name: held.tolist() for name, held in engine.held.items()} == {
            "a": [1 + 2j, 3 - 1j],
            "b": [1 - 2j, 3 + 1j],
            "c": [2, -1],
            "d": [-2, 1],
        }
        source.replace({"a": tensor.conj(), "b": tensor, "c": negative, "d": tensor.imag})
        publisher.publish()
        assert engine.held["a"].tolist() == engine.held["b"].conj().tolist() == [1 - 2j, 3 + 1j]
        assert engine.held["c"].tolist() == [-2, 1]
