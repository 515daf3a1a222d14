"""The collective transport over NCCL, whose waits end by nothing but an abort of one's own: see `lazy_nccl`."""

from __future__ import annotations

import contextlib
import datetime
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pretended.lazy_gpu import LazyGpu, LazyTensor
from pretended.lazy_nccl import LazyNccl

from weightcast import process_group
from weightcast.errors import PeerDiedError, PeersLostError, PeerTimeoutError, WeightcastError
from weightcast.format.manifest import TensorSpec
from weightcast.format.plan import plan
from weightcast.host import device as host_device
from weightcast.host.deadline import Deadline
from weightcast.integrations.sglang.stock.group import StockGroup
from weightcast.process_group import Broadcast, ProcessGroup, join_store, serve_store
from weightcast.testing.transport_kit import (
    Background,
    Reader,
    RecoveringSender,
    address_of,
    make_receiver,
    make_sender,
    send,
    value_of,
    version,
)
from weightcast.transports.collective.sender import CollectiveSender

pytestmark = pytest.mark.usefixtures("leaves_nothing")
URL = "nccl://127.0.0.1:0"
PATIENCE_SECONDS = 60.0
SHORT_SECONDS = 0.3
MANIFEST = plan([TensorSpec(f"t{number}", "uint8", (4096,)) for number in range(8)], 4096)


class Hall:
    """A sender and receivers, each with the GPU's only device."""

    def __init__(self, gpu: LazyGpu, nccl: LazyNccl, stack: contextlib.ExitStack) -> None:
        self.gpu, self.nccl, self.stack = gpu, nccl, stack

    def sender(self, deadline_seconds: float = PATIENCE_SECONDS) -> CollectiveSender:
        sender: CollectiveSender = make_sender(
            self.stack, URL, device=self.gpu.device, deadline_seconds=deadline_seconds
        )
        return sender

    def receiver(self, sender: CollectiveSender, peer: str) -> Any:
        address = address_of(sender, URL)
        return make_receiver(self.stack, address, peer, device=self.gpu.device, deadline_seconds=PATIENCE_SECONDS)

    def member(self, rank: int) -> Any:
        return next(group for group in self.nccl.groups if group.rank == rank)


@pytest.fixture(params=["silent", "reported", "reported before torch 2.13"])
def hall(request: pytest.FixtureRequest) -> Iterator[Hall]:
    reports_errors, has_exceptions = request.param != "silent", request.param == "reported"
    with (
        LazyGpu(index=1) as gpu,
        LazyNccl(gpu, reports_errors=reports_errors, has_exceptions=has_exceptions) as nccl,
        contextlib.ExitStack() as stack,
    ):
        yield Hall(gpu, nccl, stack)


def expected(number: int) -> list[bytes]:
    return [bytes([value_of(number, index)]) * size for index, size in enumerate(MANIFEST.buckets)]


@pytest.mark.parametrize("staged", [False, True], ids=["streaming", "staged"])
def test_versions_arrive(hall: Hall, staged: bool) -> None:
    sender = hall.sender()
    receivers = {peer: hall.receiver(sender, peer) for peer in ("a", "b")}
    for number in (1, 2):
        readers = [Reader(r, MANIFEST, version(number), staged=staged) for r in receivers.values()]
        sender.open(MANIFEST, version(number), peers=list(receivers), staged=staged)
        for index in range(len(MANIFEST.buckets)):
            send(sender, MANIFEST, number, index)
        assert [reader.result() for reader in readers] == [expected(number)] * 2
    assert hall.gpu.default_stream not in {group.stream for group in hall.nccl.groups}


@pytest.mark.parametrize("num_origins", [1, 2])
@pytest.mark.parametrize("staged", [False, True], ids=["streaming", "staged"])
def test_of_several_origins_an_engine_has_one_broadcast_under_way_each(
    hall: Hall, staged: bool, num_origins: int
) -> None:
    """Else what is queued behind one of them may be in the way of the other, in another order on each engine."""
    senders = [hall.sender() for _ in range(num_origins)]
    receivers = [hall.receiver(sender, "a") for sender in senders]
    readers = [Reader(receiver, MANIFEST, version(1), staged=staged) for receiver in receivers]
    for sender in senders:
        sender.open(MANIFEST, version(1), peers=["a"], staged=staged)
    members = [group for group in hall.nccl.groups if group.rank]
    num_at_once = 2 if num_origins == 1 else 1
    wait_until(lambda: all(member.max_under_way >= num_at_once for member in members))
    for index in range(len(MANIFEST.buckets)):
        for sender in senders:
            send(sender, MANIFEST, 1, index)
    assert [reader.result() for reader in readers] == [expected(1)] * num_origins
    assert [member.max_under_way for member in members] == [num_at_once] * num_origins


def test_an_update_is_prepared_and_ended_while_a_graph_is_captured(hall: Hall) -> None:
    """In the thread of the offer, which the engine may go on with, in the link's, and in those that connect and end."""
    sender = hall.sender()
    receiver = hall.receiver(sender, "a")
    hall.gpu.is_capturing = True
    reader = Reader(receiver, MANIFEST, version(1), staged=False)
    sender.open(MANIFEST, version(1), peers=["a"], staged=False)
    assert receiver._buffers._memory.size_bytes
    assert not hall.gpu.libcuda.is_relaxed, "the engine's thread has its own mode again"
    with pytest.raises(RuntimeError, match="capturing"):
        torch.empty(8, device=hall.gpu.device)
    # Packing and reading are not of the transport.
    hall.gpu.is_capturing = False
    for index in range(len(MANIFEST.buckets)):
        send(sender, MANIFEST, 1, index)
    assert reader.result() == expected(1)
    hall.gpu.is_capturing = True
    receiver.close()
    sender.close()
    wait_until(lambda: hall.member(0).is_aborted and hall.member(1).is_aborted)


def test_the_first_transfer_between_two_ranks_ends_by_the_deadline(hall: Hall) -> None:
    """torch may connect each two only then, and NCCL would wait for ever."""
    hall.nccl.connects_pairs = True
    with contextlib.closing(pair(hall, SHORT_SECONDS)) as both:
        for begin in (both.groups[0].send, both.groups[0].receive):
            with pytest.raises(PeerTimeoutError, match="connecting with rank 1"):
                begin(hall.gpu.tensor(torch.zeros(8)), 1)


def test_the_first_transfer_between_two_ranks_comes_after_what_was_queued(hall: Hall) -> None:
    with contextlib.closing(pair(hall, PATIENCE_SECONDS)) as both:
        message, received = hall.gpu.tensor(torch.zeros(8)), hall.gpu.tensor(torch.zeros(8))
        with hall.gpu.stream(hall.gpu.Stream(hall.gpu.device)):
            message.fill_(7.0)
            works = both.groups[0].send(message, 1), both.groups[1].receive(received, 0)
        for group, work in zip(both.groups, works, strict=True):
            group.wait(work)
        assert hall.gpu.read(received).tolist() == [7.0] * 8


def test_an_update_of_no_buckets_leaves_the_group_as_it_is(hall: Hall) -> None:
    """The receiver may have gone on when it hears that the sender has begun it."""
    sender = hall.sender()
    receiver = hall.receiver(sender, "a")
    for number in (1, 3):
        reader = Reader(receiver, MANIFEST, version(number), staged=False)
        sender.open(MANIFEST, version(number), peers=["a"], staged=False)
        for index in range(len(MANIFEST.buckets)):
            send(sender, MANIFEST, number, index)
        assert reader.result() == expected(number)
        receiver.end()
        receiver.open(plan([], 4096), version(number + 1), staged=False)
        sender.open(plan([], 4096), version(number + 1), peers=["a"], staged=False)
        wait_until(lambda: receiver._wanted.begin is not None)
        receiver.end()
    assert sender.num_groups == 1


@pytest.mark.parametrize("staged", [False, True], ids=["streaming", "staged"])
def test_memory_is_given_back_between_versions(hall: Hall, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from torch's cache; not during an update."""
    emptied: list[int] = []
    monkeypatch.setattr(hall.gpu, "empty_cache", lambda: emptied.append(1))
    sender = hall.sender()
    receiver = hall.receiver(sender, "a")
    for number in (1, 2):
        reader = Reader(receiver, MANIFEST, version(number), staged=staged)
        sender.open(MANIFEST, version(number), peers=["a"], staged=staged)
        receiver.release()
        for index in range(len(MANIFEST.buckets)):
            send(sender, MANIFEST, number, index)
        assert reader.result() == expected(number)
        receiver.end()
        assert not emptied
        assert sender._slots.size_bytes
        assert receiver._buffers._memory.size_bytes
        sender.release()
        receiver.release()
        assert not sender._slots.size_bytes
        assert not receiver._buffers._memory.size_bytes
        assert len(emptied) == 2
        emptied.clear()
        wait_until(lambda: not hall.nccl.stashed)
        wait_until(lambda: not tensors_on(hall.gpu))


@pytest.mark.parametrize("staged", [False, True], ids=["streaming", "staged"])
def test_a_receiver_is_lost_in_a_broadcast_and_the_others_go_on(hall: Hall, staged: bool) -> None:
    """Every kernel that waits for it is aborted by its own process, and nothing of the engines' ever waited for it."""
    sender = hall.sender()
    receivers = {peer: hall.receiver(sender, peer) for peer in ("a", "b")}
    readers = {peer: Reader(r, MANIFEST, version(1), staged=staged) for peer, r in receivers.items()}
    recovering = RecoveringSender(sender)
    recovering.open(MANIFEST, version(1), peers=list(receivers), staged=staged)
    for index in range(len(MANIFEST.buckets)):
        if index == 3:
            hall.nccl.kill(hall.member(2))
            receivers["b"].close()
        send(recovering, MANIFEST, 1, index)
    assert readers["a"].result() == expected(1)
    with pytest.raises(WeightcastError):
        readers["b"].result()
    hall.gpu.default_stream.synchronize()


def test_a_trainer_that_dies_leaves_no_kernel_behind(hall: Hall) -> None:
    sender = hall.sender()
    receiver = hall.receiver(sender, "a")
    reader = Reader(receiver, MANIFEST, version(1), staged=False)
    sender.open(MANIFEST, version(1), peers=["a"], staged=False)
    send(sender, MANIFEST, 1, 0)
    hall.nccl.kill(hall.member(0))
    for link in [peer.link for peer in sender._peers.values()]:
        link.end("the process was killed")
    with pytest.raises(PeerDiedError):
        reader.result()
    receiver.close()
    wait_until(lambda: hall.member(1).is_aborted)
    hall.gpu.default_stream.synchronize()


def test_an_engine_that_stops_leaves_nothing_that_ends_the_trainers_process(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's watchdog of our group would find a broadcast late; the process's own NCCL groups then end it."""
    sender = hall.sender(deadline_seconds=SHORT_SECONDS)
    receivers = {peer: hall.receiver(sender, peer) for peer in ("a", "b")}
    readers = {peer: Reader(r, MANIFEST, version(1), staged=False) for peer, r in receivers.items()}
    recovering = RecoveringSender(sender)
    recovering.open(MANIFEST, version(1), peers=list(receivers), staged=False)
    for index in range(len(MANIFEST.buckets)):
        if index == 3:
            hall.nccl.kill(hall.member(2))
            monkeypatch.setattr(receivers["b"]._link, "send", lambda record: None)
        send(recovering, MANIFEST, 1, index)
    assert readers["a"].result() == expected(1)
    with pytest.raises(WeightcastError):
        readers["b"].result()
    assert not hall.nccl.should_dump
    assert not any(group.has_watchdog for group in hall.nccl.groups)


def test_what_a_broken_transfer_may_still_write_to_is_kept_until_the_abort(hall: Hall) -> None:
    """Nobody else keeps it: the caller has let go of the tensor, and torch would give its memory to the next one."""
    with contextlib.closing(pair(hall, SHORT_SECONDS)) as both:
        receiving = both.groups[0]
        with pytest.raises(PeerTimeoutError):
            receiving.wait(receiving.receive(hall.gpu.tensor(torch.zeros(8)), 1))
        assert [len(tensor) for tensor in hall.nccl.stashed] == [8]
        receiving.close()
        assert not hall.nccl.stashed


def test_a_group_with_stock_servers_has_their_limit_of_thread_blocks(hall: Hall) -> None:
    """They set none, and NCCL connects no members whose own limits differ, on a host with more channels than that."""
    group = StockGroup("weightcast-1", "nccl", "127.0.0.1", 2, PATIENCE_SECONDS)
    group.connect()
    torch_groups: Any = torch.distributed
    nccl = torch_groups.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = datetime.timedelta(seconds=PATIENCE_SECONDS)
    received = hall.gpu.tensor(torch.zeros(8))

    def join() -> None:
        with host_device.own_thread(hall.gpu.device):
            store = join_store("127.0.0.1", group.port, PATIENCE_SECONDS)
            for prefix in ("weightcast-1", "weightcast-1/", "cuda/"):
                store = torch.distributed.PrefixStore(prefix, store)
            server = nccl(store, 1, 2, options)
            wait_until(server.broadcast([received], None).is_completed)
            assert is_over.wait(PATIENCE_SECONDS)
            server.abort()

    is_over = threading.Event()
    server = Background(join)
    group.broadcast(hall.gpu.tensor(torch.ones(8)))
    is_over.set()
    server.result()
    assert hall.gpu.read(received).tolist() == [1.0] * 8
    group.close()


def tensors_on(gpu: LazyGpu) -> list[torch.Tensor]:
    """Every tensor of the GPU that this process has."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is LazyTensor and gpu.has(each)]


def wait_until(is_done: Callable[[], bool]) -> None:
    over = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        if is_done():
            return
        over.wait(0.01)
    raise AssertionError("it did not happen")


def test_a_broadcast_that_nobody_answers_ends_by_the_deadline(hall: Hall) -> None:
    """Also without a word from anybody: the group's timeout bounds the wait, and the abort frees the GPU."""
    with contextlib.closing(pair(hall, SHORT_SECONDS)) as both:
        first, second = both.groups
        hall.nccl.kill(hall.member(1))
        work = first.broadcast(hall.gpu.tensor(torch.zeros(8)), root=0)
        error = PeerDiedError if hall.nccl.reports_errors else PeerTimeoutError
        with pytest.raises(error):
            first.wait(work)
        first.close()
        hall.gpu.synchronize(hall.gpu.device)
        second.close()


def test_a_broadcast_that_failed_is_over_and_no_success(hall: Hall) -> None:
    """An error completes it: the sender learns of it only by asking."""
    with contextlib.closing(pair(hall, SHORT_SECONDS)) as both:
        hall.nccl.kill(hall.member(1))
        broadcast = Broadcast(both.groups[0], hall.gpu.tensor(torch.zeros(8)), threading.Condition())
        for _ in Deadline(PATIENCE_SECONDS if hall.nccl.reports_errors else SHORT_SECONDS).polls(0.001, 0.05):
            if broadcast.is_over:
                break
        assert broadcast.is_over is hall.nccl.reports_errors
        assert bool(broadcast.error) is hall.nccl.reports_errors


def test_a_wait_ends_when_the_group_is_left(hall: Hall) -> None:
    with contextlib.closing(pair(hall, PATIENCE_SECONDS)) as both:
        work = both.groups[0].broadcast(hall.gpu.tensor(torch.zeros(8)), root=0)
        with pytest.raises(PeerDiedError, match="was left"):
            both.groups[0].wait(work, lambda: True)


class Pair:
    def __init__(self, groups: list[ProcessGroup]) -> None:
        self.groups = groups

    def close(self) -> None:
        for group in self.groups:
            group.close()


def pair(hall: Hall, timeout_seconds: float) -> Pair:
    store, port = serve_store("127.0.0.1", PATIENCE_SECONDS)
    made: dict[int, ProcessGroup] = {}

    def make(rank: int) -> None:
        own = join_store("127.0.0.1", port, PATIENCE_SECONDS) if rank else store
        made[rank] = ProcessGroup(
            "nccl", own, rank=rank, size=2, timeout_seconds=timeout_seconds, device=hall.gpu.device
        )

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Pair([made[0], made[1]])


def test_connecting_ends_by_the_deadline_although_a_member_never_comes(hall: Hall) -> None:
    store, _ = serve_store("127.0.0.1", PATIENCE_SECONDS)
    with pytest.raises(PeerTimeoutError, match="not all members have connected"):
        ProcessGroup("nccl", store, rank=0, size=2, timeout_seconds=SHORT_SECONDS, device=hall.gpu.device)
    # Another store: in that one a member still waits for a second one.
    store, _ = serve_store("127.0.0.1", PATIENCE_SECONDS)
    options: dict[str, Any] = {"timeout_seconds": PATIENCE_SECONDS, "device": hall.gpu.device}
    with pytest.raises(PeerDiedError, match="was aborted before all members"):
        ProcessGroup("nccl", store, rank=0, size=2, **options, is_left=lambda: True)


def test_the_first_broadcast_to_a_stock_server_that_never_joined_ends_by_the_deadline(hall: Hall) -> None:
    """Its group connects only then, and NCCL would wait for it for ever."""
    group = StockGroup("weightcast-1", "nccl", "127.0.0.1", 2, SHORT_SECONDS)
    group.connect()
    with pytest.raises(PeerTimeoutError, match="not all members have connected"):
        group.broadcast(hall.gpu.tensor(torch.zeros(8)))
    group.close()


def test_a_group_whose_sender_never_connects_is_given_up_at_both_ends(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL itself would wait for it for ever."""
    sender = hall.sender(deadline_seconds=SHORT_SECONDS)
    receiver = hall.receiver(sender, "a")
    reader = Reader(receiver, MANIFEST, version(1), staged=False)
    make = process_group.make_nccl

    def make_for_others(store: Any, rank: int, *rest: Any) -> Any:
        return make(store, rank or 1, *rest)

    monkeypatch.setattr(process_group, "make_nccl", make_for_others)
    for _ in range(2):
        with pytest.raises(PeersLostError):
            sender.open(MANIFEST, version(1), peers=["a"], staged=False)
    receiver.close()
    with pytest.raises(WeightcastError):
        reader.result()
