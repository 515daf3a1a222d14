"""Parameters that FSDP1 has flattened: a rank has a run of each parameter's elements, as blocks of the global tensor.

A run in memory order is the end of one row, whole rows, and the start of another, recursively: at most 2n - 1 blocks
for n dims. Invariants: those of `sharding`; the memory that is read is FSDP's shard, which the optimizer updates, also
while the module shows unsharded or flat parameters. Only inside `summon_full_params` the module's own parameters are
read, since the caller may change them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from weightcast.checkpoint.sharding import Block
from weightcast.format.geometry import Region, row_major, runs_as_blocks
from weightcast.seams.source import Held


@dataclasses.dataclass(frozen=True, slots=True)
class Flattened:
    """Parameter number `index` of a FlatParameter, and the module's entry for it, which may be absent."""

    handle: Any
    index: int
    module: nn.Module
    name: str

    @property
    def key(self) -> tuple[int, int]:
        """Return a key that is equal for tied parameters only."""
        return id(self.handle.flat_param), self.index

    def whole(self) -> torch.Tensor | None:
        """Return the module's parameter if it is the whole one: unsharded, or in `summon_full_params`. Else None."""
        own = self.module._parameters.get(self.name)
        if own is None or (self.handle.uses_sharded_strategy and not self._is_summoned):
            return None
        return own if own.shape == self.handle.flat_param._shapes[self.index] else None

    def block(self, name: str) -> Block:
        """Return this rank's part, without communication or copy. Raises ValueError with `name`."""
        handle, flat, index = self.handle, self.handle.flat_param, self.index
        shape, info = tuple(flat._shapes[index]), flat._shard_param_infos[index]
        if flat._param_extensions[index] is not None:
            raise ValueError(
                f"{name!r} is sharded by FSDP1 and tensor parallelism at once, which is not supported: use FSDP2 "
                "(torch.distributed.fsdp.fully_shard) with tensor parallelism"
            )
        is_sharded, start = handle.is_sharded(flat), info.intra_param_start_idx
        # The shard in the dtype that the optimizer updates.
        shard: torch.Tensor = (flat if is_sharded else getattr(flat, "_local_shard", flat)).detach()
        if not info.in_shard or self._is_summoned:
            # Within summon_full_params(rank0_only=True), rank 0 has everything.
            local, start = shard[:0], 0
        elif handle._use_orig_params and is_sharded and not handle._skipped_use_sharded_views:
            # FSDP adopts an assigned tensor (`parameter.data = ...`) only at its next forward pass.
            own = self.module._parameters.get(self.name)
            if own is None or tuple(own.shape) != (info.numel_in_shard,):
                raise ValueError(
                    f"{name!r} was replaced by {'nothing' if own is None else f'a tensor of {list(own.shape)}'} where "
                    f"FSDP1 had this rank's shard of [{info.numel_in_shard}]: assign whole tensors inside of "
                    "FullyShardedDataParallel.summon_full_params"
                )
            local = own.detach()
        else:
            local = shard[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
        standin = torch.empty(shape, dtype=local.dtype, device="meta")
        return Block(name, standin, local, tuple(_boxes(name, shape, flat._strides[index], start, local)))

    @property
    def _is_summoned(self) -> bool:
        return bool(self.handle._training_state.name == "SUMMON_FULL_PARAMS")


FlattenedOf: TypeAlias = dict[nn.Module, dict[str, Flattened | None]]
"""By module, its parameters that FSDP1 has flattened, by name; None for a FlatParameter, which checkpoints lack."""


def flattened(wrappers: Sequence[Any]) -> FlattenedOf:
    """Return the flattened parameters of all modules in these wrappers, in the order of the parameters."""
    found: FlattenedOf = {}
    for wrapper in wrappers:
        handle = wrapper._handle
        flat, places = handle.flat_param, {}
        found.setdefault(wrapper.module, {})["_flat_param"] = None
        for index, (name, part, _) in enumerate(flat._param_infos):
            places[part, name] = index
            found.setdefault(part, {})[name] = Flattened(handle, index, part, name)
        for name, part, _, first_name, first_part, _ in flat._shared_param_infos:
            found.setdefault(part, {})[name] = Flattened(handle, places[first_part, first_name], part, name)
    return found


def _boxes(name: str, shape: Sequence[int], strides: Sequence[int], start: int, local: torch.Tensor) -> Iterator[Held]:
    """Yield the blocks of a tensor that a run of its elements from `start` on consists of, with views of `local`."""
    # A transposed parameter is flattened in the order of its memory.
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))
    ordered = tuple(shape[dim] for dim in order)
    dense = row_major(ordered)
    if any(size > 1 and strides[dim] != step for dim, size, step in zip(order, ordered, dense, strict=True)):
        raise ValueError(
            f"{name!r} of shape {list(shape)} had gaps in memory (strides {list(strides)}) when FSDP1 flattened it: "
            "make the parameter contiguous before wrapping"
        )
    back = [order.index(dim) for dim in range(len(order))]
    done = 0
    for block in runs_as_blocks(ordered, start, start + local.numel()):
        part = local[done : done + block.numel].view(block.sizes).permute(back)
        done += block.numel
        yield Region(tuple(block.offsets[place] for place in back), tuple(part.shape)), part
