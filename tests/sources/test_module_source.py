"""ModuleSource: the Source contract, casts, and what it notices."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

from weightcast import LocalEngine, Publisher
from weightcast.engines.module import ModuleEngine
from weightcast.engines.tensors import TensorSink
from weightcast.format.bucket import DTYPE_NAMES, Layout
from weightcast.format.geometry import Region, whole
from weightcast.format.manifest import WeightVersion
from weightcast.format.plan import plan
from weightcast.serving.admission import require_fit
from weightcast.sources.module import ModuleSource
from weightcast.sources.tensors import TensorSource
from weightcast.trainer.packer import Packer, tiling

VERSION = WeightVersion("0" * 32, 1)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    net[2].weight = net[0].weight
    return net


def test_every_tensor_is_one_whole_region_of_live_memory() -> None:
    net = make_net()
    source = ModuleSource(net)
    specs, regions, state = source.specs(), source.regions(), net.state_dict()
    assert [spec.name for spec in specs] == list(regions)
    assert {name for spec in specs for name in spec.names} == set(state)
    for spec in specs:
        ((region, view),) = regions[spec.name]
        assert region == whole(spec.shape)
        assert spec.dtype == DTYPE_NAMES[view.dtype]
        assert view.data_ptr() == state[spec.name].data_ptr()
        assert not view.requires_grad


def test_the_same_objects_come_back_while_nothing_changes() -> None:
    net = make_net()
    source = ModuleSource(net, dtype=torch.float16)
    specs, regions = source.specs(), source.regions()
    with torch.no_grad():
        net[0].weight.add_(1)
    assert source.specs() is specs
    assert source.regions() is regions


@pytest.mark.parametrize("way", ["a new buffer", "its data"])
def test_a_conjugate_view_of_the_former_tensor_is_another_one(way: str) -> None:
    net, engine = nn.Module(), TensorSink()
    net.register_buffer("phases", torch.tensor([1 + 2j, 3 - 1j]))
    with Publisher(ModuleSource(net), engines=[LocalEngine(engine)]) as publisher:
        for expected in ([1 + 2j, 3 - 1j], [1 - 2j, 3 + 1j], [1 + 2j, 3 - 1j]):
            publisher.publish()
            assert engine.held["phases"].tolist() == expected
            if way == "its data":
                net.phases.data = net.phases.data.conj()
            else:
                net.phases = net.phases.conj()


def scaled(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
    state[prefix + "weight"] = 2 * state[prefix + "weight"]


class Scaled(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scaled(self, destination, prefix, None)


@pytest.mark.parametrize("how", ["hook", "partial", "override"])
def test_what_changes_a_state_dict_beside_the_module_is_named(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Else a checkpoint of another form would be published without a word."""
    net = nn.Sequential(Scaled(3, 3) if how == "override" else nn.Linear(3, 3))
    if how != "override":
        net[0]._register_state_dict_hook(scaled if how == "hook" else functools.partial(scaled))
    assert not torch.equal(net.state_dict()["0.weight"], net[0].weight)
    ((_, view),) = ModuleSource(net).regions()["0.weight"]
    assert torch.equal(view, net[0].weight)
    assert ("Scaled._save_to_state_dict of '0'" if how == "override" else "scaled of '0'") in caplog.text
    assert "use TensorSource(model.state_dict())" in caplog.text


def test_hooks_of_torchs_own_are_known(caplog: pytest.LogCaptureFixture) -> None:
    ModuleSource(nn.parallel.DataParallel(nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), make_net())))
    ModuleEngine(nn.Sequential(checkpoint_wrapper(nn.utils.spectral_norm(nn.Linear(3, 3))), make_net()))
    assert caplog.text == ""


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "0.weight"),
        (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), "0.weight"),
        (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), "0.weight"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), "a weight of '0' (SpectralNorm)"),
        (pruned, "a weight of '0' (RandomUnstructured)"),
    ],
    ids=["weight norm", "spectral norm", "orthogonal", "former spectral norm", "pruned"],
)
def test_a_weight_that_is_computed_from_others_is_refused_by_its_name(
    make: Callable[[], nn.Module], named: str
) -> None:
    """Engines would get what it is computed from, under names that only the same computation knows."""
    model = nn.Sequential(nn.Linear(4, 4))
    source = ModuleSource(model)
    model[0] = make()
    for ask in (lambda: ModuleSource(model), source.specs, source.regions):
        with pytest.raises(ValueError, match=f"{re.escape(named)}: computed from other parameters"):
            ask()
    # Where the served model computes it alike, it is sent what it computes it from.
    served = nn.Sequential(make())
    engine, stated = ModuleEngine(served), TensorSource(model.state_dict())
    require_fit(stated.specs(), engine.specs())
    engine.load(model.state_dict().items())
    engine.commit(VERSION)
    inputs = torch.randn(3, 4)
    assert torch.equal(served.eval()(inputs), model.eval()(inputs))


def test_a_hook_that_is_called_before_a_state_dict_is_made_is_named(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].register_state_dict_pre_hook(lambda module, prefix, keep_vars: None)
    ModuleSource(net)
    assert "<lambda> of '0'" in caplog.text


def test_replaced_memory_gives_new_regions_and_the_same_specs() -> None:
    net = make_net()
    source = ModuleSource(net, dtype=torch.float16)
    specs, regions = source.specs(), source.regions()
    net[0].weight.data = torch.full((5, 4), 7.0)
    assert source.regions() is not regions
    assert torch.equal(source.regions()["0.weight"][0][1], torch.full((5, 4), 7.0))
    assert source.specs() is specs


def test_another_dtype_of_the_same_memory_gives_new_specs() -> None:
    net = make_net()
    source = ModuleSource(net)
    assert source.specs()[0].dtype == "float32"
    net[0].weight.requires_grad_(False)
    net[0].weight.data = net[0].weight.data.view(torch.int32)
    assert source.specs()[0].dtype == "int32"
    assert source.regions()["0.weight"][0][1].dtype == torch.int32


def test_another_shape_gives_new_specs() -> None:
    net = make_net()
    source = ModuleSource(net)
    specs = source.specs()
    net[0].weight.data = torch.zeros(6, 4)
    assert source.specs() is not specs
    assert source.specs()[0].shape == (6, 4)
    assert source.regions()["0.weight"][0][0] == Region((0, 0), (6, 4))


def test_only_floating_point_tensors_are_cast() -> None:
    net = make_net()
    net.register_buffer("scaled", torch.zeros(3).to(torch.float8_e4m3fn))
    net.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
    dtypes = {spec.name: spec.dtype for spec in ModuleSource(net, dtype=torch.bfloat16).specs()}
    assert dtypes == {
        "scaled": "float8_e4m3fn",
        "phase": "complex64",
        "0.weight": "bfloat16",
        "1.weight": "bfloat16",
        "1.bias": "bfloat16",
        "1.running_mean": "bfloat16",
        "1.running_var": "bfloat16",
        "1.num_batches_tracked": "int64",
    }


def test_a_cast_source_is_packed_cast() -> None:
    source = ModuleSource(make_net(), dtype=torch.bfloat16)
    layout = Layout(plan(source.specs(), 1 << 16))
    payload = torch.zeros(layout.manifest.buckets[0], dtype=torch.uint8)
    Packer(layout, tiling(source.specs(), source.regions())).fill(0, payload, VERSION)
    packed = {e.record.name: v for e, v in zip(layout.entries[0], layout.views(0, payload), strict=True)}
    for name, ((_, view),) in source.regions().items():
        assert torch.equal(packed[name], view.bfloat16() if view.is_floating_point() else view)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.complex64])
def test_a_cast_to_what_holds_no_plain_weights_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"it must be torch\.bfloat16, torch\.float16, torch\.float32, torch\.float64"):
        ModuleSource(make_net(), dtype=dtype)


def test_names_and_buffers_are_passed_on() -> None:
    source = ModuleSource(make_net(), names=lambda name: f"model.{name}", buffers="none")
    assert [spec.name for spec in source.specs()] == ["model.0.weight", "model.1.weight", "model.1.bias"]
    assert source.specs()[0].aliases == ("model.2.weight",)
    assert list(source.regions()) == [spec.name for spec in source.specs()]


def test_a_meta_module_has_specs_but_no_regions() -> None:
    net = nn.Linear(3, 4, device="meta")
    source = ModuleSource(net)
    assert [spec.shape for spec in source.specs()] == [(4, 3), (4,)]
    for _ in range(2):
        with pytest.raises(ValueError, match="'weight' is on the meta device"):
            source.regions()
    net.to_empty(device="cpu")
    assert not source.regions()["weight"][0][1].is_meta
