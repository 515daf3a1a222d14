"""ModuleEngine: in place and whole or refused, in pieces, undo, reading; over the kinds of tensors there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from weightcast import LocalEngine, ModuleSource, Publisher, PublishOptions
from weightcast.engines.module import ModuleEngine
from weightcast.errors import IncompatibleWeightsError, IncompleteUpdateError, InstallError
from weightcast.format.bucket import DTYPE_NAMES, TORCH_DTYPES
from weightcast.format.geometry import Region
from weightcast.format.manifest import WeightVersion
from weightcast.format.plan import plan
from weightcast.seams.engine import Casting, Engine, ExposesTensors, Undoable
from weightcast.seams.install_map import Mapped
from weightcast.serving.admission import admit, replacement_of
from weightcast.serving.install import BlockCopies

VERSION = WeightVersion("0" * 32, 7)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit patterns: NaN payloads and -0.0 among them; a bool is 0 or 1."""
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def buffers(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def make_net() -> nn.Module:
    net = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    net[2].weight = net[0].weight
    return net


Parts: TypeAlias = Sequence[tuple[str, Region | None, torch.Tensor]]


def copy_parts(engine: ModuleEngine, *calls: Parts, between: Callable[[], None] = lambda: None) -> None:
    """As an install does: copies into the engine's own memory, of whole tensors or of pieces."""
    assert engine.install_map.bind()
    engine.begin({name for parts in calls for name, _, _ in parts})
    for number, parts in enumerate(calls):
        if number:
            between()
        blocks, sources = [(name, region) for name, region, _ in parts], [tensor for _, _, tensor in parts]
        BlockCopies(engine.install_map, blocks, sources).run()


def update_of(engine: ModuleEngine, seed: int = 1) -> dict[str, torch.Tensor]:
    return {spec.name: random_bits(spec.shape, TORCH_DTYPES[spec.dtype], seed) for spec in engine.specs()}


def test_it_has_every_ability() -> None:
    engine = ModuleEngine(make_net())
    for ability in (Engine, Mapped, Undoable, ExposesTensors, Casting):
        assert isinstance(engine, ability)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (2, 3, 5)], ids=str)
def test_every_dtype_is_copied_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module = buffers(value=random_bits(shape, dtype, seed=1), before=torch.ones(1), after=torch.ones(1))
    engine = ModuleEngine(module)
    update = update_of(engine, seed=2)
    address = module.value.data_ptr()

    engine.load(update.items())
    engine.commit(VERSION)

    assert bits(module.value) == bits(update["value"])
    assert module.value.data_ptr() == address
    assert engine.version == VERSION


def test_non_contiguous_targets_and_sources() -> None:
    grid = torch.zeros(6, 8)
    engine = ModuleEngine(buffers(columns=grid[:, 2:5], turned=grid[:, 5:].t()))
    columns, turned = torch.rand(3, 6).t(), torch.rand(6, 6)[::2]
    engine.load([("columns", columns), ("turned", turned)])
    engine.commit(VERSION)
    assert torch.equal(grid, torch.cat([torch.zeros(6, 2), columns, turned.t()], dim=1))


def test_nothing_is_loaded_by_nothing() -> None:
    engine = ModuleEngine(make_net())
    engine.load([])
    engine.load(iter(()))
    with pytest.raises(IncompleteUpdateError):
        engine.commit(VERSION)


def test_a_tied_tensor_comes_once_under_any_of_its_names() -> None:
    net = make_net()
    engine = ModuleEngine(net, buffers="none")
    update = update_of(engine)
    tied = update.pop("0.weight")
    engine.load([*update.items(), ("2.weight", tied)])
    engine.commit(VERSION)
    assert bits(net[0].weight) == bits(tied)

    both = torch.rand(5, 4)
    engine.load([("0.weight", both), ("2.weight", both.view(5, 4))])
    assert torch.equal(net[0].weight, both)


def test_different_tensors_for_tied_names_are_refused() -> None:
    net = make_net()
    engine = ModuleEngine(net)
    before = bits(net[0].weight)
    with pytest.raises(IncompatibleWeightsError, match=r"'0\.weight' and '2\.weight' are one tensor"):
        engine.load([("0.weight", torch.ones(5, 4)), ("2.weight", torch.zeros(5, 4))])
    assert bits(net[0].weight) == before


WRONG = {
    "unknown": ("absent", torch.ones(2), "unknown tensor 'absent'"),
    "misshapen": ("1.bias", torch.ones(4, 1), r"'1\.bias' has the shape \[4, 1\], the module has \[4\]"),
    "broadcastable": ("1.bias", torch.ones(1), r"has the shape \[1\]"),
    "other-dtype": ("1.bias", torch.ones(4).bfloat16(), r"is bfloat16, the module has float32"),
}


@pytest.mark.parametrize(("name", "tensor", "message"), WRONG.values(), ids=WRONG)
def test_one_wrong_tensor_refuses_the_whole_call(name: str, tensor: torch.Tensor, message: str) -> None:
    net = make_net()
    engine = ModuleEngine(net)
    before = {key: bits(value) for key, value in net.state_dict().items()}
    with pytest.raises(IncompatibleWeightsError, match=message):
        engine.load([("0.weight", torch.ones(5, 4)), (name, tensor)])
    assert {key: bits(value) for key, value in net.state_dict().items()} == before


def test_every_offender_is_named() -> None:
    engine = ModuleEngine(make_net())
    with pytest.raises(IncompatibleWeightsError) as unknown:
        engine.load([("a", torch.ones(1)), ("0.weight", torch.ones(5, 4)), ("b", torch.ones(1))])
    assert unknown.value.problems == ("unknown tensor 'a'", "unknown tensor 'b'")
    with pytest.raises(IncompatibleWeightsError) as shapes:
        engine.load([("0.weight", torch.ones(1)), ("1.bias", torch.ones(1))])
    assert len(shapes.value.problems) == 2


def test_casts_only_when_asked_and_only_plain_floats() -> None:
    net = buffers(weight=torch.zeros(3), scale=torch.zeros(3).to(torch.float8_e4m3fn), count=torch.zeros(3).long())
    wide = torch.tensor([1.5, -0.0, 3.0], dtype=torch.float64)
    assert not ModuleEngine(net).can_cast("float64", "float32")
    engine = ModuleEngine(net, cast=True)
    assert engine.can_cast("float64", "float32")
    engine.load([("weight", wide)])
    assert torch.equal(net.weight, wide.float())
    copy_parts(engine, [("weight", Region((1,), (1,)), torch.tensor([9.0]).bfloat16())])
    assert net.weight[1] == 9
    for name in ("scale", "count"):
        with pytest.raises(IncompatibleWeightsError, match="cast=True"):
            engine.load([(name, wide)])


def test_commit_names_what_is_missing_and_may_be_completed() -> None:
    engine = ModuleEngine(make_net())
    update = update_of(engine)
    mean, bias = update.pop("1.running_mean"), update.pop("1.bias")
    engine.load(update.items())
    with pytest.raises(IncompleteUpdateError, match=r"2 of 6 tensors were not loaded: '1\.bias', '1\.running_mean'"):
        engine.commit(VERSION)
    assert engine.version is None
    engine.load([("1.bias", bias), ("1.running_mean", mean)])
    engine.commit(VERSION)
    assert engine.version == VERSION
    with pytest.raises(IncompleteUpdateError, match="6 of 6"):
        engine.commit(VERSION)


def test_discard_forgets_what_was_loaded() -> None:
    engine = ModuleEngine(make_net())
    update = update_of(engine)
    engine.load(update.items())
    copy_parts(engine, [(name, None, tensor) for name, tensor in update.items()])
    engine.discard()
    with pytest.raises(IncompleteUpdateError, match="6 of 6"):
        engine.commit(VERSION)


@hypothesis.given(st.data())
def test_any_tiling_by_regions_is_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    whole = random_bits(shape, torch.bfloat16)
    module = buffers(value=torch.zeros_like(whole))
    engine = ModuleEngine(module)
    regions = data.draw(st.permutations(cut(data, Region((0,) * len(shape), shape))))
    calls = []
    for region in regions:
        part = whole[tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))]
        calls.append([("value", region, part)])
    copy_parts(engine, *calls)
    engine.commit(VERSION)
    assert bits(module.value) == bits(whole)


def cut(data: st.DataObject, region: Region) -> list[Region]:
    dims = [d for d, size in enumerate(region.sizes) if size > 1]
    if not dims or data.draw(st.booleans()):
        return [region]
    dim = data.draw(st.sampled_from(dims))
    at = data.draw(st.integers(1, region.sizes[dim] - 1))
    offsets, sizes = list(region.offsets), list(region.sizes)
    rest = sizes[dim] - at
    sizes[dim] = at
    low = Region(tuple(offsets), tuple(sizes))
    offsets[dim], sizes[dim] = offsets[dim] + at, rest
    return cut(data, low) + cut(data, Region(tuple(offsets), tuple(sizes)))


def test_memory_that_moves_between_the_offer_and_the_install_is_written_where_it_is() -> None:
    """As a framework moves it that frees a storage and fills it again, behind the same tensor."""
    module, part = buffers(value=torch.zeros(4)), torch.ones(4)
    engine = ModuleEngine(module)
    copies = BlockCopies(engine.install_map, [("value", None)], [part])
    for number in range(2):
        engine.specs()
        if number:
            former = module.value.data_ptr()
            module.value.untyped_storage().resize_(1 << 20)
            assert module.value.data_ptr() != former
        part.fill_(number + 1)
        assert engine.install_map.bind()
        engine.begin(["value"])
        copies.run()
        engine.commit(VERSION)
        assert torch.equal(module.value, part)


@pytest.mark.parametrize("num_elements", [4, 1 << 20])
def test_memory_that_was_freed_since_the_offer_fails_the_install(num_elements: int) -> None:
    module = buffers(value=torch.zeros(num_elements))
    engine = ModuleEngine(module)
    copies = BlockCopies(engine.install_map, [("value", None)], [torch.ones(num_elements)])
    engine.specs()
    module.value.untyped_storage().resize_(0)
    with pytest.raises(InstallError, match="resized or freed"):
        copies.run()


def test_an_undo_copy_restores_every_bit() -> None:
    net = make_net()
    engine = ModuleEngine(net)
    before = {key: bits(value) for key, value in net.state_dict().items()}
    restore = engine.snapshot()
    engine.load(update_of(engine).items())
    assert {key: bits(value) for key, value in net.state_dict().items()} != before
    restore()
    assert {key: bits(value) for key, value in net.state_dict().items()} == before
    with pytest.raises(IncompleteUpdateError):
        engine.commit(VERSION)


def test_an_undo_copy_that_no_longer_fits_is_refused() -> None:
    net = make_net()
    engine = ModuleEngine(net)
    restore = engine.snapshot()
    net[1] = nn.BatchNorm1d(3)
    with pytest.raises(InstallError, match="no longer fits") as error:
        restore()
    assert error.value.torn


def test_tensors_are_the_live_ones_by_name() -> None:
    net = make_net()
    engine = ModuleEngine(net, names=lambda name: f"model.{name}")
    found = dict(engine.tensors())
    assert list(found) == [spec.name for spec in engine.specs()]
    assert found["model.0.weight"].data_ptr() == net[0].weight.data_ptr()
    assert all(DTYPE_NAMES[found[s.name].dtype] == s.dtype for s in engine.specs())


def test_specs_are_the_same_object_until_something_changes() -> None:
    net = make_net()
    engine = ModuleEngine(net)
    specs = engine.specs()
    engine.load(update_of(engine).items())
    engine.commit(VERSION)
    assert engine.specs() is specs
    net[1] = nn.BatchNorm1d(3)
    assert engine.specs() != specs


def test_replaced_memory_is_found_between_updates() -> None:
    net = make_net()
    engine = ModuleEngine(net)
    net.load_state_dict({name: tensor.clone() for name, tensor in net.state_dict().items()}, assign=True)
    update = update_of(engine)
    engine.load(update.items())
    engine.commit(VERSION)
    assert bits(net[1].bias) == bits(update["1.bias"])


def test_memory_that_is_replaced_during_an_update_is_not_committed() -> None:
    net = make_net()
    engine = ModuleEngine(net)
    update = update_of(engine)
    engine.load(update.items())
    net[1].bias = nn.Parameter(net[1].bias.data.clone())
    engine.specs()
    with pytest.raises(InstallError, match="replaced during the update") as error:
        engine.commit(VERSION)
    assert error.value.torn
    engine.discard()
    engine.load(update.items())
    engine.commit(VERSION)
    assert bits(net[1].bias) == bits(update["1.bias"])


def test_a_graph_over_the_old_weights_cannot_be_used_for_gradients() -> None:
    net = nn.Linear(3, 2)
    engine = ModuleEngine(net)
    loss = net(torch.ones(1, 3, requires_grad=True)).sum()
    engine.load(update_of(engine).items())
    engine.commit(VERSION)
    assert net.weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("is_moved", [False, True])
def test_parameters_made_in_inference_mode_are_written(is_moved: bool) -> None:
    with torch.inference_mode():
        net = nn.Linear(3, 2)
    if is_moved:
        net.to(torch.bfloat16)
    engine = ModuleEngine(net)
    update = update_of(engine)
    restore = engine.snapshot()
    before = bits(net.weight.clone())
    copy_parts(engine, [("weight", None, update["weight"])])
    engine.load([("bias", update["bias"])])
    engine.commit(VERSION)
    assert bits(net.weight.clone()) == bits(update["weight"])
    restore()
    assert bits(net.weight.clone()) == before


def test_a_meta_module_is_refused() -> None:
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        ModuleEngine(nn.Linear(2, 2, device="meta"))


def test_a_fused_model_takes_one_tensor_per_expert() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    trainer, served = (transformers.Qwen3MoeForCausalLM(config).eval() for _ in range(2))
    tokens = torch.arange(6).view(1, 6)
    engine = ModuleEngine(served)
    update = list(ModuleEngine(trainer).tensors())
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in dict(update)
    with torch.no_grad():
        assert not torch.equal(served(tokens).logits, trainer(tokens).logits)
        engine.load(update[:20])
        engine.load(update[20:])
        engine.commit(VERSION)
        assert torch.equal(served(tokens).logits, trainer(tokens).logits)


@pytest.mark.gpu
def test_a_module_on_a_gpu_holds_what_was_committed() -> None:
    net = nn.Linear(512, 512).cuda()
    engine = ModuleEngine(net)
    update = update_of(engine)
    engine.load(update.items())
    engine.commit(VERSION)
    assert all(bits(tensor.cpu()) == bits(update[name]) for name, tensor in engine.tensors())
    restore = engine.snapshot()
    on_device = {name: tensor.cuda() for name, tensor in update_of(engine, seed=2).items()}
    engine.load(on_device.items())
    assert all(bits(tensor.cpu()) == bits(on_device[name].cpu()) for name, tensor in engine.tensors())
    restore()
    assert all(bits(tensor.cpu()) == bits(update[name]) for name, tensor in engine.tensors())


WHOLE = torch.zeros(12, 4)


@pytest.mark.parametrize(
    "tensors",
    [
        {"qkv": WHOLE, "q": WHOLE[:4]},
        {"a": WHOLE[:, :3], "b": WHOLE[:, 2:]},
        {"a": WHOLE, "b": WHOLE.t()},
        {"a": WHOLE, "flat": WHOLE.view(-1)},
        {"a": WHOLE, "bits": WHOLE.view(torch.int32)},
        {"a": torch.zeros(4).expand(6, 4)},
        {"a": torch.zeros(8).unfold(0, 4, 1)},
    ],
    ids=["part", "columns", "transposed", "flat", "other dtype", "expanded", "unfolded"],
)
def test_memory_that_is_shared_in_part_is_refused_before_anything_is_written(tensors: dict[str, torch.Tensor]) -> None:
    """Of two tensors the one that came last would stay, and the other be of a mixture."""
    with pytest.raises(ValueError, match=r"share memory without being one tensor|has several elements at one address"):
        ModuleEngine(buffers(**tensors))


@pytest.mark.parametrize("tensor", [torch.zeros(4).expand(6, 4), torch.empty(4, device="meta")])
def test_a_tensor_that_can_not_be_written_to_is_refused_as_long_as_it_is_there(tensor: torch.Tensor) -> None:
    module = buffers(a=torch.zeros(4))
    engine = ModuleEngine(module)
    module.a = tensor
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has several elements at one address|meta"):
            engine.specs()
    module.a = torch.zeros(4)
    engine.load([("a", torch.ones(4))])
    engine.commit(VERSION)
    assert module.a.eq(1).all()


def doubled(module: nn.Module, *more: object) -> None:
    module.double = 2 * module.weight.detach()


@pytest.mark.parametrize("how", ["pre", "post"])
def test_what_else_happens_when_a_state_dict_is_loaded_is_named(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Such as tensors that are derived from others: they would be those of the former version without a word."""
    net = nn.Sequential(nn.Linear(3, 3))
    getattr(net[0], f"register_load_state_dict_{how}_hook")(doubled)
    ModuleEngine(net)
    assert "doubled of '0'" in caplog.text


def test_tensors_may_lie_among_each_other() -> None:
    memory = torch.zeros(12, 4)
    names = {"left": memory[:8, :2], "right": memory[:8, 2:], "below": memory[8:], "again": memory[8:]}
    module = buffers(**names, step=torch.zeros(6, 5)[:, ::2])
    engine = ModuleEngine(module)
    update = update_of(engine)
    engine.load(update.items())
    engine.commit(VERSION)
    for name, tensor in update.items():
        assert bits(module.get_buffer(name)) == bits(tensor)


# --- tensors that are replaced while an update is under way ---


def other_data(net: nn.Module) -> None:
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = tensor.data.clone()


def there_and_back(net: nn.Module) -> None:
    net.half().float()


def other_parameters(net: nn.Module) -> None:
    net[2].weight = net[0].weight = nn.Parameter(net[0].weight.detach().clone())


def other_module(net: nn.Module) -> None:
    net[1] = nn.BatchNorm1d(4)


def other_storage(net: nn.Module) -> None:
    """As offloading does: freed, and brought back elsewhere."""
    storage, values = net[0].weight.untyped_storage(), net[0].weight.detach().clone()
    storage.resize_(0)
    storage.resize_(1 << 20)
    net[0].weight.data.copy_(values)


REPLACED = [other_data, there_and_back, other_parameters, other_module, other_storage]


@pytest.mark.parametrize("replace", REPLACED)
def test_tensors_that_are_replaced_between_the_offer_and_the_install_are_those_that_are_written(
    replace: Callable[[nn.Module], None],
) -> None:
    net = make_net()
    engine = ModuleEngine(net)
    for seed in (1, 2):
        update = update_of(engine, seed)
        replace(net)
        copy_parts(engine, [(name, None, tensor) for name, tensor in update.items()])
        engine.commit(VERSION)
        assert all(bits(net.state_dict()[name].clone()) == bits(tensor) for name, tensor in update.items())


@pytest.mark.parametrize("by", ["parts", "load"])
@pytest.mark.parametrize("replace", REPLACED)
def test_tensors_that_are_replaced_between_two_buckets_end_the_update(
    replace: Callable[[nn.Module], None], by: str
) -> None:
    """What came first is not in the module any more, or was carried over by whoever replaced them: nobody can say."""
    net = make_net()
    engine = ModuleEngine(net)
    update = update_of(engine)
    first, *others = update.items()

    def load_all() -> None:
        if by == "load":
            engine.load([first])
            replace(net)
            engine.load(others)
        else:
            former, rest = [(first[0], None, first[1])], [(name, None, tensor) for name, tensor in others]
            copy_parts(engine, former, rest, between=lambda: replace(net))
            engine.commit(VERSION)

    with pytest.raises(InstallError, match="replaced during the update") as error:
        load_all()
    assert error.value.torn
    engine.discard()
    engine.specs()
    engine.load(update.items())
    engine.commit(VERSION)
    assert all(bits(net.state_dict()[name]) == bits(tensor) for name, tensor in update.items())


@pytest.mark.parametrize("replace", REPLACED)
def test_tensors_that_are_replaced_after_the_last_bucket_are_not_committed(
    replace: Callable[[nn.Module], None],
) -> None:
    net = make_net()
    engine = ModuleEngine(net)
    update = update_of(engine)
    copy_parts(engine, [(name, None, tensor) for name, tensor in update.items()])
    replace(net)
    with pytest.raises(InstallError, match="replaced during the update") as error:
        engine.commit(VERSION)
    assert error.value.torn
    assert engine.version is None


def tie(net: nn.Module) -> None:
    net[1].bias = net[1].weight


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("change", [nn.Module.half, tie])
def test_a_module_of_another_form_is_not_copied_to(change: Callable[[nn.Module], object], cast: bool) -> None:
    """Its copies were made for the form that was offered for: they would cast in silence, or write one tensor twice."""
    net = make_net()
    engine = ModuleEngine(net, cast=cast)
    install_map, manifest = engine.install_map, plan(engine.specs(), 1 << 20)
    install = admit(manifest, manifest.digest(), engine)
    assert install.copied == {spec.name for spec in engine.specs()}
    change(net)
    assert not install.is_bound()
    if cast and change is nn.Module.half:
        assert replacement_of(install).install_map is engine.install_map is not install_map
    else:
        with pytest.raises(IncompatibleWeightsError, match="not fit this engine"):
            replacement_of(install)
    assert install_map.is_stale
    assert engine.install_map.bind()


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_a_model_of_another_form_refuses_a_manifest_that_it_has_installed_before(install: str) -> None:
    """The offer of a known manifest looks only at the module's members; the install looks before it writes."""
    served, trained = nn.Linear(64, 64), nn.Linear(64, 64)
    client = LocalEngine(ModuleEngine(served))
    options = PublishOptions(install=install, on_failure="report")  # type: ignore[arg-type]
    with Publisher(ModuleSource(trained), transport="memory://", engines=[client], options=options) as publisher:
        assert publisher.publish().ok
        former = {name: value.half() for name, value in served.state_dict().items()}
        served.half()
        with torch.no_grad():
            trained.weight.fill_(2.0)
        report = publisher.publish()
        assert not report.ok
        assert "'weight' is float32, the engine has float16" in str(report)
        assert not client.gate.torn
        assert all(torch.equal(value, former[name]) for name, value in served.state_dict().items())
        served.float()
        assert publisher.publish().ok
        assert torch.equal(served.weight, trained.weight)
        served.weight = nn.Parameter(torch.zeros(64, 32))
        report = publisher.publish()
        assert not report.ok
        assert not client.gate.torn
        assert "has the shape [64, 64], the engine has [64, 32]" in str(report)


def test_a_model_whose_data_has_another_dtype_takes_that_dtype() -> None:
    """By then no member was replaced, so that `specs` alone does not see it."""
    served, trained = nn.Linear(64, 64), nn.Linear(64, 64)
    engine = ModuleEngine(served)
    with Publisher(ModuleSource(trained), transport="memory://", engines=[LocalEngine(engine)]) as publisher:
        assert publisher.publish().ok
        served.half()
        trained.half()
        assert publisher.publish().ok
        assert torch.equal(served.weight, trained.weight)
    served.double()
    worker = LocalEngine(engine)
    with Publisher(ModuleSource(trained, dtype="engine"), transport="memory://", engines=[worker]) as publisher:
        assert publisher.publish().ok
    assert served.weight.dtype == torch.float64
    assert torch.equal(served.weight, trained.weight.double())


@pytest.mark.parametrize("num_bytes", [0, 100])
@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_a_storage_that_has_shrunk_is_found_before_anything_is_written(install: str, num_bytes: int) -> None:
    served, trained = nn.Linear(64, 64), nn.Linear(64, 64)
    client = LocalEngine(ModuleEngine(served))
    options = PublishOptions(install=install, on_failure="report")  # type: ignore[arg-type]
    with Publisher(ModuleSource(trained), transport="memory://", engines=[client], options=options) as publisher:
        assert publisher.publish().ok
        former = served.bias.clone()
        served.weight.untyped_storage().resize_(num_bytes)
        with torch.no_grad():
            trained.bias.fill_(2.0)
        report = publisher.publish()
        assert not report.ok
        assert "'weight' is a Parameter of layout torch.strided, not one block of memory" in str(report)
        assert not client.gate.torn
        assert torch.equal(served.bias, former)
        served.weight.untyped_storage().resize_(served.weight.nbytes)
        assert publisher.publish().ok
        assert torch.equal(served.weight, trained.weight)


def test_an_engine_that_refuses_is_asked_again_of_a_known_manifest() -> None:
    class Refusing(ModuleEngine):
        refuses = False

        def specs(self) -> Any:
            if self.refuses:
                raise ValueError("this engine was told to refuse")
            return super().specs()

    served, trained = nn.Linear(64, 64), nn.Linear(64, 64)
    engine = Refusing(served)
    options = PublishOptions(on_failure="report")
    client = LocalEngine(engine)
    with Publisher(ModuleSource(trained), transport="memory://", engines=[client], options=options) as publisher:
        assert publisher.publish().ok
        engine.refuses = True
        report = publisher.publish()
        assert not report.ok
        assert "this engine was told to refuse" in str(report)
        engine.refuses = False
        assert publisher.publish().ok


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("replace", [other_data, nn.Module.half])
def test_no_publish_is_ok_of_which_the_module_serves_nothing(
    replace: Callable[[nn.Module], object], install: str
) -> None:
    served, trained = nn.Linear(64, 64), nn.Linear(64, 64)
    is_due = [False]

    def replace_once(done: int, total: int) -> None:
        if is_due and is_due.pop():
            replace(served)

    client = LocalEngine(ModuleEngine(served, cast=True))
    options = PublishOptions(install=install, bucket_size_bytes=4096, on_failure="report")  # type: ignore[arg-type]
    with Publisher(ModuleSource(trained), transport="memory://", engines=[client], options=options) as publisher:
        for value, is_replaced in ((1.0, False), (2.0, True), (3.0, False)):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.fill_(value)
            is_due[:] = [is_replaced]
            report = publisher.publish(on_progress=replace_once)
            assert report.ok or is_replaced
            assert report.ok or client.gate.torn
            assert not report.ok or all(parameter.eq(value).all() for parameter in served.parameters())
