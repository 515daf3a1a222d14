"""Every undocumented name of vLLM that this package needs, looked up by one function; and the untested features.

Invariant: a vLLM that lacks one of these names is refused by `require` when the transfer engine is created; a missing
name is never found only during an update.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Collection, MutableSet
from contextlib import AbstractContextManager
from typing import Annotated, Any, get_type_hints

import torch
from torch import Tensor, nn

from weightcast.errors import UnsupportedError, lacking

TESTED_WITH = "0.32"
_RELOAD = "vllm.model_executor.model_loader.reload"
_LAYERS = "vllm.model_executor.layers"
STARTED = "compile_or_warm_up_model"
"""The worker's method that vLLM calls when it has loaded all models."""
HEARD = ("sleep", "discard", "reload_weights", "reset_weights", STARTED)
"""With it, the methods by which vLLM changes the weights by itself, or frees their memory."""
_ATTRIBUTES = {
    "layer_info_type": (
        *("restore_metadata", "restore_device", "kernel_tensors", "kernel_non_persistent_buffers"),
        *("can_load", "reset"),
    ),
    "worker": (*HEARD, "get_draft_model"),
    "lora_manager": ("add_adapter", "remove_adapter", "_pin_lora_in_cpu_cache"),
    "experts_runner": ("eplb_state",),
    "balanced_experts": ("logical_to_physical_map", "logical_replica_count"),
}
"""By name in `Internals`, the attributes that a class must have."""
_DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that need no draft model."""
_DRAFTS = ("draft_model", "eagle", "mtp")
"""Methods with a draft model of which an updated engine was compared with a cold start."""
KEEP_DRAFT = """--additional-config '{"weightcast": {"draft": "keep"}}'"""
"""The option with which only the main model of an engine is updated."""
_DRAFT_NOT_TRIED = f"not tried, unless it keeps its weights: {KEEP_DRAFT}"
_QUANTISED = {
    "CompressedTensorsW8A8Fp8": "compressed-tensors fp8",
    "CompressedTensorsW8A8Int8": "compressed-tensors int8",
    "CompressedTensorsW8A8Int8MoEMethod": "compressed-tensors int8 (experts)",
    "Fp8LinearMethod": "fp8 by blocks",
    "Fp8PerBlockOnlineLinearMethod": "fp8_per_block, online",
    "Int8OnlineMoEMethod": "int8_per_channel_weight_only, online (experts)",
}
"""Classes of schemes and methods of quantised layers of which an updated engine was compared with a cold start."""


@dataclasses.dataclass(frozen=True)
class Internals:
    """The functions of vLLM's layerwise reload, each with its path. `layer_info`: returns vLLM's record of a layer."""

    current_config: Annotated[Callable[[Any], AbstractContextManager[None]], "vllm.config:set_current_vllm_config"]
    layer_info: Annotated[Callable[[nn.Module], Any], f"{_RELOAD}.layerwise:get_layerwise_info"]
    pack: Annotated[Callable[[nn.Module, Any], None], f"{_RELOAD}.layerwise:_layerwise_process"]
    put_live_back: Annotated[Callable[[nn.Module, Any], None], f"{_RELOAD}.layerwise:_place_kernel_tensors"]
    original_loader: Annotated[Callable[[Tensor], Callable[..., Any]], f"{_RELOAD}.layerwise:_get_original_loader"]
    loading_layers: Annotated[MutableSet[nn.Module], f"{_RELOAD}.layerwise:LOADING_LAYERS"]
    made_of: Annotated[Callable[[Tensor], Tensor], f"{_RELOAD}.meta:materialize_meta_tensor"]
    kept_tensors: Annotated[Collection[str], f"{_RELOAD}.meta:SKIP_TENSORS"]
    kept_modules: Annotated[Collection[str], f"{_RELOAD}.meta:SKIP_MODULES"]
    with_layer: Annotated[Callable[[Tensor, nn.Module], Tensor], f"{_RELOAD}.sanitize:restore_layer_refs"]
    layer_info_type: Annotated[type, f"{_RELOAD}.types:LayerReloadingInfo"]
    experts_method: Annotated[type, f"{_LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"]
    experts: Annotated[type[nn.Module], f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts"]
    experts_runner: Annotated[Any, f"{_LAYERS}.fused_moe.runner.moe_runner:MoERunner"]
    balanced_experts: Annotated[type, "vllm.distributed.eplb.eplb_state:EplbLayerState"]
    linear_method: Annotated[type, f"{_LAYERS}.linear:UnquantizedLinearMethod"]
    embedding_method: Annotated[type, f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod"]
    is_attention: Annotated[Callable[[nn.Module], bool], f"{_LAYERS}.attention:is_deferred_attention_layer"]
    quant_method: Annotated[type, f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"]
    any_mtp_layers: Annotated[
        Callable[[], AbstractContextManager[None]],
        "vllm.model_executor.model_loader.mtp_validation:disable_mtp_completeness_check",
    ]
    worker: Annotated[Any, "vllm.v1.worker.gpu_worker:Worker"]
    lora_model: Annotated[Any, "vllm.lora.lora_model:LoRAModel"]
    lora_settings: Annotated[Any, "vllm.lora.peft_helper:PEFTHelper"]
    lora_module: Annotated[Callable[[str, Any], tuple[str, bool]], "vllm.lora.utils:parse_fine_tuned_lora_name"]
    lora_manager: Annotated[Any, "vllm.lora.model_manager:LRUCacheLoRAModelManager"]


@functools.cache
def require() -> Internals:
    """Return vLLM's functions. Raises UnsupportedError with every name that this vLLM lacks."""
    found: dict[str, Any] = {}
    problems = []
    for name, hint in get_type_hints(Internals, include_extras=True).items():
        (path,) = hint.__metadata__
        module, _, attribute = path.partition(":")
        try:
            found[name] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as exc:
            problems.append(f"{path} ({exc})")
    for owner in found.keys() & _ATTRIBUTES.keys():
        # A dataclass's fields without a default are no attributes of the class.
        known = {*dir(found[owner]), *getattr(found[owner], "__dataclass_fields__", ())}
        problems += [f"{found[owner].__name__}.{name}" for name in _ATTRIBUTES[owner] if name not in known]
    if problems:
        raise lacking("vLLM", version(), TESTED_WITH, problems)
    return Internals(**found)


def version() -> str:
    """Return the version of the running vLLM."""
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


def unsupported(vllm_config: Any, model: nn.Module) -> list[str]:
    """Return the features with which weightcast can't update an engine, by vLLM's names, each with the reason."""
    parallel, cache, offload = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.offload_config
    config, speculation, lora = vllm_config.model_config, vllm_config.speculative_config, vllm_config.lora_config
    eplb = parallel.enable_eplb
    sleeps_by, quantization = config.sleep_mode_backend, f"quantization={config.quantization!r}"
    layers = [] if config.quantization is None else [each for each in model.modules() if is_quantised(each)]
    kinds = {type(vars(layer).get("scheme") or layer.quant_method).__name__ for layer in layers}
    has_experts = any(_QUANTISED.get(kind, "").endswith("(experts)") for kind in kinds)
    # vLLM replaces weights that it hands to oneDNN by None.
    outside = any(layer._parameters.get("weight", layer) is None for layer in layers)
    is_static = any(_has_static_scales(layer) for layer in layers)
    is_updated = updates_draft(vllm_config)
    draft_with = {
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "data_parallel_size > 1": parallel.data_parallel_size > 1,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "enable_lora": lora is not None,
        "quantization": config.quantization or (is_updated and speculation.draft_model_config.quantization),
        "parallel_drafting": is_updated and speculation.parallel_drafting,
    }
    found = {
        f"{quantization}: {', '.join(sorted(kinds))}": (
            not kinds <= _QUANTISED.keys(),
            f"only these kinds were tried: {', '.join(_QUANTISED.values())}: start vLLM with one of them",
        ),
        f"{quantization}: static scales": (
            is_static,
            "not tried, since vLLM's build for CPUs lacks their kernel: use a checkpoint with scales of weights by "
            "channels or blocks, and dynamic scales of inputs",
        ),
        f"{quantization}: weights kept by oneDNN": (
            outside,
            "after a reload vLLM's oneDNN kernel computed NaN; on a CPU with AMX vLLM does without it",
        ),
        f"{quantization}: experts, tensor_parallel_size > 1": (
            "Int8OnlineMoEMethod" in kinds and parallel.tensor_parallel_size > 1,
            "a rank that fails would stop the others, which wait for its scales; a quantised checkpoint has them",
        ),
        f"{quantization}: enable_expert_parallel": (has_experts and parallel.enable_expert_parallel, "not tried"),
        f"{quantization}: enable_lora": (bool(layers) and lora is not None, "not tried"),
        f"kv_cache_dtype={cache.cache_dtype!r}": (
            cache.cache_dtype not in ("auto", "float16", "bfloat16"),
            "its scales belong to the weights that vLLM was started with",
        ),
        "enable_lora (a mixture of experts)": (lora is not None and config.is_moe, "not tried"),
        "fully_sharded_loras": (lora is not None and lora.fully_sharded_loras, "not tried"),
        "enable_tower_connector_lora": (lora is not None and lora.enable_tower_connector_lora, "not tried"),
        f"speculative_config (method={'' if speculation is None else speculation.method!r})": (
            is_updated and speculation.method not in _DRAFTS,
            _DRAFT_NOT_TRIED,
        ),
        f"speculative_config (a draft model), {', '.join(name for name, is_on in draft_with.items() if is_on)}": (
            is_updated and any(draft_with.values()),
            _DRAFT_NOT_TRIED,
        ),
        "speculative_config (a draft model that keeps its weights), enable_sleep_mode": (
            keeps_draft(vllm_config) and config.enable_sleep_mode,
            "no update would bring the draft's weights back after a sleep of level 2",
        ),
        f"sleep_mode_backend={sleeps_by!r}": (
            config.enable_sleep_mode and sleeps_by != "cumem",
            "only of cumem vLLM says whether the weights are asleep, of other modes whether anything is: use cumem",
        ),
        "prefill_context_parallel_size > 1": (parallel.prefill_context_parallel_size > 1, "not tried"),
        "decode_context_parallel_size > 1": (parallel.decode_context_parallel_size > 1, "not tried"),
        "enable_eplb, eplb_config.use_async": (
            eplb and parallel.eplb_config.use_async,
            "a thread of vLLM copies experts during an install, and would put former ones back after it: start vLLM "
            "with --eplb-config.use_async=false",
        ),
        "enable_eplb, enable_sleep_mode": (
            eplb and config.enable_sleep_mode,
            "a sleep of level 2 also drops vLLM's record of where it has the experts",
        ),
        "enable_eplb, pipeline_parallel_size > 1": (eplb and parallel.pipeline_parallel_size > 1, "not tried"),
        "enable_elastic_ep": (parallel.enable_elastic_ep, "vLLM changes its number of ranks while it serves"),
        "cpu_offload_gb": (offload.uva.cpu_offload_gb > 0, "vLLM's own reload does not support it"),
        "offload_group_size": (offload.prefetch.offload_group_size > 0, "vLLM's own reload does not support it"),
    }
    return [f"{name} ({why})" for name, (is_on, why) in found.items() if is_on]


def updates_draft(vllm_config: Any) -> bool:
    """Return whether the engine has a draft model, which is updated with its main model."""
    return _has_draft(vllm_config) and not keeps_draft(vllm_config)


def keeps_draft(vllm_config: Any) -> bool:
    """Return whether the engine has a draft model, and was told to keep its weights (`KEEP_DRAFT`).

    Raises UnsupportedError for other options of weightcast in vLLM's `additional_config`.
    """
    additional = vllm_config.additional_config
    options = additional.get("weightcast", {}) if isinstance(additional, dict) else {}
    if options not in ({}, {"draft": "keep"}):
        raise UnsupportedError(f"unknown options {options!r} in vLLM's additional config: use {KEEP_DRAFT}, or none")
    return _has_draft(vllm_config) and bool(options)


def _has_draft(vllm_config: Any) -> bool:
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method not in _DRAFTS_WITHOUT_WEIGHTS


def is_quantised(layer: Any) -> bool:
    """Return whether vLLM computes with other tensors of a layer than a trainer has, or than the checkpoint has."""
    vllm, method = require(), getattr(layer, "quant_method", None)
    is_plain = isinstance(method, (vllm.linear_method, vllm.embedding_method, vllm.experts_method))
    return isinstance(method, vllm.quant_method) and not (is_plain or vllm.is_attention(layer))


def _has_static_scales(layer: Any) -> bool:
    """Return whether a quantised layer has one scale for a whole tensor, or scales of its inputs."""
    method, scheme = layer.quant_method, vars(layer).get("scheme")
    is_static = getattr(scheme, "is_static_input_scheme", False) or getattr(method, "act_q_static", False)
    return is_static or not getattr(method, "block_quant", True) or getattr(scheme, "strategy", "") == "tensor"


def weights_sleep(vllm_config: Any, device: torch.device) -> bool:
    """Return whether the weights' memory is unmapped now, so that an access would end the process."""
    if device.type != "cuda" or not vllm_config.model_config.enable_sleep_mode:
        return False
    allocator = importlib.import_module("vllm.device_allocator").get_mem_allocator_instance()
    return any(data.tag == "weights" and data.is_asleep for data in allocator.pointer_to_data.values())
