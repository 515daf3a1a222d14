"""Memory whose pages are touched in the background: within limits, in order, and by nobody after `close`."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from forking import in_child
from transports.conftest import Ends

from weightcast.errors import ClosedError, InsufficientMemoryError
from weightcast.host import memory as host_memory
from weightcast.host.memory import SharedMemory
from weightcast.native import tables
from weightcast.testing.transport_kit import PATIENCE_SECONDS, Background, numbered, read_all, send_all, version
from weightcast.transports.ipc import IpcSender
from weightcast.transports.ipc import arena as ipc_arena
from weightcast.transports.ipc.arena import OwnedSharedArena, Populating

pytestmark = pytest.mark.usefixtures("leaves_nothing")

STEP_BYTES = ipc_arena._STEP_BYTES
NUM_STEPS = 5
SIZE_BYTES = (NUM_STEPS - 1) * STEP_BYTES + (1 << 20)


def taken_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def arena_of(sender: object) -> OwnedSharedArena:
    assert isinstance(sender, IpcSender)
    assert isinstance(sender._arena, OwnedSharedArena)
    return sender._arena


class Kernel:
    """Stands before `populate`: `begun` counts the calls, which go on when `may_go_on`; `of` says what each does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: Callable[[int], bool] | None = None) -> None:
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Event()
        self.num_calls = 0
        self._of, self._populate = of, tables.populate
        monkeypatch.setattr(tables, "populate", self.populate)
        monkeypatch.setattr(tables, "MAX_THREADS", 1)

    def populate(self, address: int, size: int) -> bool:
        number = self.num_calls
        self.num_calls += 1
        self.begun.release()
        assert self.may_go_on.wait(PATIENCE_SECONDS)
        return self._populate(address, size) if self._of is None or self._of(number) else False


@pytest.mark.skipif(not tables.populate(np.zeros(1 << 14).ctypes.data, 1), reason="the kernel is older than Linux 5.14")
def test_every_page_is_there_before_it_is_written() -> None:
    memory = SharedMemory.make(SIZE_BYTES).map()
    populating = Populating(memory.tensor(), "the test")
    for end_bytes in (1, STEP_BYTES, STEP_BYTES + 1, SIZE_BYTES):
        populating.wait(end_bytes, PATIENCE_SECONDS)
        assert taken_bytes(memory.memory.descriptor) >= end_bytes
    assert taken_bytes(memory.memory.descriptor) == SIZE_BYTES
    assert not memory.tensor().any()
    assert populating.wait(SIZE_BYTES, PATIENCE_SECONDS) == 0.0
    populating.close()
    memory.free()


def test_a_wait_ends_with_the_bytes_that_it_needs_or_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    populating = Populating(SharedMemory.make(SIZE_BYTES).map().tensor(), "the test")
    assert kernel.begun.acquire(timeout=PATIENCE_SECONDS)
    assert populating.wait(1, 0.01) > 0
    kernel.may_go_on.set()
    populating.wait(SIZE_BYTES, PATIENCE_SECONDS)
    assert kernel.num_calls == NUM_STEPS
    populating.close()


def test_nothing_is_touched_that_a_limit_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer takes memory after the arena was allocated; when there is room again, the arena is written as is."""
    memory = SharedMemory.make(SIZE_BYTES).map()
    kernel = Kernel(monkeypatch)
    room = [SIZE_BYTES]
    monkeypatch.setattr(host_memory, "available_bytes", lambda: room[0])
    populating = Populating(memory.tensor(), "the test", "free some")
    assert kernel.begun.acquire(timeout=PATIENCE_SECONDS)
    room[0] = SIZE_BYTES - STEP_BYTES - 1
    kernel.may_go_on.set()
    for thread in populating._threads:
        thread.join(PATIENCE_SECONDS)
    for end_bytes in (0, SIZE_BYTES):
        with pytest.raises(InsufficientMemoryError, match=f"test needs {SIZE_BYTES - STEP_BYTES} bytes.*free some"):
            populating.wait(end_bytes, PATIENCE_SECONDS)
    assert (kernel.num_calls, taken_bytes(memory.memory.descriptor) <= STEP_BYTES) == (1, True)
    room[0] += 1
    populating.wait(SIZE_BYTES, PATIENCE_SECONDS)
    room[0] = 0  # it is in the arena now
    assert populating.wait(SIZE_BYTES, PATIENCE_SECONDS) == 0.0
    populating.close()
    memory.free()


def test_memory_that_can_not_be_touched_is_left_to_who_writes_it() -> None:
    """The kernel's own answer, EFAULT: the file ends within the mapping."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, SIZE_BYTES)
    memory = torch.frombuffer(mmap.mmap(descriptor, SIZE_BYTES), dtype=torch.uint8)
    os.ftruncate(descriptor, STEP_BYTES)
    populating = Populating(memory, "the test")
    populating.wait(SIZE_BYTES, PATIENCE_SECONDS)
    populating.close()
    assert taken_bytes(descriptor) <= STEP_BYTES
    os.close(descriptor)


def test_an_old_kernel_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, lambda number: False)
    kernel.may_go_on.set()
    populating = Populating(SharedMemory.make(SIZE_BYTES).map().tensor(), "the test")
    populating.wait(SIZE_BYTES, PATIENCE_SECONDS)
    populating.close()
    assert kernel.num_calls == 1


def test_no_thread_to_be_had_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ipc_arena, "awaited_at_exit", refuse)
    populating = Populating(SharedMemory.make(SIZE_BYTES).map().tensor(), "the test")
    populating.wait(SIZE_BYTES, PATIENCE_SECONDS)
    populating.close()


@pytest.mark.parametrize("end", [IpcSender.release, IpcSender.close])
def test_an_arena_that_is_given_back_meanwhile_is_touched_no_more(
    end: Callable[[IpcSender], None], ipc_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, sender = Kernel(monkeypatch), ipc_ends.sender()
    sender.prepare(numbered(NUM_STEPS, STEP_BYTES), staged=True)
    kept = os.dup(arena_of(sender).announcement()[1])
    assert kernel.begun.acquire(timeout=PATIENCE_SECONDS)
    populating = arena_of(sender).populating
    ending = Background(end, sender)
    with populating._changed:
        assert populating._changed.wait_for(lambda: populating._has_stopped, PATIENCE_SECONDS)
    kernel.may_go_on.set()
    ending.result()
    assert (kernel.num_calls, taken_bytes(kept)) == (1, 0)
    os.close(kept)


def test_a_sender_that_was_prepared_sends_from_the_same_arena(ipc_ends: Ends) -> None:
    sender, manifest = ipc_ends.sender(), numbered()
    receiver = ipc_ends.receiver(sender, "a")
    sender.prepare(manifest, staged=True)
    arena = arena_of(sender)
    sender.prepare(numbered(9), staged=True)
    receiver.open(manifest, version(1), staged=True)
    sender.open(manifest, version(1), peers=["a"], staged=True)
    send_all(sender, manifest, 1)
    assert len(read_all(receiver, manifest, 1)) == 5
    assert arena_of(sender) is arena
    assert sender.memory_seconds > 0
    sender.close()
    with pytest.raises(ClosedError):
        sender.prepare(manifest, staged=True)


def test_memory_that_ran_short_is_found_when_the_update_is_opened(
    ipc_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, manifest, kernel = ipc_ends.sender(), numbered(NUM_STEPS, STEP_BYTES), Kernel(monkeypatch)
    sender.prepare(manifest, staged=True)
    assert kernel.begun.acquire(timeout=PATIENCE_SECONDS)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: STEP_BYTES)
    kernel.may_go_on.set()
    for thread in arena_of(sender).populating._threads:
        thread.join(PATIENCE_SECONDS)
    with pytest.raises(InsufficientMemoryError, match="the arena of this update needs"):
        sender.open(manifest, version(1), peers=[], staged=True)


def test_a_child_that_is_forked_meanwhile_has_no_thread_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, kernel = SharedMemory.make(SIZE_BYTES).map(), Kernel(monkeypatch)
    populating = Populating(memory.tensor(), "the test")
    assert kernel.begun.acquire(timeout=PATIENCE_SECONDS)
    assert in_child(lambda: str(len(os.listdir("/proc/self/task")))) == "1"
    kernel.may_go_on.set()
    populating.wait(SIZE_BYTES, PATIENCE_SECONDS)
    assert kernel.num_calls == NUM_STEPS
    populating.close()
    memory.free()


def test_a_process_ends_well_in_the_middle_of_it() -> None:
    code = (
        "from weightcast.host.memory import SharedMemory\n"
        "from weightcast.transports.ipc.arena import Populating\n"
        f"populating = Populating(SharedMemory.make({SIZE_BYTES}).map().tensor(), 'the test')\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_SECONDS, check=True)
