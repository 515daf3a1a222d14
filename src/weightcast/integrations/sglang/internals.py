"""Every undocumented name of SGLang that the plugin leans on, looked up when it is needed; and what was not tried.

Invariant: an SGLang that lacks one of these names is refused when a publisher connects, or serves without weightcast's
routes; it is never found out in the middle of an update.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from weightcast.errors import UnsupportedError

TESTED_WITH = "0.5.23"

SCHEDULER = "sglang.srt.managers.scheduler"
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
CHILDREN = (SCHEDULER, "sglang.srt.managers.detokenizer_manager", "sglang.srt.managers.data_parallel_controller")
"""Modules that SGLang's child processes run; the server's process loads plugins before it imports any of these."""
MADE = f"{SCHEDULER}.Scheduler.__init__"
"""Every scheduler process has one: by then its model is loaded."""
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
CALLED = f"{_UPDATER}.update_weights_from_tensor"
"""Method that a message to the scheduler processes runs in each of them, between two steps of the model."""
LOADED = tuple(
    f"{_UPDATER}.{name}"
    for name in ("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_ipc")
)
BEGUN = f"{_UPDATER}.begin_weight_update"
CHECKED = f"{_UPDATER}.check_weights"
RELEASED = f"{_UPDATER}.release_memory_occupation"
"""With `LOADED`, `BEGUN`, `CHECKED`: methods that other messages run there and that may change or free the weights.

Between the begin and end of a session a client may write to the weights past SGLang; a check may overwrite them."""
CHANGES = tuple(path.rpartition(".")[2] for path in (CALLED, *LOADED, BEGUN, CHECKED, RELEASED))
"""The names of these."""
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
ASKED = (
    f"{_CONTROL}.update_weights_from_tensor",
    f"{_CONTROL}.update_weights_from_distributed",
    f"{_CONTROL}.update_weights_from_ipc",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
)
"""Methods that SGLang's own routes for loading weights run in the process of the HTTP server."""
UNLABELLED = "default"
"""SGLang's label of weights that nobody has named."""
SERVED = f"{HTTP_SERVER}._setup_and_run_http_server"

_OFF: dict[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "kv_cache_dtype": ("auto", "float16", "bfloat16", "bf16", "float32"),
    "rl_quant_profile": (None,),
    "enable_lora": (None, False),
    "lora_paths": (None, [], {}),
    "speculative_algorithm": (None, "NGRAM"),  # which has no draft model
    "dp_size": (1,),
    "pp_size": (1,),
    "ep_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "moe_dp_size": (1,),
    "enable_eplb": (False,),
    "elastic_ep_backend": (None,),
    "cpu_offload_gb": (0,),
    "offload_group_size": (-1, 0),
    "weight_cache_mode": ("off",),
    "enable_memory_saver": (False,),
    "disaggregation_mode": ("null",),
    "tokenizer_worker_num": (1,),
}
"""The options that neither trying an offer nor an install was tested with, and their values without the feature."""


def io(name: str, **fields: Any) -> Any:
    """A request to SGLang's processes."""
    return getattr(importlib.import_module("sglang.srt.managers.io_struct"), name)(**fields)


def parallel() -> Any:
    """This process's ranks and groups."""
    return importlib.import_module("sglang.srt.runtime_context").get_parallel()


def require(subject: Any, *names: str) -> None:
    """Raises UnsupportedError, naming every attribute that `subject` lacks."""
    _refuse_if([f"{type(subject).__name__}.{name}" for name in names if not hasattr(subject, name)])


def require_arguments(function: Callable[..., Any], *names: str) -> None:
    """Raises UnsupportedError, naming every argument that `function` does not take."""
    known = inspect.signature(function).parameters
    _refuse_if([f"{function.__name__}({name})" for name in names if name not in known])


def version() -> str:
    """The version of the SGLang that runs here."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("sglang")
    return "unknown"


def _refuse_if(lacking: list[str]) -> None:
    if lacking:
        raise UnsupportedError(
            f"SGLang {version()} lacks {len(lacking)} of the names that weightcast leans on; use SGLang {TESTED_WITH}, "
            f"or a weightcast for this one: {', '.join(lacking)}",
            lacking,
        )


def unsupported(server_args: Any, model: nn.Module) -> list[str]:
    """Every configured feature that weightcast can't update an engine with, by SGLang's name for it."""
    require(server_args, *_OFF)
    found = {name: getattr(server_args, name) for name in _OFF}
    features = [f"{name}={value!r}" for name, value in found.items() if value not in _OFF[name]]
    if any(getattr(layer, "use_intel_amx_backend", False) for layer in model.modules()):
        features.append("weights packed for AMX, which SGLang can't unpack")
    derived = (getattr(layer, "_derived_weight_cache_error", None) for layer in model.modules())
    return features + [str(reason) for reason in derived if reason is not None]
