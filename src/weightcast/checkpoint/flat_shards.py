"""Parameters that FSDP1 has flattened: a rank holds a run of each one's elements, as blocks of the global tensor.

A run in memory order is in general no block: it is the end of one row, whole rows, and the start of another, and so on
inwards, 2n - 1 blocks at most for n dims. Invariants: as in `sharding`; what is read is FSDP's sharded memory, which
optimizers update, whatever the module shows at the moment: whole parameters that a forward pass has left, or flat ones.
Only inside of `summon_full_params` are the module's own parameters taken, which a caller may be changing.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from weightcast.checkpoint.sharding import Block


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
        """What this rank holds. No communication, no copy. Raises ValueError, which calls the parameter `name`."""
        flat, index = self.handle.flat_param, self.index
        shape, info = tuple(flat._shapes[index]), flat._shard_param_infos[index]
        if flat._param_extensions[index] is not None:
            raise ValueError(
                f"{name!r} is sharded by FSDP1 and tensor parallelism at once, which is not supported: use FSDP2 "
                "(torch.distributed.fsdp.fully_shard) with tensor parallelism"
            )
        # In summon_full_params(rank0_only=True), it is rank 0 that holds everything.
        is_held = info.in_shard and not self._is_summoned
        local = self._memory(name, info.numel_in_shard) if is_held else self._shard[:0]
        standin = torch.empty(shape, dtype=local.dtype, device="meta")
        start = info.intra_param_start_idx if is_held else 0
        return Block(name, standin, local, tuple(_boxes(name, shape, flat._strides[index], start, local)))

    @property
    def _is_summoned(self) -> bool:
        return bool(self.handle._training_state.name == "SUMMON_FULL_PARAMS")

    @property
    def _is_sharded(self) -> bool:
        return bool(self.handle.is_sharded(self.handle.flat_param))

    @property
    def _shard(self) -> torch.Tensor:
        """This rank's shard of the FlatParameter, in the dtype that optimizers update."""
        flat = self.handle.flat_param
        shard: torch.Tensor = flat if self._is_sharded else getattr(flat, "_local_shard", flat)
        return shard.detach()

    def _memory(self, name: str, numel: int) -> torch.Tensor:
        handle = self.handle
        if handle._use_orig_params and self._is_sharded and not handle._skipped_use_sharded_views:
            # FSDP takes over what was assigned to it (`parameter.data = ...`) at its next forward pass.
            own = self.module._parameters.get(self.name)
            if own is None or tuple(own.shape) != (numel,):
                raise ValueError(
                    f"{name!r} was replaced by {'nothing' if own is None else f'a tensor of {list(own.shape)}'} where "
                    f"FSDP1 had this rank's shard of [{numel}]: assign whole tensors inside of "
                    "FullyShardedDataParallel.summon_full_params"
                )
            return own.detach()
        start = handle.flat_param._shard_param_infos[self.index].offset_in_shard
        return self._shard[start : start + numel]


FlattenedOf: TypeAlias = dict[nn.Module, dict[str, Flattened | None]]
"""What FSDP1 has flattened of each module, by name; None for a FlatParameter itself, which belongs in no checkpoint."""


def wrappers(module: nn.Module) -> list[Any]:
    """The parts that FSDP1 has wrapped and flattened parameters of."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    parts = [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]
    return [part for part in parts if part._handle is not None]


def states(wrappers: Sequence[Any]) -> list[Any]:
    """What FSDP1 is doing, which the tensors of a rank that `summon_full_params` gave none do not show."""
    return [wrapper._handle._training_state for wrapper in wrappers]


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


def _boxes(
    name: str, shape: Sequence[int], strides: Sequence[int], start: int, local: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The blocks of a tensor that a run of its elements from `start` on is: offsets, and views of `local`."""
    # A transposed parameter is flattened as it lies in memory.
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))
    ordered = [shape[dim] for dim in order]
    dense = [math.prod(ordered[place + 1 :]) for place in range(len(ordered))]
    if any(size > 1 and strides[dim] != step for dim, size, step in zip(order, ordered, dense, strict=True)):
        raise ValueError(f"{name!r} of {list(shape)} had the strides {list(strides)} when FSDP1 flattened it: has gaps")
    back = [order.index(dim) for dim in range(len(order))]
    done = 0
    for offsets, sizes in runs_as_blocks(ordered, start, start + local.numel()):
        part = local[done : done + math.prod(sizes)].view(sizes)
        done += part.numel()
        yield tuple(offsets[place] for place in back), part.permute(back)


def runs_as_blocks(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements `start` to `stop` of a row-major tensor as blocks (offsets, sizes), in the order of the elements."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = tuple(shape[1:])
    row = math.prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if head:
        end = tail if first == last else row
        yield from (((first, *offsets), (1, *sizes)) for offsets, sizes in runs_as_blocks(inner, head, end))
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    if tail and first <= last:
        yield from (((last, *offsets), (1, *sizes)) for offsets, sizes in runs_as_blocks(inner, 0, tail))
