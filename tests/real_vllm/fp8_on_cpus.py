"""What vLLM lacks on CPUs without AMX for weights in fp8 by blocks: a kernel.

The tests add one there, so that checkpoints of that kind are tested on every CPU. It keeps weights as vLLM loads them.
"""

from __future__ import annotations

from typing import Any

import torch


def add_kernel() -> None:
    """To vLLM's kernels, in this process, if this CPU has no AMX. Idempotent."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.platforms.interface import PlatformEnum

    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if torch.cpu._is_amx_tile_supported() or any(kernel.__name__ == "Plain" for kernel in kernels):
        return

    class Plain(CPUFp8BlockScaledMMKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            pass

        def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> Any:
            rows, columns = self.weight_group_shape
            scale = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            num_rows, num_columns = layer.weight.shape
            weight = (layer.weight.float() * scale[:num_rows, :num_columns]).to(x.dtype)
            return torch.nn.functional.linear(x, weight, bias)

    kernels.append(Plain)
