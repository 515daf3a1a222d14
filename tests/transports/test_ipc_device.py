"""The life of device memory that processes share: real processes and sockets, a driver without a GPU in each."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pretended import LazyGpu
from pretended.fake_libcuda import PAGE_BYTES
from transports.conftest import Ends
from transports.ipc_children import Child

from weightcast.errors import (
    InsufficientMemoryError,
    PeerDiedError,
    PeerTimeoutError,
    UnsupportedError,
    WeightcastError,
)
from weightcast.format.manifest import TensorSpec
from weightcast.format.plan import plan
from weightcast.host import device as host_device
from weightcast.host.deadline import Deadline
from weightcast.host.device_memory import DeviceMemory
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    LinkAddress,
    address_of,
    check,
    make_receiver,
    make_sender,
    send,
    version,
)
from weightcast.transports.ipc.cuda import MappedCudaArena, OwnedCudaArena
from weightcast.transports.ipc.records import CudaArena

NUM_BUCKETS = 6
MANIFEST = plan([TensorSpec(f"t{k}", "uint8", (4096,)) for k in range(NUM_BUCKETS)], 4096)


@pytest.fixture
def gpu(leaves_nothing: None) -> Iterator[LazyGpu]:
    with LazyGpu() as made:
        yield made
        made.synchronize(made.device)
        gc.collect()
        assert made.libcuda.is_clean, "this process has memory of the driver's still"


@pytest.fixture
def children() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def gpu_ends(gpu: LazyGpu, ipc_ends: Ends) -> Ends:
    ipc_ends.device = gpu.device
    return ipc_ends


def receive(pipe: multiprocessing.connection.Connection, address: LinkAddress, peer: str, what: str = "") -> None:
    """Take part in one update for each number that comes; report each bucket once it was checked, and the outcome.

    `what`: "writes" into its second bucket. After each report, wait for a word before going on. At the end, say
    whether this process has nothing of the driver's any more.
    """
    with LazyGpu() as gpu:
        gpu.libcuda.supports_read_only = what != "old driver"
        stack = contextlib.ExitStack()
        receiver = make_receiver(stack, address, peer)
        pipe.send("connected")
        while (number := pipe.recv()) is not None:
            bucket = None
            try:
                receiver.open(MANIFEST, version(number), staged=False)
                pipe.send("open")
                for bucket in receiver:
                    assert bucket.buffer.payload.device == gpu.device
                    check(bucket, MANIFEST, number)
                    if what == "writes" and bucket.index == 1:
                        bucket.buffer.payload.fill_(0)
                        gpu.synchronize(gpu.device)
                    pipe.send(bucket.index)
                    pipe.recv()
                    # Nothing was rewritten while this process did nothing.
                    check(bucket, MANIFEST, number)
                pipe.send("whole")
            except WeightcastError as exc:
                pipe.send(type(exc).__name__)
            del bucket
            receiver.end()
        stack.close()
        del receiver
        gpu.synchronize(gpu.device)
        gc.collect()
        pipe.send(gpu.libcuda.is_clean)


def publish_one_bucket(pipe: multiprocessing.connection.Connection) -> None:
    with LazyGpu() as gpu:
        sender = make_sender(contextlib.ExitStack(), "ipc://", device=gpu.device)
        pipe.send(address_of(sender, "ipc://"))
        pipe.recv()
        sender.open(MANIFEST, version(1), peers=["engine"], staged=False)
        send(sender, MANIFEST, 1, 0)
        pipe.send("sent")
        pipe.recv()


def joined(children: contextlib.ExitStack, sender: Any, peer: str, what: str = "", number: int = 1) -> Child:
    child = children.enter_context(Child(receive, address_of(sender, "ipc://"), peer, what))
    assert child.hear() == "connected"
    child.pipe.send(number)
    assert child.hear() == "open"
    return child


def read_on(child: Child, start: int = 0) -> None:
    for index in range(start, NUM_BUCKETS):
        assert child.hear() == index
        child.pipe.send("go on")
    assert child.hear() == "whole"


def ends_clean(child: Child) -> None:
    child.pipe.send(None)
    assert child.hear() is True, "the engine has memory of the driver's still"


@pytest.mark.parametrize("what", ["", pytest.param("old driver", marks=pytest.mark.full)])
def test_engines_map_the_arena_once_for_all_versions_and_leave_nothing(
    gpu_ends: Ends, gpu: LazyGpu, children: contextlib.ExitStack, what: str
) -> None:
    """Also where the driver can't map it read-only."""
    sender = gpu_ends.sender()
    engines = [joined(children, sender, peer, what) for peer in ("a", "b")]
    arenas = set()
    for number in (1, 2, 3):
        if number > 1:
            for engine in engines:
                engine.pipe.send(number)
                assert engine.hear() == "open"
        sender.open(MANIFEST, version(number), peers=["a", "b"], staged=False)
        for index in range(NUM_BUCKETS):
            send(sender, MANIFEST, number, index)
            for engine in engines:
                assert engine.hear() == index
                engine.pipe.send("go on")
        assert [engine.hear() for engine in engines] == ["whole", "whole"]
        assert not sender.failures
        arenas |= gpu.libcuda.mapped.keys()
    assert len(arenas) == 1
    for engine in engines:
        ends_clean(engine)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_an_engine_that_is_lost_keeps_no_memory_of_the_trainer(
    gpu_ends: Ends, gpu: LazyGpu, children: contextlib.ExitStack, how: str
) -> None:
    """Killed: the driver frees what it had. Stopped: its bytes stay as they were, in an arena that the trainer left."""
    sender = gpu_ends.sender(deadline_seconds=1.0)
    victim, lively = joined(children, sender, "victim"), joined(children, sender, "lively")
    sender.open(MANIFEST, version(1), peers=["victim", "lively"], staged=False)
    send(sender, MANIFEST, 1, 0)
    assert victim.hear() == 0
    former = _processes_with_memory()[os.getpid()]
    getattr(victim, how)()
    for index in range(NUM_BUCKETS):
        if index:
            send(sender, MANIFEST, 1, index)
        assert lively.hear() == index
        lively.pipe.send("go on")
    assert lively.hear() == "whole"
    expected = PeerDiedError if how == "kill" else PeerTimeoutError
    assert {name: type(error) for name, error in sender.failures.items()} == {"victim": expected}
    if how == "kill":
        assert _processes_with_memory() == {os.getpid(): former, lively.process.pid: former}
    else:
        gpu.synchronize(gpu.device)
        now = _processes_with_memory()
        assert now[victim.process.pid] == former
        assert not (now[os.getpid()] & former)
        victim.wake()
        victim.pipe.send("go on")
        assert victim.hear() == "PeerDiedError"
        ends_clean(victim)
    ends_clean(lively)


def test_a_trainer_that_is_killed_leaves_an_engine_its_bytes_and_nothing_else(
    gpu: LazyGpu, children: contextlib.ExitStack
) -> None:
    trainer = children.enter_context(Child(publish_one_bucket))
    with contextlib.ExitStack() as stack:
        receiver = make_receiver(stack, trainer.hear(), "engine")
        receiver.open(MANIFEST, version(1), staged=False)
        trainer.pipe.send("connected")
        assert trainer.hear() == "sent"
        buckets = iter(receiver)
        bucket = next(buckets)
        trainer.kill()
        check(bucket, MANIFEST, 1)
        with pytest.raises(PeerDiedError):
            next(buckets)
        check(bucket, MANIFEST, 1)
    del bucket, buckets
    gpu.synchronize(gpu.device)
    gc.collect()
    assert not _processes_with_memory()


def test_an_engine_that_writes_into_a_bucket_fails_alone(gpu_ends: Ends, children: contextlib.ExitStack) -> None:
    """Its own GPU refuses; on hardware that is an error of its context, here of its process."""
    sender = gpu_ends.sender()
    writer, reader = joined(children, sender, "writer", "writes"), joined(children, sender, "reader")
    sender.open(MANIFEST, version(1), peers=["writer", "reader"], staged=False)
    for index in range(NUM_BUCKETS):
        send(sender, MANIFEST, 1, index)
        assert reader.hear() == index
        if index == 0:
            assert writer.hear() == 0
            writer.pipe.send("go on")
        if index == 1:
            writer.process.join(PATIENCE_SECONDS)
            assert writer.process.exitcode == -signal.SIGSEGV
        reader.pipe.send("go on")
    assert reader.hear() == "whole"
    assert {name: type(error) for name, error in sender.failures.items()} == {"writer": PeerDiedError}


def test_a_forked_child_keeps_no_memory(gpu: LazyGpu) -> None:
    """Its copy of the descriptor is closed, and what it drops is not unmapped by a driver that it does not have."""
    memory = DeviceMemory.allocate(PAGE_BYTES, gpu.device, "a test")
    descriptor = memory.descriptor
    assert descriptor is not None
    if (pid := os.fork()) == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            del memory
            os._exit(0 if gpu.libcuda.mapped else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.fstat(descriptor)
    memory.close()


def test_memory_that_torch_keeps_is_taken_back_first(gpu: LazyGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.free_bytes = PAGE_BYTES
    with pytest.raises(
        InsufficientMemoryError, match=r"the arena of this update needs 4194304 bytes, cuda:0 has 2097152"
    ):
        OwnedCudaArena(1, 2 * PAGE_BYTES, gpu.device)
    monkeypatch.setattr(gpu, "empty_cache", lambda: setattr(gpu, "free_bytes", 2 * PAGE_BYTES))
    OwnedCudaArena(1, 2 * PAGE_BYTES, gpu.device).close(free=True)


def test_a_driver_without_such_memory_is_refused_with_a_remedy(gpu: LazyGpu) -> None:
    gpu.libcuda.supports_descriptors = False
    with pytest.raises(UnsupportedError, match=r'can.t share virtual memory of cuda:0.*publish with install="staged"'):
        OwnedCudaArena(1, 4096, gpu.device)


@pytest.mark.parametrize("fault", ["no descriptor", "other size", "no memory of the driver's", "other GPU"])
def test_an_arena_that_can_not_be_opened_is_refused_and_leaves_nothing(gpu: LazyGpu, fault: str) -> None:
    from weightcast.transports.ipc.records import CudaArena

    arena = OwnedCudaArena(1, 4096, gpu.device)
    record, descriptor = arena.announcement()
    assert isinstance(record, CudaArena)
    other = os.memfd_create("something-else")
    cases: dict[str, tuple[CudaArena, int | None]] = {
        "no descriptor": (record, None),
        "other size": (CudaArena(1, 2 * record.size_bytes, record.device), descriptor),
        "no memory of the driver's": (record, other),
        "other GPU": (CudaArena(1, record.size_bytes, "GPU-of-another-host"), descriptor),
    }
    with pytest.raises(UnsupportedError, match='publish with install="staged"'):
        MappedCudaArena(*cases[fault], gpu.device)
    os.close(other)
    arena.close(free=True)


def test_the_trainer_goes_on_in_new_memory_after_a_release(
    gpu_ends: Ends, gpu: LazyGpu, children: contextlib.ExitStack
) -> None:
    sender = gpu_ends.sender()
    receiver = gpu_ends.receiver(sender, "engine")
    for number in (1, 2):
        receiver.open(MANIFEST, version(number), staged=False)
        sender.open(MANIFEST, version(number), peers=["engine"], staged=False)
        buckets = iter(receiver)
        for index in range(NUM_BUCKETS):
            send(sender, MANIFEST, number, index)
            check(next(buckets), MANIFEST, number)
        assert next(buckets, None) is None
        del buckets
        receiver.end()
        assert len(gpu.libcuda.mapped) == 2
        sender.release()
        receiver.release()
        assert any(_is_clean(gpu) for _ in Deadline(PATIENCE_SECONDS).polls(0.001, 0.01)), "it is the trainer's"


def _is_clean(gpu: LazyGpu) -> bool:
    gpu.synchronize(gpu.device)
    return gpu.libcuda.is_clean


def _processes_with_memory() -> dict[int, set[int]]:
    """Of this process and its children, the memory of fake drivers that each has mapped, or has a descriptor of."""
    found: dict[int, set[int]] = {}
    children = [process.pid for process in multiprocessing.active_children()]
    for pid in (os.getpid(), *filter(None, children)):
        files = set()
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/maps") as maps:
                files |= {int(line.split()[4]) for line in maps if "memfd:fake-libcuda" in line}
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if "memfd:fake-libcuda" in os.readlink(f"/proc/{pid}/fd/{name}"):
                        files.add(os.stat(f"/proc/{pid}/fd/{name}").st_ino)
        if files:
            found[pid] = files
    return found


@contextlib.contextmanager
def arena_of_another_gpu() -> Iterator[tuple[CudaArena, int]]:
    """A trainer's arena on the first GPU, and its descriptor, which keeps the memory."""
    with LazyGpu() as trainers:
        arena = OwnedCudaArena(1, PAGE_BYTES, trainers.device)
        arena.buffers._memory.fill_(7)
        trainers.synchronize(trainers.device)
        record, exported = arena.announcement()
        assert exported is not None
        descriptor = os.dup(exported)
        arena.close(free=True)
        del arena
        gc.collect()
        assert trainers.libcuda.is_clean
    try:
        yield record, descriptor
    finally:
        os.close(descriptor)


def test_an_arena_of_another_gpu_is_mapped_for_the_engines_own(leaves_nothing: None) -> None:
    """With no context on the GPU that it lies on: hundreds of MiB for each engine there."""
    with arena_of_another_gpu() as (record, descriptor), LazyGpu(index=1) as gpu:
        arena = MappedCudaArena(record, descriptor, gpu.device)
        assert arena.device == arena.buffers._memory.device == gpu.device
        assert set(arena.buffers._memory.cpu().tolist()) == {7}
        arena.reset()
        assert gpu.contexts == {1}
        del arena
        gc.collect()
        assert gpu.libcuda.is_clean


def test_an_arena_that_the_engines_gpu_cant_read_is_refused(leaves_nothing: None) -> None:
    with arena_of_another_gpu() as (record, descriptor), LazyGpu(index=1) as gpu:
        gpu.libcuda.accesses_peers = False
        with pytest.raises(UnsupportedError, match=r'cuda:1 can\'t read.*install="staged".*nccl://'):
            MappedCudaArena(record, descriptor, gpu.device)
        assert gpu.contexts <= {1}
        assert gpu.libcuda.is_clean


def test_a_program_that_the_trainer_starts_has_no_descriptor_of_its_arena(gpu: LazyGpu) -> None:
    made = DeviceMemory.allocate(PAGE_BYTES, gpu.device, "a trial")
    assert made.descriptor is not None
    assert not os.get_inheritable(made.descriptor)
    made.close()


@pytest.mark.parametrize("refuses", [False, True], ids=["takes it", "refuses"])
def test_a_fresh_thread_has_the_relaxed_capture_mode(
    gpu: LazyGpu, refuses: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no context before a call of the runtime that needs one, and none is made for the first device."""
    host_device._warn_of_captures.cache_clear()
    if refuses:
        monkeypatch.setattr(gpu.libcuda, "make_current", lambda: None)
    found: list[bool] = []

    def run() -> None:
        for _ in range(2):
            with host_device.own_thread(gpu.device):
                found.append(gpu.libcuda.is_relaxed)
            found.append(gpu.libcuda.is_relaxed)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [not refuses, False] * 2
    assert len(caplog.messages) == refuses
    assert all("error 201" in message and "capture graphs before" in message for message in caplog.messages)
