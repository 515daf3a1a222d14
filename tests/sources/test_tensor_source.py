"""TensorSource: tensors by name, cast on the way where that is asked for."""

from __future__ import annotations

import pytest
import torch

from weightcast import LocalEngine, Publisher, TensorSink, TensorSource


def test_floating_point_is_cast_while_it_is_packed_and_the_rest_stays() -> None:
    tensors = {"a": torch.randn(33, 3), "b": torch.randn(5, dtype=torch.float64), "steps": torch.tensor([3, 4])}
    sink = TensorSink()
    source = TensorSource(tensors, torch.bfloat16)
    with Publisher(source, transport="memory://", engines=[LocalEngine(sink)]) as publisher:
        publisher.publish()
    assert torch.equal(sink.tensors["a"], tensors["a"].bfloat16())
    assert torch.equal(sink.tensors["b"], tensors["b"].bfloat16())
    assert torch.equal(sink.tensors["steps"], tensors["steps"])
    assert source.tensors["a"] is tensors["a"]


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", TypeError), (torch.int8, ValueError)])
def test_a_dtype_that_weights_can_t_be_cast_to_is_refused(dtype: torch.dtype, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="dtype is "):
        TensorSource(dtype=dtype)
