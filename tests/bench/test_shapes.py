"""Shapes: tensors and bytes against the totals of the published checkpoints, and how they shrink."""

from __future__ import annotations

import argparse
import functools

import pytest
from publishing import shapes
from publishing.__main__ import add_arguments

full = functools.cache(shapes.named)

# Tensors of the safetensors checkpoint (a tied lm_head is not saved again; without the multi-token prediction layer,
# which transformers has not) and parameters in bf16.
PUBLISHED = {
    "qwen3-0.6b": (310, 596_049_920),
    "qwen3-1.7b": (310, 1_720_574_976),
    "llama-3.2-1b": (146, 1_235_814_400),
    "qwen3-30b-a3b": (18_867, 30_532_122_624),
    "moonlight-16b-a3b": (5_317, 15_960_110_208),
    "qwen3-next-80b-a3b": (74_391, 79_674_391_296),
}


LARGEST = "qwen3-next-80b-a3b"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == LARGEST)) for name in PUBLISHED]
)
def test_totals_are_the_published_ones(name: str) -> None:
    specs = full(name)
    num_tensors, num_parameters = PUBLISHED[name]
    assert len(specs) == num_tensors
    assert {spec.dtype for spec in specs} == {"bfloat16"}
    assert sum(spec.num_bytes for spec in specs) == 2 * num_parameters


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3-0.6b",
            {"model.embed_tokens.weight": (151936, 1024), "model.layers.27.self_attn.q_norm.weight": (128,)},
        ),
        (
            "qwen3-30b-a3b",
            {
                "lm_head.weight": (151936, 2048),
                "model.layers.47.mlp.gate.weight": (128, 2048),
                "model.layers.47.mlp.experts.127.gate_proj.weight": (768, 2048),
                "model.layers.0.mlp.experts.0.down_proj.weight": (2048, 768),
            },
        ),
        (
            "moonlight-16b-a3b",
            {
                "model.layers.0.mlp.gate_proj.weight": (11264, 2048),
                "model.layers.1.mlp.experts.63.up_proj.weight": (1408, 2048),
                "model.layers.26.mlp.shared_experts.down_proj.weight": (2048, 2816),
                "model.layers.26.mlp.gate.e_score_correction_bias": (64,),
                "model.layers.26.self_attn.kv_a_proj_with_mqa.weight": (576, 2048),
            },
        ),
        (
            "qwen3-next-80b-a3b",
            {
                "model.layers.0.linear_attn.in_proj_qkvz.weight": (12288, 2048),
                "model.layers.0.linear_attn.conv1d.weight": (8192, 1, 4),
                "model.layers.3.self_attn.q_proj.weight": (8192, 2048),
                "model.layers.47.mlp.experts.511.gate_proj.weight": (512, 2048),
                "model.layers.47.mlp.shared_expert.down_proj.weight": (2048, 512),
            },
        ),
    ],
)
def test_names_are_those_of_the_checkpoint(name: str, expected: dict[str, tuple[int, ...]]) -> None:
    found = {spec.name: spec.shape for spec in full(name)}
    assert {key: found.get(key) for key in expected} == expected


def test_many_small() -> None:
    specs = shapes.named("many-small")
    assert len(specs) == 5000
    assert {(spec.shape, spec.dtype) for spec in specs} == {((64, 64), "bfloat16")}


def test_uniform_divides_the_bytes() -> None:
    specs = shapes.named("uniform", num_tensors=50_000, num_bytes=1 << 30)
    assert len({spec.name for spec in specs}) == 50_000
    assert (1 << 30) - 50_000 * 2 < sum(spec.num_bytes for spec in specs) <= 1 << 30


def test_layers_keeps_the_first() -> None:
    specs = shapes.named("qwen3-0.6b", layers=2)
    assert len(specs) == 2 * 11 + 2
    assert {spec.name.split(".")[2] for spec in specs if ".layers." in spec.name} == {"0", "1"}


def test_more_layers_than_there_are_is_all_of_them() -> None:
    assert len(shapes.named("llama-3.2-1b", layers=99)) == 146


@pytest.mark.parametrize("name", PUBLISHED)
def test_scale_divides_widths_and_keeps_the_number_of_tensors(name: str) -> None:
    whole, scaled = shapes.named(name, layers=3), shapes.named(name, layers=3, scale=4)
    assert [spec.name for spec in scaled] == [spec.name for spec in whole]
    ratio = sum(spec.num_bytes for spec in whole) / sum(spec.num_bytes for spec in scaled)
    assert 14 < ratio <= 16.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": "qwen9"}, "known: qwen3-0.6b"),
        ({"shapes": "qwen3-0.6b", "scale": 0}, "scale is 0"),
        ({"shapes": "qwen3-0.6b", "layers": 0}, "layers is 0"),
        ({"shapes": "uniform", "num_tensors": 0}, "0 tensors"),
        ({"shapes": "uniform", "num_tensors": 10, "num_bytes": 16}, "cannot share 16 bytes"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes.named(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*PUBLISHED, "many-small", "uniform"])
def test_the_command_names_all_shapes(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--shapes", name]).shapes == name
    assert name in shapes.NAMES
