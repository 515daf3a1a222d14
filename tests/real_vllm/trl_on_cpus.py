"""What TRL 1.16's trainers want of a GPU without a need for it. `trl_on_cpus.py PROGRAM ARGUMENTS` runs a program so.

The program is imported under its own name, by which the processes that TRL spawns find its functions.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState


def train_without_a_gpu() -> None:
    """For the asynchronous trainers: the name of the GPU, and its kernel for attention over packed sequences."""
    from trl.experimental.async_grpo import packing

    torch.cuda.get_device_name = lambda *_: "cpu"
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_attend)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *_: Any, **options: Any
) -> torch.Tensor:
    outputs = []
    for i in range(len(cu_q) - 1):
        parts = (q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]])
        heads = [part.transpose(0, 1)[None] for part in parts]
        # What a group shares, its queries leave out and its keys have: the last query sees the last key.
        num_q, num_k = len(parts[0]), len(parts[1])
        mask = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        output = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=options["softmax_scale"], enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def shard_without_gpus() -> dict[str, Any]:
    """The arguments of a trainer that shards a Qwen3 with FSDP2, which accelerate allows on GPUs only."""
    make = AcceleratorState.__init__

    def make_sharding(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        make(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState().distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = make_sharding
    return {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}


def main() -> None:
    train_without_a_gpu()
    program = Path(sys.argv.pop(1))
    sys.path.insert(0, str(program.parent))
    importlib.import_module(program.stem).main()


if __name__ == "__main__":
    main()
