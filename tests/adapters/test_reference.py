"""LoRA adapters published into the reference engine: bit-equal to a cold start, whole or not at all, versioned."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from forking import preloaded
from server.tiny_qwen3 import make_model

from adapters.kit import (
    GREEDY,
    MODULES,
    PROMPTS,
    Handmade,
    Served,
    base_model,
    cold_answers,
    draw,
    logprobs,
    publishing,
    serving,
    trained,
)
from weightcast import (
    EngineServer,
    ModuleEngine,
    ModuleSource,
    Publisher,
    PublishError,
    PublishOptions,
)
from weightcast.engines.gate import Gate
from weightcast.engines.lora import LoraLayers
from weightcast.engines.transformers import TextGenerator
from weightcast.format.adapters import LoraConfig
from weightcast.format.manifest import encode
from weightcast.sources.peft import PeftAdapterSource
from weightcast.trainer.options import Adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's advice on what tests do on purpose
context = preloaded("torch", "peft", "adapters.kit", "adapters.test_reference")
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"target_modules": "all-linear"},
    ],
    ids=["plain", "rslora", "patterns", "all-linear"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_answers_are_those_of_a_cold_start(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    adapted = trained(1, base_model(dtype), **options)
    with serving(base_model(dtype)) as served, publishing(PeftAdapterSource(adapted), served.client) as publisher:
        alone = served.answers()
        for seed in (1, 2):
            draw(adapted, seed)
            report = publisher.publish()
            adapter_bytes = sum(t.nbytes for name, t in adapted.state_dict().items() if "lora_" in name)
            assert adapter_bytes <= report.num_bytes <= 1.5 * adapter_bytes + 256 * report.num_tensors
            expected = cold_answers(adapted, tmp_path / str(seed), base_model(dtype))
            assert logprobs(served.answers("policy")) == logprobs(expected)
            assert logprobs(served.answers(f"policy@{report.version}")) == logprobs(expected)
            assert served.answers() == alone, "the model alone"
        assert served.client.info().weight_version == "default"


def test_older_versions_can_be_named_until_they_are_too_many(tmp_path: Path) -> None:
    adapted, expected = trained(0), []
    target = Adapter("policy", keep=2)
    with serving() as served, publishing(PeftAdapterSource(adapted), served.client, target=target) as publisher:
        for seed in range(5):
            draw(adapted, seed)
            publisher.publish()
            expected.append(logprobs(served.answers("policy")))
        assert served.named() == ["policy@2", "policy@3", "policy@4"]
        assert [logprobs(served.answers(name)) for name in served.named()] == expected[2:]
        with pytest.raises(LookupError, match="no adapter 'policy@1'; published adapters: policy, policy@2"):
            served.answers("policy@1")
        assert publisher.engines[0].version == 4
    assert len({str(each) for each in expected}) == 5


# --- updates that are refused ---


def parts(adapted: Any) -> tuple[Tensors, LoraConfig]:
    source = PeftAdapterSource(adapted)
    return {name: held[0][1] for name, held in source.regions().items()}, source.lora_config


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
Q = "model.layers.0.self_attn.q_proj"


def changed(tensors: Tensors, **values: torch.Tensor | None) -> Tensors:
    found: dict[str, torch.Tensor | None] = {**tensors, **values}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


BROKEN: dict[str, tuple[Callable[[Tensors, LoraConfig], tuple[Tensors, LoraConfig]], str]] = {
    "inputs": (lambda t, c: (changed(t, **{A: torch.zeros(4, 65)}), c), f"'{A}' has the shape [4, 65]"),
    "outputs": (lambda t, c: (changed(t, **{B: torch.zeros(63, 4)}), c), f"'{B}' has the shape [63, 4]"),
    "transposed": (lambda t, c: (changed(t, **{A: t[A].T.contiguous()}), c), f"'{A}' has the shape [64, 4]"),
    "rank": (lambda t, c: (t, msgspec.structs.replace(c, r=8)), "with rank 8 it is"),
    "rank of one": (
        lambda t, c: (t, msgspec.structs.replace(c, rank_pattern={Q: 2})),
        f"'{A}' has the shape [4, 64]; with rank 2 it is [2, 64]",
    ),
    "half a layer": (lambda t, c: (changed(t, **{B: None}), c), f"missing tensor '{B}'"),
    "half an adapter": (
        lambda t, c: ({name: x for name, x in t.items() if "layers.1" not in name}, c),
        "missing tensor 'base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight'",
    ),
    "unlisted": (
        lambda t, c: (t, msgspec.structs.replace(c, target_modules=c.target_modules[1:])),
        f"unknown tensor '{A}'",
    ),
    "another model": (
        lambda t, c: (
            {name.replace("q_proj", "qkv"): x for name, x in t.items()},
            msgspec.structs.replace(c, target_modules=tuple(m.replace("q_proj", "qkv") for m in c.target_modules)),
        ),
        "unknown module 'model.layers.0.self_attn.qkv'",
    ),
    "no linear layer": (
        lambda t, c: (
            {name.replace(Q, "model.embed_tokens"): x for name, x in t.items()},
            msgspec.structs.replace(c, target_modules=("model.embed_tokens", *c.target_modules[1:])),
        ),
        "unknown module 'model.embed_tokens'",
    ),
    "stray pattern": (
        lambda t, c: (t, msgspec.structs.replace(c, alpha_pattern={"lm_head": 2.0})),
        "the rank or alpha of 'lm_head' is given",
    ),
    "other tensors": (
        lambda t, c: (changed(t, **{"lm_head.weight": torch.zeros(2, 2)}), c),
        "unknown tensor 'lm_head.weight'",
    ),
    "integers": (lambda t, c: (changed(t, **{A: t[A].to(torch.int8)}), c), f"'{A}' is int8"),
    "two dtypes": (
        lambda t, c: (changed(t, **{A: t[A].half()}), c),
        f"'{A}' is float16 and its lora_B float32: the two must have one dtype",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_update_is_refused_by_name_and_the_old_one_serves(case: str) -> None:
    adapted = trained(1)
    with serving() as served:
        with publishing(PeftAdapterSource(adapted), served.client) as publisher:
            publisher.publish()
        before, alone = served.answers("policy"), served.answers()
        spoil, said = BROKEN[case]
        draw(adapted, 2)
        with (
            publishing(Handmade(*spoil(*parts(adapted))), served.client) as publisher,
            pytest.raises(PublishError) as e,
        ):
            publisher.publish()
        assert said in str(e.value)
        assert served.named() == ["policy@0"]
        assert served.answers("policy") == before
        assert served.answers() == alone
        assert not served.client.info().paused
        with publishing(PeftAdapterSource(adapted), served.client) as publisher:
            assert publisher.publish().ok
        assert served.answers("policy") != before


def refused(
    served: Served, source: Any, said: str, *, target: Adapter | None = None, version: int | None = None
) -> None:
    with publishing(source, served.client, target=target) as publisher, pytest.raises(PublishError, match=said):
        publisher.publish(version)


def test_an_adapter_of_another_version_of_the_model_is_refused() -> None:
    adapted = trained(1)
    with serving() as served:
        stranger = ("0" * 32, 3)
        refused(
            served,
            PeftAdapterSource(adapted),
            "'policy' is for version 3 of run 0+ of the model, and this engine serves the weights that it was started",
            target=Adapter("policy", base=stranger),
        )
        with Publisher(ModuleSource(make_model(2)), engines=[served.client]) as models:
            report = models.publish()
        base = (report.run, report.version)
        refused(served, PeftAdapterSource(adapted), "serves version 0", target=Adapter("policy", base=stranger))
        with publishing(PeftAdapterSource(adapted), served.client, target=Adapter("policy", base=base)) as publisher:
            assert publisher.publish().ok


def test_a_label_stands_for_one_version_for_ever() -> None:
    with serving() as served:
        for number in (3, 4):
            with publishing(PeftAdapterSource(trained(number)), served.client) as publisher:
                publisher.publish(number)
        before = served.answers("policy@3")
        refused(served, PeftAdapterSource(trained(9)), "policy@3 of run .* is loaded in this engine", version=3)
        assert served.answers("policy@3") == before
        with publishing(PeftAdapterSource(trained(9)), served.client) as publisher:
            assert publisher.publish().version == 5, "above those of other runs"


def test_an_engine_without_adapters_refuses_by_name() -> None:
    with serving(with_adapters=False) as served:
        before = served.answers()
        refused(served, PeftAdapterSource(trained(1)), "version 0: local takes no adapters: start it with LoRA")
        assert served.answers() == before


@pytest.mark.parametrize(
    ("alpha", "said"),
    [({}, "`lora_alpha`"), ({"lora_alpha": 1e300}, "lora_alpha is 1e+300; it must be a finite number, at most")],
    ids=["none", "too large"],
)
def test_settings_without_an_alpha_of_use_are_refused_by_name(alpha: dict[str, float], said: str) -> None:
    with EngineServer(ModuleEngine(make_model())) as server:
        config = {"r": 4, "target_modules": ["q"], **alpha}
        offer = {"kind": "offer", "run": "0" * 32, "version": 1, "manifest_digest": "0" * 64}
        body = {"update_info": {**offer, "target": {"name": "policy", "config": config}}}
        reply = httpx.post(f"{server.url}/update_weights", json=body, trust_env=False)
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -1e300])
def test_an_alpha_that_is_not_finite_is_refused_by_name(alpha: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"lora_alpha is {alpha}; it must be a finite number")):
        PeftAdapterSource(trained(1, lora_alpha=alpha))
    _, config = parts(trained(1))
    with pytest.raises(ValueError, match=re.escape(f"the alpha of '{Q}' is {alpha}; it must be")):
        msgspec.structs.replace(config, alpha_pattern={Q: alpha})


def test_an_adapter_goes_through_a_store_as_by_any_transport(tmp_path: Path) -> None:
    adapted = trained(1)
    options = PublishOptions(target=Adapter("policy"))
    with (
        serving() as served,
        Publisher(
            PeftAdapterSource(adapted), transport=f"file://{tmp_path}/store", engines=[served.client], options=options
        ) as publisher,
    ):
        for seed in (1, 2):
            draw(adapted, seed)
            assert publisher.publish().ok
            assert logprobs(served.answers("policy")) == logprobs(cold_answers(adapted, tmp_path / str(seed)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: publishing(ModuleSource(make_model())), "a source of whole models: pass PeftAdapterSource"),
        (lambda: Publisher(PeftAdapterSource(trained(1))), "has only an adapter: pass options="),
        (lambda: publishing(PeftAdapterSource(trained(1)), install="streaming"), "an adapter is installed as a whole"),
        (lambda: publishing(PeftAdapterSource(trained(1)), verify="installed"), "leave out install='streaming'"),
        (lambda: Adapter("policy@7"), "the adapter's name is 'policy@7'"),
        (lambda: Adapter("policy", keep=-1), "keep is -1"),
        (lambda: PeftAdapterSource(trained(1), "other"), "no adapter 'other'; it has 'default'"),
        (lambda: PeftAdapterSource(trained(1, use_dora=True)), "is not plain LoRA|has use_dora"),
        (lambda: PeftAdapterSource(trained(1, target_modules=["embed_tokens"])), "embed_tokens' can't be published"),
        (lambda: PeftAdapterSource(trained(1, bias="all")), "has bias='all'"),
        (lambda: PeftAdapterSource(trained(1, modules_to_save=["lm_head"])), "has modules_to_save"),
    ],
)  # fmt: skip
def test_mistakes_are_found_when_things_are_made(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_a_changed_scaling_or_a_merged_adapter_is_refused() -> None:
    adapted = trained(1)
    source = PeftAdapterSource(adapted)
    adapted.merge_adapter()
    with pytest.raises(ValueError, match=r"q_proj' can't be published .* call unmerge_adapter"):
        source.regions()
    adapted.unmerge_adapter()
    adapted.get_base_model().get_submodule(Q).scale_layer(0.5)
    with pytest.raises(ValueError, match="its scaling is 2, and alpha / r gives 4"):
        _ = source.lora_config


def test_an_adapter_that_was_deleted_and_added_again_is_the_new_one() -> None:
    adapted = trained(1)
    source = PeftAdapterSource(adapted)
    former = {name: held[0][1].clone() for name, held in source.regions().items()}
    config = adapted.peft_config["default"]
    adapted.add_adapter("other", config)
    adapted.set_adapter("other")
    adapted.delete_adapter("default")
    adapted.add_adapter("default", config)
    draw(adapted, 2)
    layer, found = adapted.get_base_model().get_submodule(Q), source.regions()
    assert found.keys() == former.keys()
    assert torch.equal(found[B][0][1], layer.lora_B["default"].weight)
    assert not torch.equal(found[B][0][1], former[B])


def test_a_layer_that_was_replaced_in_the_engine_gets_the_next_version(tmp_path: Path) -> None:
    adapted = trained(1)
    with serving() as served, publishing(PeftAdapterSource(adapted), served.client) as publisher:
        publisher.publish()
        former = served.model.get_submodule(Q)
        layer = torch.nn.Linear(former.in_features, former.out_features, bias=False).requires_grad_(False)
        layer.weight.copy_(former.weight)
        served.model.set_submodule(Q, layer)
        draw(adapted, 2)
        publisher.publish()
        assert served.answers("policy") == cold_answers(adapted, tmp_path)


# --- failures on the way ---


def test_a_failed_load_leaves_the_old_version_and_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = trained(1)
    with serving() as served, publishing(PeftAdapterSource(adapted), served.client) as publisher:
        publisher.publish()
        before = served.answers("policy")
        assert served.layers is not None
        draw(adapted, 2)
        name = served.layers.name
        with monkeypatch.context() as patched:
            patched.setattr(served.layers, "name", lambda labels: name(labels) if len(labels) < 3 else fail())
            with pytest.raises(PublishError, match="told to fail"):
                publisher.publish()
        assert not served.client.info().torn
        assert served.named() == ["policy@0"]
        assert served.answers("policy") == before
        assert publisher.publish().version == 2
        assert served.answers("policy") != before


def fail() -> None:
    raise RuntimeError("told to fail")


def test_a_torn_model_takes_no_adapter_until_it_is_healed() -> None:
    with serving() as served:
        served.client.quarantine("wrong weights")
        refused(served, PeftAdapterSource(trained(1)), "the model is torn, so that no adapter helps: wrong weights")
        with Publisher(ModuleSource(make_model()), engines=[served.client]) as models:
            models.publish()
        with publishing(PeftAdapterSource(trained(1)), served.client) as publisher:
            assert publisher.publish().ok


def test_a_version_of_the_model_takes_the_adapters_names_and_a_failed_one_does_not() -> None:
    with serving() as served:
        with publishing(PeftAdapterSource(trained(1)), served.client) as publisher:
            publisher.publish()
        before = served.answers("policy")
        wrong = torch.nn.Linear(2, 2)
        with Publisher(ModuleSource(wrong), engines=[served.client]) as models, pytest.raises(PublishError):
            models.publish()
        assert served.answers("policy") == before
        other = make_model(3).requires_grad_(False)
        with Publisher(ModuleSource(other), engines=[served.client]) as models:
            models.publish()
        assert served.named() == []
        with pytest.raises(LookupError, match="published adapters: none yet"):
            served.answers("policy")
        with TextGenerator(other, None, gate=Gate()) as cold:
            assert logprobs(served.answers()) == logprobs(cold.generate(PROMPTS, GREEDY))
        with publishing(PeftAdapterSource(trained(1)), served.client) as publisher:
            publisher.publish()
        assert served.named() == ["policy@0"]


def test_an_engine_that_comes_late_gets_the_last_version() -> None:
    adapted = trained(1)
    with serving() as first, serving() as late, publishing(PeftAdapterSource(adapted), first.client) as publisher:
        late.client.name = "late"
        for _ in range(2):
            report = publisher.publish()
        publisher.add_engine(late.client, sync=True)
        assert late.named() == [f"policy@{report.version}"]
        assert logprobs(late.answers("policy")) == logprobs(first.answers("policy"))
        assert publisher.sync(late.client).version == report.version, "which it has already"
        assert publisher.publish().version == report.version + 1
        assert late.named() == ["policy@1", "policy@2"]


def killed_at(url: str, phase: str) -> None:
    """A trainer that publishes one version and then is killed at a phase of the next."""

    def on_event(event: Any) -> None:
        if (event.version, event.phase) == (1, phase):
            os.kill(os.getpid(), signal.SIGKILL)

    adapted = trained(1)
    with publishing(PeftAdapterSource(adapted), url, on_event=on_event, lease_seconds=2.0) as publisher:
        publisher.publish()
        draw(adapted, 2)
        publisher.publish()


@pytest.mark.parametrize("phase", ["offered", "packed", "received", "installed"])
def test_a_trainer_that_is_killed_leaves_a_whole_version(phase: str, leaves_nothing: None) -> None:
    model = base_model()
    layers = LoraLayers(model)
    generator = TextGenerator(model, None, gate=Gate(), adapters=layers)
    with EngineServer(ModuleEngine(model, adapters=layers), generator=generator) as server:
        trainer = context.Process(target=killed_at, args=(server.url, phase))
        trainer.start()
        trainer.join(60)
        assert trainer.exitcode == -signal.SIGKILL
        number = 1 if phase == "installed" else 0
        with serving() as other:
            with publishing(PeftAdapterSource(trained(1 + number)), other.client) as publisher:
                publisher.publish()
            expected = logprobs(other.answers("policy"))
        assert logprobs(generator.generate(PROMPTS, GREEDY, adapter="policy")) == expected
        assert not server.worker.info().paused
        with publishing(PeftAdapterSource(trained(3)), server.url, takeover=True) as publisher:
            assert publisher.publish().version == number + 1
        trainer.close()


# --- a stream of versions under requests ---


def test_every_request_of_a_stream_is_answered_by_the_version_it_began_with(leaves_nothing: None) -> None:
    num_versions, adapted = 40, trained(0)
    with serving() as served, publishing(PeftAdapterSource(adapted), served.client) as publisher:
        expected, running = {}, []
        for seed in range(num_versions):
            draw(adapted, seed)
            version = publisher.publish().version
            label = f"policy@{version}"
            running.append(served.generator.submit(PROMPTS, GREEDY, adapter="policy"))
            running.append(served.generator.submit(PROMPTS, GREEDY, adapter=label))
            assert [request.adapter for request in running[-2:]] == [label, label]
            if seed % 8 == 0:
                expected[label] = logprobs(served.answers(label))
        answers = [(request.adapter, logprobs(request.future.result(60))) for request in running]
        for label, answer in answers:
            expected.setdefault(label, answer)
            assert answer == expected[label]
        assert len({str(answer) for answer in expected.values()}) == num_versions
        publisher.publish()
        assert served.layers is not None
        assert len(served.layers._loaded) <= 4, "two that can be named, one that the last offer found in use"
        gc.collect()
        halves = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape in ((4, 64), (4, 128))]
        assert len(halves) < 100


# --- over HTTP ---


def test_the_server_names_adapters_as_models() -> None:
    adapted, model = trained(1), base_model()
    layers = LoraLayers(model)
    generator = TextGenerator(model, None, gate=Gate(), adapters=layers)
    with (
        EngineServer(ModuleEngine(model, adapters=layers), generator=generator, model_name="tiny") as server,
        httpx.Client(base_url=server.url, timeout=30, trust_env=False) as http,
        publishing(PeftAdapterSource(adapted), server.url) as publisher,
    ):
        ask = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        assert http.post("/v1/completions", json={**ask, "model": "policy"}).status_code == 404
        alone = http.post("/v1/completions", json=ask).json()
        answers = []
        for seed in (1, 2):
            draw(adapted, seed)
            assert publisher.publish().engines[server.url].pause_seconds == 0
            answers.append(http.post("/v1/completions", json={**ask, "model": "policy"}).json())
        assert [answer["model"] for answer in answers] == ["policy@0", "policy@1"]
        named = http.post("/v1/completions", json={**ask, "model": "policy@0"}).json()
        assert named["choices"][0]["token_ids"] == answers[0]["choices"][0]["token_ids"]
        assert alone["model"] == "tiny"
        again = http.post("/v1/completions", json={**ask, "model": "tiny"}).json()
        assert again["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        models = {model["id"] for model in http.get("/v1/models").json()["data"]}
        assert models == {"tiny", "policy", "policy@0", "policy@1"}
        info = http.get("/weight_info").json()
        assert [(v["number"], v["is_current"]) for v in info["adapters"]] == [(0, False), (1, True)]
        assert "adapters" in info["abilities"]
        with http.stream("POST", "/v1/completions", json={**ask, "model": "policy", "stream": True}) as stream:
            assert '"model":"policy@1"' in next(stream.iter_lines())
        missing = http.post("/v1/completions", json={**ask, "model": "other"})
        assert missing.status_code == 404
        assert "published adapters: policy, policy@0, policy@1" in missing.json()["error"]["message"]


def test_records_leave_out_what_is_not_set() -> None:
    config = LoraConfig(4, 16.0, ("q",))
    assert encode(config) == b'{"r":4,"lora_alpha":16.0,"target_modules":["q"]}'
    assert config.scaling("q") == 4
    assert msgspec.structs.replace(config, use_rslora=True).scaling("q") == 8
    assert dataclasses.replace(Adapter("policy"), keep=0).keep == 0
    assert MODULES
