"""In which dtypes an engine says that it has tensors, where its loader has to be asked."""

from __future__ import annotations

import torch

from integrations.loader_model import Model, ModelEngine, checkpoint
from weightcast.control.worker_rpc import Dtypes, numbered
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.rank_consensus import RankConsensus
from weightcast.integrations.plugin.rank_worker import RankWorker


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


def test_what_a_loader_copies_to_is_what_it_has() -> None:
    held = checkpoint(0)
    answers = ModelEngine(Model()).dtypes([TensorSpec(n, "float64", tuple(t.shape)) for n, t in held.items()])
    live = {name: parameter.dtype for name, parameter in Model().named_parameters()}
    assert answers["embed.table"] == "float32"
    assert answers["experts.0.w1"] == "bfloat16"
    assert set(answers) <= set(held)
    assert live["norm.weight"] == torch.float32
    assert answers["norm.weight"] == "float32"


def test_a_rank_answers_as_json() -> None:
    rank = RankWorker(ModelEngine(Model()), RankConsensus(()), engine_rank=0, world_size=1)
    reply = rank.answer(numbered(Dtypes([spec("experts.0.w1", 1, 1), spec("nothing", 2)])))
    assert reply["error"] is None
    assert reply["dtypes"] == {"experts.0.w1": "bfloat16"}
