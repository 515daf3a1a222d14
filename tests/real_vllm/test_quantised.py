"""Engines that quantise while they load, and engines of a quantised checkpoint: installs, undo and proof.

An updated engine answers as one that was started from the weights that came, bit for bit; what it computes with is
proven to be made of them.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_features import COMBINED, ONE_DNN, OTHER_KIND, SCALES_TOGETHER, STATIC_SCALES, RefusedLayers, lora
from publishers import publisher_of
from real_engines.setups import on
from safetensors.torch import load_file
from warm_python import WarmPython

from real_vllm.cold import Request
from real_vllm.conftest import Checkpoints
from real_vllm.models import make_model, model_of
from real_vllm.offline import Offline, OfflineSetup, offline_on
from real_vllm.oracle import NUM_TOKENS, PROMPT
from real_vllm.servers import Server, Setup
from real_vllm.test_model import Tensors, engine_of, install, offer
from real_vllm.trainer import IPC, faulty_ipc
from real_vllm.trainer import Tensors as Source
from weightcast import LocalEngine, ModuleSource, Publisher, PublishError
from weightcast.errors import IncompatibleWeightsError, InstallError, WeightcastError
from weightcast.format.bucket import HEADER_BYTES
from weightcast.format.tensor_digest import tensor_digest
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.model import VllmModel
from weightcast.serving.install_map import held_weights
from weightcast.sources.fp8_blocks import Fp8BlockSource
from weightcast.testing.faults import Corrupt

BF16 = torch.bfloat16


def saved(family: str, quantization: str = "") -> OfflineSetup:
    return OfflineSetup(family, BF16, BF16, quantization=quantization)


EXPERTS_ONLINE = "int8_per_channel_weight_only"
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
"""Without it vLLM has a kernel for int8 that weightcast refuses (see test_model.py), and none for int8 experts and for
fp8 by blocks.
"""
NEED_AMX = [saved("qwen3-moe", EXPERTS_ONLINE), saved("qwen3+int8"), saved("qwen3-moe+int8")]
BLOCKS = [saved("qwen3+fp8-blocks"), saved("qwen3", "fp8_per_block")]
SLOW = saved("qwen3+fp8")
ALWAYS = NEED_AMX[:2] if HAS_AMX else [SLOW]
ALL = [
    *ALWAYS,
    *(
        pytest.param(setup, marks=pytest.mark.full, id=str(setup))
        for setup in (SLOW, *BLOCKS, *(NEED_AMX if HAS_AMX else ()))
        if setup not in ALWAYS
    ),
]
LAYER = {"qwen3": "model.layers.1.mlp.down_proj", "qwen3-moe": "model.layers.1.mlp.experts.routed_experts"}


def family(offline: Offline) -> str:
    return offline.setup.family.partition("+")[0]


def projection(offline: Offline) -> str:
    """The name of a tensor that is quantised."""
    return f"model.layers.1.mlp.{'experts.2.' * (family(offline) == 'qwen3-moe')}down_proj.weight"


def quantised(offline: Offline, tensors: Tensors) -> set[str]:
    """The names of the tensors that fill quantised layers."""
    only_experts = offline.setup.quantization == EXPERTS_ONLINE
    return {name for name in tensors if "_proj." in name and (".experts." in name or not only_experts)}


def assert_proven(offline: Offline, engine: VllmModel, tensors: Tensors) -> None:
    """What vLLM computes with in quantised layers was made of these tensors."""
    assert engine.install_map is not None
    found, end = engine.install_map.held(0, 1 << 40)
    assert end == -1
    held = held_weights("", "", {0: found}, with_blocks=False)
    assert held.differing == {}
    assert quantised(offline, tensors) <= held.digests.keys()
    assert held.digests == {name: tensor_digest(tensors[name]) for name in held.digests}


@pytest.fixture
def weights(offline: Offline, checkpoint: Checkpoints) -> Iterator[dict[int, Tensors]]:
    """The tensors of both seeds, by seed. The test ends with those of seed 0."""
    setup = offline.setup
    folders = {seed: checkpoint(setup.family, seed, setup.saved_dtype) for seed in (0, 1)}
    found = {seed: load_file(folder / "model.safetensors") for seed, folder in folders.items()}
    yield found
    install(engine_of(offline), found[0])


@offline_on(*ALL)
def test_alternating_installs_serve_what_a_cold_start_does(offline: Offline, weights: dict[int, Tensors]) -> None:
    engine = engine_of(offline)
    assert offline.cold[0] != offline.cold[1]
    for seed in (1, 0, 1):
        tensors = {name: tensor.clone() for name, tensor in weights[seed].items()}
        install(engine, tensors)
        assert_proven(offline, engine, tensors)
        for tensor in tensors.values():
            tensor.view(torch.uint8).fill_(255)
        assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[seed]


@offline_on(*ALL)
def test_a_failed_install_goes_back_to_the_quantised_weights(offline: Offline, weights: dict[int, Tensors]) -> None:
    engine, other = engine_of(offline), list(weights[0].items())
    install(engine, weights[1])
    where = {name: (id(p), p.data_ptr()) for name, p in offline.model.named_parameters()}

    def cut(num_whole: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from other[:num_whole]
        raise RuntimeError("the test's fault")

    for num_whole in (0, len(other) // 2, len(other) - 1):
        offer(engine, weights[0])
        undo = engine.snapshot()
        with pytest.raises(RuntimeError, match="the test's fault"):
            engine.load(cut(num_whole))
        undo()
        assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[1]
        assert_proven(offline, engine, weights[1])
    install(engine, weights[0])
    assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[0]
    assert where == {name: (id(p), p.data_ptr()) for name, p in offline.model.named_parameters()}


@offline_on(*ALL)
def test_a_changed_bit_of_what_was_quantised_is_found(offline: Offline, weights: dict[int, Tensors]) -> None:
    engine = engine_of(offline)
    install(engine, weights[1])
    layer = offline.model.get_submodule(LAYER[family(offline)])
    live = next(t.data for _, t in layer.named_parameters() if t.element_size() == 1)
    live.view(torch.uint8)[(0,) * live.ndim] ^= 1
    assert engine.install_map is not None
    found, _ = engine.install_map.held(0, 1 << 40)
    differing = held_weights("", "", {0: found}, with_blocks=False).differing
    assert "has changed since the engine quantised it" in differing[projection(offline)]
    assert all(LAYER[family(offline)] in fault for fault in differing.values())


def unfit_updates(offline: Offline, tensors: Tensors) -> dict[str, Tensors]:
    """By what is said of it, an update that the engine must refuse."""
    name, embedding = projection(offline), "model.embed_tokens.weight"
    weight, (rows, columns) = tensors[name], tensors[name].shape
    scales = [scale for scale in tensors if scale.startswith(name) and scale != name]
    engines = f"the engine has [{rows}, {columns}]"
    plain = {n: t.to(BF16) if t.element_size() == 1 else t for n, t in tensors.items() if "_scale" not in n}
    changed = {
        f"'{name}' has the shape [16, {columns}], {engines}": {name: weight[:16]},
        f"'{name}' has the shape [{2 * rows}, {columns}], {engines}": {name: twice(weight)},
        f"'{name}' has the shape [{columns}, {rows}], {engines}": {name: weight.T.contiguous()},
        f"'{name}' is int32, the engine has ": {name: weight.to(torch.int32)},
        f"'{name}' is float8_e5m2, the engine has ": {name: weight.float().to(torch.float8_e5m2)},
        f"'{embedding}' is int8, the engine has bfloat16": {embedding: tensors[embedding].to(torch.int8)},
        f"unknown tensor '{embedding}_scale'": {f"{embedding}_scale": torch.ones(1)},
        f"unknown tensor '{name}.nonsense'": {f"{name}.nonsense": torch.ones(4)},
    }
    lacking = {f"missing tensor '{name}'": {name}, f"missing tensor '{embedding}'": {embedding}}
    lacking["missing tensor 'model.layers.1."] = {n for n in tensors if ".layers.1." in n}
    for scale in scales:
        changed[f"'{scale}' has the shape [16, "] = {scale: tensors[scale][:1].expand(16, -1).contiguous()}
        changed[f"'{scale}' is int32, the engine has "] = {scale: tensors[scale].to(torch.int32)}
        lacking[f"missing tensor '{scale}'"] = {scale}
    if scales:
        changed[f"'{name}' is bfloat16, the engine has "] = {name: plain[name]}
    else:
        changed[f"unknown tensor '{name}_scale'"] = {f"{name}_scale": torch.ones(rows, 1)}
        changed[f"'{name}' is float8_e4m3fn, the engine has bfloat16"] = {name: weight.to(torch.float8_e4m3fn)}
    updates = {said: tensors | other for said, other in changed.items()}
    updates |= {said: {n: t for n, t in tensors.items() if n not in names} for said, names in lacking.items()}
    return updates | ({f"missing tensor '{scales[0]}' ": plain} if scales else {})


def twice(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor of any dtype, twice."""
    return tensor.view(torch.uint8).repeat(2, 1).view(tensor.dtype)


@offline_on(*ALL)
def test_unfit_updates_are_refused_by_name(offline: Offline, weights: dict[int, Tensors]) -> None:
    """Tensors of another shape or form than the checkpoint's; more of them, or fewer."""
    engine = engine_of(offline)
    install(engine, weights[0])
    updates = unfit_updates(offline, weights[1])
    assert len(updates) >= 12
    for said, tensors in updates.items():
        with pytest.raises(IncompatibleWeightsError) as refused:
            offer(engine, tensors)
        assert any(said in problem for problem in refused.value.problems), (said, refused.value.problems)
    assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[0]
    assert_proven(offline, engine, weights[0])
    install(engine, weights[1])
    assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[1]


def other_kind(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "_QUANTISED", {})


def static_scales(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_layer(offline).quant_method, "block_quant", False, raising=False)


def scales_together(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline.config.parallel_config, "tensor_parallel_size", 2)


def expert_parallel(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline.config.parallel_config, "enable_expert_parallel", True)


def with_lora(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline.config, "lora_config", lora())
    monkeypatch.setattr(type(offline.config.model_config), "is_moe", False)


def one_dnn(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantised_layer(offline)._parameters, "weight", None)


def quantised_layer(offline: Offline) -> Any:
    return offline.model.get_submodule(LAYER[family(offline)])


OF_EXPERTS = pytest.mark.skipif(not HAS_AMX, reason="vLLM serves no int8 experts on a CPU without AMX")


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (other_kind, OTHER_KIND),
        (static_scales, STATIC_SCALES),
        pytest.param(scales_together, SCALES_TOGETHER, marks=OF_EXPERTS),
        pytest.param(expert_parallel, COMBINED, marks=OF_EXPERTS),
        (with_lora, COMBINED),
        (one_dnn, ONE_DNN),
    ],
)
@offline_on(ALWAYS[0] if HAS_AMX else BLOCKS[1])
def test_another_quantisation_is_refused_with_the_reason(
    offline: Offline,
    change: Callable[[Offline, pytest.MonkeyPatch], None],
    refused: RefusedLayers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert internals.unsupported(offline.config, offline.model) == []
    change(offline, monkeypatch)
    (found,) = internals.unsupported(offline.config, offline.model)
    assert found.startswith(f"quantization={offline.config.model_config.quantization!r}: ")
    assert f"({refused.why}" in found


@pytest.mark.parametrize(
    "options",
    [{"verify": "installed", "undo": True}, {"delta": "always"}, {"install": "streaming"}],
    ids=["verified", "delta", "streaming"],
)
@offline_on(BLOCKS[0])
def test_weights_that_the_trainer_quantises(offline: Offline, checkpoint: Checkpoints, options: dict[str, Any]) -> None:
    """A trainer of plain weights updates an engine of a checkpoint in fp8, which vLLM's own function has quantised."""
    setup, plain = offline.setup, family(offline)
    folders = [checkpoint(setup.family, seed, setup.saved_dtype) for seed in (0, 1)]
    config = json.loads((folders[0] / "config.json").read_text())["quantization_config"]
    model = make_model(plain, 0, BF16)
    source = Fp8BlockSource(ModuleSource(model), config)
    engine = LocalEngine(engine_of(offline))
    with publisher_of(source, transport=IPC, engines=[engine], bucket_size_bytes=1 << 16, **options) as publisher:
        for seed in (1, 0, 1, 0):
            model.load_state_dict(model_of(plain, seed, BF16).state_dict())
            report = publisher.publish()
            sent, expected = source.regions(), load_file(folders[seed] / "model.safetensors")
            assert sent.keys() == expected.keys()
            for name, [(_, view)] in sent.items():
                assert torch.equal(view.view(torch.uint8), expected[name].view(torch.uint8)), name
            assert offline.ask(PROMPT, NUM_TOKENS) == offline.cold[seed]
            (result,) = report.engines.values()
            assert not [name for name in result.unproven if "_proj." in name]
    engine.close()


ONE = Setup("qwen3-moe", BF16, quantization=EXPERTS_ONLINE) if HAS_AMX else Setup("qwen3+fp8", BF16)
TWO = Setup("qwen3+int8", BF16, tp=2)


@on(ONE, full=[TWO] if HAS_AMX else [])
def test_a_server_with_quantised_layers(server: Server, checkpoint: Checkpoints) -> None:
    """Whole, versioned, proven over all ranks, and taken back when an install fails."""
    setup = server.setup
    sent: dict[str, torch.Tensor] = {}
    seeds = {s: load_file(checkpoint(setup.family, s, setup.dtype) / "model.safetensors") for s in (0, 1)}
    sent |= {name: tensor.clone() for name, tensor in seeds[0].items()}
    options: dict[str, Any] = {"engines": [server.url], "verify": "installed", "undo": True}
    with publisher_of(Source(sent), **options) as publisher:
        version = 0
        for seed in (1, 0, 1):
            for name, tensor in sent.items():
                tensor.copy_(seeds[seed][name])
            if seed == 0:
                server.call("test_fail_load", 17, setup.tp - 1)
                with pytest.raises(PublishError) as caught:
                    publisher.publish()
                (error,) = caught.value.failures.values()
                assert isinstance(error, InstallError)
                assert not error.torn
                assert server.version() == str(version)
                assert_serves(server, 1)
            report = publisher.publish()
            version = report.version
            assert server.version() == str(version)
            (result,) = report.engines.values()
            assert not [name for name in result.unproven if ".mlp." in name and "_proj." in name]
            assert_serves(server, seed)


_DIES = """
import os, signal, sys
from safetensors.torch import load_file
from real_vllm.trainer import Tensors
from weightcast import Publisher, PublishOptions
def on_progress(done, total):
    if 2 * done >= total:
        os.kill(os.getpid(), signal.SIGKILL)
url, file = sys.argv[1:]
options = PublishOptions(bucket_size_bytes=1 << 16)
Publisher(Tensors(load_file(file)), engines=[url], options=options).publish(on_progress=on_progress)
"""


@on(ONE)
def test_broken_updates_of_a_server_with_quantised_layers(
    server: Server, checkpoint: Checkpoints, python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused by name, and what serves is as a cold start; then a good one is taken."""
    setup, faulty = server.setup, faulty_ipc(monkeypatch)
    files = [checkpoint(setup.family, seed, setup.dtype) / "model.safetensors" for seed in (0, 1)]
    old, new = map(load_file, files)
    options: dict[str, Any] = {"engines": [server.url], "bucket_size_bytes": 1 << 16}

    def error(publisher: Publisher, version: int | None = None) -> WeightcastError:
        with pytest.raises(PublishError) as refused:
            publisher.publish(version)
        (found,) = refused.value.failures.values()
        assert server.version() == str(served)
        assert not server.is_paused()
        assert_serves(server, 0)
        return found

    sent = {name: tensor.clone() for name, tensor in old.items()}
    with publisher_of(Source(sent), **options) as publisher:
        report = publisher.publish()
        served, last = report.version, report.num_buckets - 1
        for name, tensor in sent.items():
            tensor.copy_(new[name])
        faulty.senders[-1].fault = Corrupt(last, HEADER_BYTES + 7)
        assert f"bucket {last}" in str(error(publisher))
        with pytest.raises(ValueError, match=f"version {served} is not above"):
            publisher.publish(served)
        with publisher_of(Source(sent), **options) as second:
            assert "has held this engine since" in str(error(second))
    name = next(name for name in new if name.endswith("down_proj.weight"))
    for spoiled, said in (
        (new | {name: new[name][:16]}, f"'{name}' has the shape [16, "),
        ({n: t for n, t in new.items() if n != name}, f"missing tensor '{name}'"),
        (new | {name: new[name].to(torch.int32)}, f"'{name}' is int32"),
    ):
        with publisher_of(Source(spoiled), **options) as publisher:
            assert said in str(error(publisher))
    assert python.run(_DIES, server.url, str(files[1])) == -signal.SIGKILL
    assert_serves(server, 0)
    with publisher_of(Source(new), takeover=True, **options) as publisher:
        publisher.publish()
    assert_serves(server, 1)


def assert_serves(server: Server, seed: int) -> None:
    assert server.cold is not None
    answers = [server.cold.answer(server.setup, each, Request(PROMPT, NUM_TOKENS)) for each in (0, 1)]
    assert answers[0] != answers[1]
    assert server.ask(PROMPT, NUM_TOKENS) == answers[seed]
