"""What is the collective transport's own: its groups, who is let in, how an update goes on after a loss."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from weightcast.errors import (
    ClosedError,
    InsufficientMemoryError,
    PeerDiedError,
    PeersLostError,
    PeerTimeoutError,
    UnsupportedError,
    UpdateAbortedError,
)
from weightcast.format.bucket import BucketBuffer, pages, slot_size_bytes
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.host import memory as host_memory
from weightcast.links.link import LinkListener, frame
from weightcast.process_group import ProcessGroup, require
from weightcast.seams.transport import Receiver
from weightcast.testing.leftovers import nothing_left
from weightcast.testing.transport_kit import (
    Background,
    LinkAddress,
    Reader,
    RecoveringSender,
    address_of,
    listener_of,
    make_receiver,
    make_sender,
    write_raw_header,
)
from weightcast.transports.collective import group as collective_group
from weightcast.transports.collective.buffers import BucketTarget, ReceiveBuffers
from weightcast.transports.collective.group import BroadcastGroup, GroupSettings
from weightcast.transports.collective.records import FromReceiver, JoinFailed, Joining, ReadAlong
from weightcast.transports.collective.sender import CollectiveSender

RUN = "5a" * 16
ENDPOINT = "gloo://127.0.0.1:0"
DEADLINE_SECONDS = 20.0


class Hall:
    """A sender and receivers in one process, and a count of the broadcasts and of the groups."""

    def __init__(self, num_buckets: int = 12, *, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self.stack = contextlib.ExitStack()
        self.sender: CollectiveSender = make_sender(self.stack, ENDPOINT, run=RUN, deadline_seconds=deadline_seconds)
        self.manifest = plan([TensorSpec(f"t{i}", "uint8", (4096,)) for i in range(num_buckets)], 4096)
        self.before_bucket: Callable[[int], object] = _nothing

    def receiver(self, peer: str) -> Receiver:
        address = address_of(self.sender, ENDPOINT)
        made: Receiver = make_receiver(self.stack, address, peer, run=RUN, deadline_seconds=DEADLINE_SECONDS)
        return made

    @property
    def num_groups(self) -> int:
        return self.sender.num_groups

    @property
    def group(self) -> BroadcastGroup | None:
        return self.sender._group

    def update(self, number: int, receivers: dict[str, Receiver], **at_bucket: object) -> dict[str, Reader]:
        """Send a version; `at_bucket` maps a peer to a function of each of its buckets."""
        readers = {
            peer: Reader(r, self.manifest, version(number), staged=True, on_bucket=at_bucket.get(peer, _nothing))  # type: ignore[arg-type]
            for peer, r in receivers.items()
        }
        self.send(number, list(receivers), staged=True)
        return readers

    def send(self, number: int, peers: list[str], *, staged: bool) -> None:
        sender = RecoveringSender(self.sender)
        sender.open(self.manifest, version(number), peers=peers, staged=staged)
        for index in range(len(self.manifest.buckets)):
            self.before_bucket(index)
            num_bytes = fill(sender.buffer(index), self.manifest, number, index)
            sender.send(index, num_bytes)


def fill(buffer: BucketBuffer, manifest: Manifest, number: int, index: int) -> int:
    """Returns how many bytes are to be sent."""
    size = manifest.buckets[index]
    buffer.payload[:size].fill_((number * 7 + index) % 251)
    return write_raw_header(buffer, size, version(number), index)


def _nothing(bucket: object) -> None:
    """A peer that only receives, a sender that waits for nobody."""


def version(number: int) -> WeightVersion:
    return WeightVersion(RUN, number)


def whole(reader: Reader, manifest: Manifest, number: int) -> bool:
    found = reader.result()
    expected = [bytes([(number * 7 + k) % 251]) * size for k, size in enumerate(manifest.buckets)]
    return found == expected


@pytest.fixture
def hall() -> Iterator[Hall]:
    with nothing_left():
        made = Hall()
        with made.stack:
            yield made


def test_the_group_is_kept_while_its_members_stay_and_made_anew_when_they_change(hall: Hall) -> None:
    a = hall.receiver("a")
    for number in (1, 2, 3):
        readers = hall.update(number, {"a": a})
        assert whole(readers["a"], hall.manifest, number)
        a.end()
    assert hall.num_groups == 1
    b = hall.receiver("b")
    for number in (4, 5):
        readers = hall.update(number, {"a": a, "b": b})
        assert all(whole(reader, hall.manifest, number) for reader in readers.values())
        a.end()
        b.end()
    assert hall.num_groups == 2
    a.close()
    a = hall.receiver("a")
    readers = hall.update(6, {"a": a, "b": b})
    assert all(whole(reader, hall.manifest, 6) for reader in readers.values())
    assert hall.num_groups == 3
    assert not hall.sender.failures


def lose_one_on_the_way(hall: Hall, receivers: dict[str, Receiver]) -> None:
    """Send version 1; "goes" leaves at its sixth bucket, and all others get everything."""
    num_seen = 0
    has_left = threading.Event()

    def leave(bucket: object) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 6:
            receivers["goes"].close()
            has_left.set()

    # Small buckets fit into the sockets' buffers: without this the sender may be done before anybody has read one.
    def wait(index: int) -> None:
        if index == 8:
            assert has_left.wait(DEADLINE_SECONDS)

    hall.before_bucket = wait
    readers = hall.update(1, receivers, goes=leave)
    with pytest.raises(Exception, match="closed"):
        readers.pop("goes").result()
    assert all(whole(reader, hall.manifest, 1) for reader in readers.values())


def test_after_a_loss_the_others_get_all_of_it_in_a_new_group(hall: Hall) -> None:
    receivers = {peer: hall.receiver(peer) for peer in ("a", "b", "goes")}
    lose_one_on_the_way(hall, receivers)
    assert isinstance(hall.sender.failures["goes"], PeerDiedError)
    assert hall.num_groups == 2


def test_workers_that_share_memory_outlive_the_loss_of_another_engine(hall: Hall) -> None:
    receivers = {peer: hall.receiver(peer) for peer in ("wide", "wide#1", "goes")}
    lose_one_on_the_way(hall, receivers)
    assert set(hall.sender.failures) == {"goes"}


def test_who_cannot_join_is_named_and_keeps_nobody_waiting(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    receivers = {peer: hall.receiver(peer) for peer in "ab"}

    def keep_alone() -> str:
        raise InsufficientMemoryError("no memory here")

    monkeypatch.setattr(receivers["a"]._buffers, "keep_alone", keep_alone)
    readers = hall.update(1, receivers)
    assert whole(readers["b"], hall.manifest, 1)
    assert set(hall.sender.failures) == {"a"}
    assert "no memory here" in str(hall.sender.failures["a"])
    assert hall.num_groups == 2
    receivers["a"].end()


def test_what_an_engine_fails_in_by_itself_is_not_the_others_fault(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    receivers = {peer: hall.receiver(peer) for peer in "abc"}

    def target(*args: object, **options: object) -> object:
        raise InsufficientMemoryError("no memory here")

    monkeypatch.setattr(receivers["a"]._buffers, "target", target)
    readers = hall.update(1, receivers)
    assert all(whole(readers[peer], hall.manifest, 1) for peer in "bc")
    assert set(hall.sender.failures) == {"a"}
    with pytest.raises(UpdateAbortedError, match="no memory here"):
        readers["a"].result()


def test_who_broke_a_group_is_named_though_its_message_comes_after_the_break(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' words, or gloo's thread of a broken broadcast, may be heard first."""
    receivers = {peer: hall.receiver(peer) for peer in "abc"}
    link = receivers["a"]._link
    send_now = link.send
    delayed: list[threading.Thread] = []

    def send_after_the_break(message: msgspec.Struct) -> None:
        group = hall.group
        if isinstance(message, JoinFailed):
            delayed.append(threading.Thread(target=wait_and_send, args=(message, group)))
            delayed[-1].start()
        elif delayed and threading.current_thread() not in delayed:
            # A link keeps the order of its messages.
            delayed.append(threading.Thread(target=after, args=(delayed[-1], message)))
            delayed[-1].start()
        else:
            send_now(message)

    def wait_and_send(message: msgspec.Struct, group: BroadcastGroup) -> None:
        with hall.sender.condition:
            is_broken = lambda: group.error() or any(member.left.epoch for member in group.members)  # noqa: E731
            assert hall.sender.condition.wait_for(is_broken, DEADLINE_SECONDS)
        send_now(message)

    def after(former: threading.Thread, message: msgspec.Struct) -> None:
        former.join()
        send_now(message)

    def target(*args: object, **options: object) -> object:
        raise InsufficientMemoryError("no memory here")

    monkeypatch.setattr(link, "send", send_after_the_break)
    monkeypatch.setattr(receivers["a"]._buffers, "target", target)
    readers = hall.update(1, receivers)
    assert all(whole(readers[peer], hall.manifest, 1) for peer in "bc")
    assert set(hall.sender.failures) == {"a"}
    with pytest.raises(UpdateAbortedError, match="no memory here"):
        readers["a"].result()
    for thread in delayed:
        thread.join()


def test_late_bytes_of_a_group_that_was_left_never_land_in_another_manifests_bucket() -> None:
    supply = ReceiveBuffers("a", torch.device("cpu"))
    large = plan([TensorSpec(f"t{i}", "uint8", (32768,)) for i in range(2)], 32768)
    small = plan([TensorSpec(f"t{i}", "uint8", (2048,)) for i in range(16)], 2048)
    supply.prepare(large, staged=True)
    targets = tuple(supply.target(large, index, is_here=False) for index in range(2))
    supply.leave(threading.main_thread(), targets)
    supply.prepare(small, staged=True)
    for index in range(16):
        place = supply.target(small, index, is_here=False).buffer
        for part in (place.header, place.payload):
            part.fill_(7)
        for target in targets:
            target.flat.fill_(255)
        assert all(bool((part == 7).all()) for part in (place.header, place.payload))


def test_a_worker_that_is_to_read_along_where_it_cannot_says_so_and_is_lost(hall: Hall) -> None:
    with nothing_left(), contextlib.ExitStack() as stack:
        listener = LinkListener(RUN, host="127.0.0.1")
        stack.callback(listener.close)
        listener.carry(FromReceiver)
        address = LinkAddress(ENDPOINT, listener.address, listener.secret)
        make_receiver(stack, address, "e#1", run=RUN, deadline_seconds=DEADLINE_SECONDS)
        (link,) = listener.links()
        for epoch, memory in enumerate(("nowhere", f"{os.getpid()}/0/0/weightcast-buckets-x"), 1):
            link.send(ReadAlong(epoch, memory))
            with listener.condition:
                assert listener.condition.wait_for(lambda: link.records, DEADLINE_SECONDS)
            answer = link.records.popleft()
            assert isinstance(answer, JoinFailed)
            assert (answer.epoch, answer.is_own) == (epoch, True)
            assert "in one container" in answer.reason


def test_heartbeats_go_on_while_the_store_of_a_group_is_served(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_store, beats = collective_group.serve_store, list[bool]()

    def beat() -> None:
        """The links' thread needs the condition for each heartbeat."""
        with hall.sender.condition:
            beats.append(True)

    def slow(host: str, timeout_seconds: float) -> tuple[Any, int]:
        Background(beat).result()
        return serve_store(host, timeout_seconds)

    monkeypatch.setattr(collective_group, "serve_store", slow)
    readers = hall.update(1, {"a": hall.receiver("a")})
    assert whole(readers["a"], hall.manifest, 1)
    assert beats == [True]


def test_a_member_that_has_left_its_group_is_invited_again_and_loses_nothing(hall: Hall) -> None:
    receivers = {peer: hall.receiver(peer) for peer in "ab"}
    readers = hall.update(1, receivers)
    assert all(whole(reader, hall.manifest, 1) for reader in readers.values())
    for receiver in receivers.values():
        receiver.end()
    stream = receivers["b"]._stream
    receivers["b"].on_broken(stream, "as if its socket had failed")
    readers = hall.update(2, receivers)
    assert all(whole(reader, hall.manifest, 2) for reader in readers.values())
    assert not hall.sender.failures


def test_streaming_two_buckets_arrive_while_one_is_held_and_no_more(hall: Hall) -> None:
    a: Any = hall.receiver("a")
    reader = Reader(a, hall.manifest, version(1), staged=False, pause_at=1)
    sending = threading.Thread(target=hall.send, args=(1, ["a"]), kwargs={"staged": False})
    sending.start()
    assert reader.has_paused.wait(DEADLINE_SECONDS)
    wanted, stream = a._wanted, a._stream
    with a._condition:
        assert a._condition.wait_for(lambda: wanted.num_received == 4 and not stream.targets, DEADLINE_SECONDS)
    assert stream.position == 4
    assert a._buffers._memory.size_bytes <= 3 * pages(slot_size_bytes(hall.manifest))
    reader.go_on.set()
    assert whole(reader, hall.manifest, 1)
    sending.join(DEADLINE_SECONDS)
    assert not hall.sender.failures


def test_who_dies_while_the_group_forms_is_named_and_the_others_form_another() -> None:
    """It has answered the invitation: the others wait for it in gloo, whose timeout ends what is left of that group."""
    with nothing_left():
        hall = Hall(deadline_seconds=3.0)
        with hall.stack:
            receivers: dict[str, Any] = {peer: hall.receiver(peer) for peer in ("a", "b", "goes")}
            goes = receivers["goes"]
            join = goes._answer

            def answer_and_die(invitation: object) -> object:
                answer = join(invitation)
                goes._stream.start = threading.Thread(target=goes.close).start
                return answer

            goes._answer = answer_and_die
            readers = hall.update(1, receivers)
            with pytest.raises(Exception, match="closed"):
                readers.pop("goes").result()
            assert all(whole(reader, hall.manifest, 1) for reader in readers.values())
            assert set(hall.sender.failures) == {"goes"}
            assert hall.num_groups == 2


def test_who_has_everything_and_waits_is_not_blamed_for_who_stands_still() -> None:
    with nothing_left():
        hall = Hall(deadline_seconds=1.0)
        with hall.stack:
            receivers: dict[str, Any] = {peer: hall.receiver(peer) for peer in ("a", "stands")}
            last = len(hall.manifest.buckets) - 1
            readers = {
                peer: Reader(r, hall.manifest, version(1), staged=False, pause_at=pause_at)
                for (peer, r), pause_at in zip(receivers.items(), (None, last - 3), strict=True)
            }
            hall.send(1, list(receivers), staged=False)
            assert whole(readers["a"], hall.manifest, 1)
            assert {peer: type(error) for peer, error in hall.sender.failures.items()} == {"stands": PeerTimeoutError}
            readers["stands"].go_on.set()
            with pytest.raises(Exception, match="took no bucket"):
                readers["stands"].result()


def test_who_has_the_last_bucket_is_not_blamed_for_who_stands_still_before_it() -> None:
    with nothing_left():
        hall = Hall(deadline_seconds=1.0)
        with hall.stack:
            receivers: dict[str, Any] = {peer: hall.receiver(peer) for peer in ("a", "stands")}
            goes_on = threading.Event()
            stands, last = receivers["stands"], len(hall.manifest.buckets) - 1
            on_received = stands.on_received

            def stand_still(stream: object, target: BucketTarget) -> None:
                if target.index == last:
                    goes_on.wait(DEADLINE_SECONDS)
                on_received(stream, target)

            stands.on_received = stand_still
            readers = hall.update(1, receivers)
            goes_on.set()
            assert whole(readers["a"], hall.manifest, 1)
            assert {peer: type(error) for peer, error in hall.sender.failures.items()} == {"stands": PeerTimeoutError}
            with pytest.raises(Exception, match="took no bucket"):
                readers["stands"].result()


def test_a_broken_connection_that_nobody_notices_costs_no_member_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo wakes neither end of a connection that broke in the middle of a message: everybody waits, and answers."""
    with nothing_left():
        hall = Hall(deadline_seconds=1.0)
        with hall.stack:
            is_over = threading.Event()
            hall.stack.callback(is_over.set)
            receivers = {peer: hall.receiver(peer) for peer in "ab"}
            broadcast, num_begun = ProcessGroup.broadcast, 0

            def break_one(group: ProcessGroup, tensor: torch.Tensor, *, root: int) -> Any:
                nonlocal num_begun
                num_begun += group.rank == 2
                if group.rank == 2 and num_begun == 6:
                    return NeverWoken(is_over)
                return broadcast(group, tensor, root=root)

            monkeypatch.setattr(ProcessGroup, "broadcast", break_one)
            readers = hall.update(1, receivers)
            assert all(whole(reader, hall.manifest, 1) for reader in readers.values())
            assert not hall.sender.failures
            assert hall.num_groups == 2


def test_what_breaks_twice_with_nobody_to_blame_is_given_up(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    receivers = {peer: hall.receiver(peer) for peer in "ab"}
    readers = {peer: Reader(r, hall.manifest, version(1), staged=True) for peer, r in receivers.items()}
    broadcast = ProcessGroup.broadcast

    def broken(group: ProcessGroup, tensor: torch.Tensor, *, root: int) -> Any:
        if group.rank == 0:
            raise PeerDiedError("as if the network had failed")
        return broadcast(group, tensor, root=root)

    monkeypatch.setattr(ProcessGroup, "broadcast", broken)
    peers, survivors = ["a", "b"], []
    while peers:
        assert hall.sender.open(hall.manifest, version(1), peers=peers, staged=True) == 0
        num_bytes = fill(hall.sender.buffer(0), hall.manifest, 1, 0)
        with pytest.raises(PeersLostError) as caught:
            hall.sender.send(0, num_bytes)
        peers = list(caught.value.survivors)
        survivors.append(peers)
        del caught  # its traceback has the group
    assert survivors == [["a", "b"], []]
    assert {peer: type(error) for peer, error in hall.sender.failures.items()} == dict.fromkeys("ab", PeerDiedError)
    for reader in readers.values():
        with pytest.raises(UpdateAbortedError, match="the network had failed"):
            reader.result()


class NeverWoken:
    """A receive whose connection has broken."""

    def __init__(self, is_over: threading.Event) -> None:
        self._is_over = is_over

    def wait(self) -> None:
        self._is_over.wait(DEADLINE_SECONDS)
        raise RuntimeError("Connection closed by peer")


def test_strangers_are_turned_away_and_disturb_nobody(hall: Hall) -> None:
    port = listener_of(hall.sender).port
    with contextlib.ExitStack() as stack:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, frame(Joining(epoch=1)), b""):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS))
            stranger.sendall(words)
        a = hall.receiver("a")
        assert whole(hall.update(1, {"a": a})["a"], hall.manifest, 1)


def test_a_wrong_secret_opens_nothing(hall: Hall) -> None:
    address = address_of(hall.sender, ENDPOINT)._replace(secret="0" * 64)
    with pytest.raises(PeerDiedError, match="another run"):
        make_receiver(hall.stack, address, "a", run=RUN)


def test_a_version_that_does_not_fit_is_refused_when_it_is_opened(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    a = hall.receiver("a")
    monkeypatch.setattr(host_memory, "available_bytes", lambda *args, **kwargs: 1000)
    with pytest.raises(InsufficientMemoryError, match="streaming"):
        a.open(hall.manifest, version(1), staged=True)


def test_a_port_in_use_is_the_callers_to_mend() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"can.t listen on 127.0.0.1:{port}: .*free port"):
            make_sender(contextlib.ExitStack(), f"gloo://127.0.0.1:{port}", run=RUN)


def test_a_fixed_port_can_be_had_again_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            sender = make_sender(stack, f"gloo://127.0.0.1:{port}", run=RUN)
            make_receiver(stack, address_of(sender, "gloo://"), "a", run=RUN)
            assert listener_of(sender).port == port
            sender.close()
            listener_of(sender).close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gloo://0.0.0.0:1", "this host's own"),
        ("gloo://host:99999", "range"),
        ("gloo://host:1/path", "write gloo://HOST:PORT"),
        ("gloo://host:1?x=1", "write gloo://HOST:PORT"),
    ],
)
def test_endpoints_that_make_no_sense_say_so(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CollectiveSender(url, run=RUN, listener=Any)  # type: ignore[arg-type]


def test_nccl_without_a_gpu_is_refused_with_the_reason() -> None:
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        with contextlib.ExitStack() as stack:
            make_sender(stack, "nccl://127.0.0.1:0", device=torch.device("cuda"))
        return
    with contextlib.ExitStack() as stack, pytest.raises(UnsupportedError, match="nccl"):
        make_sender(stack, "nccl://127.0.0.1:0", run=RUN)


def test_a_group_that_is_closed_before_its_thread_connects_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that dies just then has the group closed; without its store torch would end the process (SIGSEGV)."""
    held: list[Callable[[], None]] = []
    monkeypatch.setattr(collective_group, "awaited_at_exit", lambda call, name: held.append(call))
    settings = GroupSettings("gloo", "127.0.0.1", torch.device("cpu"), DEADLINE_SECONDS, threading.Condition())
    group = BroadcastGroup(1, settings, {})
    group.connect()
    group.close()
    held.pop()()
    assert not group.connect_error
    assert not group.is_connected


def test_what_a_gpu_ends_without_a_word_is_looked_for_all_the_time() -> None:
    """It may end after it was asked for, and before the wait: no wait may then be long."""
    with contextlib.ExitStack() as stack:
        sender = make_sender(stack, ENDPOINT, run=RUN, deadline_seconds=DEADLINE_SECONDS)
        group = BroadcastGroup(1, sender._settings, {})
        sender._settings = sender._settings._replace(backend="nccl")
        waits: list[float] = []
        sender.condition.wait = waits.append  # type: ignore[assignment]
        manifest = plan([TensorSpec("t", "uint8", (4096,))], 4096)
        sender.open(manifest, version(1), peers=[], staged=True)
        answers = iter([False, True])
        sender._await(sender._require_update(0), group, lambda: next(answers), list)
        group.close()
        assert waits
        assert max(waits) <= 0.01


def test_asking_for_gloo_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was asked"))
    require("gloo")


def test_closing_while_others_wait_ends_in_time(hall: Hall) -> None:
    a = hall.receiver("a")
    reader = Reader(a, hall.manifest, version(1), staged=True)
    opening = threading.Thread(
        target=hall.sender.open, args=(hall.manifest, version(1)), kwargs={"peers": ["a"], "staged": True}
    )
    opening.start()
    opening.join(DEADLINE_SECONDS)
    assert not opening.is_alive()
    hall.sender.close()
    with pytest.raises(Exception, match=r"closed|gone"):
        reader.result()


def test_an_engine_that_was_lost_can_take_the_same_version_when_it_is_published_again(hall: Hall) -> None:
    """Nobody was left to go on with the first attempt, so that it is over."""
    lost = hall.receiver("a")
    reader = Reader(lost, hall.manifest, version(1), staged=True)
    hall.sender.open(hall.manifest, version(1), peers=["a"], staged=True)
    lost.close()

    def send() -> None:
        for index in range(len(hall.manifest.buckets)):
            hall.sender.send(index, fill(hall.sender.buffer(index), hall.manifest, 1, index))

    with pytest.raises(PeersLostError) as caught:
        send()
    assert not caught.value.survivors
    with pytest.raises(ClosedError):
        reader.result()
    again = hall.update(1, {"a": hall.receiver("a")})["a"]
    assert not hall.sender.failures
    assert whole(again, hall.manifest, 1)
