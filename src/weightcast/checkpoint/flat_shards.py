"""Parameters that FSDP1 has flattened: a rank holds a run of each one's elements, as blocks of the global tensor.

A run in memory order is in general no block: it is the end of one row, whole rows, and the start of another, and so on
inwards, 2n - 1 blocks at most for n dims. Invariants: as in `sharding`; what is read is FSDP's sharded memory, which
optimizers update, whatever the module shows at the moment: whole parameters that a forward pass has left, or flat ones.
Only inside of `summon_full_params` are the module's own parameters taken, which a caller may be changing.
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
    """One parameter of a FlatParameter, number `index` there, and the module's own entry for it (it may be absent)."""

    handle: Any
    index: int
    module: nn.Module
    name: str

    @property
    def key(self) -> tuple[int, int]:
        """The same for tied parameters, and for no others."""
        return id(self.handle.flat_param), self.index

    def whole(self) -> torch.Tensor | None:
        """The module's own parameter where that is the whole one: unsharded, or in `summon_full_params`."""
        own = self.module._parameters.get(self.name)
        if own is None or (self.handle.uses_sharded_strategy and not self._is_summoned):
            return None
        return own if own.shape == self.handle.flat_param._shapes[self.index] else None

    def block(self, name: str) -> Block:
        """Return this rank's part, without communication or copy. Raises ValueError, naming the parameter `name`."""
        handle, flat, index = self.handle, self.handle.flat_param, self.index
        shape, info = tuple(flat._shapes[index]), flat._shard_param_infos[index]
        if flat._param_extensions[index] is not None:
            raise ValueError(
                f"{name!r} is sharded by FSDP1 and tensor parallelism at once, which is not supported: use FSDP2 "
                "(torch.distributed.fsdp.fully_shard) with tensor parallelism"
            )
        is_sharded, start = handle.is_sharded(flat), info.intra_param_start_idx
        # In the dtype that optimizers update.
        shard: torch.Tensor = (flat if is_sharded else getattr(flat, "_local_shard", flat)).detach()
        if not info.in_shard or self._is_summoned:
            # In summon_full_params(rank0_only=True), it is rank 0 that holds everything.
            local, start = shard[:0], 0
        elif handle._use_orig_params and is_sharded and not handle._skipped_use_sharded_views:
            # FSDP takes over what was assigned to it (`parameter.data = ...`) at its next forward pass.
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
"""Parameters of each module that FSDP1 has flattened, by name; None for a FlatParameter, which no checkpoint has."""


def flattened(wrappers: Sequence[Any]) -> FlattenedOf:
    """Of all that these wrap, in the order of the parameters."""
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
    """The blocks of a tensor that a run of its elements from `start` on is, with views of `local`."""
    # A transposed parameter is flattened as it lies in memory.
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))
    ordered = tuple(shape[dim] for dim in order)
    dense = row_major(ordered)
    if any(size > 1 and strides[dim] != step for dim, size, step in zip(order, ordered, dense, strict=True)):
        raise ValueError(f"{name!r} of {list(shape)} had the strides {list(strides)} when FSDP1 flattened it: has gaps")
    back = [order.index(dim) for dim in range(len(order))]
    done = 0
    for block in runs_as_blocks(ordered, start, start + local.numel()):
        part = local[done : done + block.numel].view(block.sizes).permute(back)
        done += block.numel
        yield Region(tuple(block.offsets[place] for place in back), tuple(part.shape)), part
