"""A module's checkpoint form: equal to what `save_pretrained` writes, views only, and noticed when it changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightcast.checkpoint import conversion
from weightcast.checkpoint.live import LiveCheckpoint, checkpoint_tensors
from weightcast.errors import ManifestError
from weightcast.format.geometry import whole

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, object]] = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3-untied": {"head_dim": 8, "tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8},
    "gpt2": {},
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**MOE, "head_dim": 8, "decoder_sparse_step": 2},
    "qwen3_moe-tied": {**MOE, "head_dim": 8, "tie_word_embeddings": True},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def make_model(name: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **{**SMALL, **MODELS[name]})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")

    specs, views = checkpoint_tensors(model)

    assert {spec.name: spec.shape for spec in specs} == {name: tuple(t.shape) for name, t in saved.items()}
    assert {spec.name: spec.dtype for spec in specs} == {n: str(t.dtype).partition(".")[2] for n, t in saved.items()}
    for key, tensor in saved.items():
        assert torch.equal(views[key], tensor), key


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "llama"])
def test_views_are_the_live_memory(name: str) -> None:
    model = make_model(name)
    _, views = checkpoint_tensors(model)
    with torch.no_grad():
        for number, view in enumerate(views.values()):
            view.fill_(number + 1)
    assert all((parameter != 0).all() for parameter in model.parameters())
    assert sum(view.numel() for view in views.values()) == sum(p.numel() for p in model.parameters())


def test_a_model_loaded_from_its_checkpoint_has_the_same_form(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert checkpoint_tensors(loaded)[0] == checkpoint_tensors(model)[0]


def test_tied_parameters_are_one_record_under_the_saved_name() -> None:
    specs, _ = checkpoint_tensors(make_model("qwen3_moe-tied"))
    aliases = {spec.name: spec.aliases for spec in specs if spec.aliases}
    assert aliases == {"model.embed_tokens.weight": ("lm_head.weight",)}


def test_the_form_of_a_meta_model_is_that_of_the_real_one() -> None:
    with torch.device("meta"):
        specs, views = checkpoint_tensors(make_model("qwen3_moe-tied"))
    assert specs == checkpoint_tensors(make_model("qwen3_moe-tied"))[0]
    assert all(view.is_meta for view in views.values())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 3, bias=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def names_of(module: nn.Module, **options: object) -> list[str]:
    return [spec.name for spec in checkpoint_tensors(module, **options)[0]]  # type: ignore[arg-type]


def test_a_plain_module_has_its_state_dict() -> None:
    net = Net()
    specs, views = checkpoint_tensors(net)
    assert [spec.name for spec in specs] == list(net.state_dict())
    assert all(torch.equal(views[name], tensor) for name, tensor in net.state_dict().items())


def test_buffers_are_chosen() -> None:
    parameters = [name for name, _ in Net().named_parameters()]
    assert names_of(Net(), buffers="none") == parameters
    assert sorted(names_of(Net(), buffers="all")) == sorted([*Net().state_dict(), "scratch"])
    with pytest.raises(ValueError, match="buffers is 'some'"):
        checkpoint_tensors(Net(), buffers="some")  # type: ignore[arg-type]


class DistributedDataParallel(nn.Module):
    """Has the name and the child of torch's own, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def checkpointed(net: nn.Module) -> nn.Module:
    assert isinstance(net, Net)
    net.inner = checkpoint_wrapper(net.inner)
    return net


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "data-parallel": nn.DataParallel,
    "compile": compiled,
    "checkpoint": checkpointed,
    "compiled-ddp-of-checkpoint": lambda net: compiled(DistributedDataParallel(checkpointed(net))),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    assert names_of(wrap(Net())) == list(Net().state_dict())


def test_a_wrapped_pretrained_model_has_its_checkpoint_form() -> None:
    model = make_model("mixtral")
    assert names_of(DistributedDataParallel(compiled(model))) == names_of(model)


def test_a_submodule_that_is_called_module_keeps_its_name() -> None:
    net = nn.Module()
    net.module = nn.Linear(2, 2)
    assert names_of(net) == ["module.weight", "module.bias"]


def test_tied_parameters_of_a_plain_module_have_the_first_name() -> None:
    net = Net()
    net.again = net.head
    net.transposed = nn.Parameter(net.head.weight.data.t())
    specs = {spec.name: spec for spec in checkpoint_tensors(net)[0]}
    assert specs["head.weight"].aliases == ("again.weight",)
    assert specs["transposed"].shape == (4, 3)


def test_empty_tensors_are_never_tied() -> None:
    net = nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))])
    assert names_of(net) == ["0", "1"]


def test_names_are_renamed() -> None:
    assert names_of(nn.Linear(2, 2), names=lambda name: f"a.{name}") == ["a.weight", "a.bias"]
    assert names_of(nn.Linear(2, 2), names={"bias": "b"}) == ["weight", "b"]
    with pytest.raises(ValueError, match="two tensors have the name 'x'"):
        checkpoint_tensors(nn.Linear(2, 2), names=lambda _: "x")


def test_what_has_no_checkpoint_form_is_refused() -> None:
    with pytest.raises(ValueError, match="has no shape yet"):
        checkpoint_tensors(nn.LazyLinear(3))
    sparse = nn.Module()
    sparse.register_buffer("index", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="not one block of memory"):
        checkpoint_tensors(sparse)


class Saved(nn.Linear):
    """Has `state` beside its parameters, as an extra state or under a name of its own."""

    state: object = None

    def get_extra_state(self) -> object:
        return self.state


class Packed(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "alike"] = self.weight.detach()
        destination[prefix + "scale"] = torch.ones(2)


def with_state(state: object) -> nn.Module:
    model = nn.Sequential(Saved(2, 2))
    model[0].state = state
    return model


LEFT_OUT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dynamic": (
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}),
        r"0\.scale; 0\.zero_point; 0\._packed_params\.dtype; 0\._packed_params\._packed_params: ",
    ),
    "static": (lambda: torch.ao.nn.quantized.Linear(4, 4), r"scale; zero_point; _packed_params\.dtype; "),
    "state": (lambda: with_state({"mean": 3.0}), r"0\._extra_state: "),
    "state-of-a-tensor": (lambda: with_state(torch.ones(3)), r"0\._extra_state: "),
    "of-a-class-of-its-own": (lambda: nn.Sequential(Packed(2, 2)), r"^0\.scale: "),
}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("make", "named"), LEFT_OUT.values(), ids=LEFT_OUT)
@pytest.mark.parametrize("sharded", [True, False])
def test_weights_that_are_no_parameters_are_refused_by_name(
    make: Callable[[], nn.Module], named: str, sharded: bool
) -> None:
    """They would stay behind without a word, at either end."""
    with pytest.raises(ValueError, match=named):
        LiveCheckpoint(make(), sharded=sharded)


@pytest.mark.parametrize("state", [None, {}, b"", torch.empty(0)])
def test_an_extra_state_without_content_is_nothing_that_is_left_out(state: object) -> None:
    """As some layers have it that keep one only in a training in fp8."""
    assert list(LiveCheckpoint(with_state(state)).views) == ["0.weight", "0.bias"]


class Computed(torch.Tensor):
    """A tensor without memory of its own, which torch.compile could not take apart either."""

    @staticmethod
    def __new__(cls) -> Computed:
        made: Computed = torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def zero3() -> torch.Tensor:
    """As DeepSpeed leaves a partitioned parameter between steps."""
    parameter = nn.Parameter(torch.empty(0))
    for name, value in (("ds_id", 3), ("ds_shape", torch.Size([2, 2])), ("ds_tensor", torch.ones(2))):
        setattr(parameter, name, value)
    return parameter


def freed() -> torch.Tensor:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.untyped_storage().resize_(0)
    return parameter


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return nn.Parameter(torch.empty(2, 2))


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "zero3": (zero3, r"'weight' is partitioned by DeepSpeed ZeRO-3, this module holds \[0\] of \[2, 2\]: .*Gathered"),
    "computed": (lambda: nn.Parameter(Computed()), "'weight' is a Computed of layout torch.strided, not one block"),
    "fake": (fake, "'weight' is a FakeTensor of layout torch.strided, not one block of memory"),
    "freed": (freed, "'weight' is a Parameter of layout torch.strided, not one block of memory"),
    "empty": (lambda: nn.Parameter(torch.empty(0)), r"'weight' has the shape \[0\], its Linear is of \[2, 2\]"),
    "flat": (lambda: nn.Parameter(torch.ones(3)), r"'weight' has the shape \[3\], its Linear is of \[2, 2\]"),
    "no-rows": (lambda: nn.Parameter(torch.ones(0, 2)), r"'weight' has the shape \[0, 2\], its Linear is of \[2, 2\]"),
}


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_parameter_that_is_not_there_is_refused_by_name(
    make: Callable[[], torch.Tensor], reason: str, sharded: bool
) -> None:
    net = nn.Linear(2, 2)
    net._parameters["weight"] = make()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=reason):
        LiveCheckpoint(net, sharded=sharded)


def test_what_a_computation_left_in_a_parameters_place_is_refused() -> None:
    net = nn.Linear(2, 2)
    net._parameters["weight"] = net.weight * 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"'weight' is not a parameter but computed from others \(MulBackward0\)"):
        checkpoint_tensors(net)


def test_layers_without_elements_and_of_other_kinds_are_taken_as_they_are() -> None:
    class Own(nn.Linear):
        """Holds its weight flat, for itself."""

    own = Own(2, 2)
    own.weight = nn.Parameter(torch.ones(4))
    embedding = nn.Embedding(0, 2, _weight=torch.empty(0, 2))
    assert names_of(nn.Sequential(embedding, own)) == ["0.weight", "1.weight", "1.bias"]


@pytest.fixture
def mesh(tmp_path: Path) -> object:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_dtensor_on_one_device_is_its_local_tensor(mesh: torch.distributed.DeviceMesh) -> None:
    net = nn.Linear(4, 4)
    torch.distributed.fsdp.fully_shard(net, mesh=mesh)
    live = LiveCheckpoint(net)
    assert [spec.shape for spec in live.specs] == [(4, 4), (4,)]
    assert live.views["weight"].data_ptr() == net.weight.to_local().data_ptr()
    assert not live.refresh()


def test_a_dtensor_whose_local_tensor_is_replaced_is_seen(mesh: torch.distributed.DeviceMesh) -> None:
    """As FSDP2 does it in its first forward pass, and when a model is moved."""
    net = nn.Linear(4, 4)
    torch.distributed.fsdp.fully_shard(net, mesh=mesh)
    live = LiveCheckpoint(net, sharded=True)
    net.weight._local_tensor = torch.ones(4, 4)
    assert live.refresh()
    assert live.views["weight"].eq(1).all()
    assert not live.refresh()


def test_a_sharded_dtensor_is_refused(mesh: torch.distributed.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(4, 4)
    torch.distributed.fsdp.fully_shard(net, mesh=mesh)
    monkeypatch.setattr(torch.distributed.DeviceMesh, "size", lambda self, axis=None: 2)
    with pytest.raises(ValueError, match=r"'weight' is a DTensor .* one place"):
        checkpoint_tensors(net)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_on_one_device_holds_whole_parameters(mesh: object, use_orig_params: bool) -> None:
    net = Net()
    expected = names_of(net)
    kind = torch.distributed.fsdp.FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says what it does on one device
        wrapped = kind(net, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    if use_orig_params:
        assert names_of(wrapped) == expected
    else:
        with pytest.raises(ValueError, match=r"flattened by FSDP1 .* an engine needs a module with whole parameters"):
            checkpoint_tensors(wrapped)
    live = LiveCheckpoint(wrapped, sharded=True)
    assert [name for spec in live.specs for name in spec.names] == expected
    for spec in live.specs:
        ((region, view),) = live.regions()[spec.name]
        assert region == whole(spec.shape)
        assert view.shape == spec.shape


# --- conversions ---


def fused_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return make_model("mixtral"), {"fused": torch.arange(24.0).reshape(4, 6)}


def revert_with(monkeypatch: pytest.MonkeyPatch, revert: conversion.Reversal) -> None:
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", revert)


def test_any_cutting_and_turning_is_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tensors = fused_model()

    def revert(_: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        left, right = state["fused"].split([2, 4], dim=1)
        return {"a": left.t().contiguous(), "b": right[:1].contiguous(), "c": right[1:].clone()}

    revert_with(monkeypatch, revert)
    views = conversion.checkpoint_views(model, tensors)
    whole = tensors["fused"]
    assert torch.equal(views["a"], whole[:, :2].t())
    assert torch.equal(views["b"], whole[:1, 2:])
    assert torch.equal(views["c"], whole[1:, 2:])


def test_live_tensors_may_be_strided_views(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = fused_model()
    whole = torch.arange(120.0).reshape(10, 12)[2:6, 3:9]
    revert_with(monkeypatch, lambda _, state: dict(zip("abc", state["fused"].chunk(3, dim=1), strict=True)))
    views = conversion.checkpoint_views(model, {"fused": whole})
    assert torch.equal(torch.cat([views[n] for n in "abc"], dim=1), whole)


REVERSALS: dict[str, tuple[conversion.Reversal, str]] = {
    "joins": (lambda _, state: {"a": torch.cat([state["fused"], state["fused"]])}, "'a' is computed"),
    "computes": (lambda _, state: {"a": state["fused"] * 2}, "'a' is computed"),
    "casts": (lambda _, state: {"a": state["fused"].half()}, "'a' is computed"),
    "writes": (lambda _, state: {"a": state["fused"].add_(1)}, "writes to a tensor"),
    "permutes": (
        lambda _, state: {"a": state["fused"].view(4, 3, 2).transpose(1, 2).reshape(4, 6)},
        "reverting its weight conversion failed",
    ),
    "forgets": (lambda _, state: {"a": state["fused"][:2]}, "once"),
    "drops": (lambda _, state: {}, "once"),
    "doubles": (lambda _, state: {"a": state["fused"][:3], "b": state["fused"][1:]}, "once"),
    "overlaps": (lambda _, state: {"a": state["fused"][:2], "b": state["fused"][1:3]}, "once"),
}


@pytest.mark.parametrize(("revert", "message"), REVERSALS.values(), ids=REVERSALS)
def test_what_is_no_view_or_not_once_is_refused(
    revert: conversion.Reversal, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tensors = fused_model()
    revert_with(monkeypatch, revert)
    with pytest.raises(ValueError, match=message):
        conversion.checkpoint_views(model, tensors)


def test_tiling_by_interleaved_parts_is_proved() -> None:
    whole = torch.empty(4, 6)
    conversion.tile(whole, [whole[:, 0::2], whole[:, 1::2]], "w")
    conversion.tile(whole, [whole[0::2], whole[1::2, :3], whole[1::2, 3:]], "w")
    with pytest.raises(ManifestError):
        conversion.tile(whole, [whole[:, 0::2], whole[:, 0::2]], "w")
    with pytest.raises(ManifestError):
        conversion.tile(whole, [whole[0::2], whole[1::2, :3], whole[0::2, 3:]], "w")
    with pytest.raises(ManifestError, match="do not divide"):
        conversion.tile(whole, [whole.view(-1)[0::4], whole[1:]], "w")


# --- changes ---


def replace_data(net: Net) -> None:
    net.head.weight.data = net.head.weight.data.clone()


def reassign_parameter(net: Net) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())


def reassign_module(net: Net) -> None:
    net.head = nn.Linear(4, 3, bias=False)


def assign_state(net: Net) -> None:
    net.load_state_dict({name: tensor.clone() for name, tensor in net.state_dict().items()}, assign=True)


def reassign_buffer(net: Net) -> None:
    net.inner[1].running_mean = torch.ones(4)


SAME_SPECS = [replace_data, reassign_parameter, reassign_module, assign_state, reassign_buffer]


@pytest.mark.parametrize("change", SAME_SPECS)
def test_new_memory_is_noticed_and_specs_stay(change: Callable[[Net], None]) -> None:
    net = Net()
    live = LiveCheckpoint(net)
    specs, views = live.specs, live.views
    change(net)
    assert live.refresh()
    assert live.specs is specs
    assert live.views is not views
    state = net.state_dict()
    assert all(view.data_ptr() == state[name].data_ptr() for name, view in live.views.items())
    assert not live.refresh()


def test_another_view_of_the_same_memory_is_noticed() -> None:
    net, memory = Net(), torch.arange(64.0).view(8, 8)
    net.head.weight.data = memory[:4, :4]
    live = LiveCheckpoint(net)
    net.head.weight.data = memory[:4, :4].t()
    assert live.refresh()
    assert torch.equal(live.views["head.weight"], memory[:4, :4].t())
    assert not live.refresh()


def to_half(net: Net) -> None:
    net.half()


def add_parameter(net: Net) -> None:
    net.inner[0].register_parameter("scale", nn.Parameter(torch.ones(4)))


def add_module(net: Net) -> None:
    net.head.adapter = nn.Linear(2, 2)


def remove_bias(net: Net) -> None:
    net.inner[0].bias = None


def resize(net: Net) -> None:
    net.head.weight.data = torch.zeros(5, 4)


def rename(net: Net) -> None:
    net.tail = net.head
    del net.head


@pytest.mark.parametrize("change", [to_half, add_parameter, add_module, remove_bias, resize, rename])
def test_new_specs_are_noticed(change: Callable[[Net], None]) -> None:
    net = Net()
    live = LiveCheckpoint(net)
    specs = live.specs
    change(net)
    assert live.refresh()
    assert live.specs != specs
    assert [spec.name for spec in live.specs] == list(net.state_dict())


def test_new_values_are_no_change() -> None:
    net = Net()
    live = LiveCheckpoint(net)
    specs, views = live.specs, live.views
    optimizer = torch.optim.AdamW(net.parameters())
    net.head(net.inner(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    net.load_state_dict(net.state_dict())
    assert not live.refresh()
    assert live.specs is specs
    assert live.views is views


def test_a_buffer_that_does_not_belong_may_come_and_go() -> None:
    net = Net()
    live = LiveCheckpoint(net)
    views = live.views
    net.scratch = torch.ones(3)
    assert not live.refresh()
    assert live.views is views


def test_a_change_that_cannot_be_seen_is_refused_each_time() -> None:
    net = Net()
    live = LiveCheckpoint(net)
    net.head = nn.LazyLinear(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="has no shape yet"):
            live.refresh()
