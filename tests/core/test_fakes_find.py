"""The GPU and NCCL without hardware find the defects that they were made for: each mend is undone, and found missing.

`as_it_was`: the code of one finding is as it was; otherwise the same lines pass. bench/README.md lists
what can't be shown so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from forking import in_child
from pretended import lazy_nccl
from pretended.fake_libcuda import PAGE_BYTES
from pretended.lazy_gpu import POISON, LazyEvent, LazyGpu
from pretended.lazy_nccl import LazyNccl
from transports.test_nccl import MANIFEST, Hall, expected, pair

from core.direct import fleet
from core.test_gpu_order import OnGpu, ends_on, values
from weightcast import TensorSource, process_group
from weightcast.errors import IntegrityError, PeerDiedError, PeerTimeoutError, PublishError, UpdateAbortedError
from weightcast.format.bucket import check_bucket, root_digest
from weightcast.host import device as host_device
from weightcast.host import device_memory
from weightcast.host.deadline import Deadline
from weightcast.host.device_memory import DeviceMemory
from weightcast.process_group import Broadcast, ProcessGroup
from weightcast.testing.transport_kit import PATIENCE_SECONDS, Background, Reader, send, version
from weightcast.trainer import publish_run
from weightcast.trainer.packer import pack
from weightcast.transports.collective.receiver import BroadcastStream
from weightcast.transports.receiving import ArenaReceiver
from weightcast.transports.sending import ArenaSender

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.parametrize("as_it_was", [False, True], ids=["mended", "as_it_was"]),
]
SOON_SECONDS = 0.5


@pytest.fixture
def gpu() -> Iterator[LazyGpu]:
    with LazyGpu() as made:
        yield made


@pytest.fixture
def hall(gpu: LazyGpu) -> Iterator[Hall]:
    with LazyNccl(gpu) as nccl, contextlib.ExitStack() as stack:
        yield Hall(gpu, nccl, stack)


def comes(is_so: Callable[[], bool], as_it_was: bool = False) -> bool:
    """Whether it becomes so; what never does as it was is asked for a short while."""
    deadline = Deadline(SOON_SECONDS if as_it_was else PATIENCE_SECONDS)
    return any(is_so() for _ in deadline.polls(0.001, 0.01))


def announce_what_is_queued(monkeypatch: pytest.MonkeyPatch, gpu: LazyGpu) -> None:
    """A bucket is announced with an event behind its packing, and the reader's stream waits for that."""
    packed: dict[int, LazyEvent] = {}
    take = ArenaReceiver._next_bucket

    def next_bucket(self: ArenaReceiver, wanted: Any) -> Any:
        bucket = take(self, wanted)
        if bucket is not None:
            packed[bucket.index].wait(gpu.current_stream(gpu.device))
        return bucket

    monkeypatch.setattr(ArenaSender, "_await_packed", lambda self, index, event: packed.update({index: event}))
    monkeypatch.setattr(ArenaReceiver, "_next_bucket", next_bucket)


def test_a1_a_trainer_that_dies_leaves_a_thread_and_a_kernel_and_the_engine_blocked(
    hall: Hall, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: a stream waits for NCCL, that of the engine, and nobody aborts."""
    waits: list[object] = []

    def wait_in_the_stream(group: ProcessGroup, work: Any, is_left: object) -> None:
        waits.append(work.wait())
        host_device.synchronize_stream(hall.gpu.device)

    if as_it_was:
        monkeypatch.setattr(ProcessGroup, "wait", wait_in_the_stream)
        monkeypatch.setattr(BroadcastStream, "leave", lambda self: setattr(self, "is_left", True))
        monkeypatch.setattr(host_device, "own_stream", lambda device: contextlib.nullcontext())
    sender = hall.sender()
    receiver = hall.receiver(sender, "a")
    reader = Reader(receiver, MANIFEST, version(1), staged=False)
    sender.open(MANIFEST, version(1), peers=["a"], staged=False)
    assert comes(lambda: bool(waits or not as_it_was))
    hall.nccl.kill(hall.member(0))
    for peer in list(sender._peers.values()):
        peer.link.end("the process was killed")
    with pytest.raises(PeerDiedError):
        reader.result()
    receiver.close()
    assert comes(lambda: hall.member(1).is_aborted, as_it_was) is not as_it_was
    assert comes(LazyEvent(hall.member(1).stream).query, as_it_was) is not as_it_was
    assert comes(LazyEvent(hall.gpu.default_stream).query, as_it_was) is not as_it_was
    names = [thread.name for thread in threading.enumerate()]
    assert "weightcast-collective" in names or not as_it_was
    # Nothing else ends the thread that waits there.
    hall.gpu._has_gone = as_it_was


def test_a2_the_root_is_made_of_digests_that_are_not_there_yet(
    gpu: LazyGpu, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4 is undone in both: the host's wait for each bucket's packing would hide it."""
    announce_what_is_queued(monkeypatch, gpu)
    trainer, is_read = threading.current_thread(), threading.Event()

    def pack_late(*args: Any) -> Any:
        # Over when the trainer waits for it, or has read the root: an engine that is faster would hide it, too.
        gpu.current_stream(gpu.device).give(lambda: is_read.is_set() or threading.current_thread() is trainer)
        return pack(*args)

    def root(*args: Any) -> str:
        with gpu.stream(gpu.default_stream) if as_it_was else contextlib.nullcontext():
            found = root_digest(*args)
        is_read.set()
        return found

    monkeypatch.setattr(publish_run, "pack", pack_late)
    monkeypatch.setattr(publish_run, "root_digest", root)
    engine, source = OnGpu(gpu), TensorSource({name: gpu.tensor(tensor) for name, tensor in values(1).items()})
    outcome = pytest.raises(PublishError, match="1 buckets with root digest") if as_it_was else contextlib.nullcontext()
    options = {"transport": "memory://", "install": "streaming", "bucket_size_bytes": 1 << 20}
    with fleet(source, engine, **options) as (publisher, _), outcome:
        publisher.publish()


def test_a2_the_next_step_writes_what_is_still_to_be_packed(
    gpu: LazyGpu, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def beside(side: Any, device: torch.device) -> Iterator[None]:
        side.wait_stream(gpu.current_stream(device))
        with gpu.stream(side):
            yield

    if as_it_was:
        monkeypatch.setattr(host_device, "beside", beside)
    weights, bucket = gpu.tensor(torch.ones(8)), gpu.tensor(torch.zeros(8))
    connections = publish_run.Connections("memory://", "0" * 32, gpu.device, deadline_seconds=60.0, lease_seconds=60.0)
    with contextlib.closing(connections), connections.packing_stream():
        bucket.copy_(weights)
    weights.zero_()
    gpu.default_stream.synchronize()
    gpu.synchronize(gpu.device)
    assert gpu.read(bucket).tolist() == [0.0 if as_it_was else 1.0] * 8


def test_a4_a_trainer_that_dies_while_it_packs_blocks_the_engines_stream(
    gpu: LazyGpu, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_it_was:
        announce_what_is_queued(monkeypatch, gpu)
    with ends_on(gpu, deadline_seconds=SOON_SECONDS) as (sender, receiver, manifest):
        packing, reading = gpu.Stream(gpu.device), gpu.Stream(gpu.device)
        over = gpu.hold(packing)
        with gpu.stream(packing), contextlib.nullcontext() if as_it_was else pytest.raises(PeerTimeoutError):
            send(sender, manifest, 1, 0)
        buckets = iter(receiver)
        with gpu.stream(reading):
            if as_it_was:
                next(buckets)
            # The trainer goes, and with it what would have packed the bucket.
            sender.close()
            with pytest.raises(UpdateAbortedError):
                next(buckets)
        assert comes(LazyEvent(reading).query, as_it_was) is not as_it_was
        over.set()


def test_a10_a_member_that_never_comes_is_waited_for_without_a_deadline(
    hall: Hall, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_it_was:
        monkeypatch.setattr(process_group, "in_time", lambda call, *rest: call())
    # What the fake takes for "for ever".
    monkeypatch.setattr(lazy_nccl, "PATIENCE_SECONDS", 2.0)
    store, _ = process_group.serve_store("127.0.0.1", PATIENCE_SECONDS)
    error, words = (AssertionError, "without a deadline") if as_it_was else (PeerTimeoutError, "not all members")
    with pytest.raises(error, match=words):
        ProcessGroup("nccl", store, rank=0, size=2, timeout_seconds=0.2, device=hall.gpu.device)


def test_b1_a_broadcast_that_failed_counts_as_one_that_succeeded(
    hall: Hall, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hall.nccl.reports_errors = True
    if as_it_was:
        monkeypatch.setattr(ProcessGroup, "wait", lambda self, work: comes(work.is_completed))
        monkeypatch.setattr(Broadcast, "error", property(lambda self: self._error))
    with contextlib.closing(pair(hall, PATIENCE_SECONDS)) as both:
        hall.nccl.kill(hall.member(0))
        received = hall.gpu.tensor(torch.full((8,), POISON, dtype=torch.uint8))
        broadcast = Broadcast(both.groups[1], received, threading.Condition())
        assert comes(lambda: broadcast.is_over)
        assert (not broadcast.error) is as_it_was
        with contextlib.nullcontext() if as_it_was else pytest.raises(PeerDiedError):
            both.groups[1].wait(broadcast._work)
        assert set(hall.gpu.read(received).tolist()) == {POISON}, "what was taken for received"


def test_d1_a_late_broadcast_of_ours_sets_the_flag_that_ends_the_process(
    hall: Hall, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: torch's watchdog watched our groups, too; and it kept the tensor of the last operation."""
    hall.nccl.may_dump = as_it_was
    if as_it_was:
        monkeypatch.setattr(process_group, "_NCCL_ENVIRONMENT", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    with contextlib.closing(pair(hall, SOON_SECONDS)) as both:
        works = [group.broadcast(hall.gpu.tensor(torch.zeros(8)), root=0) for group in both.groups]
        for group, work in zip(both.groups, works, strict=True):
            group.wait(work)
        del works, work
        assert bool(hall.nccl.stashed) is as_it_was
        hall.nccl.kill(hall.member(1))
        with pytest.raises(PeerTimeoutError):
            both.groups[0].wait(both.groups[0].broadcast(hall.gpu.tensor(torch.zeros(8)), root=0))
    assert bool(hall.nccl.should_dump) is as_it_was


def test_b2_a_bucket_in_the_same_process_is_read_before_it_is_packed(
    gpu: LazyGpu, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_it_was:
        monkeypatch.setattr(ArenaSender, "_await_packed", lambda *args: None)
    with ends_on(gpu) as (sender, receiver, manifest):
        with gpu.stream(gpu.Stream(gpu.device)):
            send(sender, manifest, 1, 0)
        bucket = next(iter(receiver))
        assert (set(bucket.buffer.payload.cpu().tolist()) == {POISON}) is as_it_was
        with pytest.raises(IntegrityError) if as_it_was else contextlib.nullcontext():
            check_bucket(bucket.buffer, manifest.buckets[0], version(1), 0)


def test_b3_what_receives_and_the_engines_kernels_wait_for_each_other(
    hall: Hall, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing arrives while a kernel of the engine runs, and what comes is queued before the engine's next one."""
    if as_it_was:
        monkeypatch.setattr(host_device, "own_stream", lambda device: contextlib.nullcontext())
    gpu = hall.gpu
    sender = hall.sender()
    receiver = hall.receiver(sender, "a")
    reader = Reader(receiver, MANIFEST, version(1), staged=True)
    over = gpu.hold(gpu.default_stream)
    num_given = gpu.default_stream.num_given

    def send_all() -> None:
        with gpu.stream(gpu.Stream(gpu.device)):
            sender.open(MANIFEST, version(1), peers=["a"], staged=True)
            for index in range(len(MANIFEST.buckets)):
                send(sender, MANIFEST, 1, index)

    sending = Background(send_all)
    assert comes(lambda: reader.is_done_within(0), as_it_was) is not as_it_was
    over.set()
    sending.result()
    assert reader.result() == expected(1)
    assert (gpu.default_stream.num_given > num_given) is as_it_was


def test_a9_a_child_that_the_trainer_forks_keeps_the_arena(
    gpu: LazyGpu, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_it_was:
        monkeypatch.setattr(device_memory, "close_in_child", lambda memory: memory)
    memory = DeviceMemory.allocate(PAGE_BYTES, gpu.device, "a test")

    def kept() -> str:
        """A DataLoader's worker, after its parent's arena has gone: descriptors of the driver's memory that it has."""
        names = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(f"/proc/self/fd/{number}"))
        return str(sum("memfd:fake-libcuda" in name for name in names))

    found = in_child(kept)
    memory.close()
    assert found == ("1" if as_it_was else "0")


def test_a9_what_a_view_reads_is_unmapped_with_the_arena(
    gpu: LazyGpu, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Place:
        """Says where the memory is, and does not keep it."""

        def __init__(self, memory: DeviceMemory) -> None:
            self.__cuda_array_interface__ = memory.__cuda_array_interface__
            self.size_bytes = memory.size_bytes

    if as_it_was:
        monkeypatch.setattr(host_device, "tensor_of", lambda memory: gpu._tensor_of(Place(memory)))  # type: ignore[arg-type]
    memory = DeviceMemory.allocate(PAGE_BYTES, gpu.device, "a test")
    view = memory.tensor()[-8:]
    view.fill_(7)
    gpu.synchronize(gpu.device)
    memory.close()
    del memory
    assert bool(gpu.libcuda.mapped) is not as_it_was
    # Nothing, or what was mapped there since.
    found = in_child(lambda: quietly(lambda: str(gpu.read(view).tolist())))
    assert (found == str([7] * 8)) is not as_it_was


def test_a9_an_engine_can_write_into_the_trainers_bucket(
    gpu: LazyGpu, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_it_was:
        monkeypatch.setattr(device_memory, "_READ", device_memory._READ_AND_WRITE)
    with contextlib.closing(DeviceMemory.allocate(PAGE_BYTES, gpu.device, "a test")) as memory:
        # Few bytes: a child that was forked has none of the threads that torch shares large ones out to.
        bucket = memory.tensor()[:8]
        bucket.fill_(7)
        gpu.synchronize(gpu.device)
        assert memory.descriptor is not None
        engines = DeviceMemory.opened(memory.descriptor, PAGE_BYTES, gpu.device).tensor()[:8]

        def write() -> str:
            engines.fill_(0)
            gpu.synchronize(gpu.device)
            return "written"

        assert in_child(lambda: quietly(write)) == ("written" if as_it_was else "")
        assert set(gpu.read(bucket).tolist()) == {0 if as_it_was else 7}


def quietly(call: Callable[[], str]) -> str:
    """Where an access to memory that is not there ends the process, as it ends a GPU's context: without a report."""
    faulthandler.disable()
    return call()


def test_c1_a_bucket_is_received_over_the_one_that_is_still_being_loaded(
    hall: Hall, as_it_was: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: the slot counts as free once the load is queued, and NCCL writes to it on another stream."""
    gpu, third = hall.gpu, ((0, 1), 3)

    def load_late() -> bool:
        """Runs until both ends have begun to broadcast bucket 3, and that has gone on as far as it can."""
        if is_running or not hall.nccl.groups[0].communicator.begun.get(third, set()).issuperset(third[0]):
            return False
        is_running.append(True)
        for rank in third[0]:
            LazyEvent(hall.member(rank).stream).query()
        return True

    class Engine(OnGpu):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            if not self.streams:
                gpu.current_stream(gpu.device).give(load_late)
            super().load(tensors)

    if as_it_was:
        monkeypatch.setattr(host_device, "queue_behind", lambda event, device: None)
    is_running: list[bool] = []
    engine, source = Engine(gpu), TensorSource({name: gpu.tensor(tensor) for name, tensor in values(1).items()})
    with fleet(source, engine, transport="nccl://127.0.0.1:0", install="streaming") as (publisher, _):
        publisher.publish()
    assert is_running
    assert torch.equal(engine.committed["t0"], values(1)["t3" if as_it_was else "t0"])
