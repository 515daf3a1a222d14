"""`dtype="engine"`: each tensor is cast to what the engines say they have, or refused by name before any byte moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from publishers import publisher_of
from safetensors.torch import save_file
from torch import nn

import weightcast
from core.direct import DirectEngine, RecordingEngine, fleet
from weightcast import EngineServer, ModuleEngine, ModuleSource, PublishError, SafetensorsSource, TensorSource
from weightcast.sources.joined import JoinedSource
from weightcast.trainer.export import export


class Gated(nn.Module):
    """A linear layer, and beside it what bfloat16 can't tell apart and a count that no cast concerns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.bias = nn.Parameter(6.8 + torch.rand(8) / 1000)
        self.register_buffer("count", torch.tensor(7))


def served(dtype: torch.dtype = torch.bfloat16) -> Gated:
    model = Gated()
    model.linear.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def in_file(path: Path, model: Gated) -> SafetensorsSource:
    save_file({n: t.detach() for n, t in model.state_dict().items()}, path / "model.safetensors")
    return SafetensorsSource(path, dtype="engine")


SOURCES: dict[str, Callable[[Path, Gated], Any]] = {
    "module": lambda _, model: ModuleSource(model, dtype="engine"),
    "tensors": lambda _, model: TensorSource(model.state_dict(), dtype="engine"),
    "file": in_file,
    "joined": lambda _, model: JoinedSource(
        TensorSource({"bias": model.bias.detach()}, dtype="engine"),
        TensorSource({n: t for n, t in model.state_dict().items() if n != "bias"}, dtype="engine"),
    ),
}


def assert_cast(found: Gated, trained: Gated) -> None:
    assert torch.equal(found.bias, trained.bias)
    assert torch.equal(found.linear.weight, trained.linear.weight.to(found.linear.weight.dtype))


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_tensor_has_the_dtype_of_the_engine(tmp_path: Path, kind: str, install: str) -> None:
    trained, found = Gated(), served()
    with fleet(SOURCES[kind](tmp_path, trained), ModuleEngine(found), install=install) as (publisher, _):
        for _ in range(2):
            publisher.publish()
            assert_cast(found, trained)
            with torch.no_grad():
                trained.bias.mul_(1) if kind == "file" else trained.bias.add_(0.0001)
        assert found.linear.weight.dtype == torch.bfloat16


def test_over_http_and_to_an_engine_that_casts() -> None:
    trained, found = Gated(), served()
    with EngineServer(ModuleEngine(found, cast=True)) as server:
        source = ModuleSource(trained, dtype="engine")
        with weightcast.Publisher(source, engines=[server.url]) as publisher:
            publisher.publish()
    assert_cast(found, trained)


def test_engines_that_differ_are_refused_by_name() -> None:
    trained, found, other = Gated(), served(), served(torch.float16)
    source = ModuleSource(trained, dtype="engine")
    with fleet(source, ModuleEngine(found), ModuleEngine(other)) as (publisher, _):
        with pytest.raises(
            PublishError, match=r"'linear.weight' is float16 in engine-1, bfloat16 in engine-0"
        ) as caught:
            publisher.publish()
        assert set(caught.value.failures) == {"engine-1"}
        assert_cast(found, trained)
        assert not other.linear.weight.any()


def test_an_engine_that_comes_late_has_the_dtypes_or_is_refused() -> None:
    trained, found, late, other = Gated(), served(), served(), served(torch.float32)
    clients = [DirectEngine(name, ModuleEngine(m)) for name, m in (("late", late), ("other", other))]
    with fleet(ModuleSource(trained, dtype="engine"), ModuleEngine(found)) as (publisher, _):
        publisher.publish()
        publisher.add_engine(clients[0], sync=True)
        assert_cast(late, trained)
        with pytest.raises(PublishError, match=r"'linear.weight' is float32 in other, bfloat16 in"):
            publisher.add_engine(clients[1], sync=True)
        with pytest.raises(PublishError, match=r"float32 in other, bfloat16 in engine-0"):
            publisher.publish()
        assert_cast(found, trained)
    for client in clients:
        client.close()


def test_an_engine_that_can_not_say_is_refused_by_name() -> None:
    with (
        fleet(ModuleSource(Gated(), dtype="engine"), RecordingEngine()) as (publisher, _),
        pytest.raises(PublishError, match=r"RecordingEngine can't say which dtypes .* give the source a dtype"),
    ):
        publisher.publish()


def test_where_there_is_no_engine_to_ask(tmp_path: Path) -> None:
    source = ModuleSource(Gated(), dtype="engine")
    with (
        publisher_of(source, transport=f"file://{tmp_path}/store") as publisher,
        pytest.raises(
            ValueError, match=r"this publisher has no engine to ask \(a store has none\): give the source a dtype"
        ),
    ):
        publisher.publish()
    with pytest.raises(ValueError, match=r"an export has no engine: give the source a dtype"):
        export(source, tmp_path / "exported")


def test_joined_sources_are_cast_alike() -> None:
    with pytest.raises(ValueError, match=r"only some of the joined sources have dtype='engine'"):
        JoinedSource(TensorSource({}, dtype="engine"), TensorSource({}))
