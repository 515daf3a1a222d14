"""What an SGLang is refused for, told from its options and its model, without SGLang."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from engine_features import Refused, refusals

from weightcast.errors import UnsupportedError
from weightcast.integrations.sglang import internals
from weightcast.integrations.sglang.engine import require_one_key

PLAIN = {name: values[0] for name, (values, _) in internals._OFF.items()}
PLAIN |= {"enable_memory_saver": False, "enable_weights_cpu_backup": False}
MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2))


def runner_of(model: torch.nn.Module = MODEL, quantization: str | None = None) -> types.SimpleNamespace:
    config = types.SimpleNamespace(quantization=quantization)
    return types.SimpleNamespace(model=model, model_config=config, lora_manager=None)


def arguments(**options: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**PLAIN | options)


def test_a_plain_server_is_updated() -> None:
    assert internals.unsupported(arguments(), runner_of()) == []


@pytest.mark.parametrize("refused", refusals("sglang"), ids=lambda refused: refused.option)
def test_a_feature_is_refused_by_its_name_with_the_reason(refused: Refused) -> None:
    found = internals.unsupported(arguments(**{refused.option: refused.value}), runner_of())
    assert found == [f"{refused.option}={refused.value!r} ({refused.why})"]


def test_the_table_has_every_refusal() -> None:
    assert {refused.option for refused in refusals("sglang")} == internals._OFF.keys()


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE", "STANDALONE"])
def test_speculation_is_none_of_these(algorithm: str) -> None:
    assert internals.unsupported(arguments(speculative_algorithm=algorithm), runner_of(), runner_of()) == []


def test_a_memory_saver_has_no_second_model() -> None:
    saved = arguments(enable_memory_saver=True)
    assert internals.unsupported(saved, runner_of()) == []
    draft, kept = (
        internals.unsupported(saved, runner_of(), runner_of()),
        internals.unsupported(saved, runner_of(), keeps_draft=True),
    )
    assert draft == kept == ["enable_memory_saver with enable_lora or a draft model (not tried)"]


def test_quantised_checkpoints_are_refused_without_an_option() -> None:
    quantised = runner_of(quantization="fp8")
    (main,) = internals.unsupported(arguments(), quantised)
    assert main.startswith("quantization='fp8' (")
    (draft,) = internals.unsupported(arguments(), runner_of(), quantised)
    assert draft.startswith("speculative_draft_model_quantization='fp8' (")


def test_a_draft_model_that_keeps_its_weights_may_be_any() -> None:
    options = arguments(speculative_algorithm="EAGLE3", speculative_token_map="map", enable_multi_layer_eagle=True)
    assert len(internals.unsupported(options, runner_of(), runner_of())) == 3
    assert internals.unsupported(options, runner_of(), keeps_draft=True) == []
    assert internals.keeps_draft("keep")
    assert not internals.keeps_draft("")
    with pytest.raises(UnsupportedError, match="unknown WEIGHTCAST_DRAFT='drop': start SGLang with "):
        internals.keeps_draft("drop")


def test_packed_and_derived_weights_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].use_intel_amx_backend = True
    model[1]._derived_weight_cache_error = "a cache of the indexer"
    packed, derived = internals.unsupported(arguments(), runner_of(model))
    assert "AMX" in packed
    assert derived == "a cache of the indexer"


def test_another_sglang_is_refused_by_the_names_that_it_lacks() -> None:
    args = arguments()
    del args.moe_dp_size
    with pytest.raises(UnsupportedError, match=r"SimpleNamespace\.moe_dp_size"):
        internals.unsupported(args, runner_of())


def test_another_sglang_is_refused_by_the_arguments_that_it_lacks() -> None:
    def flush_cache(timeout: float) -> None: ...

    internals.require_arguments(flush_cache, "timeout")
    with pytest.raises(UnsupportedError, match=r"flush_cache\(empty_cache\)"):
        internals.require_arguments(flush_cache, "timeout", "empty_cache")


@pytest.mark.parametrize(
    ("admin", "api", "option"),
    [("other", "secret", "--admin-api-key"), ("other", None, "--admin-api-key"), (None, "other", "--api-key")],
)
def test_two_keys_for_one_route_are_refused_where_the_server_starts(
    admin: str | None, api: str | None, option: str
) -> None:
    keys = types.SimpleNamespace(admin_api_key=admin, api_key=api)
    with pytest.raises(ValueError, match=f"SGLang's {option} and WEIGHTCAST_TOKEN differ.*set both to the same"):
        require_one_key(keys, "secret")


@pytest.mark.parametrize(
    ("admin", "api", "token"),
    [(None, None, "secret"), ("secret", "other", "secret"), (None, "secret", "secret"), ("other", None, None)],
)
def test_one_key_is_taken(admin: str | None, api: str | None, token: str | None) -> None:
    require_one_key(types.SimpleNamespace(admin_api_key=admin, api_key=api), token)
