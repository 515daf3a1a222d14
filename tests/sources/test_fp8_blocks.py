"""Weights that are quantised on their way: the reference's bits, or an error by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from core.direct import DirectEngine
from fp8_blocks import CONFIG, quantised, reference
from publishers import publisher_of
from torch import nn
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

from weightcast import IteratorSource, LocalEngine, ModuleEngine, ModuleSource, Region, StoreSource, TensorSource
from weightcast.checkpoint.fp8_blocks import quantise_by_torch
from weightcast.engines.tensors import TensorSink
from weightcast.errors import IncompatibleWeightsError, NotFiniteError, PublishError
from weightcast.seams.source import Gather, Held, Regions, Source
from weightcast.sources.fp8_blocks import Fp8BlockSource
from weightcast.sources.joined import JoinedSource

BF16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Blocks of very different sizes, one of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator) * torch.logspace(-4, 2, shape[-1])
    if len(shape) > 1:
        tensor[:128, ..., :128] = 0
    return tensor.to(dtype)


def held(source: Source) -> Tensors:
    """Every tensor, put together from its regions."""
    found = dict[str, torch.Tensor]()
    regions = source.regions()
    for spec in source.specs():
        whole = found[spec.name] = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for region, view in regions[spec.name]:
            at = tuple(slice(o, o + size) for o, size in zip(region.offsets, region.sizes, strict=True))
            whole.view(torch.uint8 if whole.itemsize == 1 else whole.dtype)[at] = (
                view.view(torch.uint8) if view.itemsize == 1 else view
            )
    return found


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        same = found[name].contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8))
        assert same or (tensor.numel() == 0), name


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 384), (130, 300), (5, 7), (1, 1), (300, 5000), (3000, 130), (0, 5), (5, 0)])
def test_weights_have_the_bits_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensors = {"up_proj.weight": random(*shape, dtype=dtype) if 0 not in shape else torch.empty(shape, dtype=dtype)}
    source = Fp8BlockSource(TensorSource(tensors), CONFIG)
    if 0 in shape:
        assert [spec.shape for spec in source.specs()] == [shape, tuple(-(-size // 128) for size in shape)]
        assert source.regions() == {}
        return
    assert_equal(held(source), quantised(tensors, "up_proj.weight"))


@pytest.mark.parametrize("shape", [(256, 384), (130, 300), (1, 1)])
@pytest.mark.parametrize(
    "device", [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str
)
def test_torch_has_the_bits_of_the_reference(shape: tuple[int, int], device: torch.device) -> None:
    """As it computes on a GPU."""
    values = random(*shape, dtype=torch.float32)
    expected, expected_scale = reference(values)
    weight, scale = torch.empty_like(expected, device=device), torch.empty_like(expected_scale, device=device)
    quantise_by_torch(values.to(device), weight, scale, (128, 128))
    assert_equal({"weight": weight.cpu(), "scale": scale.cpu()}, {"weight": expected, "scale": expected_scale})


@pytest.mark.parametrize("block", [(128, 128), (32, 64), (7, 3), (1, 128), (128, 1)])
def test_blocks_of_any_size(block: tuple[int, int]) -> None:
    weight = random(70, 200)
    found = held(Fp8BlockSource(TensorSource({"a.weight": weight}), CONFIG | {"weight_block_size": block}))
    assert_equal(found, dict(zip(("a.weight", "a.weight_scale_inv"), reference(weight, block), strict=True)))


def test_views_with_strides_and_a_cast() -> None:
    """A transposed weight, some columns of another, and one that the source casts before."""
    wide = random(200, 600, dtype=torch.float32)
    tensors = {"a.weight": wide.t(), "b.weight": wide[:, 40:400], "c.weight": wide[::2]}
    source = Fp8BlockSource(TensorSource(tensors, dtype=BF16), CONFIG)
    assert_equal(held(source), quantised({name: t.to(BF16) for name, t in tensors.items()}, *tensors))


class Split:
    """A source whose views have their last dim split in two, as those of interleaved layouts have."""

    def __init__(self, weight: torch.Tensor, inner: int) -> None:
        self._plain = TensorSource({"a.weight": weight})
        self._regions = {"a.weight": [(Region((0, 0), tuple(weight.shape)), weight.unflatten(1, (-1, inner)))]}

    def specs(self) -> Sequence[Any]:
        return self._plain.specs()

    def regions(self) -> Regions:
        return self._regions


@pytest.mark.parametrize("inner", [2, 16])
def test_views_with_a_last_dim_in_two(inner: int) -> None:
    weight = random(150, 4128)
    assert_equal(held(Fp8BlockSource(Split(weight, inner), CONFIG)), quantised({"a.weight": weight}, "a.weight"))


def test_a_mixture_of_experts() -> None:
    """transformers keeps its experts in one tensor; norms, embeddings, the router and the head stay as they are."""
    config = Qwen3MoeConfig(
        hidden_size=144, intermediate_size=160, moe_intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=72, num_experts=3, num_experts_per_tok=2, vocab_size=50,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(BF16)
    plain = {name: view for name, [(_, view)] in ModuleSource(model).regions().items()}
    names = [name for name in plain if name.endswith("_proj.weight")]
    assert len(names) == 4 + 3 * 3
    assert len(plain) > len(names) + 4
    source = Fp8BlockSource(ModuleSource(model), FineGrainedFP8Config())
    assert_equal(held(source), quantised(plain, *names))
    num_bytes = sum(spec.num_bytes for spec in source.specs() if "_proj." in spec.name)
    assert num_bytes < 0.51 * sum(plain[name].nbytes for name in names)


NAMES = ["lm.layers.1.mlp.gate", "lm.layers.1.mlp.gate_proj", "lm.layers.11.attn.q", "lm.vision.fc1", "lm.mtp.eh_proj"]
PATTERNS = ["lm.layers.1", "lm.layers.*", "mlp.gate", "gate_proj", "fc1", "lm.mtp", "vision", "lm.layers.1.mlp.gate"]


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_ignored_modules_are_those_of_transformers(key: str, pattern: str) -> None:
    tensors = {f"{name}.weight": random(4, 4) for name in [*NAMES, "other"]}
    source = Fp8BlockSource(TensorSource(tensors), CONFIG | {key: [pattern]})
    found = {spec.name.removesuffix(".weight") for spec in source.specs() if spec.dtype == "float8_e4m3fn"}
    convertible = {name for name in [*NAMES, "other"] if should_convert_module(name, [pattern])}
    assert found == convertible - {"lm.layers.1.mlp.gate"}  # a router, which engines never quantise


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors', expected 'fp8'"),
        ({"weight_block_size": None}, "weight_block_size is None, expected two sizes"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static', expected 'dynamic'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0', expected 'float'"),
        ({"modules_to_convert": ["embed_tokens"]}, "modules_to_convert is"),
        ({"modules_to_not_convert": ["("]}, "not a regular expression"),
        ({"quantization_config": CONFIG}, "a model's config: pass its quantization_config"),
    ],
)
def test_a_config_of_another_kind_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fp8BlockSource(TensorSource({"a.weight": random(4, 4)}), CONFIG | changes)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight": random(4, 4, dtype=torch.float64)}, "'a.weight' is float64"),
        ({"a.weight": random(4, 4).to(torch.float8_e4m3fn)}, "'a.weight' is float8_e4m3fn"),
        ({"conv.weight": random(4, 1, 4)}, r"'conv.weight' has the shape \[4, 1, 4\], expected two dims"),
        ({"a.weight": random(4, 4), "a.weight_scale_inv": torch.ones(1, 1)}, "scales already, a.weight_scale_inv"),
        ({"norm.weight": random(4), "lm_head.weight": random(4, 4)}, "no tensor is quantised"),
    ],
)
def test_what_should_be_quantised_and_can_not_be_is_an_error_by_name(tensors: Tensors, words: str) -> None:
    source = Fp8BlockSource(TensorSource(tensors), CONFIG)
    for read in (source.specs, source.regions):
        with pytest.raises(ValueError, match=words):
            read()


def test_tied_weights_have_tied_scales() -> None:
    weight = random(140, 130)
    source = Fp8BlockSource(TensorSource({"a.weight": weight, "b.weight": weight}), CONFIG)
    (of_weight, of_scale) = source.specs()
    assert of_weight.aliases == ("b.weight",)
    assert of_scale.names == ("a.weight_scale_inv", "b.weight_scale_inv")
    assert of_scale.group == of_weight.group == "a.weight"
    tied = TensorSource({"a.weight": weight, "lm_head.weight": weight})
    with pytest.raises(ValueError, match=r"'a\.weight' is quantised, 'lm_head\.weight' is not quantised"):
        Fp8BlockSource(tied, CONFIG).specs()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_an_error_by_name(value: float) -> None:
    """Engines keep what they have, and take the next version."""
    tensors = {"a.weight": random(300, 300), "b.weight": random(300, 300)}
    engine = LocalEngine(TensorSink())
    with publisher_of(Fp8BlockSource(TensorSource(tensors), CONFIG), engines=[engine], check_finite=False) as publisher:
        publisher.publish()
        tensors["b.weight"][299, 1] = value
        with pytest.raises(NotFiniteError, match=r"'b\.weight' holds NaN or infinity") as refused:
            publisher.publish()
        assert len(refused.value.problems) == 1
        assert_equal(dict(engine.engine.held), quantised(tensors | {"b.weight": random(300, 300)}, *tensors))
        tensors["b.weight"].fill_(2)
        publisher.publish()
        assert_equal(dict(engine.engine.held), quantised(tensors, *tensors))
    engine.close()


def test_a_source_that_streams_is_refused() -> None:
    with pytest.raises(TypeError, match="IteratorSource streams its tensors"):
        Fp8BlockSource(IteratorSource(), CONFIG)
    with pytest.raises(TypeError, match="quantization_config is a NoneType"):
        Fp8BlockSource(TensorSource({"a.weight": random(4, 4)}), None)


class Shards:
    """A source that has these rows of a weight, one region for each."""

    def __init__(self, weight: torch.Tensor, *rows: tuple[int, int]) -> None:
        self._plain = TensorSource({"a.weight": weight})
        regions = [(Region((first, 0), (end - first, weight.shape[1])), weight[first:end]) for first, end in rows]
        self._regions: dict[str, Sequence[Held]] = {"a.weight": regions}

    def specs(self) -> Sequence[Any]:
        return self._plain.specs()

    def regions(self) -> Regions:
        return self._regions


def test_a_rank_quantises_its_own_blocks() -> None:
    weight = random(300, 200)
    for rows in ([(0, 128), (128, 300)], [(0, 256), (256, 300)], [(0, 300)], [(0, 0), (0, 300)]):
        assert_equal(held(Fp8BlockSource(Shards(weight, *rows), CONFIG)), quantised({"a.weight": weight}, "a.weight"))
    part = Fp8BlockSource(Shards(weight, (128, 256)), CONFIG).regions()
    assert [region for region, _ in part["a.weight"]] == [Region((128, 0), (128, 200))]
    assert [region for region, _ in part["a.weight_scale_inv"]] == [Region((1, 0), (1, 2))]


@pytest.mark.parametrize("rows", [(0, 150), (150, 300), (64, 128)])
def test_a_shard_that_cuts_a_block_is_refused_by_name(rows: tuple[int, int]) -> None:
    words = re.escape(f"'a.weight' of [300, 200]: this rank has {rows[0]} to {rows[1]} of dim 0")
    with pytest.raises(ValueError, match=f"shards cut blocks.*{words}"):
        Fp8BlockSource(Shards(random(300, 200), rows), CONFIG).regions()


def test_memory_is_made_once() -> None:
    """Also when the module's tensors are replaced; other shapes need other memory."""
    model = nn.Sequential(nn.Linear(200, 300), nn.LayerNorm(300))
    source = Fp8BlockSource(ModuleSource(model), CONFIG)

    def pointers() -> list[int]:
        return [view.data_ptr() for name in ("0.weight", "0.weight_scale_inv") for _, view in source.regions()[name]]

    specs, regions, before = source.specs(), source.regions(), pointers()
    with torch.no_grad():
        model[0].weight.mul_(3)
    assert source.regions() is regions
    assert pointers() == before
    assert_equal(held(source), quantised(dict(model.state_dict()), "0.weight"))
    model[0].weight.data = random(300, 200, dtype=torch.float32)
    assert source.regions() is not regions
    assert source.specs() is specs
    assert pointers() == before
    assert_equal(held(source), quantised(dict(model.state_dict()), "0.weight"))
    model[0] = nn.Linear(100, 300)
    assert_equal(held(source), quantised(dict(model.state_dict()), "0.weight"))


class Completed:
    """A source whose values are there only after `complete`."""

    num_gathers = 1

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = torch.full_like(tensor, float("nan"))
        self._complete = tensor
        self._source = TensorSource({"a.weight": self.tensor})

    def specs(self) -> Sequence[Any]:
        return self._source.specs()

    def regions(self) -> Regions:
        return self._source.regions()

    def complete(self, gather: Gather) -> None:
        self.tensor.copy_(self._complete)


def test_what_is_completed_is_quantised_after_that() -> None:
    weight = random(130, 130)
    source = Fp8BlockSource(Completed(weight), CONFIG)
    assert source.num_gathers == 1
    source.regions()
    source.complete(lambda parts: ())
    found = {name: view for name, [(_, view)] in source.regions().items()}
    assert_equal(found, quantised({"a.weight": weight}, "a.weight"))


class Quantised(nn.Module):
    """An engine's module of the tensors that come."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            parent, _, leaf = name.rpartition(".")
            if parent not in self._modules:
                self.add_module(parent, nn.Module())
            parameter = nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            self.get_submodule(parent).register_parameter(leaf, parameter)


def step(tensors: Tensors, seed: int) -> None:
    """An optimizer's step of some elements, which leaves the largest of a block where it is."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.mul_(1 - 0.1 * (torch.rand(tensor.shape, generator=generator) < 0.02))


@pytest.fixture
def tensors() -> Tensors:
    shapes = {"up": (700, 300), "down": (300, 700), "lm_head": (50, 30)}
    return {f"{name}.weight": random(*shape) for name, shape in shapes.items()} | {"norm.weight": random(300)}


@pytest.mark.parametrize("transport", ["memory://", "ipc://", "gloo://127.0.0.1:0"])
@pytest.mark.parametrize("options", [{"delta": "always"}, {"undo": True}, {"install": "streaming"}], ids=str)
def test_it_is_published_as_any_source(tensors: Tensors, transport: str, options: dict[str, Any]) -> None:
    """Verified in the engine's memory, as a delta, with undo or streaming."""
    expected = quantised(tensors, "up.weight", "down.weight")
    served = Quantised(expected)
    engine = DirectEngine("engine", ModuleEngine(served))
    source = Fp8BlockSource(TensorSource(tensors), CONFIG)
    settings: dict[str, Any] = {"transport": transport, "bucket_size_bytes": 65536, "verify": "installed", **options}
    with publisher_of(source, engines=[engine], **settings) as publisher:
        for seed in range(3):
            step(tensors, seed)
            report = publisher.publish()
            assert report.ok
            assert_equal(dict(served.state_dict()), quantised(tensors, "up.weight", "down.weight"))
            (result,) = report.engines.values()
            assert (result.unproven, result.num_compared) == ({}, len(expected))
            assert report.num_bytes == sum(tensor.nbytes for tensor in expected.values())
        if "delta" in options:
            assert report.delta is not None
            assert report.delta.base == report.version - 1
            assert report.delta.num_bytes < report.num_bytes / 4
    engine.close()


def test_a_store_keeps_quantised_versions(tensors: Tensors, tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with publisher_of(Fp8BlockSource(TensorSource(tensors), CONFIG), engines=[], transport=url) as publisher:
        publisher.publish()
    assert_equal(held(StoreSource(url)), quantised(tensors, "up.weight", "down.weight"))


def test_an_engine_of_plain_weights_refuses_quantised_ones(tensors: Tensors) -> None:
    engine = LocalEngine(ModuleEngine(Quantised(tensors)))
    source = Fp8BlockSource(TensorSource(tensors), CONFIG)
    with publisher_of(source, engines=[engine]) as publisher, pytest.raises(PublishError) as caught:
        publisher.publish()
    (error,) = caught.value.failures.values()
    assert isinstance(error, IncompatibleWeightsError)
    assert any("up.weight_scale_inv" in problem for problem in error.problems)
    engine.close()


def test_it_can_be_joined(tensors: Tensors) -> None:
    rest = {"other.weight": random(3, 3)}
    joined = JoinedSource(Fp8BlockSource(TensorSource(tensors), CONFIG), TensorSource(rest))
    assert_equal(held(joined), quantised(tensors, "up.weight", "down.weight") | rest)
