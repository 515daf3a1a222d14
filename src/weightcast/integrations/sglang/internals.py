"""Every undocumented name of SGLang that the plugin needs, looked up at start; and the untested features.

Invariant: with an SGLang that lacks one of these names, a publisher is refused when it connects, or the server has no
weightcast routes; a missing name is never found only during an update.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

from weightcast.errors import UnsupportedError, lacking

TESTED_WITH = "0.5.23"

SCHEDULER = "sglang.srt.managers.scheduler"
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
CHILDREN = (SCHEDULER, "sglang.srt.managers.detokenizer_manager", "sglang.srt.managers.data_parallel_controller")
"""Modules that SGLang's child processes run. The server's process loads plugins before it imports any of these."""
MADE = f"{SCHEDULER}.Scheduler.__init__"
"""Class that every scheduler process creates once its model is loaded."""
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
CALLED = f"{_UPDATER}.update_weights_from_tensor"
"""Method that a message runs in every scheduler process, between two steps of the model."""
LOADED = (
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.update_weights_from_distributed",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.begin_weight_update",
)
CHECKED = f"{_UPDATER}.check_weights"
RELEASED = f"{_UPDATER}.release_memory_occupation"
"""With `LOADED`, `CHECKED`: methods that other messages run there and that may change or free the weights.

Between the begin and end of a session a client may write to the weights past SGLang; a check may overwrite them."""
CHANGES = tuple(path.rpartition(".")[2] for path in (CALLED, *LOADED, CHECKED, RELEASED))
"""The same methods, by name."""
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
ASKED = (
    f"{_CONTROL}.update_weights_from_tensor",
    f"{_CONTROL}.update_weights_from_distributed",
    f"{_CONTROL}.update_weights_from_ipc",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
)
"""Methods that SGLang's own routes for loading weights run in the HTTP server's process."""
UNLABELLED = "default"
"""SGLang's label of weights without a name."""
SERVED = f"{HTTP_SERVER}._setup_and_run_http_server"

DRAFT_VARIABLE = "WEIGHTCAST_DRAFT"
"""Environment variable of SGLang: with "keep" only the main model of an engine is updated."""
KEEP_DRAFT = f"{DRAFT_VARIABLE}=keep in its environment"
_NOT_TRIED = "not tried"
_DRAFT_NOT_TRIED = f"not tried, unless the draft model keeps its weights: start SGLang with {KEEP_DRAFT}"
_OF_DRAFTS = (
    *("speculative_algorithm", "speculative_token_map", "speculative_draft_model_quantization"),
    "enable_multi_layer_eagle",
)
"""Options that do not matter if the draft model keeps its weights."""
_QUANTISED = (
    "not tried, since SGLang needs a GPU, AMX or Arm to serve them: start it from a checkpoint that is not quantised, "
    "or use vLLM"
)
_EXPERTS_MOVED = "not tried; SGLang moves experts between ranks while it serves"
_OFF: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization": ((None,), _QUANTISED),
    "modelopt_quant": ((None,), _QUANTISED),
    "kt_weight_path": ((None,), _QUANTISED),
    "kv_cache_dtype": (
        ("auto", "float16", "bfloat16", "bf16", "float32"),
        "its scales belong to the weights that SGLang was started with",
    ),
    "rl_quant_profile": ((None,), _QUANTISED),
    "enable_lora_overlap_loading": ((None, False), _NOT_TRIED),
    "speculative_algorithm": ((None, "NGRAM", "EAGLE", "STANDALONE"), _DRAFT_NOT_TRIED),
    "speculative_token_map": ((None,), _DRAFT_NOT_TRIED),
    "speculative_draft_model_quantization": ((None,), _DRAFT_NOT_TRIED),
    "enable_multi_layer_eagle": ((False,), _DRAFT_NOT_TRIED),
    "dp_size": ((1,), "its engines would not agree on a version"),
    "pp_size": ((1,), _NOT_TRIED),
    "ep_size": ((1,), _NOT_TRIED),
    "dcp_size": ((1,), _NOT_TRIED),
    "attn_cp_size": ((1,), _NOT_TRIED),
    "moe_dp_size": ((1,), _NOT_TRIED),
    "enable_eplb": ((False,), _EXPERTS_MOVED),
    "elastic_ep_backend": ((None,), _EXPERTS_MOVED),
    "cpu_offload_gb": ((0,), _NOT_TRIED),
    "offload_group_size": ((-1, 0), _NOT_TRIED),
    "weight_cache_mode": (("off",), "SGLang's own update session refuses it"),
    "disaggregation_mode": (("null",), _NOT_TRIED),
    "tokenizer_worker_num": ((1,), "the workers would not agree on a version"),
}
"""Options with which weightcast can't update an engine: their values when the feature is off, and the reason."""


def looked_up(path: str) -> Any:
    """Return a function or class of SGLang, by `module:name`. Raises UnsupportedError if this SGLang has none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as exc:
        raise lacking("SGLang", version(), TESTED_WITH, [f"{module}.{name}"]) from exc


def io(name: str, **fields: Any) -> Any:
    """Return a request object for SGLang's processes."""
    return looked_up(f"sglang.srt.managers.io_struct:{name}")(**fields)


def adapter_record() -> Any:
    """Return SGLang's class of records of adapters. Raises UnsupportedError if this SGLang has none."""
    record = looked_up("sglang.srt.lora.lora_registry:LoRARef")
    require(record, "deterministic_id")
    return record


def adapter(label: str, run: str, *, is_pinned: bool) -> Any:
    """Return SGLang's record of a version of an adapter. Equal in all processes.

    `is_pinned`: in a registry, SGLang does not unload it for others; in a scheduler, it keeps a place in every batch.
    """
    record = adapter_record()
    # The path is never read.
    path = f"weightcast://{run}/{label}"
    return record(lora_id=record.deterministic_id(label, path), lora_name=label, lora_path=path, pinned=is_pinned)


def parallel() -> Any:
    """Return SGLang's parallel state of this process."""
    return looked_up("sglang.srt.runtime_context:get_parallel")()


def resolved(server_args: Any) -> Any:
    """Return SGLang's options with what it has decided itself, for example for this model. Raises UnsupportedError."""
    return looked_up("sglang.srt.arg_groups.overrides:resolved_view")(server_args)


def draft_runner(scheduler: Any) -> Any:
    """Return the ModelRunner of a scheduler's (first) draft model; None without speculation, and with n-grams."""
    worker = scheduler.draft_worker
    if worker is None:
        return None
    require(worker, "weight_update_runners")
    return next((runner for _, runner in worker.weight_update_runners()), None)


def keeps_draft(value: str) -> bool:
    """Return whether SGLang was told to keep the draft model's weights: the value of `DRAFT_VARIABLE`.

    Raises UnsupportedError for another value.
    """
    if value not in ("", "keep"):
        raise UnsupportedError(f"unknown {DRAFT_VARIABLE}={value!r}: start SGLang with {KEEP_DRAFT}, or without it")
    return bool(value)


def require(subject: Any, *names: str) -> None:
    """Raise UnsupportedError with every attribute that `subject` lacks."""
    _refuse_if([f"{type(subject).__name__}.{name}" for name in names if not hasattr(subject, name)])


def require_arguments(function: Callable[..., Any], *names: str) -> None:
    """Raise UnsupportedError with every argument that `function` lacks."""
    known = inspect.signature(function).parameters
    _refuse_if([f"{function.__name__}({name})" for name in names if name not in known])


def version() -> str:
    """Return the version of the running SGLang."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("sglang")
    return "unknown"


def _refuse_if(names: list[str]) -> None:
    if names:
        raise lacking("SGLang", version(), TESTED_WITH, names)


def unsupported(options: Any, runner: Any, draft: Any = None, *, keeps_draft: bool = False) -> list[str]:
    """Return the features with which weightcast can't update an engine, by SGLang's names, each with the reason.

    `options`: SGLang's, `resolved`. `runner`: SGLang's ModelRunner. `draft`: that of a draft model that is updated with
    it. `keeps_draft`: there is a draft model, and it keeps its weights.
    """
    require(options, *_OFF, "enable_memory_saver", "enable_weights_cpu_backup")
    found = {name: getattr(options, name) for name in _OFF}
    # A checkpoint's own quantisation is not among the options.
    found["quantization"] = found["quantization"] or runner.model_config.quantization
    if draft is not None:
        of_draft = "speculative_draft_model_quantization"
        found[of_draft] = found[of_draft] or draft.model_config.quantization
    if keeps_draft:
        found = {name: value for name, value in found.items() if name not in _OF_DRAFTS}
    features = [f"{n}={value!r} ({_OFF[n][1]})" for n, value in found.items() if value not in _OFF[n][0]]
    layers = [layer for each in (runner, draft) if each is not None for layer in each.model.modules()]
    if runner.lora_manager is not None:
        experts = looked_up("sglang.srt.lora.layers:FusedMoEWithLoRA")
        if any(isinstance(layer, experts) for layer in layers):
            features.append(f"a mixture of experts with LoRA ({_NOT_TRIED})")
        if draft is not None:
            features.append(f"a draft model with enable_lora ({_DRAFT_NOT_TRIED})")
    if options.enable_memory_saver and (runner.lora_manager is not None or draft is not None or keeps_draft):
        features.append(f"enable_memory_saver with enable_lora or a draft model ({_NOT_TRIED})")
    if any(getattr(layer, "use_intel_amx_backend", False) for layer in layers):
        features.append("weights packed for AMX, which SGLang can't unpack")
    derived = (getattr(layer, "_derived_weight_cache_error", None) for layer in layers)
    return features + [str(reason) for reason in derived if reason is not None]
