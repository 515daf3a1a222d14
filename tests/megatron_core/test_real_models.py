"""Real Megatron-core models, cut in every way and trained: what an engine gets of them, checked three ways."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from core.direct import RecordingEngine

from megatron_core import models, rank, shards
from megatron_core.cases import CASES, DIAGONAL, TOKENS, Case
from weightcast.control.server.app import EngineServer
from weightcast.host.deadline import Deadline

pytestmark = pytest.mark.megatron

RELATIVE = 1e-2
"""Loose: transformers and Megatron add in other orders. What is exact is compared with shards and mbridge's export."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A case, and what its ranks have left, by rank."""

    case: Case
    reports: list[dict[str, Any]]

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """What the engine holds."""
        held: dict[str, torch.Tensor] = self.reports[0]["held"]
        return held


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A case is run once, and all of its tests come after it."""
    case = CASES[request.param]
    is_new = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19)
    if (case.grouped and is_new) or (case.fused_down and not is_new):
        pytest.skip(
            f"Megatron-core {version('megatron-core')} has no {'GroupedMLP' if is_new else 'FusedMLASelfAttention'}"
        )
    if is_new and ("q_lora_rank", None) in case.fields:
        pytest.skip("from Megatron-core 0.19 on queries without a rank have a norm, which no checkpoint has")
    if is_new and case.optimizer != "torch":
        pytest.skip("from Megatron-core 0.19 on the reduction of gradients asks CUDA for a stream")
    return Trained(case, rank.run(request.param, tmp_path_factory.mktemp(request.param)))


def of_cases(condition: Callable[[Case], bool] = lambda case: True) -> Any:
    cases = [
        pytest.param(name, marks=[pytest.mark.full] * (name not in DIAGONAL))
        for name, case in CASES.items()
        if condition(case)
    ]
    return pytest.mark.parametrize("trained", cases, indirect=True, scope="module")


def _without_prediction(tensors: dict[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    limit = case.hf_config.num_hidden_layers
    return {n: t for n, t in tensors.items() if not n.startswith(f"model.layers.{limit}.")}


@of_cases()
def test_every_shard_is_the_published_tensor_s(trained: Trained) -> None:
    """Published tensors, cut again as Megatron cuts them, are bit for bit what each rank holds."""
    case, reports = trained.case, trained.reports
    held = _without_prediction(trained.held, case)
    expected = models.checkpoint_specs(case.hf_config)
    assert held.keys() == {each for spec in expected for each in spec.names}
    assert {n: tuple(t.shape) for n, t in held.items()} == {n: s.shape for s in expected for n in s.names}
    num_stages = case.pp * case.vpp
    for report in reports:
        for stage, layers, tensors in report["chunks"]:
            stages = tuple(tuple(layers) if number == stage else () for number in range(num_stages))
            experts: shards.Experts = "grouped" if case.grouped else "each" if case.te else "sequential"
            job = shards.Job(
                case.tp,
                stages,
                case.ep,
                case.etp,
                te=case.te,
                experts=experts,
                padded=case.padded,
                cut_down=True,
                fused_down=case.fused_down,
            )
            place = shards.Rank(stage, report["tp"], report["ep"], report["etp"])
            cut = shards.Sharder(held, case.hf_config, job).tensors(place)
            _require_same(cut, {n: t for n, t in tensors.items() if not n.startswith("mtp.")}, case, report["tp"])


def _require_same(cut: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], case: Case, tp: int) -> None:
    if case.mtp:
        tensors = {n: t for n, t in tensors.items() if n in cut or "embedding" not in n}
    assert cut.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = cut[name]
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = max(0, case.hf_config.vocab_size - tp * tensor.shape[0])
            found, tensor = found[:rows], tensor[:rows]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(shards.centred(name, found), shards.centred(name, tensor)), name


@of_cases(lambda case: case.has_bridge)
def test_mbridge_exports_the_same(trained: Trained) -> None:
    held, exported = trained.held, trained.reports[0]["exported"]
    if trained.case.tied:
        held = {n: t for n, t in held.items() if n != "lm_head.weight"}
        exported = {n: t for n, t in exported.items() if n != "lm_head.weight"}
    assert held.keys() == exported.keys()
    assert [n for n in held if not torch.equal(held[n], exported[n])] == []


@of_cases(lambda case: case.dtype == "float32" and not case.mtp)
def test_transformers_gives_the_same_log_probabilities_but_for_rounding(trained: Trained, tmp_path: Path) -> None:
    case, reports = trained.case, trained.reports
    parts = {report["tp"]: report["logits"] for report in reports if report["logits"] is not None}
    # Megatron's own softmax would run over the padding as well.
    logits = torch.cat([parts[tp] for tp in range(case.tp)], dim=-1)[..., : case.hf_config.vocab_size]
    model = _loaded_model(case, trained.held, tmp_path)
    with torch.no_grad():
        theirs = model(TOKENS[:, :-1]).logits.log_softmax(-1)
    ours = logits.log_softmax(-1)
    assert ours.shape == theirs.shape
    worst = ((ours - theirs).abs() / theirs.abs()).max().item()
    assert worst < RELATIVE, f"relative difference {worst:.1e}"


def _loaded_model(case: Case, held: dict[str, torch.Tensor], directory: Path) -> Any:
    """transformers' own model, from the published tensors as from a checkpoint."""
    tensors = {n: t.contiguous() for n, t in held.items() if not (case.tied and n == "lm_head.weight")}
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    case.hf_config.save_pretrained(directory)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@of_cases()
def test_loading_gives_every_rank_its_shards_back(trained: Trained) -> None:
    assert [name for report in trained.reports for name in report["loaded"]] == []


@of_cases()
def test_few_collectives_and_none_of_the_trainer_s(trained: Trained) -> None:
    reports = trained.reports
    for number, report in enumerate(reports):
        counts, num_buckets = report["counts"], report["num_buckets"]
        assert counts.pop("kept") == 1
        assert not [key for key in counts if key.startswith("torch ")]
        exchanges = counts.get("broadcast row", 0)
        assert exchanges <= 3 * num_buckets + 4
        assert counts.get("send row", 0) == (exchanges if number else 0)
        assert counts.get("receive row", 0) == (0 if number else (len(reports) - 1) * exchanges)
        # What is too long for a row. No weights: each rank packs into memory that it maps, or sends its own.
        assert counts.get("send", 0) <= 3
        assert counts.get("receive", 0) <= (0 if number else 3 * (len(reports) - 1))
        assert counts.get("broadcast", 0) <= 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "number"),
    [
        ("tp2-te", 40),
        pytest.param("tp2-te", 1000, marks=pytest.mark.full),
        pytest.param("tp2-pp2-te", 300, marks=pytest.mark.full),
    ],
)
def test_publishes_in_the_background_are_of_one_step_each(case: str, number: int, tmp_path: Path) -> None:
    """Starts that wait, are skipped and are cancelled, with training steps right after them."""
    first, *others = rank.run(case, tmp_path, f"start {number}", seconds=800.0)
    assert first["versions"], "some were published"
    assert first["versions"] == sorted(set(first["versions"]))
    assert first["wrong"] == []
    assert {report["num_skipped"] for report in others} == {first["num_skipped"]}
    assert len(first["versions"]) + first["num_skipped"] + first["num_cancelled"] == number


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_trainers", [2, pytest.param(40, marks=pytest.mark.full)])
def test_an_engine_has_one_step_whichever_rank_is_killed(num_trainers: int, tmp_path: Path) -> None:
    """After one of up to 50 starts of each trainer; then another trainer publishes to the same engine."""
    engine, chance = RecordingEngine(), random.Random(7)
    with EngineServer(engine) as server:
        for number in range(num_trainers):
            folder = tmp_path / str(number)
            folder.mkdir()
            rank.run_and_kill("tp2-te", folder, server.url, number * rank.NUM_STARTS, chance)
            for _ in Deadline(60.0).polls():
                if not server.worker.info().holder:
                    break
            version = server.gate.version
            assert not server.gate.torn
            if version is not None and version.number >= number * rank.NUM_STARTS:
                last = torch.load(folder / f"{version.number}.export", weights_only=True)
            assert all(torch.equal(tensor, last[name]) for name, tensor in engine.held.items())
