"""Updates whose bytes leave from several origins: an engine gets what one origin would have sent, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from transports.ipc_children import Child

import weightcast
from core.direct import DirectEngine, RecordingEngine
from core.origins import SPECS, Hosts, Weights, drive, over, weights
from weightcast.errors import (
    InsufficientMemoryError,
    IntegrityError,
    ManifestError,
    PeerDiedError,
    PeersLostError,
    UnsupportedError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import BucketBuffer
from weightcast.format.geometry import Region
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.messages import InitInfo, InstallMode, Received
from weightcast.format.plan import plan
from weightcast.host import memory as host_memory
from weightcast.host.deadline import Deadline
from weightcast.seams.transport import Bucket, Receiver
from weightcast.serving.session import OriginReceivers
from weightcast.testing.payloads import PAYLOADS, Payload, item, raw_bytes
from weightcast.testing.transport_kit import (
    OTHER_RUN,
    PATIENCE_SECONDS,
    RUN,
    Background,
    TransportEnds,
    check,
    listener_of,
    numbered,
    version,
)
from weightcast.testing.transport_kit import send as send_bucket

pytestmark = [pytest.mark.usefixtures("leaves_nothing"), pytest.mark.cluster]

INSTALLS: list[InstallMode] = ["staged", "streaming"]
GLOO = "gloo://127.0.0.1:0"
BUCKET_BYTES = 4096


class WholeTensors:
    """A `ModuleEngine` that takes no regions. `calls`: the names in each call of `load`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._engine = weightcast.ModuleEngine(model)
        self.calls: list[list[str]] = []
        self.commit, self.discard = self._engine.commit, self._engine.discard
        self.specs, self.snapshot = self._engine.specs, self._engine.snapshot

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = list(tensors)
        self.calls.append([name for name, _ in found])
        self._engine.load(found)


ENGINES: list[Callable[[torch.nn.Module], Any]] = [weightcast.ModuleEngine, WholeTensors]


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


@pytest.mark.parametrize("install", INSTALLS)
@pytest.mark.parametrize("num_origins", [2, 3])
@pytest.mark.parametrize("payload", [p for p in PAYLOADS if any(0 not in s.shape for s in p.specs())], ids=str)
def test_every_payload_arrives_as_it_was(
    payload: Payload, num_origins: int, install: InstallMode, stack: contextlib.ExitStack
) -> None:
    engine, manifest = RecordingEngine(), over(payload.specs(), payload.bucket_size_bytes, num_origins)
    hosts = Hosts("memory://", DirectEngine("a", engine), stack, num_origins=num_origins)
    hosts.publish(manifest, payload.tensors(), 1, install)
    assert bits(engine.held) == payload.expected()


@pytest.mark.parametrize("url", ["memory://", "ipc://", GLOO])
@pytest.mark.parametrize("install", INSTALLS)
@pytest.mark.parametrize("engine_of", ENGINES)
def test_an_engine_holds_what_one_origin_would_have_sent(
    engine_of: Callable[[torch.nn.Module], Any], install: InstallMode, url: str, stack: contextlib.ExitStack
) -> None:
    """Version after version, from two origins, from one of them alone, and from two again."""
    two, one = over(SPECS, BUCKET_BYTES, 2), plan(SPECS, BUCKET_BYTES)
    assert len(two.origins) == 2
    model = Weights()
    hosts = Hosts(url, DirectEngine("a", engine_of(model)), stack)
    for number, manifest in enumerate([two, two, one, two], 1):
        hosts.publish(manifest, weights(number), number, install, undo=number == 2)
        assert bits(model.state_dict()) == bits(weights(number))
        assert hosts.client.gate.version == version(number)


def test_a_load_group_that_straddles_origins_reaches_the_engine_in_one_call(stack: contextlib.ExitStack) -> None:
    engine, manifest = WholeTensors(Weights()), over(SPECS, BUCKET_BYTES, 2)
    origins = manifest.bucket_origins
    members = [record for record in manifest.tensors if record.group]
    assert len({origins[piece.bucket] for record in members for piece in record.pieces}) == 2
    Hosts("memory://", DirectEngine("a", engine), stack).publish(manifest, weights(1), 1, "streaming")
    assert sum({"q_a", "kv_a"} <= set(call) for call in engine.calls) == 1
    assert sum(bool({"q_a", "kv_a"} & set(call)) for call in engine.calls) == 1


# --- faults ---


def corrupt(buffer: BucketBuffer) -> None:
    buffer.payload[3] ^= 4


SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    "corrupt": ({"spoil": corrupt}, "bytes were changed during the transfer"),
    "stale": ({"header": {"version": version(1)}}, "its header says version 1, expected version"),
    "another run": ({"header": {"version": WeightVersion(OTHER_RUN, 2)}}, f"run {OTHER_RUN}, expected run {RUN}"),
    "another bucket": ({"header": {"index": 99}}, "its header says index 99, expected index"),
    "another origin": ({"header": {"origin": 7}}, "its header says origin 7, expected origin"),
}


def nth(manifest: Manifest, origin: int, where: str) -> int:
    """The number of an origin's first, second or last bucket."""
    return manifest.spans[origin][{"first": 0, "second": 1, "last": -1}[where]]


@contextlib.contextmanager
def failing(hosts: Hosts, number: int, kinds: tuple[type[WeightcastError], ...], match: str) -> Iterator[None]:
    """The body has spoilt this update: the worker says so, the trainer gives it up."""
    yield
    with pytest.raises(kinds, match=match):
        hosts.link.wait(Received, number, Deadline(PATIENCE_SECONDS))
    hosts.give_up(number)


@pytest.mark.parametrize("where", ["first", "second", "last"])
@pytest.mark.parametrize("origin", [0, 1])
@pytest.mark.parametrize("install", INSTALLS)
@pytest.mark.parametrize("fault", SPOILT)
def test_a_spoilt_bucket_of_any_origin_leaves_the_old_version(
    fault: str, install: InstallMode, origin: int, where: str, stack: contextlib.ExitStack
) -> None:
    spoilt, match = SPOILT[fault]
    assert_old_version_stays("memory://", stack, install, origin, where, (IntegrityError,), match, spoilt=spoilt)


@pytest.mark.parametrize("where", ["first", "second", "last"])
@pytest.mark.parametrize("origin", [0, 1])
@pytest.mark.parametrize("install", INSTALLS)
@pytest.mark.parametrize("url", ["memory://", "ipc://", GLOO])
@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_sender_that_ends_leaves_the_old_version(
    end: str, url: str, install: InstallMode, origin: int, where: str, stack: contextlib.ExitStack
) -> None:
    # A sender that closes says so first; a receiver that writes to it just then finds the connection gone.
    kinds = (UpdateAbortedError,) if end == "abort" else (UpdateAbortedError, PeerDiedError)
    match = "the test says so" if end == "abort" else "closed|gone"
    assert_old_version_stays(url, stack, install, origin, where, kinds, match, end=end)


def assert_old_version_stays(
    url: str,
    stack: contextlib.ExitStack,
    install: InstallMode,
    origin: int,
    where: str,
    kinds: tuple[type[WeightcastError], ...],
    match: str,
    *,
    spoilt: Mapping[str, Any] | None = None,
    end: str = "",
) -> None:
    manifest, model = over(SPECS, BUCKET_BYTES, 2), Weights()
    hosts = Hosts(url, DirectEngine("a", WholeTensors(model)), stack)
    hosts.publish(manifest, weights(1), 1, install)
    struck = nth(manifest, origin, where)
    hosts.offer(manifest, 2, install, undo=True)
    hosts.open(manifest, 2, install)
    with failing(hosts, 2, kinds, match):
        for index in manifest.rounds[: manifest.rounds.index(struck)]:
            hosts.send(manifest, weights(2), 2, index)
        if end == "close":
            hosts.senders[origin].close()
        elif end == "abort":
            hosts.senders[origin].abort("the test says so")
        else:
            hosts.send(manifest, weights(2), 2, struck, **(spoilt or {}))
    if end == "close" and origin == 0:
        hosts.await_free()
    assert bits(model.state_dict()) == bits(weights(1))
    assert hosts.client.gate.version == version(1)
    assert hosts.client.gate.is_open
    if end == "close":
        hosts.replace(origin)
    hosts.publish(manifest, weights(3), 3, install)
    assert bits(model.state_dict()) == bits(weights(3))


@pytest.mark.parametrize(
    ("url", "install", "origin"),
    [("ipc://", "staged", 0), ("ipc://", "streaming", 1), (GLOO, "staged", 1), (GLOO, "streaming", 0)],
)
def test_a_host_that_is_killed_half_way_leaves_the_old_version(
    url: str, install: InstallMode, origin: int, stack: contextlib.ExitStack
) -> None:
    manifest, model = over(SPECS, BUCKET_BYTES, 2), Weights()
    hosts = Hosts(url, DirectEngine("a", WholeTensors(model)), stack)
    hosts.publish(manifest, weights(1), 1, install)
    child = stack.enter_context(Child(drive, url, manifest.encode(), origin, install))
    local = hosts.senders[1 - origin]
    hosts.senders[origin].close()
    hosts.connect_to({origin: child.hear(), 1 - origin: listener_of(local).address})
    hosts.offer(manifest, 2, install, undo=True)
    child.pipe.send(None)
    local.open(manifest.of_origin(1 - origin), version(2), peers=["a"], staged=install == "staged")
    assert child.hear() == "open"
    for index in manifest.rounds[:4]:
        if manifest.bucket_origins[index] == origin:
            child.pipe.send(index)
            assert child.hear() == index
        else:
            hosts.send(manifest, weights(2), 2, index)
    if origin:
        with failing(hosts, 2, (PeerDiedError,), "gone"):
            child.kill()
            # The worker may wait for the other one's bucket first, or have left the update by now.
            with contextlib.suppress(PeersLostError):
                hosts.send(manifest, weights(2), 2, manifest.rounds[4])
    else:
        # The publisher's own link ends, and with it the session.
        child.kill()
        hosts.await_free()
    assert bits(model.state_dict()) == bits(weights(1))
    assert hosts.client.gate.version == version(1)
    assert hosts.client.gate.is_open
    hosts.replace(origin)
    hosts.publish(manifest, weights(3), 3, install)
    assert bits(model.state_dict()) == bits(weights(3))


@pytest.mark.parametrize("install", INSTALLS)
@pytest.mark.parametrize("phase", ["offered", "half-way", "received", "sealed"])
def test_an_abort_in_any_phase_frees_everything(phase: str, install: InstallMode, stack: contextlib.ExitStack) -> None:
    manifest, model = over(SPECS, BUCKET_BYTES, 2), Weights()
    hosts = Hosts(GLOO, DirectEngine("a", WholeTensors(model)), stack)
    hosts.publish(manifest, weights(1), 1, install)
    hosts.offer(manifest, 2, install, undo=True)
    if phase != "offered":
        hosts.open(manifest, 2, install)
    if phase == "half-way":
        for index in manifest.rounds[:3]:
            hosts.send(manifest, weights(2), 2, index)
    if phase in ("received", "sealed"):
        root = hosts.send_all(manifest, weights(2), 2)
        hosts.link.wait(Received, 2, Deadline(PATIENCE_SECONDS))
    if phase == "sealed":
        hosts.seal(manifest, 2, root)
    update = hosts.client.worker._session.update  # type: ignore[union-attr]
    assert update is not None
    hosts.give_up(2)
    hosts.client.worker._session.end_update(UpdateAbortedError("the test waits for its thread"))  # type: ignore[union-attr]
    assert [*update._assembly.parts, *update._assembly.whole, *update._assembly._begun] == []
    assert bits(model.state_dict()) == bits(weights(1))
    assert hosts.client.gate.is_open
    hosts.publish(manifest, weights(3), 3, install)
    assert bits(model.state_dict()) == bits(weights(3))


@pytest.mark.parametrize("install", INSTALLS)
def test_an_offer_of_more_origins_than_addresses_is_refused(install: InstallMode, stack: contextlib.ExitStack) -> None:
    model = Weights()
    hosts = Hosts("memory://", DirectEngine("a", weightcast.ModuleEngine(model)), stack)
    with pytest.raises(ManifestError, match="buckets of 3 origins were offered, but init named 2 addresses") as caught:
        hosts.offer(over(SPECS, BUCKET_BYTES, 3), 1, install)
    assert caught.value.fault == "origin"
    hosts.publish(over(SPECS, BUCKET_BYTES, 2), weights(2), 2, install)
    assert bits(model.state_dict()) == bits(weights(2))


def test_a_transport_that_is_unknown_is_refused_at_init() -> None:
    client = DirectEngine("a", RecordingEngine())
    info = InitInfo(RUN, "a", "pigeon://z", "unix:@nobody", "0" * 64, 5.0)
    with pytest.raises(UnsupportedError, match="pigeon"):
        client.init(info)
    assert client.info().holder == ""
    client.close()


def test_an_origin_that_can_not_be_reached_ends_the_session_and_closes_the_others(stack: contextlib.ExitStack) -> None:
    client = DirectEngine("a", RecordingEngine())
    ends = TransportEnds()
    ends.url, ends.stack = "ipc://", stack
    sender = ends.sender()
    listener = listener_of(sender)
    client.init(
        InitInfo(RUN, "a", "ipc://", "unix:@nobody", listener.secret, 5.0, origins=(listener.address, "unix:@no"))
    )
    session = client.worker._session
    if session is not None:
        session._connected.wait(PATIENCE_SECONDS)
    assert client.info().holder == ""
    assert not sender.connected(["a"])
    client.close()


# --- memory ---


def test_memory_for_what_straddles_origins_is_checked_before_any_byte_moves(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = over(SPECS, BUCKET_BYTES, 2)
    origins = manifest.bucket_origins
    straddling = [t for t in manifest.tensors if len({origins[piece.bucket] for piece in t.pieces}) > 1]
    assert straddling
    needed = sum(record.num_bytes for record in straddling)
    model = Weights()
    hosts = Hosts("memory://", DirectEngine("a", WholeTensors(model)), stack)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: needed - 1)
        with pytest.raises(InsufficientMemoryError, match=f"needs {needed} bytes.*streaming"):
            hosts.offer(manifest, 1, "staged")
        patch.setattr(host_memory, "available_bytes", lambda: 3 * needed - 1)
        message = f"a part, in each of 3 workers, needs {3 * needed} bytes"
        with pytest.raises(InsufficientMemoryError, match=message):
            hosts.offer(manifest, 2, "staged", num_workers=3)
    hosts.publish(manifest, weights(2), 3, "staged")
    assert bits(model.state_dict()) == bits(weights(2))


def test_an_engine_that_is_copied_to_piece_by_piece_needs_no_memory_for_them(stack: contextlib.ExitStack) -> None:
    manifest, model = over(SPECS, BUCKET_BYTES, 2), Weights()
    hosts = Hosts("memory://", DirectEngine("a", weightcast.ModuleEngine(model)), stack)
    hosts.publish(manifest, weights(1), 1, "staged")
    install = hosts.client.worker._session.install  # type: ignore[union-attr]
    assert install is not None
    assert install.straddling_bytes == 0
    assert bits(model.state_dict()) == bits(weights(1))


@pytest.mark.parametrize("num_origins", [1, 2])
def test_what_is_cut_is_put_together_before_the_install(num_origins: int, stack: contextlib.ExitStack) -> None:
    manifest = over(SPECS, BUCKET_BYTES, num_origins)
    given: list[int] = []

    class Watching(WholeTensors):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            found = list(tensors)
            given.extend(tensor.data_ptr() for _, tensor in found)
            super().load(found)

    model = Weights()
    hosts = Hosts("memory://", DirectEngine("a", Watching(model)), stack)
    hosts.offer(manifest, 1, "staged")
    hosts.open(manifest, 1, "staged")
    root = hosts.send_all(manifest, weights(1), 1)
    hosts.link.wait(Received, 1, Deadline(PATIENCE_SECONDS))
    update = hosts.client.worker._session.update  # type: ignore[union-attr]
    assert update is not None
    ready = {record.name: tensor for record, tensor in update._assembly.whole}
    assert ready
    assert {name: raw_bytes(tensor) for name, tensor in ready.items()} == bits(
        {name: tensor for name, tensor in weights(1).items() if name in ready}
    )
    hosts.seal(manifest, 1, root)
    hosts.client.finish(1)
    assert {tensor.data_ptr() for tensor in ready.values()} <= set(given)
    assert [*update._assembly.parts, *update._assembly.whole, *update._assembly._begun] == []
    assert bits(model.state_dict()) == bits(weights(1))


# --- receivers ---


class Ends(TransportEnds):
    def __init__(self, url: str, stack: contextlib.ExitStack) -> None:
        self.url, self.stack = url, stack


def four_to_two() -> Manifest:
    """Four buckets of origin 0, two of origin 1."""
    specs = [spec for spec, _ in (item(f"t{i}", "uint8", (8192,)) for i in range(6))]
    first = {spec.name: [Region((0,), spec.shape)] for spec in specs[:4]}
    second = {spec.name: [Region((0,), spec.shape)] for spec in specs[4:]}
    return plan(specs, 8192, origins=[first, second])


def receivers_of(ends: Ends, num_origins: int = 2) -> tuple[list[Any], OriginReceivers]:
    senders = [ends.sender() for _ in range(num_origins)]
    composite = OriginReceivers([ends.receiver(sender) for sender in senders])
    ends.stack.callback(composite.close)
    return senders, composite


def test_a_bucket_is_valid_until_the_next_one_of_its_origin_is_asked_for(stack: contextlib.ExitStack) -> None:
    """Streaming, with two slots each: what is sent on meanwhile never lands on a bucket that is still held."""
    manifest = four_to_two()
    senders, composite = receivers_of(Ends("memory://", stack))
    composite.open(manifest, version(1), staged=False)
    for origin, sender in enumerate(senders):
        sender.open(manifest.of_origin(origin), version(1), peers=["a"], staged=False)
    found, held = [], dict[int, tuple[torch.Tensor, bytes]]()
    arriving = iter(composite)
    for index in manifest.rounds:
        origin = manifest.bucket_origins[index]
        buffer = senders[origin].buffer(index - manifest.spans[origin].start)
        buffer.payload.fill_(index + 1)
        senders[origin].send(index - manifest.spans[origin].start, buffer.payload.numel() + 256)
        held.pop(origin, None)
        bucket = next(arriving)
        found.append(bucket.index)
        held[origin] = bucket.buffer.payload, bytes([index + 1]) * 8192
        assert all(bytes(payload.tolist()) == expected for payload, expected in held.values())
    assert found == manifest.rounds == [0, 4, 1, 5, 2, 3]
    assert next(arriving, None) is None


@pytest.mark.parametrize("staged", [True, False])
def test_a_manifest_of_one_origin_uses_the_first_receiver_alone(staged: bool, stack: contextlib.ExitStack) -> None:
    senders, composite = receivers_of(Ends("ipc://", stack), num_origins=3)
    manifest = numbered(4)
    composite.open(manifest, version(1), staged=staged)
    senders[0].open(manifest, version(1), peers=["a"], staged=staged)
    indices = []
    arriving = iter(composite)
    for index in range(4):
        send_bucket(senders[0], manifest, 1, index)
        bucket = next(arriving)
        check(bucket, manifest, 1)
        indices.append(bucket.index)
    assert indices == [0, 1, 2, 3]
    assert next(arriving, None) is None


def test_a_spoilt_bucket_is_read_again_from_its_own_origin(stack: contextlib.ExitStack) -> None:
    manifest = four_to_two()
    senders, composite = receivers_of(Ends("ipc://", stack))
    composite.open(manifest, version(1), staged=True)
    for origin, sender in enumerate(senders):
        sender.open(manifest.of_origin(origin), version(1), peers=["a"], staged=True)
    arriving = iter(composite)
    for index in manifest.rounds[:2]:
        origin = manifest.bucket_origins[index]
        send_bucket(senders[origin], manifest.of_origin(origin), 1, 0)
        bucket = next(arriving)
        sent = bytes(bucket.buffer.payload.tolist())
        bucket.buffer.payload.zero_()
        assert composite.reread(bucket)
        assert bytes(bucket.buffer.payload.tolist()) == sent


class Grumbling(Receiver):
    """Raises from `end` and `close`, after having noted the call."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        raise AssertionError("never opened")

    def __iter__(self) -> Iterator[Bucket]:
        raise AssertionError("never iterated")

    def end(self) -> None:
        self._calls.append("end")
        raise UpdateAbortedError("the test says so")

    def close(self) -> None:
        self._calls.append("close")
        raise UpdateAbortedError("the test says so")


def test_end_and_close_reach_every_receiver_whatever_one_of_them_raises() -> None:
    calls: list[str] = []
    composite = OriginReceivers([Grumbling(calls) for _ in range(3)])
    with pytest.raises(UpdateAbortedError):
        composite.end()
    with pytest.raises(UpdateAbortedError):
        composite.close()
    assert calls == ["end"] * 3 + ["close"] * 3


@pytest.mark.parametrize("call", ["end", "close"])
@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_an_iteration_that_waits_for_any_origin_is_woken(num_sent: int, call: str, stack: contextlib.ExitStack) -> None:
    manifest = four_to_two()
    senders, composite = receivers_of(Ends("memory://", stack))
    composite.open(manifest, version(1), staged=True)
    for origin, sender in enumerate(senders):
        sender.open(manifest.of_origin(origin), version(1), peers=["a"], staged=True)
    for index in manifest.rounds[:num_sent]:
        origin = manifest.bucket_origins[index]
        send_bucket(senders[origin], manifest.of_origin(origin), 1, 0)
    arriving: list[int] = []

    def read() -> Sequence[int]:
        for bucket in composite:
            arriving.append(bucket.index)
        return arriving

    reading = Background(read)
    getattr(composite, call)()
    with pytest.raises(WeightcastError):
        reading.result()
    assert arriving == manifest.rounds[: len(arriving)]
