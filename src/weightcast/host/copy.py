"""Copies between tensors: in host memory by the native core, to and from a GPU by way of pinned memory.

In host memory the calling thread copies, not torch's team of threads: where publisher and engines share a host these
teams share its cores, and each barrier waits for a thread that has none. A copy as large as an install is shared out.

Between host memory and a GPU torch waits for each tensor, which the driver copies through a small buffer of its own.
Here they go in groups through two slots of pinned memory: one is written while the other is read.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from weightcast.host import device as host_device
from weightcast.native.tables import CopyTable, places

_BYTES_PER_THREAD = 64 << 20
_MAX_THREADS = 4
"""Fewer than these fill a memory channel's bandwidth, and other ranks copy beside them."""
_PINNED_SLOTS, _PINNED_SLOT_BYTES = 2, 64 << 20
_SLOT_BYTES_PER_THREAD = 8 << 20
"""A GPU waits for each slot, and one thread copies more slowly than a GPU does."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size, what a GPU copies tensors of one dtype as: torch's batch copy knows fewer dtypes there than tensors have."""
_CAST_IN_BATCHES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A target and its source."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`torch._foreach_copy_`, for tensors on any device and of any dtype; raises RuntimeError as that does.

    A target that autograd has saved for a backward pass is not noticed: see `torch.autograd.graph.increment_version`.
    """
    PreparedCopies(targets, sources).run()


class PreparedCopies:
    """`copy_all` of the same tensors, as often as wanted: what each pair needs is found out once.

    The tensors are kept. Before another `run`, `are_in_place` says whether it is the same copies still.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Raises ValueError for a tensor that ends outside of its storage, which may have been freed; RuntimeError for
        one without memory that torch is to copy.
        """
        self._table = table = CopyTable(targets, sources)
        others = (tensor for number in table.others for tensor in (targets[number], sources[number]))
        if any(not tensor.data_ptr() and tensor.nbytes for tensor in others):
            raise RuntimeError("the memory that is to be copied from or to was freed: its tensor has none")
        self._targets, self._places = list(targets), places(targets)
        # Most sources are views of a few buckets.
        self._storages = dict(zip(map(torch.UntypedStorage.data_ptr, table.storages), table.storages, strict=True))
        self._jobs: list[Callable[[], None]] = []
        # Copies of a GPU belong to the caller's stream. One call for each pair of dtypes and devices: torch before 2.11
        # writes all targets as if they were of the first one's dtype, where sources are of one.
        by_kind: dict[tuple[torch.dtype | torch.device, ...], list[Pair]] = {}
        with torch.no_grad():
            for number in table.others:
                target, source = _as_integers(targets[number], sources[number])
                kind = target.dtype, source.dtype, target.device, source.device
                by_kind.setdefault(kind, []).append((target, source))
        for (dtype, source_dtype, *_), pairs in by_kind.items():
            if {tensor.device.type for tensor in pairs[0]} == {"cpu", "cuda"}:
                self._jobs.append(functools.partial(_copy_by_pinned_slots, list(_slot_loads(pairs))))
            elif dtype != source_dtype and not {dtype, source_dtype}.issubset(_CAST_IN_BATCHES):
                self._jobs += [functools.partial(_copy_batch, [target], [source]) for target, source in pairs]
            else:
                self._jobs.append(functools.partial(_copy_batch, *zip(*pairs, strict=True)))

    def are_in_place(self, *, targets: bool = True) -> bool:
        """Return whether all tensors have the memory that they had. If not, a copy may reach memory of another owner.

        `targets`: False if the caller has just checked the targets.
        """
        are_sources = all(storage.data_ptr() == address for address, storage in self._storages.items())
        return are_sources and (not targets or places(self._targets) == self._places)

    def run(self, *, bytes_per_thread: int = _BYTES_PER_THREAD) -> None:
        """Copy. Raises RuntimeError as torch does."""
        # Not torch's number of threads, which an engine may have set to one: it computes nothing while it is copied to.
        most = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._table.run(threads=max(1, min(self._table.num_bytes // bytes_per_thread, most)))
        for job in self._jobs:
            job()


def _as_integers(target: torch.Tensor, source: torch.Tensor) -> Pair:
    """Views of a pair of one dtype by which its bits are copied; other pairs as they are."""
    dtype = _INTEGERS.get(target.itemsize)
    if target.dtype != source.dtype or dtype is None:
        return target, source
    if target.is_neg() or source.is_neg() or target.is_conj() or source.is_conj():
        return target, source
    return target.view(dtype), source.view(dtype)


def _copy_batch(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False
) -> None:
    with torch.inference_mode():
        if len(targets) == len(sources) == 1:
            targets[0].copy_(sources[0], non_blocking=non_blocking)
        else:
            torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def _slot_loads(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """The pairs, large ones cut, in groups that a slot of pinned memory has room for."""
    load, load_bytes = list[Pair](), 0
    pending = [(target, source.expand(target.shape)) for target, source in pairs if target.numel()][::-1]
    while pending:
        target, source = pending.pop()
        num_bytes = _slot_bytes(target, source)
        if num_bytes > _PINNED_SLOT_BYTES:
            if len(target) == 1:
                pending.append((target[0], source[0]))
            else:
                num_parts = -(-num_bytes // _PINNED_SLOT_BYTES)
                pending += zip(target.chunk(num_parts)[::-1], source.chunk(num_parts)[::-1], strict=True)
            continue
        if load_bytes + num_bytes > _PINNED_SLOT_BYTES:
            yield load
            load, load_bytes = [], 0
        load.append((target, source))
        load_bytes += num_bytes
    if load:
        yield load


def _slot_bytes(target: torch.Tensor, source: torch.Tensor) -> int:
    """Return the bytes of a pair in a slot, in the host tensor's dtype (a GPU casts faster), aligned for any dtype."""
    host = target if target.is_cpu else source
    return -(-target.numel() * host.itemsize // 16) * 16


def _copy_by_pinned_slots(loads: Sequence[list[Pair]]) -> None:
    """Copies to the host are over when this returns; those to a GPU are queued on this thread's stream, their sources
    read. torch gives pinned memory to nobody else while copies of it are under way.
    """
    is_to_host = loads[0][0][0].is_cpu if loads else False
    slots: list[torch.Tensor] = []
    under_way: collections.deque[tuple[host_device.Event, list[torch.Tensor], list[torch.Tensor]]] = collections.deque()

    def finish() -> None:
        """Wait for the copies of the slot that was used the longest ago; to the host, write its tensors."""
        done, targets, parts = under_way.popleft()
        done.synchronize()
        if is_to_host:
            PreparedCopies(targets, parts).run(bytes_per_thread=_SLOT_BYTES_PER_THREAD)

    largest = max((sum(itertools.starmap(_slot_bytes, load)) for load in loads), default=0)
    for number, load in enumerate(loads):
        if len(slots) < _PINNED_SLOTS:
            slots.append(host_device.pinned(largest))
        else:
            finish()
        targets, sources = map(list, zip(*load, strict=True))
        parts, start = list[torch.Tensor](), 0
        for target, source in load:
            part = slots[number % _PINNED_SLOTS][start : start + _slot_bytes(target, source)]
            typed = part.view((target if is_to_host else source).dtype)
            parts.append(typed[: target.numel()].view(target.shape))
            start += part.numel()
        if not is_to_host:
            PreparedCopies(parts, sources).run(bytes_per_thread=_SLOT_BYTES_PER_THREAD)
        _copy_batch(*((parts, sources) if is_to_host else (targets, parts)), non_blocking=True)
        on_device = sources[0] if is_to_host else targets[0]
        under_way.append((host_device.recorded(on_device.device), targets, parts))
    while is_to_host and under_way:
        finish()
