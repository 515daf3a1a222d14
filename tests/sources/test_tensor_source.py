"""TensorSource: tensors by name, cast on the way where that is asked for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from weightcast import EngineServer, LocalEngine, Publisher, PublishError, PublishOptions, TensorSink, TensorSource
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
