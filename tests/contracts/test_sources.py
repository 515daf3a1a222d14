"""The source contract over every source there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from contracts.modules import module_of
from fp8_blocks import CONFIG, quantised

from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Held, Regions, Source
from weightcast.sources.fp8_blocks import Fp8BlockSource
from weightcast.sources.joined import JoinedSource
from weightcast.sources.module import ModuleSource
from weightcast.sources.safetensors import SafetensorsSource
from weightcast.sources.stream import IteratorSource
from weightcast.sources.tensors import TensorSource
from weightcast.testing import Payload, SourceContract, payloads


class TestModuleSource(SourceContract):
    @pytest.fixture
    def source(self, payload: Payload) -> Source:
        return ModuleSource(module_of(payload.build()))


class TestSafetensorsSource(SourceContract):
    # what the format has no dtype for, and an archive of nothing, which its library does not write
    @pytest.fixture(
        params=payloads(
            without_dtypes=("complex32", "complex128", "float4_e2m1fn_x2"),
            without=("empty_stream",),
        ),
        ids=str,
    )
    def payload(self, request: pytest.FixtureRequest) -> Payload:
        payload: Payload = request.param
        return payload

    @pytest.fixture
    def source(self, payload: Payload, tmp_path: Path) -> Iterator[Source]:
        tensors = {name: t.contiguous().clone() for spec, t in payload.build() for name in spec.names}
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
        with SafetensorsSource(tmp_path) as source:
            yield source


class TestJoinedSource(SourceContract):
    @pytest.fixture
    def source(self, payload: Payload) -> Source:
        built = payload.build()
        halves = [
            TensorSource(
                {spec.name: tensor for spec, tensor in part}, aliases={spec.name: spec.aliases for spec, _ in part}
            )
            for part in (built[::2], built[1::2])
        ]
        return JoinedSource(*halves)


QUANTISED = {
    "quantised": {"up_proj.weight": (256, 384), "norm.weight": (384,), "lm_head.weight": (130, 4)},
    "quantised_edges": {f"layers.{i}.weight": (100 * i + 1, 130) for i in range(5)},
}


class TestFp8BlockSource(SourceContract):
    @pytest.fixture(params=QUANTISED)
    def plain(self, request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return {name: torch.randn(shape).bfloat16() for name, shape in QUANTISED[request.param].items()}

    @pytest.fixture
    def payload(self, plain: dict[str, torch.Tensor]) -> Payload:
        names = [name for name, tensor in plain.items() if tensor.ndim > 1 and name != "lm_head.weight"]
        tensors = quantised(plain, *names)
        return Payload("quantised", lambda: [(TensorSource({n: t}).specs()[0], t) for n, t in tensors.items()])

    @pytest.fixture
    def source(self, plain: dict[str, torch.Tensor]) -> Source:
        return Fp8BlockSource(TensorSource(plain), CONFIG)


def test_a_joined_source_follows_its_sources() -> None:
    first, second = TensorSource({"a": torch.zeros(2)}), TensorSource({"b": torch.zeros(3)})
    joined = JoinedSource(first, second)
    specs, regions = joined.specs(), joined.regions()
    second.replace({"b": torch.ones(3)})
    assert joined.specs() is specs
    assert joined.regions() is not regions
    assert torch.equal(joined.regions()["b"][0][1], torch.ones(3))
    second.replace({"c": torch.ones(3)})
    assert [spec.name for spec in joined.specs()] == ["a", "c"]
    second.replace({"a": torch.ones(3)})
    with pytest.raises(ValueError, match="two of the joined sources have 1 names in common, a:"):
        joined.specs()
    with pytest.raises(TypeError, match="IteratorSource streams its tensors"):
        JoinedSource(first, IteratorSource())


class Changing:
    """A source that puts other tensors into the mapping that it has given before."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._specs = TensorSource({"a": tensor}).specs()
        self._regions: dict[str, Sequence[Held]] = {}
        self.put(tensor)

    def put(self, tensor: torch.Tensor) -> None:
        self._regions["a"] = ((whole(tensor.shape), tensor),)

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def test_joined_modules_have_the_same_regions_until_a_tensor_is_replaced() -> None:
    """By another object, a publisher plans its packing anew."""
    model, tower = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    joined = JoinedSource(ModuleSource(model), TensorSource({"tower": tower.weight}))
    first = joined.regions()
    assert joined.regions() is first
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    assert joined.regions() is not first
    ((_, view),) = joined.regions()["weight"]
    assert torch.equal(view, torch.ones(2, 2))


def test_a_joined_source_follows_what_is_put_into_a_mapping_that_it_was_given() -> None:
    changing = Changing(torch.zeros(2))
    joined = JoinedSource(changing, TensorSource({"b": torch.zeros(3)}))
    before = joined.regions()
    assert joined.regions() is before
    changing.put(torch.ones(2))
    assert torch.equal(joined.regions()["a"][0][1], torch.ones(2))
    assert joined.regions() is not before


class InRows:
    """Each tensor in up to nine regions of some rows each."""

    def __init__(self, whole: Source) -> None:
        self._specs = whole.specs()
        self._regions = {name: list(_rows(*held[0])) for name, held in whole.regions().items()}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def _rows(region: Region, tensor: torch.Tensor) -> Iterator[Held]:
    if not region.sizes:
        yield region, tensor
        return
    first = 0
    for rows in tensor.split(max(1, len(tensor) // 8)):
        yield Region((first, *region.offsets[1:]), tuple(rows.shape)), rows
        first += len(rows)


class TestSourceOfSeveralRegions(SourceContract):
    @pytest.fixture
    def source(self, payload: Payload) -> Source:
        return InRows(ModuleSource(module_of(payload.build())))


def test_a_module_source_is_live() -> None:
    """What the trainer's optimizer has done is what is published."""
    model = torch.nn.Linear(2, 2)
    source = ModuleSource(model)
    before = source.regions()
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert source.regions() is before
    assert before["weight"][0][1].tolist() == [[3.0, 3.0]] * 2
