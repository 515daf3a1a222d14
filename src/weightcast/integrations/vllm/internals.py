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

from weightcast.errors import UnsupportedError

TESTED_WITH = "0.32"
_RELOAD = "vllm.model_executor.model_loader.reload"
_LAYERS = "vllm.model_executor.layers"
_INFO = (
    *("restore_metadata", "restore_device", "kernel_tensors", "kernel_non_persistent_buffers"),
    *("can_load", "reset"),
)

CHANGES = ("sleep", "discard", "reload_weights", "reset_weights")
"""The worker's methods by which vLLM changes the weights by itself, or frees their memory."""
_LORA_MANAGER = ("add_adapter", "remove_adapter", "_pin_lora_in_cpu_cache")
_DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that need no draft model."""


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
    linear_method: Annotated[type, f"{_LAYERS}.linear:UnquantizedLinearMethod"]
    embedding_method: Annotated[type, f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod"]
    is_attention: Annotated[Callable[[nn.Module], bool], f"{_LAYERS}.attention:is_deferred_attention_layer"]
    quant_method: Annotated[type, f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"]
    worker: Annotated[Any, "vllm.v1.worker.gpu_worker:Worker"]
    lora_model: Annotated[Any, "vllm.lora.lora_model:LoRAModel"]
    lora_settings: Annotated[Any, "vllm.lora.peft_helper:PEFTHelper"]
    lora_module: Annotated[Callable[[str, Any], tuple[str, bool]], "vllm.lora.utils:parse_fine_tuned_lora_name"]
    lora_manager: Annotated[Any, "vllm.lora.model_manager:LRUCacheLoRAModelManager"]

    @property
    def plain_methods(self) -> tuple[type, ...]:
        """Classes of quantisation methods that do not change weights, except on a CPU."""
        return self.linear_method, self.embedding_method


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
    info = found.get("layer_info_type")
    if info is not None:
        known = {field.name for field in dataclasses.fields(info)} | vars(info).keys()
        problems += [f"{_RELOAD}.types:LayerReloadingInfo.{name}" for name in _INFO if name not in known]
    worker = found.get("worker")
    if worker is not None:
        problems += [f"{worker.__name__}.{name}" for name in CHANGES if not hasattr(worker, name)]
    manager = found.get("lora_manager")
    if manager is not None:
        problems += [f"{manager.__name__}.{name}" for name in _LORA_MANAGER if not hasattr(manager, name)]
    if problems:
        raise UnsupportedError(
            f"vLLM {version()} lacks {len(problems)} names that weightcast needs ({'; '.join(problems)}): use vLLM "
            f"{TESTED_WITH}, or a weightcast version for this vLLM",
            problems,
        )
    return Internals(**found)


def version() -> str:
    """Return the version of the running vLLM."""
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


def unsupported(vllm_config: Any) -> list[str]:
    """Return the configured features with which dry runs and installs were not tested, by vLLM's names."""
    parallel, cache, offload = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.offload_config
    model, speculation, lora = vllm_config.model_config, vllm_config.speculative_config, vllm_config.lora_config
    quantization, sleeps_by = model.quantization, model.sleep_mode_backend
    has_draft = speculation is not None and speculation.method not in _DRAFTS_WITHOUT_WEIGHTS
    configured = {
        f"quantization={quantization!r}": quantization is not None,
        f"kv_cache_dtype={cache.cache_dtype!r}": cache.cache_dtype not in ("auto", "float16", "bfloat16"),
        "enable_lora (a mixture of experts)": lora is not None and model.is_moe,
        "fully_sharded_loras": lora is not None and lora.fully_sharded_loras,
        "enable_tower_connector_lora": lora is not None and lora.enable_tower_connector_lora,
        "speculative_config (a draft model)": has_draft,
        f"sleep_mode_backend={sleeps_by!r}": model.enable_sleep_mode and sleeps_by != "cumem",
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "prefill_context_parallel_size > 1": parallel.prefill_context_parallel_size > 1,
        "decode_context_parallel_size > 1": parallel.decode_context_parallel_size > 1,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "enable_eplb": parallel.enable_eplb,
        "enable_elastic_ep": parallel.enable_elastic_ep,
        "cpu_offload_gb": offload.uva.cpu_offload_gb > 0,
        "offload_group_size": offload.prefetch.offload_group_size > 0,
    }
    return [name for name, is_on in configured.items() if is_on]


def weights_sleep(vllm_config: Any, device: torch.device) -> bool:
    """Return whether the weights' memory is unmapped now, so that an access would end the process."""
    if device.type != "cuda" or not vllm_config.model_config.enable_sleep_mode:
        return False
    allocator = importlib.import_module("vllm.device_allocator").get_mem_allocator_instance()
    return any(data.tag == "weights" and data.is_asleep for data in allocator.pointer_to_data.values())
