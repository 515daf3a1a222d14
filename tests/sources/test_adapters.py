"""PEFT models are published merged: bit-equal to peft's own `merge_and_unload` on a copy, with nothing changed live."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core.direct import DirectEngine, RecordingEngine
from forking import preloaded
from torch import nn

from weightcast.sources.module import ModuleSource
from weightcast.trainer.publisher import Publisher

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    from packaging.version import Version
    from peft import IA3Config, LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.peft import MIN_PEFT_VERSION

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's advice on what tests do on purpose
needs_transformers_peft = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"this transformers takes PEFT {MIN_PEFT_VERSION} and newer",
)


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(8, 2)
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(4, 6, 3), nn.Conv2d(6, 4, 1), nn.Conv3d(4, 3, 2))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 4, 6)), nn.Parameter(torch.randn(3, 6, 4))
        self.gain = nn.Parameter(torch.randn(4))


def experts() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.gate, model.stack = nn.Linear(4, 3), Stack()
    return nn.Sequential(model)


def train(model: nn.Module, seed: int = 1) -> None:
    """As an optimizer's step: everything trainable changes, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def taken(source: ModuleSource) -> dict[str, torch.Tensor]:
    regions = source.regions()
    return {name: regions[spec.name][0][1] for spec in source.specs() for name in spec.names}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in copy.deepcopy(model).merge_and_unload().state_dict().items()}


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Nothing of the live model is other than before: objects, memory, values, names, what is merged."""

    def tensors() -> dict[str, torch.Tensor]:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    before = [(n, t, t.data_ptr(), t.clone()) for n, t in tensors().items()]
    notes = [list(m.merged_adapters) for m in model.modules() if hasattr(m, "merged_adapters")]
    yield
    after = tensors()
    assert list(after) == [name for name, *_ in before]
    for name, tensor, pointer, value in before:
        assert after[name] is tensor or "attention.base_layer" in name  # peft's own makes another when it is looked at
        assert tensor.data_ptr() == pointer, name
        assert torch.equal(tensor, value), name
    assert notes == [list(m.merged_adapters) for m in model.modules() if hasattr(m, "merged_adapters")]


def lora(**options: Any) -> Any:
    return LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], **options})


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "lora": (llama, lora()),
    "all-linear": (llama, lora(target_modules="all-linear")),
    "rslora": (llama, lora(use_rslora=True)),
    "bias": (llama, lora(bias="all")),
    "lora-bias": (llama, lora(target_modules=["q_proj"], lora_bias=True)),
    "dropout": (llama, lora(lora_dropout=0.5)),
    "modules-to-save": (llama, lora(modules_to_save=["lm_head", "embed_tokens"])),
    "tied-modules-to-save": (lambda: llama(tie_word_embeddings=True), lora(modules_to_save=["embed_tokens"])),
    "embeddings": (llama, lora(target_modules=["embed_tokens", "lm_head"])),
    "tied": (lambda: llama(tie_word_embeddings=True), lora()),
    "conv1d": (gpt2, lora(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)),
    "conv2d": (Plain, lora(target_modules=["conv", "linear"])),
    "convolutions": (convolutions, lora(target_modules=["0", "1", "2"], lora_bias=True)),
    "parameters": (experts, lora(target_modules=["gate"], target_parameters=["stack.up", "stack.down"])),
}

OTHERS: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "dora": (llama, lora(use_dora=True), "q_proj' is a Linear of peft.tuners.lora.layer whose adapter 'default'"),
    "embeddings-dora": (
        llama,
        lora(target_modules=["embed_tokens"], use_dora=True),
        "embed_tokens' is an? Embedding of",
    ),
    "ia3": (
        llama,
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        "k_proj' is a Linear of peft.tuners.ia3",
    ),
    "loha": (llama, peft.LoHaConfig(r=2, target_modules=["q_proj"]), "q_proj' is a Linear of peft.tuners.loha"),
    "lokr": (llama, peft.LoKrConfig(r=2, target_modules=["q_proj"]), "q_proj' is a Linear of peft.tuners.lokr"),
    "oft": (
        llama,
        peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
        "q_proj' is a Linear of peft.tuners.oft",
    ),
    "vera": (llama, peft.VeraConfig(r=2, target_modules=["q_proj"]), "q_proj' is a Linear of peft.tuners.vera"),
    "norms": (llama, peft.LNTuningConfig(target_modules=["input_layernorm"]), "input_layernorm' is a LNTuningLayer of"),
    "adalora": (
        llama,
        peft.AdaLoraConfig(total_step=9, init_r=3, target_r=2, target_modules=["q_proj"]),
        "q_proj' is a SVDLinear of peft.tuners.adalora",
    ),
}
"""Adapters of another kind than LoRA, with the layer that a message names."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_what_is_published_is_what_peft_merges(case: str, dtype: torch.dtype) -> None:
    build, config = CASES[case]
    model = get_peft_model(build().to(dtype), copy.deepcopy(config))
    train(model)
    source, kept = ModuleSource(model), []
    for step in range(2):
        train(model, step)
        expected = merged_by_peft(model)
        with untouched(model):
            found = taken(source)
        same(found, expected)
        kept.append((source.regions(), source.specs()))
    assert kept[0][0] is kept[1][0]
    assert kept[0][1] is kept[1][1]


def adapted(**options: Any) -> Any:
    model = get_peft_model(llama(), lora(**options))
    train(model)
    return model


def test_several_active_adapters_are_merged_and_inactive_ones_are_not() -> None:
    model = adapted()
    for name, options in (("b", {"r": 2, "use_rslora": True}), ("c", {}), ("d", {"target_modules": ["o_proj"]})):
        model.add_adapter(name, lora(**options))
        model.base_model.set_adapter(name)
        train(model, len(name))
    source = ModuleSource(model)
    for active in (["default", "b"], ["c"], ["b", "default", "d"], ["d"]):
        model.base_model.set_adapter(active)
        train(model, len(active))
        expected = merged_by_peft(model)
        with untouched(model):
            same(taken(source), expected)


def test_disabled_adapters_are_merged_as_peft_does() -> None:
    model = adapted(modules_to_save=["lm_head"])
    source = ModuleSource(model)
    with model.disable_adapter():
        expected = merged_by_peft(model)
        same(taken(source), expected)


def test_what_the_trainer_has_merged_is_read_in_place() -> None:
    """As TRL does: merge_adapter(), publish, unmerge_adapter()."""
    model = adapted()
    source = ModuleSource(model)
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    expected = merged_by_peft(model)
    model.merge_adapter()
    found = taken(source)
    same(found, expected)
    assert found["model.layers.0.self_attn.q_proj.weight"].data_ptr() == weight.data_ptr()
    model.unmerge_adapter()
    train(model, 2)
    expected = merged_by_peft(model)
    same(taken(source), expected)


def test_only_merged_layers_take_memory() -> None:
    model = adapted(target_modules=["q_proj"])
    live = {parameter.data_ptr() for parameter in model.parameters()}
    copied = {name for name, tensor in taken(ModuleSource(model)).items() if tensor.data_ptr() not in live}
    assert copied == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)}


@needs_transformers_peft
def test_adapters_injected_into_a_transformers_model() -> None:
    model, twin = llama(), get_peft_model(llama(), lora())
    model.add_adapter(lora())
    train(model)
    train(twin)
    expected = merged_by_peft(twin)
    with untouched(model):
        found = taken(ModuleSource(model))
    same(found, expected)


def test_adapters_injected_into_any_module() -> None:
    model = peft.inject_adapter_in_model(lora(target_modules=["linear"]), Plain())
    train(model)
    wrapped = get_peft_model(Plain(), lora(target_modules=["linear"]))
    wrapped.load_state_dict({f"base_model.model.{n}": t for n, t in model.state_dict().items()})
    same(taken(ModuleSource(model)), merged_by_peft(wrapped))


@needs_transformers_peft
def test_adapters_added_and_removed_in_between_are_noticed() -> None:
    model: Any = llama()
    source = ModuleSource(model)
    before, specs = {name: t.clone() for name, t in taken(source).items()}, source.specs()
    model.add_adapter(lora())
    train(model)
    found = taken(source)
    assert source.specs() is specs
    assert not torch.equal(
        found["model.layers.0.self_attn.q_proj.weight"], before["model.layers.0.self_attn.q_proj.weight"]
    )
    model.delete_adapter("default")
    assert taken(source).keys() == before.keys()


def test_a_layer_whose_only_adapter_was_deleted_has_none() -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
    source = ModuleSource(model)
    model.delete_adapter("other")
    same(taken(source), merged_by_peft(model))


def test_a_first_merge_in_inference_mode_is_like_any_other() -> None:
    model = adapted()
    with torch.inference_mode():
        source = ModuleSource(model)
        taken(source)
    train(model, seed=3)
    same(taken(source), merged_by_peft(model))


def test_a_base_weight_that_is_a_buffer_is_not_written() -> None:
    base = nn.Sequential(nn.Linear(6, 4))
    weight = base[0].weight.detach().clone()
    del base[0].weight
    base[0].register_buffer("weight", weight)
    model = get_peft_model(base, LoraConfig(target_modules=["0"], init_lora_weights=False))
    source = ModuleSource(model)
    expected = merged_by_peft(model)
    for _ in range(3):
        with untouched(model):
            same(taken(source), expected)


def test_wrappers_around_and_modules_beside_a_peft_model() -> None:
    model = adapted()
    expected = merged_by_peft(model)
    same(taken(ModuleSource(torch.compile(model))), expected)
    same(taken(ModuleSource(nn.DataParallel(model))), expected)
    both = nn.ModuleDict({"actor": model, "critic": nn.Linear(2, 1)})
    found = taken(ModuleSource(both))
    same({name.removeprefix("actor."): t for name, t in found.items() if name.startswith("actor.")}, expected)
    assert found.keys() - {f"actor.{name}" for name in expected} == {"critic.weight", "critic.bias"}


def test_hooks_and_what_modules_refer_to_are_not_copied() -> None:
    model = adapted()
    model.lock = threading.Lock()  # can't be copied
    model.base_model.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    model.base_model.model.model.layers[0].self_attn.q_proj.owner = threading.Lock()
    taken(ModuleSource(model))


def test_engines_get_merged_weights_under_the_names_of_the_base() -> None:
    model, engine = adapted(), DirectEngine("engine", RecordingEngine())
    with (
        contextlib.closing(engine),
        Publisher(ModuleSource(model), transport="memory://", engines=[engine]) as publisher,
    ):
        for seed in range(3):
            train(model, seed)
            publisher.publish()
            same(dict(engine.engine.held), merged_by_peft(model))


def test_a_meta_model_has_specs_and_no_regions() -> None:
    with torch.device("meta"):
        model = get_peft_model(LlamaForCausalLM(llama().config), lora())
    source = ModuleSource(model)
    assert {name for spec in source.specs() for name in spec.names} == llama().state_dict().keys()
    with pytest.raises(ValueError, match="is on the meta device"):
        source.regions()


# --- several ranks ---


def _ranks(rank: int, file: str) -> None:
    """Replicas are merged by each rank, FSDP2 shards together; what is merged already is read in place."""
    import torch.distributed as dist
    from gather.published import published
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        model = adapted()
        expected = merged_by_peft(model)
        found = published(ModuleSource(nn.parallel.DistributedDataParallel(model)))
        assert rank or not same(found, expected)
        sharded = adapted()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        found = published(ModuleSource(sharded))
        assert rank or not same(found, expected)
        sharded.merge_adapter()
        found = published(ModuleSource(sharded))
        assert found.keys() == (set() if rank else expected.keys())
        assert all(torch.allclose(tensor, expected[name], atol=1e-5) for name, tensor in found.items())
    finally:
        dist.destroy_process_group()


@pytest.mark.cluster
def test_adapters_on_several_ranks(tmp_path: Path) -> None:
    preloaded("torch", "torch.distributed.fsdp", "peft", "transformers")
    torch.multiprocessing.start_processes(_ranks, (str(tmp_path / "meet"),), nprocs=2, start_method="forkserver")


# --- refused ---


class Stubborn(nn.Module):
    """An adapter of somebody's own, by peft's names."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(2, 2), nn.ModuleDict({"default": nn.Linear(2, 2)})


def quantised() -> nn.Module:
    model = adapted()
    layer = model.base_model.model.model.layers[1].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(torch.zeros(128, 1, dtype=torch.uint8), requires_grad=False)
    return model


def grouped() -> nn.Module:
    return get_peft_model(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), LoraConfig(r=2, target_modules=["0"]))


BIASED = LoraConfig(r=2, target_modules=["0"], lora_bias=True)


def nested() -> nn.Module:
    """LoRA of a layer, around LoHa of the same."""
    model = peft.PeftMixedModel(llama(), peft.LoHaConfig(r=2, target_modules=["q_proj"]), "loha")
    model.add_adapter("lora", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter(["loha", "lora"])
    return model


def shared_base() -> nn.Module:
    """Two layers with adapters of their own and one base, as replicated layers have."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return get_peft_model(model, LoraConfig(r=2, target_modules=["0", "1"]))


def tuned(config: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: get_peft_model(llama(**options), config)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (tuned(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)), "'prompt_encoder'"),
        (tuned(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)), "'prompt_encoder'"),
        (tuned(peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)), "AdaptionPrompt"),
        (
            tuned(lora(target_modules=["embed_tokens"]), tie_word_embeddings=True),
            "embed_tokens.*lm_head.* are one tensor",
        ),
        (tuned(lora(target_modules=["lm_head"]), tie_word_embeddings=True), "lm_head.*embed_tokens.* are one tensor"),
        (quantised, r"layers.1.self_attn.q_proj' is a Linear .* has a 'weight' that is a Parameter of torch.uint8"),
        (Stubborn, "'base_layer.weight' is a part of a layer with a PEFT adapter"),
        (
            tuned(lora(target_modules=["q_proj"], alora_invocation_tokens=[1], task_type="CAUSAL_LM")),
            "q_proj.* whose adapter 'default' is not plain LoRA",
        ),
        (tuned(lora(trainable_token_indices=[1, 4])), "embed_tokens' is a TrainableTokensWrapper of peft"),
        (
            lambda: get_peft_model(Plain(), lora(target_modules=["attention"])),
            "'attention' is a MultiheadAttention of peft.tuners.lora.layer",
        ),
        (grouped, "'0' is a Conv2d of peft.tuners.lora.layer with groups"),
        (
            lambda: get_peft_model(nn.Sequential(nn.Linear(2, 2, bias=False)), BIASED),
            "'0' is a .* whose base module has no parameter 'bias'",
        ),
        (nested, "q_proj' is a Linear of peft.tuners.lora.layer around a Linear of peft.tuners.loha"),
        (shared_base, "'0.weight' and '1.weight' are one tensor"),
    ],
)
def test_what_has_no_merged_form_is_refused_by_name(build: Callable[[], nn.Module], message: str) -> None:
    model = build()
    train(model)
    with untouched(model), pytest.raises(ValueError, match=message):
        ModuleSource(model).regions()


@pytest.mark.parametrize("case", OTHERS)
def test_adapters_of_other_kinds_are_refused_by_name_until_the_trainer_has_merged_them(case: str) -> None:
    build, config, message = OTHERS[case]
    model = get_peft_model(build(), copy.deepcopy(config))
    train(model)
    with untouched(model), pytest.raises(ValueError, match=f"{message}.*call merge_adapter"):
        ModuleSource(model)
    expected = merged_by_peft(model)
    model.merge_adapter()
    with untouched(model):
        same(taken(ModuleSource(model)), expected)


def test_adapters_can_be_refused() -> None:
    with pytest.raises(ValueError, match=r"has PEFT adapters: merge them, or pass adapters='merge'"):
        ModuleSource(adapted(), adapters="refuse")
    source = ModuleSource(adapted().merge_and_unload(), adapters="refuse")
    assert source.regions()
    with pytest.raises(ValueError, match="adapters is 'keep'; it must be 'merge' or 'refuse'"):
        ModuleSource(llama(), adapters="keep")  # type: ignore[arg-type]
