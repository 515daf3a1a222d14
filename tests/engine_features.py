"""Which features of vLLM and SGLang weightcast updates, and for which it refuses an engine: the table of
docs/compatibility.md.

Tests compare each refusal with what the code says (real_vllm/test_model.py, integrations/test_sglang_internals.py), the
table with the page, and look for the tests that a cell names (test_engine_features.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Run(NamedTuple):
    """An updated engine was compared with a cold start: by tests of `file` that have `word`. `note`: for the page."""

    file: str
    word: str
    note: str = ""

    def __str__(self) -> str:
        return f"run on CPUs{f', {self.note}' if self.note else ''}"


class Refused(NamedTuple):
    """Refused for `why` with this `value` of an option, which vLLM has in the `section` of its configuration.

    `also`: another option of the section, which must be on.
    """

    why: str
    option: str
    value: Any
    section: str = ""
    also: str = ""

    def __str__(self) -> str:
        return f"refused: {self.why}"


class RefusedLayers(NamedTuple):
    """A vLLM with such layers is refused for `why`: see real_vllm/test_quantised.py."""

    why: str

    def __str__(self) -> str:
        return f"refused: {self.why}"


class Feature(NamedTuple):
    """A row. `vllm`, `sglang`: none if the engine has no such feature, or its cell is in another row."""

    name: str
    vllm: tuple[Run | Refused | RefusedLayers, ...] = ()
    sglang: tuple[Run | Refused, ...] = ()


_ACCEPTANCE, _MODEL, _QUANTISED = (f"real_vllm/test_{name}.py" for name in ("acceptance", "model", "quantised"))
_SGLANG = "real_sglang/test_transactional.py"
_OLD_SCALES = "its scales belong to the weights that {} was started with"
_DRAFT_NOT_TRIED = """not tried, unless it keeps its weights: --additional-config '{"weightcast": {"draft": "keep"}}'"""
_SGLANG_QUANTISED = (
    "not tried, since SGLang needs a GPU, AMX or Arm to serve them: start it from a checkpoint that is not quantised, "
    "or use vLLM"
)
_SGLANG_DRAFT_NOT_TRIED = (
    "not tried, unless the draft model keeps its weights: start SGLang with WEIGHTCAST_DRAFT=keep in its environment"
)
_ASYNC_EPLB = (
    "a thread of vLLM copies experts during an install, and would put former ones back after it: start vLLM with "
    "--eplb-config.use_async=false"
)
_MOVED = "not tried; SGLang moves experts between ranks while it serves"
_OFFLOAD = "vLLM's own reload does not support it"
_NOT_TRIED = "not tried"
_OTHER_SLEEP = "only of cumem vLLM says whether the weights are asleep, of other modes whether anything is: use cumem"
_SLEEP = ("model_config", "enable_sleep_mode")


OTHER_KIND = RefusedLayers("only these kinds were tried")
STATIC_SCALES = RefusedLayers("not tried, since vLLM's build for CPUs lacks their kernel")
SCALES_TOGETHER = RefusedLayers("a rank that fails would stop the others, which wait for its scales")
COMBINED = RefusedLayers(_NOT_TRIED)
ONE_DNN = RefusedLayers("after a reload vLLM's oneDNN kernel computed NaN")


class Namespace:
    """A stand-in for a part of vLLM's configuration."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


def lora(**options: bool) -> Namespace:
    off = {"fully_sharded_loras": False, "enable_tower_connector_lora": False}
    return Namespace(max_lora_rank=16, max_cpu_loras=4, **off | options)


def speculation(method: str, quantization: str | None = None, **options: bool) -> Namespace:
    options = {"parallel_drafting": False} | options
    return Namespace(method=method, draft_model_config=Namespace(quantization=quantization), **options)


FEATURES = [
    Feature("tensor parallelism", (Run(_ACCEPTANCE, "TWO"),), (Run(_SGLANG, "TWO"),)),
    Feature(
        "data parallelism",
        (Run(_ACCEPTANCE, "REPLICAS"),),
        (Refused("its engines would not agree on a version", "dp_size", 2),),
    ),
    Feature("pipeline parallelism", (Run(_ACCEPTANCE, "PIPELINE"),), (Refused(_NOT_TRIED, "pp_size", 2),)),
    Feature(
        "expert parallelism",
        (Run(_ACCEPTANCE, "EXPERTS", "with a kernel that the tests patch: stock vLLM can't serve it there"),),
        (Refused(_NOT_TRIED, "ep_size", 2), Refused(_NOT_TRIED, "moe_dp_size", 2)),
    ),
    Feature(
        "EPLB",
        (Run("real_vllm/test_moved_experts.py", "BALANCED", "with routing by the tests: stock vLLM has it for GPUs"),),
        (Refused(_MOVED, "enable_eplb", True),),
    ),
    Feature(
        "asynchronous EPLB; elastic expert parallelism",
        (
            Refused(_ASYNC_EPLB, "enable_eplb", True, "parallel_config"),
            Refused("vLLM changes its number of ranks while it serves", "enable_elastic_ep", True, "parallel_config"),
        ),
        (Refused(_MOVED, "elastic_ep_backend", "mooncake"),),
    ),
    Feature(
        "context parallelism; CPU offloading",
        (
            Refused(_NOT_TRIED, "prefill_context_parallel_size", 2, "parallel_config"),
            Refused(_NOT_TRIED, "decode_context_parallel_size", 2, "parallel_config"),
            Refused(_OFFLOAD, "cpu_offload_gb", 1.0, "offload_config.uva"),
            Refused(_OFFLOAD, "offload_group_size", 2, "offload_config.prefetch"),
        ),
        (
            Refused(_NOT_TRIED, "dcp_size", 2),
            Refused(_NOT_TRIED, "attn_cp_size", 2),
            Refused(_NOT_TRIED, "cpu_offload_gb", 1),
            Refused(_NOT_TRIED, "offload_group_size", 2),
        ),
    ),
    Feature(
        "quantised checkpoints: compressed-tensors int8 and fp8 by channels, fp8 by blocks; quantised while loading: "
        "fp8_per_block, int8_per_channel_weight_only (experts)",
        (
            Run(_QUANTISED, 'saved("qwen3+fp8-blocks")', "int8 and fp8 by blocks on those with AMX"),
            Run(_QUANTISED, 'saved("qwen3", "fp8_per_block")', "int8 and fp8 by blocks on those with AMX"),
        ),
        tuple(
            Refused(_SGLANG_QUANTISED, option, "fp8")
            for option in ("quantization", "modelopt_quant", "kt_weight_path", "rl_quant_profile")
        ),
    ),
    Feature(
        "quantised otherwise; with static scales; int8 without AMX",
        (OTHER_KIND, STATIC_SCALES, ONE_DNN),
    ),
    Feature(
        "quantised KV cache",
        (Refused(_OLD_SCALES.format("vLLM"), "cache_dtype", "fp8", "cache_config"),),
        (Refused(_OLD_SCALES.format("SGLang"), "kv_cache_dtype", "fp8_e4m3"),),
    ),
    Feature(
        "LoRA adapters",
        (Run("real_vllm/test_adapters.py", "LORA"),),
        (
            Run(
                "real_sglang/test_adapters.py",
                "LORA",
                "with plain memory in place of pinned, by the tests: stock SGLang can't serve LoRA there",
            ),
        ),
    ),
    Feature(
        "LoRA adapters into a stock server",
        (Run("real_vllm/test_stock_adapters.py", "STOCK_LORA"),),
        (Run("real_sglang/test_stock_adapters.py", "STOCK_LORA", "likewise"),),
    ),
    Feature(
        "LoRA, fully sharded, of towers, of a mixture of experts, or with overlapped loading",
        (
            Refused(_NOT_TRIED, "lora_config", lora(fully_sharded_loras=True)),
            Refused(_NOT_TRIED, "lora_config", lora(enable_tower_connector_lora=True)),
        ),
        (Refused(_NOT_TRIED, "enable_lora_overlap_loading", True),),
    ),
    Feature(
        "quantised, with expert parallelism or LoRA; experts quantised while loading, with tensor parallelism",
        (COMBINED, SCALES_TOGETHER),
    ),
    Feature("speculation by n-grams", (Run(_ACCEPTANCE, "SPECULATING"),)),
    Feature(
        "draft models: MTP layers, EAGLE heads, small models",
        (Run("real_vllm/test_draft_models.py", "MTP, SMALL, EAGLE"),),
        (
            Run(
                "real_sglang/test_draft_models.py",
                "EAGLE, full=(SMALL, MTP)",
                "one proposed token at a time, with attention and kernels by the tests: stock SGLang has them for AMX",
            ),
        ),
    ),
    Feature(
        "draft models of other methods, quantised, or with LoRA, data, pipeline or expert parallelism",
        (
            Refused(_DRAFT_NOT_TRIED, "speculative_config", speculation("eagle3")),
            Refused(_DRAFT_NOT_TRIED, "speculative_config", speculation("medusa")),
            Refused(_DRAFT_NOT_TRIED, "speculative_config", speculation("mtp", quantization="fp8")),
            Refused(_DRAFT_NOT_TRIED, "speculative_config", speculation("draft_model", parallel_drafting=True)),
        ),
        (
            Refused(_SGLANG_DRAFT_NOT_TRIED, "speculative_algorithm", "EAGLE3"),
            Refused(_SGLANG_DRAFT_NOT_TRIED, "speculative_token_map", "map.pt"),
            Refused(_SGLANG_DRAFT_NOT_TRIED, "speculative_draft_model_quantization", "fp8"),
            Refused(_SGLANG_DRAFT_NOT_TRIED, "enable_multi_layer_eagle", True),
        ),
    ),
    Feature(
        "another sleep mode than cumem",
        (Refused(_OTHER_SLEEP, "sleep_mode_backend", "another", *_SLEEP),),
    ),
    Feature(
        "memory saver",
        sglang=(
            Run(
                "real_sglang/test_memory_saver.py",
                "SAVER",
                "with a saver of the tests, under which weights lose their values: the real one is for GPUs. Refused: "
                "with LoRA or a draft model",
            ),
        ),
    ),
    Feature(
        "disaggregated prefill; shared weight cache; several tokenizer workers",
        sglang=(
            Refused(_NOT_TRIED, "disaggregation_mode", "prefill"),
            Refused("SGLang's own update session refuses it", "weight_cache_mode", "on"),
            Refused("the workers would not agree on a version", "tokenizer_worker_num", 2),
        ),
    ),
]


def refusals(engine: str) -> list[Refused]:
    """All refusals of "vllm" or "sglang"."""
    return [cell for feature in FEATURES for cell in getattr(feature, engine) if isinstance(cell, Refused)]


def page() -> str:
    """The table as the page has it."""
    lines = ["| | vLLM | SGLang |", "|---|---|---|"]
    for feature in FEATURES:
        cells = []
        for engine in ("vllm", "sglang"):
            first, *others = dict.fromkeys(map(str, getattr(feature, engine))) or [""]
            cells.append("; ".join([first, *(other.removeprefix("refused: ") for other in others)]))
        lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    return "\n".join(lines).replace("|  |", "| |")
