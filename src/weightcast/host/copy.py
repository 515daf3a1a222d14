"""Copies between tensors: in host memory without torch's team of threads, to and from a GPU by way of pinned memory.

torch copies every large tensor with all its threads and a barrier. Where publisher and engines share a host these teams
share its cores, and each barrier waits for a thread that has none: a copy of many tensors takes many times as long.
Here the calling thread copies; a copy as large as an install is shared out, in pieces, with one wait at its end.

Between host memory and a GPU torch waits for each tensor, which the driver copies through a small buffer of its own.
Here they go in groups through two slots of pinned memory: one is written while the other is read, by several threads.

What was prepared for tensors is good while they stay where they are, which `TensorPlaces` sees for all of them at once.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from weightcast.host import device as host_device
from weightcast.host.closing import ClosedOnExit

PLAIN_BYTES = 64 << 10
"""From here on a plain copy is worth a call of its own, in which other Python threads run.

Below, torch uses no team, and what it does for a tensor besides takes as long as the copy. Where copies are kept for
the next time, Python makes these.
"""

_HOST_MEMORY = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")
"""The memory of this process, by address."""
_INLINE_DIMS = 5
"""torch's tensors have sizes and strides of more dims in memory of their own."""
_FORM_WORDS = 1 + 2 * _INLINE_DIMS + 2


class _Unshown(np.ndarray[Any, Any]):
    """Most of this can't be read: no debugger and no report of an error is to try."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    __str__ = __repr__


_WORDS = np.frombuffer(_HOST_MEMORY.toreadonly()[8 : 1 << 62], dtype=np.int64).view(_Unshown)
"""The same in words of 8 bytes, to be read, from the second one on: NumPy takes no array that begins at address 0."""
_FORMS = np.ndarray(1 << 53, f"V{8 * _FORM_WORDS}", buffer=_WORDS, strides=(8,)).view(_Unshown)
"""So many words from each word on."""
_PIECE_BYTES = 4 << 20
_SMALL_BATCH_BYTES = 1 << 20
_BATCH_TENSORS = 2048
_BYTES_PER_THREAD = 64 << 20
_MAX_THREADS = 4
"""Fewer than these fill a memory channel's bandwidth, and other ranks copy beside them."""
_PINNED_SLOTS, _PINNED_SLOT_BYTES = 2, 64 << 20
_SLOT_BYTES_PER_THREAD = 8 << 20
"""A GPU waits for each slot, and one thread copies more slowly than a GPU does."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size, what a GPU copies tensors of one dtype as: torch's batch copy knows fewer dtypes there than tensors have."""
_CAST_IN_BATCHES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LOOKED_AT_WORDS = 24
"""Of an object of torch's."""
_SAMPLES = (
    ((3, 5, 7, 2, 4), (1009, 211, 29, 13, 3), 17),
    ((6, 4, 2, 3, 5), (907, 199, 31, 11, 2), 41),
    ((8, 2, 3, 9, 6), (803, 401, 97, 19, 5), 23),
)
_TYPES = (torch.Tensor, torch.nn.Parameter)
_address = torch.Tensor.data_ptr
_num_bytes = operator.attrgetter("nbytes")
_itemsize = operator.attrgetter("itemsize")
_dtype_of = operator.attrgetter("dtype")
_LOOKS = (_address, torch.Tensor.numel, torch.Tensor.stride)
_is_cpu = operator.attrgetter("is_cpu")
_assign: Any = operator.setitem

Ints: TypeAlias = np.ndarray[Any, Any]
Job: TypeAlias = Callable[[], None]
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A target and its source."""


class TensorPlaces:
    """Where tensors lie in memory, in which form and dtype, for finding out whether that is still so. They are kept.

    torch tells it of one tensor at a time, which for many small ones takes as long as their copies. It stands in the
    C++ objects of the tensors, which are read here for all of them at once. Where in these it is was found by looking
    (see `_object_layout`), and is compared with what torch tells of each; torch is asked about those of which it is not
    so: tensors of more than five dims, or without elements. Engines' classes of tensors, which may answer each call in
    Python, are not asked themselves.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.addresses = list(map(_address, tensors))
            itemsizes = np.fromiter(map(_itemsize, tensors), np.int64, len(tensors))
        self._tensors = tensors
        self._reads: list[tuple[Callable[[Ints], Ints], Ints, Ints]] = []
        """What reads, where, and what it found there."""
        is_read, layout = np.zeros(len(tensors), dtype=bool), _object_layout()
        if layout is not None and all(issubclass(kind, torch._C.TensorBase) for kind in set(map(type, tensors))):
            objects = words_of(tensors)
            impls = word_of(words_at(objects + layout.impl))
            storages, forms = words_at(impls + layout.storage), _forms_at(impls + layout.form)
            is_read = (storages != 0) & (forms[:, 0] <= _INLINE_DIMS)
            memory = np.zeros_like(storages)
            memory[is_read] = words_at(word_of(storages[is_read]) + layout.data)
            is_read &= memory + forms[:, -2] * itemsizes == self.addresses
            objects, impls, storages = objects[is_read], impls[is_read], word_of(storages[is_read])
            # In this order: a storage is read once it is known that its tensor still has it.
            for read, places in (
                (words_at, objects + layout.impl),
                (words_at, impls + layout.storage),
                (_forms_at, impls + layout.form),
                (words_at, storages + layout.data),
            ):
                self._reads.append((read, places, read(places)))
        self._others = list(itertools.compress(tensors, ~is_read))
        self._looks = self._look()

    def are_same(self) -> bool:
        """Whether each has the memory, sizes, strides and dtype that it had."""
        are_as_found = (np.array_equal(read(places), found) for read, places, found in self._reads)
        return all(are_as_found) and self._look() == self._looks

    def _look(self) -> list[list[Any]]:
        with torch._C.DisableTorchFunctionSubclass():
            return [list(map(_dtype_of, self._tensors)), *(list(map(look, self._others)) for look in _LOOKS)]


class _ObjectLayout(NamedTuple):
    """Where torch's objects have what `TensorPlaces` reads, in words from their beginnings.

    `impl`: in a Python tensor, the address of its C++ object. `storage`: in that, the address of the storage's; `form`:
    there too, the number of dims, five sizes, five strides, the offset, the number of elements. `data`: in a storage,
    the address of its memory.
    """

    impl: int
    storage: int
    form: int
    data: int


@functools.cache
def _object_layout() -> _ObjectLayout | None:
    """Found by looking for what torch tells of some tensors in their objects; None where it is not there."""
    plain = [torch.empty(9999, dtype=torch.uint8).as_strided(*form) for form in _SAMPLES]
    tensors = [*plain, torch.nn.Parameter(plain[0], requires_grad=False)]

    def find(address: Callable[[Any], int], told: Callable[[Any], Sequence[int]]) -> int | None:
        """The first word of the objects from which on each has what was told of it."""
        places = [(word_of(address(tensor)), told(tensor)) for tensor in tensors]
        for number in range(_LOOKED_AT_WORDS):
            if all([*words_at(range(n := first + number, n + len(values)))] == values for first, values in places):
                return number
        return None

    storage_of, impl_of = torch.Tensor.untyped_storage, operator.attrgetter("_cdata")
    impl = find(id, lambda t: [t._cdata])
    storage = find(impl_of, lambda t: [storage_of(t)._cdata])
    form = find(impl_of, lambda t: [t.ndim, *t.shape, *t.stride(), t.storage_offset(), t.numel()])
    data = find(lambda t: storage_of(t)._cdata, lambda t: [storage_of(t).data_ptr()])
    if impl is None or storage is None or form is None or data is None:
        return None
    return _ObjectLayout(impl, storage, form, data)


def word_of(address: Any) -> Any:
    """The word at an address of this process, or at each of an array's, for `words_at`."""
    return address // 8 - 1


def words_of(objects: Sequence[object]) -> Ints:
    """The first word of each object."""
    return np.asarray(word_of(np.fromiter(map(id, objects), np.int64, len(objects))))


def words_at(places: Ints | Sequence[int]) -> Ints:
    """What stands in these words, for what Python and torch tell of one object at a time, of tens of thousands.

    They have to belong to objects that are alive.
    """
    return np.asarray(_WORDS[places])


def _forms_at(places: Ints) -> Ints:
    return np.asarray(_FORMS[places]).view(np.int64).reshape(-1, _FORM_WORDS)


def is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `copy_plain` may take this pair: large, and its bytes can be copied as they are."""
    return target.nbytes >= PLAIN_BYTES and _has_equal_bytes(target, source)


def _has_equal_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy is one of bytes in a row: both in host memory, contiguous, one dtype, equal shapes."""
    return (
        target.dtype == source.dtype
        and target.shape == source.shape
        and not target.dtype.is_complex
        and type(target) in _TYPES
        and type(source) in _TYPES
        and target.is_cpu
        and source.is_cpu
        and target.is_contiguous()
        and source.is_contiguous()
        and not (source.is_neg() or target.is_neg())
    )


def copy_plain(target: torch.Tensor, source: torch.Tensor, start_bytes: int, size_bytes: int) -> None:
    """Copy those bytes of a pair that `is_plain` accepts. Other Python threads run meanwhile."""
    ctypes.memmove(target.data_ptr() + start_bytes, source.data_ptr() + start_bytes, size_bytes)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`torch._foreach_copy_`, for tensors on any device and of any dtype; raises RuntimeError as that does.

    A target that autograd has saved for a backward pass is not noticed.
    """
    PreparedCopies(targets, sources, runs_once=True).run()


class PreparedCopies:
    """`copy_all` of the same tensors, as often as wanted: what each pair needs is found out once.

    The tensors are kept. Before another `run`, `are_in_place` says whether it is the same copies still.
    """

    def __init__(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, runs_once: bool = False
    ) -> None:
        self._tensors = targets, sources
        tensors = [*targets, *sources]
        self._places = None if runs_once else TensorPlaces(tensors)
        addresses = list(map(_address, tensors)) if self._places is None else self._places.addresses
        if 0 in addresses and any(t.nbytes for t in tensors if not t.data_ptr()):
            raise RuntimeError("the memory that is to be copied from or to was freed: its tensor has none")
        self._jobs: list[Job] = []
        self._num_bytes = 0
        """Of copies within host memory, which threads share."""
        if not all(map(_is_cpu, itertools.chain(targets, sources))):
            # Copies of a GPU belong to the caller's stream: other threads have streams of their own. One call for each
            # pair of dtypes and devices: torch before 2.11 writes all targets as if they were of the first one's dtype,
            # where sources are of one.
            by_kind: dict[tuple[torch.dtype | torch.device, ...], list[Pair]] = {}
            with torch.no_grad():
                for target, source in itertools.starmap(_as_integers, zip(targets, sources, strict=True)):
                    kind = target.dtype, source.dtype, target.device, source.device
                    by_kind.setdefault(kind, []).append((target, source))
            for (dtype, source_dtype, *_), pairs in by_kind.items():
                if {tensor.device.type for tensor in pairs[0]} == {"cpu", "cuda"}:
                    self._jobs.append(functools.partial(_copy_by_pinned_slots, list(_slot_loads(pairs))))
                elif dtype != source_dtype and not {dtype, source_dtype}.issubset(_CAST_IN_BATCHES):
                    self._jobs += [functools.partial(_copy_batch, [target], [source]) for target, source in pairs]
                else:
                    self._jobs.append(functools.partial(_copy_batch, *zip(*pairs, strict=True)))
            return
        sizes = list(map(_num_bytes, targets))
        self._num_bytes = sum(sizes)
        batches = _batches if runs_once else small_copies
        if max(sizes, default=0) < PLAIN_BYTES:
            self._jobs = list(batches(targets, sources))
            return
        moves: list[tuple[int, int, int]] = []
        other_targets, other_sources = list[torch.Tensor](), list[torch.Tensor]()
        for size, target, source in zip(sizes, targets, sources, strict=True):
            if size >= PLAIN_BYTES and is_plain(target, source):
                moves.append((target.data_ptr(), source.data_ptr(), size))
            else:
                other_targets.append(target)
                other_sources.append(source)
        self._jobs = [*_pieces(moves), *batches(other_targets, other_sources)]

    def are_in_place(self) -> bool:
        """Whether all have the memory that they had: to copy to or from where another's may be by now ends badly."""
        return self._places is not None and self._places.are_same()

    def run(self) -> None:
        """Copy. Raises RuntimeError as torch does."""
        with CopyTeam(self._num_bytes // _BYTES_PER_THREAD) as team:
            self.run_by(team)

    def run_by(self, team: CopyTeam) -> None:
        """As `run`, by threads that make other copies, too."""
        team.run(self._jobs)


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
    """What a pair takes of a slot, where it has the host tensor's dtype: a GPU casts faster. Aligned for any dtype."""
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
            PreparedCopies(targets, parts).run_by(team)

    largest = max((sum(itertools.starmap(_slot_bytes, load)) for load in loads), default=0)
    with CopyTeam(largest // _SLOT_BYTES_PER_THREAD) as team:
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
                PreparedCopies(parts, sources).run_by(team)
            _copy_batch(*((parts, sources) if is_to_host else (targets, parts)), non_blocking=True)
            on_device = sources[0] if is_to_host else targets[0]
            under_way.append((host_device.recorded(on_device.device), targets, parts))
        while is_to_host and under_way:
            finish()


def _batches(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Iterator[Job]:
    """Jobs that copy all of these, none of which is much longer than others."""
    start, batch_bytes = 0, 0
    for end, num_bytes in enumerate(map(_num_bytes, targets), 1):
        batch_bytes += num_bytes
        if batch_bytes >= _PIECE_BYTES or end - start == _BATCH_TENSORS or end == len(targets):
            yield functools.partial(_copy_batch, targets[start:end], sources[start:end])
            start, batch_bytes = end, 0


def small_copies(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Iterator[Job]:
    """Jobs that copy tensors in host memory, as often as wanted, and without torch those that are small and plain."""
    if len(targets) != len(sources):
        raise RuntimeError(f"{len(sources)} tensors are to be copied to {len(targets)}")
    other_targets, other_sources = list[torch.Tensor](), list[torch.Tensor]()
    into, of, size_bytes = list[memoryview](), list[memoryview](), 0
    for target, source, num_bytes in zip(targets, sources, map(_num_bytes, targets), strict=True):
        if num_bytes >= PLAIN_BYTES or not _has_equal_bytes(target, source):
            other_targets.append(target)
            other_sources.append(source)
            continue
        start, from_start = target.data_ptr(), source.data_ptr()
        into.append(_HOST_MEMORY[start : start + num_bytes])
        of.append(_HOST_MEMORY[from_start : from_start + num_bytes])
        size_bytes += num_bytes
        if size_bytes >= _SMALL_BATCH_BYTES:
            yield functools.partial(_move_small, into, of)
            into, of, size_bytes = [], [], 0
    if into:
        yield functools.partial(_move_small, into, of)
    yield from _batches(other_targets, other_sources)


def _move_small(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    collections.deque(map(_assign, targets, itertools.repeat(slice(None)), sources), maxlen=0)


def _pieces(moves: Iterable[tuple[int, int, int]]) -> Iterator[Job]:
    """Jobs of about _PIECE_BYTES; `moves`: to which address, from which, and how many bytes."""
    parts, part_bytes = list[tuple[int, int, int]](), 0
    for target, source, num_bytes in moves:
        for start in range(0, num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, num_bytes - start)
            parts.append((target + start, source + start, size))
            part_bytes += size
            if part_bytes >= _PIECE_BYTES:
                yield functools.partial(_move, parts)
                parts, part_bytes = [], 0
    if parts:
        yield functools.partial(_move, parts)


def _move(parts: Sequence[tuple[int, int, int]]) -> None:
    for target, source, size_bytes in parts:
        ctypes.memmove(target, source, size_bytes)


class CopyTeam(ClosedOnExit):
    """The thread that calls `run`, and helpers that wait for the next `run` in between.

    For one `with` block of one thread. A process that is forked within the block must not use it.
    """

    def __init__(self, num_threads: int) -> None:
        """Of at most so many threads; of no more than there are cores."""
        # Not torch's number of threads, which an engine may have set to one: it computes nothing while it is copied to.
        self._num_helpers = min(num_threads, _MAX_THREADS, len(os.sched_getaffinity(0))) - 1
        self._helpers: ThreadPoolExecutor | None = None
        if self._num_helpers > 0:
            self._helpers = ThreadPoolExecutor(self._num_helpers, thread_name_prefix="weightcast-copy")

    def run(self, jobs: Sequence[Job]) -> None:
        """Run every job, each thread the next one; raise what one of them raised, once none runs any more."""
        left, lock, errors = iter(jobs), threading.Lock(), list[BaseException]()

        def work() -> None:
            while True:
                with lock:
                    job = None if errors else next(left, None)
                if job is None:
                    return
                try:
                    job()
                except BaseException as exc:
                    errors.append(exc)

        helping: list[Future[None]] = []
        if self._helpers is not None:
            helping = [self._helpers.submit(work) for _ in jobs[1 : 1 + self._num_helpers]]
        work()
        wait(helping)
        if errors:
            # Not kept here too: an error that this frame refers to would keep its frames, and the tensors in them.
            del errors[1:]
            raise errors.pop()

    def close(self) -> None:
        """Wait until the helpers have ended."""
        if self._helpers is not None:
            self._helpers.shutdown()
