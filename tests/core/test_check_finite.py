"""`check_finite`: NaN and infinity are refused by name, and engines keep what they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.direct import RecordingEngine, fleet
from weightcast import IteratorSource, PublishError, TensorSource
from weightcast.errors import NotFiniteError

NAN, INFINITY = float("nan"), float("inf")


def tensors(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    held = {
        "a": torch.ones(300, 7),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "n": torch.arange(4),
        "empty": torch.ones(0),
    }
    return held | changed


def with_value(value: float, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.ones(300, 7).to(dtype)
    tensor[299, 6] = value
    return tensor


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        ({"a": with_value(NAN, torch.float32)}, {}, "'a' holds NaN"),
        ({"a": with_value(-INFINITY, torch.bfloat16)}, {}, "'a' holds infinity"),
        ({"a": with_value(NAN, torch.float8_e4m3fn)}, {}, "'a' holds NaN"),
        ({"a": with_value(NAN, torch.complex64)}, {}, "'a' holds NaN"),
        ({"a": with_value(-70000.0, torch.float32)}, {"dtype": torch.float16}, "'a' has values up to 70000, too large"),
        ({"a": with_value(NAN, torch.float32), "b": with_value(INFINITY, torch.float64)}, {}, "'a' .*; 'b' holds inf"),
    ],
)
def test_nothing_reaches_an_engine(bad: dict[str, torch.Tensor], options: Any, message: str, install: str) -> None:
    source = TensorSource(tensors(), **options)
    with fleet(source, RecordingEngine(), check_finite=True, install=install) as (publisher, [engine]):
        publisher.publish()
        source.replace(tensors(**bad))
        with pytest.raises(NotFiniteError, match=message) as caught:
            publisher.publish()
        assert len(caught.value.problems) == len(bad)
        assert (len(engine.engine.versions), engine.info().weight_version) == (1, "0")
        assert not engine.info().torn
        assert not engine.info().paused
        source.replace(tensors())
        assert publisher.publish().ok


def test_it_is_off_by_default() -> None:
    with fleet(TensorSource(tensors(a=with_value(NAN, torch.float32))), RecordingEngine()) as (publisher, [engine]):
        publisher.publish()
        assert engine.engine.held["a"].isnan().any()


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_what_is_streamed_is_looked_at_when_its_turn_comes(install: str) -> None:
    source = IteratorSource()
    with fleet(source, RecordingEngine(), check_finite=True, install=install) as (publisher, [engine]):
        source.use(tensors().items())
        publisher.publish()
        source.use(tensors(b=torch.full((5,), NAN, dtype=torch.bfloat16)).items())
        with pytest.raises((NotFiniteError, PublishError), match="'b' holds NaN"):
            publisher.publish()
        assert len(engine.engine.versions) == 1
        source.use(tensors().items())
        assert publisher.publish().ok
