"""Copies between tensors: in host memory by the native core, to and from a GPU through pinned memory.

In host memory the calling thread copies, not torch's thread pool: when publisher and engines share a host, their pools
share its cores, and each barrier waits for a thread without a core. A copy as large as an install uses several threads.

Between host memory and a GPU torch waits for each tensor, which the driver copies through its own small buffer. This
module copies groups of tensors through two slots of pinned memory: one is written while the other is read.
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
from weightcast.native.deltas import ChangedWords
from weightcast.native.tables import CopyTable, Rows, same_places

_BYTES_PER_THREAD = 64 << 20
_MAX_THREADS = 4
"""Limit on the threads of one copy: fewer can saturate the memory, and other ranks copy at the same time."""
_PINNED_SLOTS, _PINNED_SLOT_BYTES = 2, 64 << 20
_SLOT_BYTES_PER_THREAD = 8 << 20
"""Bytes per thread for a slot, smaller than usual: a GPU waits for each slot, and is faster than one thread."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size, the dtype as which a GPU copies, since torch's batch copy there does not support every dtype."""
_CAST_IN_BATCHES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A target and its source."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Do what `torch._foreach_copy_` does, for any devices and dtypes. Raises RuntimeError as it does.

    Autograd does not notice the write: see `torch.autograd.graph.increment_version`.
    """
    PreparedCopies(targets, sources).run()


class PreparedCopies:
    """A repeatable `copy_all` of the same tensors, which are analysed once and kept.

    Before another `run`, `are_in_place` checks that the tensors still have their memory.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor | int],
        payloads: Sequence[torch.Tensor] = (),
        *,
        is_within_storage: bool = False,
    ) -> None:
        """`payloads`: those in host memory that have all sources. With them a source may be the address of a contiguous
        tensor of its target's shape and dtype. `is_within_storage`: see `CopyTable`.

        Raise ValueError for a tensor that ends beyond its storage, which may have been freed; RuntimeError for a tensor
        without memory that torch would have to copy.
        """
        self._table = table = CopyTable(targets, sources, sources_in=payloads, is_within_storage=is_within_storage)
        others = [(targets[number], _tensor_at(sources[number], targets[number], payloads)) for number in table.others]
        if any(not tensor.data_ptr() and tensor.nbytes for tensor in itertools.chain.from_iterable(others)):
            raise RuntimeError("a tensor to copy has no memory, since its storage was freed: load it back first")
        self._targets, self._places = list(targets), table.places
        # By address, since most sources are views of a few buckets.
        tensors = [tensor for tensor in payloads or sources if isinstance(tensor, torch.Tensor)]
        storages = {storage.data_ptr(): storage for storage in map(torch.Tensor.untyped_storage, tensors)}
        self._addresses, self._storages = list(storages), list(storages.values())
        self._rows_of_payload: Rows | None = None
        self._jobs: list[Callable[[], None]] = []
        # GPU copies run on the caller's stream. One call for each pair of dtypes and devices: torch before 2.11 writes
        # all targets in the first one's dtype if the sources have the same dtype.
        by_kind: dict[tuple[torch.dtype | torch.device, ...], list[Pair]] = {}
        with torch.no_grad():
            for target, source in itertools.starmap(_as_integers, others):
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
        """Return whether all tensors have their former memory. If not, a copy may write to memory of another owner.

        `targets`: False if the caller has just checked the targets.
        """
        are_sources = list(map(torch.UntypedStorage.data_ptr, self._storages)) == self._addresses
        return are_sources and (not targets or same_places(self._targets, self._places))

    def run(self, *, bytes_per_thread: int = _BYTES_PER_THREAD) -> None:
        """Make the copies. Raises RuntimeError as torch does."""
        # Not torch's number of threads, which an engine may have set to 1: it is paused during the copies.
        most = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._table.run(threads=max(1, min(self._table.num_bytes // bytes_per_thread, most)))
        for job in self._jobs:
            job()

    def run_changes(self, payload: torch.Tensor, changes: ChangedWords, *, former: bool = False) -> None:
        """Copy what changed to targets that have the former payload; see `ChangedWords.scatter`.

        All sources are views of this payload. Pairs that torch copies, such as casts, are copied in full; so are all if
        a copy reads words twice, as a broadcast does. `former` needs that there are no such copies (`can_restore`).
        """
        rows = self._rows_in(payload)
        if not changes.can_scatter(rows):
            assert not former
            self.run()
            return
        changes.scatter(rows, former=former, threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        for job in self._jobs:
            assert not former
            job()

    def can_restore(self, payload: torch.Tensor, changes: ChangedWords) -> bool:
        """Return whether `run_changes` can make the targets as they were before these changes."""
        return not self._jobs and changes.can_scatter(self._rows_in(payload))

    def _rows_in(self, payload: torch.Tensor) -> Rows:
        if self._rows_of_payload is None:
            self._rows_of_payload = self._table.rows_in(payload)
        return self._rows_of_payload


def _tensor_at(source: torch.Tensor | int, target: torch.Tensor, payloads: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a source; for an address, the view of the payload that has a tensor like the target there."""
    if isinstance(source, torch.Tensor):
        return source
    payload = next(p for p in payloads if 0 <= source - p.data_ptr() < p.nbytes)
    start = source - payload.data_ptr()
    return payload[start : start + target.nbytes].view(target.dtype).view(target.shape)


def _as_integers(target: torch.Tensor, source: torch.Tensor) -> Pair:
    """Return integer views of a pair with equal dtypes, whose bits are copied; other pairs unchanged."""
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
    """Yield the pairs, large ones split, in groups that fit into a slot of pinned memory."""
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
    """Copy through pinned memory. Copies to the host are finished when this returns; those to a GPU are queued on this
    thread's stream, and their sources were read. torch does not reuse pinned memory while copies from it are pending.
    """
    is_to_host = loads[0][0][0].is_cpu if loads else False
    slots: list[torch.Tensor] = []
    under_way: collections.deque[tuple[host_device.Event, list[torch.Tensor], list[torch.Tensor]]] = collections.deque()

    def finish() -> None:
        """Wait for the copies of the oldest slot; for copies to the host, write its tensors."""
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
