"""NCCL without hardware, for tests of waits: groups of one process, over a `LazyGpu`.

Invariants, which are those of torch's ProcessGroupNCCL: `Work.wait` returns at once and has the thread's stream wait;
an operation runs on a stream of the group's own, behind what the caller's stream was given; a member that has died
wakes nobody: kernels of the others run on, and every stream that waits for them, until their own `abort`;
`is_completed` is true after an error too; making a group waits for every member, without a deadline; connecting and
aborting are not allowed while another thread captures a graph, and happen on the thread's current device; members
whose limits of thread blocks differ don't connect.

An operation keeps its tensor until it was waited for or is dropped. Unless a group is made with
TORCH_NCCL_BLOCKING_WAIT in the environment, it has a watchdog: this keeps the tensors of what is over until the group's
next operation, and an operation that has failed, or is older than the group's timeout, has it set the flag of the whole
process by which the monitor of its first NCCL group ends the process. It looks whenever it may be the first to do so.

    with LazyGpu() as gpu, LazyNccl(gpu) as nccl:
        ...                                      # nccl:// in this process
        nccl.kill(nccl.groups[-1])
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import threading
import time
import types
import weakref
from collections import Counter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from pretended.lazy_gpu import PATIENCE_SECONDS, LazyEvent, LazyGpu, LazyStream
from weightcast import process_group
from weightcast.host.deadline import Deadline

_POLL_SECONDS = 0.001
_ID = "lazy nccl"
_COMM_ERROR = 2
"""torch's WorkResult.COMM_ERROR."""
_DEFAULT_MAX_CTAS = 64


_Operation: TypeAlias = tuple[tuple[int, ...], int]
"""Between which ranks, its source first, and how many there were between them before."""


@dataclasses.dataclass
class _Communicator:
    """What the members of a group share. By operation, `begun`: who has begun it, `sent`: what its source sends."""

    members: dict[int, LazyNcclGroup] = dataclasses.field(default_factory=dict)
    begun: dict[_Operation, set[int]] = dataclasses.field(default_factory=dict)
    sent: dict[_Operation, torch.Tensor] = dataclasses.field(default_factory=dict)

    def is_broken(self) -> bool:
        return any(member.is_dead for member in self.members.values())


class LazyNccl:
    """Stands in for NCCL while it is open. `groups`: every member that was made, in order.

    `reports_errors`: a broken broadcast is completed with an error at the others, as over a network; its kernel runs on
    all the same. `has_exceptions`: they can be asked for, as from torch 2.13 on. `connects_pairs`: of each two members,
    at their first transfer, without a deadline. `should_dump`: for which operations watchdogs have set the flag that
    ends the process; a block that ends well asserts that there are none, unless `may_dump`.
    """

    def __init__(
        self, gpu: LazyGpu, *, reports_errors: bool = False, has_exceptions: bool = True, connects_pairs: bool = False
    ) -> None:
        self.gpu = gpu
        self.reports_errors = reports_errors
        self.has_exceptions = has_exceptions
        self.connects_pairs = connects_pairs
        self.groups: list[LazyNcclGroup] = []
        self.should_dump: list[str] = []
        self.may_dump = False
        self.has_gone = False
        self._works = weakref.WeakSet[LazyWork]()
        self._communicators: dict[bytes, _Communicator] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> LazyNccl:
        nccl = self

        class ProcessGroupNCCL(LazyNcclGroup):
            """What torch.distributed has by that name."""

            Options = LazyNcclOptions

            def __init__(self, store: Any, rank: int, size: int, options: LazyNcclOptions) -> None:
                super().__init__(nccl, store, rank, size, options)

        for owner, name, value in (
            (dist, "ProcessGroupNCCL", ProcessGroupNCCL),
            (process_group, "require", lambda backend: None),
        ):
            if hasattr(owner, name):
                self._undo.callback(setattr, owner, name, getattr(owner, name))
            else:
                self._undo.callback(delattr, owner, name)
            setattr(owner, name, value)
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        """Whoever waits for a member still is told that it has gone; groups that are being closed end first."""
        self.has_gone = True
        deadline = Deadline(PATIENCE_SECONDS)
        for thread in threading.enumerate():
            if thread.name.startswith(("weightcast-group", "weightcast-collective")):
                thread.join(max(0.0, deadline.remaining_seconds))
        self._undo.close()
        for group in self.groups:
            group.watch()
        if kind is None and not self.may_dump:
            assert not self.should_dump, f"torch's monitor would end the process for {self.should_dump}"

    @property
    def stashed(self) -> list[torch.Tensor]:
        """The tensors that operations and groups keep."""
        works = [tensor for work in list(self._works) for tensor in work.stash]
        return works + [tensor for group in self.groups for tensor in group.shelf]

    def require_own_thread(self) -> None:
        """The thread makes or ends a communicator now."""
        assert self.gpu.current_index == self.gpu.device.index, "NCCL would use another device"
        if self.gpu.is_capturing and not self.gpu.libcuda.is_relaxed:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def kill(self, group: LazyNcclGroup) -> None:
        """The member's process dies: it takes part in nothing any more, and tells nobody."""
        group.is_dead = True

    def communicator(self, store: Any, rank: int) -> _Communicator:
        """What the members that have this store share; waits for rank 0 to begin it."""
        if rank == 0:
            store.set(_ID, secrets.token_hex(8))
        self.wait_for(lambda: store.check([_ID]))
        return self._communicators.setdefault(store.get(_ID), _Communicator())

    def wait_for(self, is_done: Any) -> None:
        for _ in Deadline(PATIENCE_SECONDS).polls(_POLL_SECONDS, _POLL_SECONDS):
            if is_done():
                return
            if self.has_gone:
                break
        raise AssertionError("a wait for NCCL, without a deadline, for a member that does not come")


class LazyNcclOptions:
    """As torch's ProcessGroupNCCL.Options."""

    def __init__(self) -> None:
        self.config = types.SimpleNamespace(max_ctas=_DEFAULT_MAX_CTAS)
        self._timeout: Any = None


class LazyNcclGroup:
    """One member, as torch's ProcessGroupNCCL. `max_under_way`: how many operations it had begun that were not over."""

    def __init__(self, nccl: LazyNccl, store: Any, rank: int, size: int, options: LazyNcclOptions) -> None:
        self.nccl = nccl
        self.rank = rank
        self.size = size
        self.options = options
        self.has_watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() not in ("1", "true", "yes", "y")
        self.is_dead = False
        self.is_aborted = False
        self.communicator = _Communicator()
        self.stream = LazyStream(nccl.gpu)
        self.max_under_way = 0
        self.under_way: list[LazyWork] = []
        self.shelf: list[torch.Tensor] = []
        """What the watchdog has taken from operations that are over, given back at the next operation."""
        self._store = store
        self._is_connected = False
        self._num_begun: Counter[tuple[int, ...]] = Counter()
        nccl.groups.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Wait until all members are there."""
        self.connect()

    def connect(self) -> None:
        """Wait until all members are there. Without a device the first operation does."""
        if not self._is_connected:
            self.nccl.require_own_thread()
            store, self._store = self._store, None
            self.communicator = self.nccl.communicator(store, self.rank)
            self.communicator.members[self.rank] = self
            self.nccl.wait_for(lambda: len(self.communicator.members) == self.size)
            # NCCL applies each member's limit after all have agreed, on a host where there are more channels than that.
            limits = {member.options.config.max_ctas for member in self.communicator.members.values()}
            if len(limits) > 1:
                raise RuntimeError(f"NCCL error: unhandled system error (members with {sorted(limits)} channels)")
            self._is_connected = True

    def watch(self) -> None:
        """Have the watchdog look at each operation now, if there is one."""
        if not self.has_watchdog or self.is_dead:
            return
        for work in list(self.under_way):
            error = None if work.is_over() else work.failure()
            if error or (not work.is_over() and work.is_late()):
                self.nccl.should_dump.append(f"rank {self.rank}: {error or 'an operation past its timeout'}")

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> LazyWork:
        """Rank 0's tensor to all. Queued."""
        return self._begin(tuple(range(self.size)), tensors[0])

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> LazyWork:
        """To one member. Queued: over when that one receives."""
        return self._begin((self.rank, rank), tensors[0])

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> LazyWork:
        """From one member. Queued."""
        return self._begin((rank, self.rank), tensors[0])

    def _begin(self, ranks: tuple[int, ...], tensor: torch.Tensor) -> LazyWork:
        self.connect()
        operation = ranks, self._num_begun[ranks]
        self._num_begun[ranks] += 1
        begun = self.communicator.begun.setdefault(operation, set())
        begun.add(self.rank)
        if self.nccl.connects_pairs and len(ranks) == 2 and not operation[1]:
            self.nccl.require_own_thread()
            self.nccl.wait_for(lambda: begun.issuperset(ranks))
        self.shelf.clear()
        for other in list(self.under_way):
            other.is_over()
        work = LazyWork(self, operation, tensor)
        self.nccl._works.add(work)
        self.max_under_way = max(self.max_under_way, len(self.under_way))
        return work

    def abort(self) -> None:
        """End this member's kernels. The others' run on."""
        self.nccl.require_own_thread()
        self.watch()
        self.is_dead = self.is_aborted = True
        self.stream.synchronize()
        self.shelf.clear()
        self._store = None


class LazyWork:
    """An operation under way, as torch's Work."""

    def __init__(self, group: LazyNcclGroup, operation: _Operation, tensor: torch.Tensor) -> None:
        self._group, self._operation = group, operation
        self.stash = [tensor]
        self._error: str | None = None
        self._began = time.monotonic()
        gpu = group.nccl.gpu
        LazyEvent(gpu.current_stream(gpu.device)).wait(group.stream)
        group.under_way.append(self)
        group.stream.give(functools.partial(self._transfer, tensor))
        self._over = LazyEvent(group.stream)

    def _transfer(self, tensor: torch.Tensor) -> bool:
        """The kernel: over when all that take part have begun this operation, or when this one is aborted."""
        group, communicator, operation = self._group, self._group.communicator, self._operation
        if group.is_aborted:
            self._error = "NCCL communicator was aborted"
            group.under_way.remove(self)
            return True
        source, *others = operation[0]
        if group.rank == source:
            communicator.sent.setdefault(operation, group.nccl.gpu.read(tensor))
        is_begun = communicator.begun[operation].issuperset(operation[0])
        if communicator.is_broken() or not is_begun or operation not in communicator.sent:
            return False
        if group.rank in others:
            tensor.copy_(communicator.sent[operation])
        group.under_way.remove(self)
        if group.has_watchdog:
            group.shelf += self.stash
        return True

    def wait(self) -> bool:
        """Have the thread's stream wait; the thread does not."""
        gpu = self._group.nccl.gpu
        self._over.wait(gpu.current_stream(gpu.device))
        self.stash.clear()
        return True

    def is_over(self) -> bool:
        """Does what can be done by now."""
        return self._over.query()

    def is_late(self) -> bool:
        timeout: float = self._group.options._timeout.total_seconds()
        return time.monotonic() - self._began >= timeout

    def is_completed(self) -> bool:
        """Over, well or badly."""
        return self.is_over() or self.failure() is not None

    def exception(self) -> RuntimeError | None:
        """torch before 2.13 raises TypeError also where there is none."""
        if not self._group.nccl.has_exceptions:
            raise TypeError("Unregistered type : std::__exception_ptr::exception_ptr")
        error = self.failure()
        return None if error is None else RuntimeError(error)

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def get_future_result(self) -> torch.futures.Future[int]:
        """Done once an error is known; of a success torch's watchdog learns later, if there is one."""
        result = torch.futures.Future[int]()
        if self.failure() is not None:
            result.set_result(_COMM_ERROR)
        return result

    def failure(self) -> str | None:
        is_reported = self._group.nccl.reports_errors and self._group.communicator.is_broken()
        return self._error or ("NCCL: remote process exited" if is_reported and not self.is_over() else None)
