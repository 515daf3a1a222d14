"""The way from an iterator of tensors to a publish, for every framework that hands its weights over so."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from weightcast import IteratorSource, LocalEngine, Publisher, PublishError, TensorSource
from weightcast.engines.tensors import TensorSink
from weightcast.errors import IncompatibleWeightsError
from weightcast.integrations.handed import HandedPublisher, exhaust

SOURCES = [IteratorSource, TensorSource]
NUM_TENSORS = 5


class Export:
    """An exporter of tensors of a value. `num_read`: how many were asked for; `fails_at`: where it raises."""

    def __init__(self, value: float, *, fails_at: int = -1) -> None:
        self.value, self.fails_at = value, fails_at
        self.num_read = 0
        self.has_ended = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(NUM_TENSORS):
            self.num_read += 1
            if number == self.fails_at:
                raise OSError("the exporter failed")
            yield f"t{number}", torch.full((300,), self.value + number)
        self.has_ended = True


class Fails(TensorSink):
    """An engine that takes nothing as long as it is told so."""

    is_failing = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.is_failing:
            raise RuntimeError("out of luck")
        super().load(tensors)


@pytest.fixture
def sink() -> Fails:
    return Fails()


@pytest.fixture
def made(sink: Fails, leaves_nothing: None) -> Iterator[Callable[..., HandedPublisher]]:
    """Makes one of a kind of source, into the sink."""
    engine, handed = LocalEngine(sink), []

    def make(kind: type[Any], **options: Any) -> HandedPublisher:
        source = kind()
        publisher = {"engines": [engine], "transport": "memory://", "trainer_group": None}
        handed.append(HandedPublisher(source, lambda: Publisher(source, **publisher), **options))
        return handed[-1]

    yield make
    for each in handed:
        each.close()
    engine.close()


def holds(sink: TensorSink, value: float) -> bool:
    return [float(tensor[0]) for tensor in sink.held.values()] == [value + number for number in range(NUM_TENSORS)]


@pytest.mark.parametrize("kind", SOURCES)
def test_each_iterator_is_a_version(kind: type[Any], sink: Fails, made: Callable[..., HandedPublisher]) -> None:
    handed = made(kind)
    for version in range(3):
        weights = Export(10.0 * version)
        assert handed.publish(weights).version == version
        assert weights.has_ended
        assert holds(sink, 10.0 * version)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("is_first", [True, False])
def test_an_iterator_is_taken_to_its_end_whatever_fails(
    kind: type[Any], is_first: bool, sink: Fails, made: Callable[..., HandedPublisher]
) -> None:
    handed = made(kind)
    if not is_first:
        handed.publish(Export(1.0))
    sink.is_failing = True
    weights = Export(2.0)
    with pytest.raises(PublishError, match="out of luck"):
        handed.publish(weights)
    assert weights.has_ended
    sink.is_failing = False
    with pytest.raises(OSError, match="the exporter failed"):
        handed.publish(Export(3.0, fails_at=2))
    assert not sink.held if is_first else holds(sink, 1.0)
    handed.publish(Export(4.0))
    assert holds(sink, 4.0)


def test_tensors_that_are_refused_are_taken_to_their_end_as_well(made: Callable[..., HandedPublisher]) -> None:
    for kind in SOURCES:
        weights = Export(1.0)
        with pytest.raises(ValueError, match=r"'bits' (is|has dtype) torch\.bits8"):
            made(kind).publish(itertools.chain([("bits", torch.empty(3, dtype=torch.bits8))], weights))
        assert weights.has_ended


def test_what_has_to_be_forgotten_is_forgotten_before_the_rest_is_taken(
    made: Callable[..., HandedPublisher],
) -> None:
    weights, num_read = Export(1.0), []
    handed = made(IteratorSource, forget=lambda: num_read.append(weights.num_read))
    handed.publish(Export(0.0))
    assert num_read == []
    with pytest.raises(IncompatibleWeightsError, match="found 'other'"):
        handed.publish(iter(itertools.chain([("other", torch.ones(1))], weights)))
    assert num_read == [0]
    assert weights.has_ended


def test_a_trainer_that_goes_back_to_an_earlier_step_is_another_run(
    sink: Fails, made: Callable[..., HandedPublisher]
) -> None:
    handed = made(IteratorSource)
    for step in (5, 7, 3, 4):
        assert handed.publish(Export(float(step)), step).version == step
        assert holds(sink, step)


@pytest.mark.parametrize("kind", SOURCES)
def test_one_that_was_closed_keeps_no_tensor_and_connects_again(
    kind: type[Any], sink: Fails, made: Callable[..., HandedPublisher]
) -> None:
    handed, array = made(kind), torch.zeros(3).numpy().copy()
    kept = weakref.ref(array)
    handed.publish([("a", torch.from_numpy(array))])
    del array
    handed.close()
    handed.close()
    assert kept() is None
    handed.publish([("a", torch.ones(3))])
    assert torch.equal(sink.held["a"], torch.ones(3))


def test_wrong_arguments_are_an_error_when_it_is_opened() -> None:
    source = TensorSource()
    handed = HandedPublisher(source, lambda: Publisher(source, transport="smoke://", trainer_group=None))
    with pytest.raises(ValueError, match="smoke"):
        handed.open()


def test_another_rank_takes_part_to_the_end() -> None:
    weights = Export(1.0)
    exhaust(weights)
    assert weights.has_ended
