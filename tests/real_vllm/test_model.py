"""VllmModel on a real vLLM of one rank: what it refuses, what it installs, and how it goes back."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import msgspec
import pytest
import torch
from engine_features import Refused, lora, refusals, speculation

from real_vllm.conftest import Checkpoints
from real_vllm.models import make_model, model_of
from real_vllm.offline import Offline, OfflineSetup, offline_on
from real_vllm.oracle import FAR, NUM_TOKENS, PROMPT, assert_is_of, assert_other, deviation
from weightcast.errors import (
    IncompatibleWeightsError,
    IncompleteUpdateError,
    InstallError,
    UnsupportedError,
    WeightcastError,
)
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.integrations.plugin.acceptance import Acceptance
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.layerwise_load import has_plain_weights
from weightcast.integrations.vllm.model import VllmModel, dry_run
from weightcast.seams.engine import Engine, ExposesTensors, Undoable, Validating
from weightcast.sources.module import ModuleSource

VERSION = WeightVersion("5a" * 16, 1)
CPU = torch.device("cpu")
BF16 = OfflineSetup("qwen3", torch.bfloat16)
DENSE, PADDED, EXPERTS, BIASED, TIED = map(OfflineSetup, ("qwen3", "qwen3-padded", "qwen3-moe", "qwen2", "llama-tied"))
# vLLM's kernels for its weights on a CPU take no float32, and AMX_MLA is not supported.
LATENT = OfflineSetup("deepseek-v3", torch.bfloat16, torch.bfloat16, attention="CPU_MLA")
ROUTER_BIAS = (*map(OfflineSetup, ("glm4-moe", "ernie-moe")), LATENT)
ALL = (DENSE, PADDED, EXPERTS, BIASED, TIED, BF16)
LAYER = "model.layers.1"
Q_PROJ, DOWN_PROJ, NORM = f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.mlp.down_proj.weight", "model.norm.weight"
EXPERT = f"{LAYER}.mlp.experts.2.down_proj.weight"
ROUTERS = ".e_score_correction_bias"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = dict[str, torch.Tensor]


def weights(offline: Offline, seed: int) -> Tensors:
    """The checkpoint of that seed, by name; a tied tensor once."""
    source = ModuleSource(model_of(offline.setup.family, seed, offline.setup.saved_dtype))
    return {spec.name: source.regions()[spec.name][0][1].detach() for spec in source.specs()}


def specs(tensors: Tensors) -> list[TensorSpec]:
    return [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]


def unsupported(offline: Offline) -> list[str]:
    """The features for which it is refused, without their reasons."""
    found = internals.unsupported(offline.config, offline.model)
    assert all(feature.endswith(")") for feature in found)
    return [feature.rpartition(" (")[0] for feature in found]


def engine_of(offline: Offline) -> VllmModel:
    return VllmModel(offline.model, offline.config, CPU)


def by_dry_run(offline: Offline) -> Acceptance:
    return Acceptance(offline.model, lambda model, specs: dry_run(model, offline.config, specs), None, is_alone=True)


def offer(engine: VllmModel, tensors: Tensors) -> None:
    engine.validate(plan(specs(tensors), 1 << 20))


def install(engine: VllmModel, tensors: Tensors) -> None:
    offer(engine, tensors)
    engine.load(tensors.items())
    engine.commit(VERSION)


def served(offline: Offline, seed: int) -> Any:
    """The transformers model whose answers are expected, in the dtype that is served."""
    if offline.setup.dtype == offline.setup.saved_dtype:
        return model_of(offline.setup.family, seed, offline.setup.dtype)
    return make_model(offline.setup.family, seed, offline.setup.saved_dtype).to(offline.setup.dtype)


def assert_seed(offline: Offline, seed: int) -> None:
    """It answers as an engine that was started from the weights of that seed, bit for bit."""
    answer = offline.ask(PROMPT, NUM_TOKENS)
    assert answer == offline.cold[seed]
    assert_is_of(served(offline, seed), PROMPT, answer)
    assert_other(served(offline, 1 - seed), PROMPT, answer)


def state(model: torch.nn.Module) -> dict[str, Any]:
    """Every tensor bit by bit, by every name and with its identity, and what vLLM has noted of each layer."""
    tensors = {
        name: (id(tensor), tensor.shape, tensor.flatten().view(torch.uint8).tolist())
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }
    layer_info = internals.require().layer_info
    notes = {f"info of {name}": repr(vars(layer_info(layer))) for name, layer in model.named_modules()}
    attributes = {f"attributes of {n}": {k: id(v) for k, v in vars(m).items()} for n, m in model.named_modules()}
    return tensors | notes | attributes


@pytest.fixture(autouse=True)
def back_to_seed_0(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins and ends with the weights that vLLM was started from."""
    yield
    if "offline" in request.fixturenames:
        offline = request.getfixturevalue("offline")
        install(engine_of(offline), weights(offline, 0))


# --- what it is ---


@offline_on(DENSE)
def test_it_has_the_abilities_that_it_claims(offline: Offline) -> None:
    engine: Engine = engine_of(offline)
    assert isinstance(engine, Validating)
    assert isinstance(engine, Undoable)
    assert not isinstance(engine, ExposesTensors)
    assert engine.specs() is None


# --- installs ---


@offline_on(*ALL, *ROUTER_BIAS)
def test_alternating_installs_serve_what_a_cold_start_does(offline: Offline) -> None:
    engine = engine_of(offline)
    assert_seed(offline, 0)
    for seed in (1, 0, 1):
        install(engine, weights(offline, seed))
        assert_seed(offline, seed)


@offline_on(*ALL)
def test_an_install_keeps_where_parameters_lie(offline: Offline) -> None:
    """Captured graphs hold their addresses."""
    where = {name: (id(p), p.data_ptr()) for name, p in offline.model.named_parameters()}
    install(engine_of(offline), weights(offline, 1))
    assert where == {name: (id(p), p.data_ptr()) for name, p in offline.model.named_parameters()}


@offline_on(*ALL)
def test_nothing_that_came_is_kept(offline: Offline) -> None:
    """A transport writes the next version where this one lay."""
    engine = engine_of(offline)
    tensors = {name: tensor.clone() for name, tensor in weights(offline, 1).items()}
    install(engine, tensors)
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in tensors.values()]
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    del tensor
    tensors.clear()
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []
    assert_seed(offline, 1)


@offline_on(BF16)
def test_the_checkpoints_dtype_and_the_live_one_are_taken(offline: Offline) -> None:
    engine, tensors = engine_of(offline), weights(offline, 1)
    install(engine, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    assert_seed(offline, 1)
    with pytest.raises(IncompatibleWeightsError) as refused:
        offer(engine, {name: tensor.to(torch.float16) for name, tensor in tensors.items()})
    assert len(refused.value.problems) == len(tensors)
    assert f"{Q_PROJ!r} is float16, the engine has bfloat16 or float32" in refused.value.problems
    assert "cast while packing: ModuleSource(model, dtype=torch.float32)" in str(refused.value)


@offline_on(BF16, TIED, LATENT)
def test_it_says_which_dtypes_its_weights_have(offline: Offline) -> None:
    """By the start-up checkpoint, and by a dry run; a router's bias is kept in float32 beside bfloat16."""
    tensors = weights(offline, 1)
    dtype = str(offline.setup.dtype).removeprefix("torch.")
    offered = [msgspec.structs.replace(spec, dtype="float64") for spec in specs(tensors)]
    expected = {name: "float32" if name.endswith(ROUTERS) else dtype for name in tensors}
    assert any(name.endswith(ROUTERS) for name in tensors) is (offline.setup == LATENT)
    assert engine_of(offline).dtypes(offered) == expected
    assert by_dry_run(offline).dtypes(offered) == expected


@offline_on(EXPERTS, TIED)
def test_the_work_rounds_are_still_needed(offline: Offline) -> None:
    """vLLM's own three calls leave weights packed for the CPU as they were. Where they don't, `reload` can be less."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with internals.require().current_config(offline.config):
        initialize_layerwise_reload(offline.model)
        offline.model.load_weights(iter(weights(offline, 1).items()))
        finalize_layerwise_reload(offline.model, offline.config.model_config)
    answer = offline.ask(PROMPT, NUM_TOKENS)
    assert deviation(served(offline, 1), PROMPT, answer).logprob > FAR


# --- offers ---

Change = Callable[[Tensors], None]


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def shaped(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def typed(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def all_of(*changes: Change) -> Change:
    return lambda tensors: [change(tensors) for change in changes] and None


# case: engine, what is wrong, a piece of each problem by the reference, and by a dry run alone
FAULTS: dict[str, tuple[OfflineSetup, Change, Sequence[str], Sequence[str]]] = {
    "unknown module": (DENSE, shaped("model.layers.9.mlp.gate.weight", 2, 2), ["layers.9"], ["layers.9"]),
    "unknown leaf": (DENSE, shaped(f"{LAYER}.mlp.down_proj.wait", 2, 2), ["wait"], ["wait"]),
    "bias that nobody has": (DENSE, shaped(f"{LAYER}.mlp.down_proj.bias", 128), ["proj.bias"], ["proj.bias"]),
    "too small": (DENSE, shaped(Q_PROJ, 64, 128), [Q_PROJ], [Q_PROJ, "qkv_proj"]),
    "other rank": (DENSE, shaped(Q_PROJ, 256), [Q_PROJ], [Q_PROJ, "qkv_proj"]),
    "too many rows": (DENSE, shaped(Q_PROJ, 512, 128), [Q_PROJ], [Q_PROJ]),
    "too many columns": (DENSE, shaped(DOWN_PROJ, 128, 512), [DOWN_PROJ], [DOWN_PROJ]),
    "too large a vocabulary": (PADDED, shaped(EMBEDDING, 512, 128), [EMBEDDING], [EMBEDDING, "embed_tokens"]),
    "other norm": (DENSE, shaped(NORM, 64), [NORM], [NORM, "model.norm"]),
    "no q_proj": (DENSE, without(Q_PROJ), [Q_PROJ], ["qkv_proj"]),
    "no down_proj": (DENSE, without(DOWN_PROJ), [DOWN_PROJ], ["down_proj"]),
    "no norm": (DENSE, without(NORM), [NORM], ["model.norm"]),
    "no bias": (BIASED, without(f"{LAYER}.self_attn.k_proj.bias"), ["k_proj.bias"], ["qkv_proj.bias"]),
    "no embedding": (TIED, without(EMBEDDING), [EMBEDDING], ["embed_tokens"]),
    "no expert": (EXPERTS, without(EXPERT), [EXPERT], ["w2_weight"]),
    "small expert": (EXPERTS, shaped(EXPERT, 3, 5), [EXPERT], ["w2_weight"]),
    "large expert": (EXPERTS, shaped(EXPERT, 128, 128), [EXPERT], [EXPERT, "w2_weight"]),
    "other dtype": (DENSE, typed(Q_PROJ, torch.float16), [Q_PROJ], [Q_PROJ]),
    "four things": (
        DENSE,
        all_of(shaped("what", 1), shaped(Q_PROJ, 1, 2), typed(NORM, torch.int8), without(DOWN_PROJ)),
        ["what", Q_PROJ, NORM, DOWN_PROJ],
        ["what", Q_PROJ, NORM, "qkv_proj", "down_proj"],
    ),
}


def faulty(*, by_dry_run: bool) -> pytest.MarkDecorator:
    cases = [(setup, change, named[by_dry_run]) for setup, change, *named in FAULTS.values()]
    return pytest.mark.parametrize(("offline", "change", "named"), cases, ids=FAULTS, indirect=["offline"])


@faulty(by_dry_run=False)
def test_what_does_not_fit_the_checkpoint_is_refused(offline: Offline, change: Change, named: Sequence[str]) -> None:
    engine, tensors, before = engine_of(offline), weights(offline, 1), state(offline.model)
    change(tensors)
    with pytest.raises(IncompatibleWeightsError) as refused:
        offer(engine, tensors)
    assert_named(refused.value, named)
    assert state(offline.model) == before


@faulty(by_dry_run=True)
def test_what_the_loader_does_not_take_is_refused(offline: Offline, change: Change, named: Sequence[str]) -> None:
    tensors, before = weights(offline, 1), state(offline.model)
    change(tensors)
    with pytest.raises(IncompatibleWeightsError) as refused:
        by_dry_run(offline).accept(plan(specs(tensors), 1 << 20))
    assert_named(refused.value, named)
    assert state(offline.model) == before


def assert_named(error: IncompatibleWeightsError, named: Sequence[str]) -> None:
    """Every offender, and nothing besides."""
    assert [piece for piece in named if not any(piece in problem for problem in error.problems)] == []
    assert [problem for problem in error.problems if not any(piece in problem for piece in named)] == []


@offline_on(*ALL)
def test_trying_an_offer_leaves_no_trace(offline: Offline) -> None:
    """At the start, and after an install, when vLLM's records hold the loaders of that install."""
    for seed in (0, 1):
        install(engine_of(offline), weights(offline, seed))
        before, answer = state(offline.model), offline.ask(PROMPT, NUM_TOKENS)
        offer(engine_of(offline), weights(offline, 1))
        if offline.setup.dtype == offline.setup.saved_dtype:
            by_dry_run(offline).accept(plan(specs(weights(offline, 1)), 1 << 20))
        assert state(offline.model) == before
        assert offline.ask(PROMPT, NUM_TOKENS) == answer


@offline_on(DENSE)
def test_a_manifest_is_tried_once(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, manifest = engine_of(offline), plan(specs(weights(offline, 1)), 1 << 20)
    engine._acceptance = by_dry_run(offline)
    runs: list[object] = []
    loader = offline.model.load_weights
    monkeypatch.setattr(offline.model, "load_weights", lambda ws: runs.append(ws) or loader(ws), raising=False)
    for _ in range(3):
        engine.validate(manifest)
    assert len(runs) == 1


@offline_on(DENSE)
def test_a_refused_offer_leaves_the_accepted_one(offline: Offline) -> None:
    engine, tensors = engine_of(offline), weights(offline, 1)
    offer(engine, tensors)
    with pytest.raises(IncompatibleWeightsError):
        offer(engine, {NORM: tensors[NORM]})
    engine.load(tensors.items())
    engine.commit(VERSION)
    assert_seed(offline, 1)


# --- layers that were exchanged since vLLM was started ---


def exchanged(layer: torch.nn.Module) -> torch.nn.Module:
    """A copy with tensors of its own, which compute the same."""
    copied = copy.copy(layer)
    copied._parameters = dict(layer._parameters)
    for name, parameter in layer.named_parameters(recurse=False):
        made = torch.nn.Parameter(parameter.data.clone(), requires_grad=False)
        made.__class__ = parameter.__class__
        vars(made).update(vars(parameter))
        copied._parameters[name] = made
    return copied


@offline_on(DENSE, EXPERTS)
def test_a_layer_that_took_anothers_place_is_refused_at_the_offer(offline: Offline) -> None:
    """vLLM would load into the former one, whatever is published."""
    engine, attention = engine_of(offline), offline.model.get_submodule(f"{LAYER}.self_attn")
    install(engine, weights(offline, 1))
    o_proj = attention.o_proj
    attention.o_proj = exchanged(o_proj)
    try:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=rf"{LAYER}\.self_attn\.o_proj took another layer's place"):
                offer(engine, weights(offline, 0))
            assert_seed(offline, 1)
    finally:
        attention.o_proj = o_proj
    install(engine, weights(offline, 0))
    assert_seed(offline, 0)


@offline_on(DENSE, TIED)
def test_layers_that_have_changed_places_are_loaded_where_they_are(offline: Offline) -> None:
    engine, layers = engine_of(offline), offline.model.model.layers
    install(engine, weights(offline, 1))
    for seed in (0, 1):
        layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
        install(engine, weights(offline, seed))
        assert_seed(offline, seed)


@offline_on(TIED)
def test_a_head_that_was_untied_is_refused_at_the_offer(offline: Offline) -> None:
    engine, head = engine_of(offline), offline.model.lm_head
    install(engine, weights(offline, 1))
    tied = head.weight
    head._parameters["weight"] = torch.nn.Parameter(tied.data.clone(), requires_grad=False)
    try:
        with pytest.raises(UnsupportedError, match=f"{HEAD!r} was {EMBEDDING!r}, .* tie them again"):
            offer(engine, weights(offline, 0))
    finally:
        head._parameters["weight"] = tied


@offline_on(DENSE)
def test_a_packed_layer_is_known_by_what_it_computes(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = offline.model.lm_head
    assert not has_plain_weights(layer)
    monkeypatch.setattr(layer, "cpu_linear", functools.partial(layer.cpu_linear))
    assert not has_plain_weights(layer), "however vLLM writes it"
    for plain in (torch.nn.functional.linear, lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)):
        monkeypatch.setattr(layer, "cpu_linear", plain)
        assert has_plain_weights(layer)


# --- tied embeddings ---


@offline_on(TIED)
def test_a_tied_head_may_come_under_both_names(offline: Offline) -> None:
    engine, tensors = engine_of(offline), weights(offline, 1)
    both = [msgspec.structs.replace(spec, aliases=(HEAD,) if spec.name == EMBEDDING else ()) for spec in specs(tensors)]
    engine.validate(plan(both, 1 << 20))
    engine.load([*tensors.items(), (HEAD, tensors[EMBEDDING])])
    engine.commit(VERSION)
    assert_seed(offline, 1)


@offline_on(TIED)
def test_a_tied_head_may_come_as_a_tensor_of_its_own(offline: Offline) -> None:
    tensors = weights(offline, 1)
    install(engine_of(offline), {HEAD: tensors[EMBEDDING].clone(), **tensors})
    assert_seed(offline, 1)


@offline_on(TIED)
def test_a_tied_head_with_values_of_its_own_is_not_installed(offline: Offline) -> None:
    engine, tensors = engine_of(offline), weights(offline, 1)
    tensors |= {HEAD: tensors[EMBEDDING] + 1}
    offer(engine, tensors)
    restore = engine.snapshot()
    with pytest.raises(InstallError, match=HEAD):
        engine.load(tensors.items())
    restore()
    assert_seed(offline, 0)


@offline_on(TIED)
def test_a_tied_head_of_another_shape_is_refused(offline: Offline) -> None:
    with pytest.raises(IncompatibleWeightsError, match=HEAD):
        offer(engine_of(offline), weights(offline, 1) | {HEAD: torch.zeros(2, 128)})


# --- completeness ---


@offline_on(DENSE)
def test_a_load_needs_an_offer_and_a_commit_a_load(offline: Offline) -> None:
    engine, tensors = engine_of(offline), weights(offline, 1)
    with pytest.raises(InstallError, match="validated"):
        engine.load(tensors.items())
    offer(engine, tensors)
    with pytest.raises(IncompleteUpdateError, match="not loaded"):
        engine.commit(VERSION)
    assert_seed(offline, 0)


@offline_on(DENSE, EXPERTS)
def test_a_load_that_lacks_a_tensor_is_not_committed(offline: Offline) -> None:
    engine, tensors = engine_of(offline), weights(offline, 1)
    offer(engine, tensors)
    restore = engine.snapshot()
    engine.load((name, tensor) for name, tensor in tensors.items() if name != Q_PROJ)
    with pytest.raises(IncompleteUpdateError, match=Q_PROJ):
        engine.commit(VERSION)
    restore()
    assert_seed(offline, 0)


@offline_on(*ALL)
def test_a_tensor_that_the_loader_drops_is_noticed(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tensors = engine_of(offline), weights(offline, 1)
    offer(engine, tensors)
    restore = engine.snapshot()
    loader = offline.model.load_weights
    drop = lambda ws: loader((n, w) for n, w in ws if n != Q_PROJ)  # noqa: E731
    monkeypatch.setattr(offline.model, "load_weights", drop, raising=False)
    engine.load(tensors.items())
    monkeypatch.undo()
    with pytest.raises(IncompleteUpdateError, match=r"layers\.1\.self_attn\.qkv_proj"):
        engine.commit(VERSION)
    restore()
    assert_seed(offline, 0)


@offline_on(*ALL)
def test_what_comes_for_a_layer_that_is_packed_is_an_error(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader may hold a parameter from before: what it loads into that now would be lost."""
    engine, o_proj = engine_of(offline), f"{LAYER}.self_attn.o_proj"
    offer(engine, weights(offline, 1))
    restore, loader = engine.snapshot(), offline.model.load_weights

    def late(ws: Any) -> None:
        held = offline.model.get_submodule(o_proj).weight
        loader(ws)
        held.weight_loader(held, weights(offline, 1)[f"{o_proj}.weight"])

    monkeypatch.setattr(offline.model, "load_weights", late, raising=False)
    with pytest.raises(InstallError, match=f"called more often for {o_proj}"):
        engine.load(weights(offline, 1).items())
    monkeypatch.undo()
    restore()
    assert_seed(offline, 0)


@offline_on(DENSE)
def test_a_loader_that_writes_past_its_layers_is_refused(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes into a packed layer would not be packed."""
    loader, o_proj = offline.model.load_weights, f"{LAYER}.self_attn.o_proj"

    def past(ws: Any) -> Any:
        for name, tensor in ws:
            if name == f"{o_proj}.weight":
                offline.model.get_submodule(o_proj).weight.data.copy_(tensor)
            else:
                loader([(name, tensor)])

    monkeypatch.setattr(offline.model, "load_weights", past, raising=False)
    with pytest.raises(UnsupportedError, match=f"without a call of their loaders it sets {o_proj}.weight"):
        engine_of(offline)


# --- failures in an install ---


class Boom(Exception):
    """What a test has vLLM raise."""


def fail_at_tensor(position: float) -> Callable[[Offline, pytest.MonkeyPatch, Tensors], Tensors]:
    """The stream breaks at that part of its length."""

    def breaking(offline: Offline, monkeypatch: pytest.MonkeyPatch, tensors: Tensors) -> Tensors:
        loader = offline.model.load_weights
        last = int(position * (len(tensors) - 1))

        def broken(stream: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for number, named in enumerate(stream):
                if number == last:
                    raise Boom
                yield named

        monkeypatch.setattr(offline.model, "load_weights", lambda ws: loader(broken(ws)), raising=False)
        return tensors

    return breaking


def bad_tensor(name: str) -> Callable[[Offline, pytest.MonkeyPatch, Tensors], Tensors]:
    """One tensor has not the shape that was offered, which the loader notices."""

    def spoilt(offline: Offline, monkeypatch: pytest.MonkeyPatch, tensors: Tensors) -> Tensors:
        return tensors | {name: torch.zeros(3, 7)}

    return spoilt


def fail_in(find: Callable[[Any], tuple[Any, str]]) -> Callable[[Offline, pytest.MonkeyPatch, Tensors], Tensors]:
    """A method of vLLM's raises: `find` gives its object and name."""

    def failing(offline: Offline, monkeypatch: pytest.MonkeyPatch, tensors: Tensors) -> Tensors:
        def boom(*args: Any, **kwargs: Any) -> None:
            raise Boom

        subject, name = find(offline.model)
        monkeypatch.setattr(subject, name, boom, raising=False)
        return tensors

    return failing


FAILURES = {
    "at the first tensor": fail_at_tensor(0),
    "in the middle": fail_at_tensor(0.5),
    "at the last tensor": fail_at_tensor(1),
    "a bad tensor after others of its layer": bad_tensor(f"{LAYER}.self_attn.v_proj.weight"),
    "while a layer is packed": fail_in(lambda m: (m.model.layers[1].self_attn.o_proj.quant_method, _PROCESS)),
    "while the mlp is packed": fail_in(lambda m: (_mlp(m).quant_method, _PROCESS)),
    "in the middle of the end": fail_in(lambda m: (m.model.layers[1].self_attn.attn, _PROCESS)),
    "while the head is packed": fail_in(lambda m: (m.lm_head.quant_method, _PROCESS)),
}
_PROCESS = "process_weights_after_loading"


def _mlp(model: Any) -> Any:
    mlp = model.model.layers[1].mlp
    return mlp.experts.routed_experts if hasattr(mlp, "experts") else mlp.down_proj


@pytest.mark.parametrize("failure", FAILURES)
@offline_on(*ALL)
def test_an_undo_brings_back_the_very_same(offline: Offline, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, answer, before = engine_of(offline), offline.ask(PROMPT, NUM_TOKENS), values(offline.model)
    break_install(engine, offline, failure, monkeypatch, undo=True)
    assert values(offline.model) == before
    assert offline.ask(PROMPT, NUM_TOKENS) == answer
    install(engine, weights(offline, 1))
    assert_seed(offline, 1)


@pytest.mark.parametrize("failure", FAILURES)
@offline_on(*ALL)
def test_without_undo_the_model_stays_whole_and_the_next_install_heals(
    offline: Offline, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(offline)
    break_install(engine, offline, failure, monkeypatch, undo=False)
    assert [name for name, p in offline.model.named_parameters() if p.is_meta] == []
    assert len(offline.ask(PROMPT, NUM_TOKENS).tokens) == NUM_TOKENS
    install(engine, weights(offline, 1))
    assert_seed(offline, 1)


def break_install(
    engine: VllmModel, offline: Offline, failure: str, monkeypatch: pytest.MonkeyPatch, *, undo: bool
) -> None:
    tensors = weights(offline, 1)
    offer(engine, tensors)
    restore = engine.snapshot() if undo else engine.discard
    tensors = FAILURES[failure](offline, monkeypatch, tensors)
    with pytest.raises(Exception) as failed:  # noqa: PT011, PT012  (vLLM raises what it likes, in either)
        engine.load(tensors.items())
        engine.commit(VERSION)
    monkeypatch.undo()
    assert not isinstance(failed.value, WeightcastError)
    restore()


def values(model: torch.nn.Module) -> dict[str, Any]:
    return {n: t.flatten().view(torch.uint8).tolist() for n, t in [*model.named_parameters(), *model.named_buffers()]}


@offline_on(DENSE, EXPERTS)
def test_what_another_reload_left_half_way_is_healed(offline: Offline) -> None:
    """vLLM's own calls, which a client may send as well, stop where they fail."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    engine, tensors = engine_of(offline), weights(offline, 1)
    with internals.require().current_config(offline.config):
        initialize_layerwise_reload(offline.model)
        offline.model.load_weights(iter([(Q_PROJ, tensors[Q_PROJ])]))
    offer(engine, tensors)
    engine.snapshot()
    assert_seed(offline, 0)
    install(engine, tensors)
    assert_seed(offline, 1)


# --- what is not supported ---


@offline_on(DENSE)
def test_a_vllm_without_a_name_is_refused_by_that_name(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    monkeypatch.delattr(layerwise, "_place_kernel_tensors")
    internals.require.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match="_place_kernel_tensors"):
            engine_of(offline)
    finally:
        monkeypatch.undo()
        internals.require.cache_clear()


@pytest.mark.parametrize("name", sorted({*internals.HEARD} - {internals.STARTED}))
@offline_on(DENSE)
def test_a_vllm_without_a_method_that_changes_weights_is_refused_by_its_name(
    offline: Offline, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = internals.require().worker
    monkeypatch.delattr(worker, name)
    monkeypatch.setattr(internals, "require", internals.require.__wrapped__)
    with pytest.raises(UnsupportedError, match=rf"Worker\.{name}\b"):
        engine_of(offline)


@offline_on(DENSE)
def test_a_sleep_of_another_kind_is_refused_by_its_name(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of vLLM's own it is known where the weights are asleep."""
    model = offline.config.model_config
    monkeypatch.setattr(model, "sleep_mode_backend", "another")
    assert unsupported(offline) == []
    monkeypatch.setattr(model, "enable_sleep_mode", True)
    assert unsupported(offline) == ["sleep_mode_backend='another'"]
    monkeypatch.setattr(model, "sleep_mode_backend", "cumem")
    assert unsupported(offline) == []


@offline_on(DENSE)
def test_speculation_is_refused_but_for_the_methods_that_were_tried(
    offline: Offline, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own configuration, and by every method that it knows."""
    from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod

    config = offline.config
    folder = str(checkpoint(offline.setup.family, 0, offline.setup.saved_dtype))
    targets = {"target_model_config": config.model_config, "target_parallel_config": config.parallel_config}
    for method, model in (("ngram", None), ("ngram_gpu", None), ("draft_model", folder)):
        own = SpeculativeConfig(method=method, model=model, num_speculative_tokens=3, **targets)
        assert own.method == method
        monkeypatch.setattr(config, "speculative_config", own)
        assert unsupported(offline) == []
    accepted = set()
    for method in get_args(SpeculativeMethod):
        monkeypatch.setattr(config, "speculative_config", speculation(method))
        if not unsupported(offline):
            accepted.add(method)
    assert accepted == {"ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "mtp"}


@offline_on(DENSE)
def test_draft_models_are_refused_with_what_was_not_tried(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    config, name = offline.config, "speculative_config (a draft model)"
    monkeypatch.setattr(config, "speculative_config", speculation("mtp"))
    for option in ("pipeline_parallel_size", "data_parallel_size"):
        with monkeypatch.context() as patch:
            patch.setattr(config.parallel_config, option, 2)
            assert unsupported(offline) == [f"{name}, {option} > 1"]
    monkeypatch.setattr(config.parallel_config, "enable_expert_parallel", True)
    monkeypatch.setattr(config, "lora_config", lora())
    assert unsupported(offline) == [f"{name}, enable_expert_parallel, enable_lora"]


@offline_on(DENSE)
def test_a_draft_model_that_keeps_its_weights_may_be_any(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where it might lose them."""
    config = offline.config
    monkeypatch.setattr(config, "speculative_config", speculation("medusa"))
    monkeypatch.setattr(config, "additional_config", {"weightcast": {"draft": "keep"}, "another": 1})
    assert unsupported(offline) == []
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    assert unsupported(offline) == ["speculative_config (a draft model that keeps its weights), enable_sleep_mode"]
    monkeypatch.setattr(config, "additional_config", {"weightcast": {"draft": "update"}})
    with pytest.raises(UnsupportedError, match=r"unknown options .*update"):
        unsupported(offline)


@offline_on(TIED)
def test_a_vllm_that_packs_ties_otherwise_is_refused(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(offline.model.lm_head, "cpu_linear")
    with pytest.raises(UnsupportedError, match="cpu_linear"):
        engine_of(offline)


@offline_on(LATENT)
def test_an_attention_that_drops_its_weights_is_refused(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline.model.model.layers[0].self_attn.mla_attn.mla_attn, "is_amx_bmm_enabled", True)
    with pytest.raises(UnsupportedError, match="--attention-backend CPU_MLA"):
        engine_of(offline)


@offline_on(DENSE)
def test_moving_experts_are_accepted_if_no_thread_copies_them(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = offline.config
    monkeypatch.setattr(config.parallel_config, "enable_eplb", True)
    assert unsupported(offline) == ["enable_eplb, eplb_config.use_async"]
    monkeypatch.setattr(config.parallel_config.eplb_config, "use_async", False)
    assert unsupported(offline) == []
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 2)
    assert unsupported(offline) == ["enable_eplb, enable_sleep_mode", "enable_eplb, pipeline_parallel_size > 1"]


@offline_on(DENSE)
def test_experts_with_lora_are_refused_by_name(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself does not generate with these on a CPU."""
    monkeypatch.setattr(offline.config, "lora_config", lora())
    monkeypatch.setattr(type(offline.config.model_config), "is_moe", True)
    assert unsupported(offline) == ["enable_lora (a mixture of experts)"]


@pytest.mark.parametrize("refused", refusals("vllm"), ids=lambda refused: refused.option)
@offline_on(DENSE)
def test_a_feature_is_refused_by_its_name_with_the_reason(
    offline: Offline, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert internals.unsupported(offline.config, offline.model) == []
    config: Any = offline.config
    for part in filter(None, refused.section.split(".")):
        config = getattr(config, part)
    monkeypatch.setattr(config, refused.option, refused.value)
    if refused.also:
        monkeypatch.setattr(config, refused.also, True)
    (found,) = internals.unsupported(offline.config, offline.model)
    assert found.endswith(f" ({refused.why})")
    engine = engine_of(offline)
    with pytest.raises(UnsupportedError) as caught:
        offer(engine, weights(offline, 1))
    assert str(caught.value) == f"weightcast can't update an engine with {found}: start it without"
