"""What Megatron-core (0.16, 0.19) needs to train on CPUs: devices by name, CUDA's random states, missing kernels.

Each patch changes one name of one module. torch itself stays as it is, so that nothing else of the process is touched;
but for `torch.cuda.current_device`, and the names of tensor types and `Tensor.cuda`, where a case asks for them.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from typing import Any

import torch

_MODULES = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.utils",
)
"""These write device="cuda"."""


class _OnCpu(types.ModuleType):
    """torch, as such a module sees it."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _on_cpu(found) if name in ("zeros", "tensor") else found


def _on_cpu(make: Any) -> Any:
    def making(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        made: torch.Tensor = make(*args, **kwargs)
        return made

    return making


def train_on_cpu() -> None:
    """What every case needs. Call it before a model is built."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    for name in _MODULES:
        importlib.import_module(name).torch = _OnCpu("torch")  # type: ignore[attr-defined]
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    # True by mistake, and undefined instead of None, where Transformer Engine is missing.
    importlib.import_module("megatron.core.transformer.multi_latent_attention").HAVE_TE = False  # type: ignore[attr-defined]
    importlib.import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None


def share_embeddings() -> None:
    """Tied weights over pipeline stages go through `Tensor.cuda`."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def own_optimizers() -> None:
    """Megatron's optimizers ask for types by CUDA's names."""
    plain = torch.Tensor.type

    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = named  # type: ignore[method-assign]
    torch.cuda.FloatTensor = torch.FloatTensor  # type: ignore[misc]
    torch.cuda.IntTensor = torch.IntTensor  # type: ignore[misc]


def fused_norms(layer: type) -> None:
    """From Megatron-core 0.19 on latent attention takes no other layer with a norm inside than its backend's."""
    provider: Any = importlib.import_module("megatron.core.extensions.transformer_engine_spec_provider")
    provider.TELayerNormColumnParallelLinear = layer


def delta_net() -> None:
    """What it takes from flash-linear-attention, which is for GPUs; the rule itself Megatron has in torch as well."""
    found: Any = importlib.import_module("megatron.core.ssm.gated_delta_net")
    # One module up to Megatron-core 0.18, from 0.19 on a package with the class in one module and its base in another.
    for name in {cls.__module__ for cls in found.GatedDeltaNet.__mro__ if cls.__module__.startswith(found.__name__)}:
        module: Any = importlib.import_module(name)
        module.HAVE_FLA = True
        module.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def grouped_gemm() -> None:
    """GroupedMLP's kernel, as a loop."""

    def gmm(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
        parts = torch.split(x, counts.tolist())
        return torch.cat([p @ (w[i].t() if trans_b else w[i]) for i, p in enumerate(parts)])

    module = importlib.import_module("megatron.core.transformer.moe.grouped_gemm_util")
    module.grouped_gemm = True
    module.ops = types.SimpleNamespace(gmm=gmm)
