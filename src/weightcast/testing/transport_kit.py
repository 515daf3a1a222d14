"""Kit for transport tests: manifests whose every byte shows version and bucket, steps of both ends, threads."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from weightcast import registry
from weightcast.errors import IntegrityError, PeersLostError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, Layout, check_bucket, queued_digest, write_header
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.messages import Hello
from weightcast.format.plan import plan
from weightcast.host.closing import on_failure
from weightcast.host.memory import host_identity
from weightcast.links.link import LinkListener, WorkerLink
from weightcast.seams.transport import Bucket, Receiver, Sender
from weightcast.testing.faults import SenderWrapper
from weightcast.testing.payloads import DTYPES, Payload, region_slices
from weightcast.trainer.packer import Fill, Packer, pack, tiling
from weightcast.trainer.publish_run import connect

RUN, OTHER_RUN = "5e" * 16, "a7" * 16
PATIENCE_SECONDS = 60.0
SHORT_SECONDS = 0.5

T = TypeVar("T")


class LinkAddress(NamedTuple):
    """Link address that a receiver of the transport `url` connects to, and the secret for its hello."""

    url: str
    link: str
    secret: str


_listeners: weakref.WeakKeyDictionary[Sender, LinkListener] = weakref.WeakKeyDictionary()


def make_sender(
    stack: contextlib.ExitStack,
    url: str,
    *,
    run: str = RUN,
    device: torch.device | None = None,
    deadline_seconds: float = PATIENCE_SECONDS,
    secret: str = "",
) -> Any:
    """Make a sender of the registered transport, and a link listener for it; leaving `stack` closes both."""
    device, lease_seconds = device or torch.device("cpu"), 4 * SHORT_SECONDS
    listener, sender = connect(
        url, run, device, deadline_seconds=deadline_seconds, lease_seconds=lease_seconds, secret=secret
    )
    stack.callback(listener.close)
    stack.callback(sender.close)
    _listeners[sender] = listener
    return sender


def listener_of(sender: Any) -> LinkListener:
    """Return the listener of a sender from `make_sender`, or of a wrapper's `inner` sender."""
    while sender not in _listeners:
        sender = sender.inner
    return _listeners[sender]


def address_of(sender: Any, url: str) -> LinkAddress:
    listener = listener_of(sender)
    return LinkAddress(url, listener.address, listener.secret)


def make_receiver(
    stack: contextlib.ExitStack,
    address: LinkAddress,
    peer: str,
    *,
    run: str = RUN,
    device: torch.device | None = None,
    deadline_seconds: float = PATIENCE_SECONDS,
) -> Any:
    """Make a receiver and connect its link; leaving `stack` closes both. Raises as `WorkerLink.open`."""
    transport = registry.transport(address.url)
    link = WorkerLink(address.link, lease_seconds=PATIENCE_SECONDS, deadline_seconds=deadline_seconds)
    stack.callback(link.close)
    receiver = transport.receiver(
        address.url,
        run=run,
        peer=peer,
        link=link,
        device=device or torch.device("cpu"),
        deadline_seconds=deadline_seconds,
    )
    stack.callback(receiver.close)
    engine, _, rank = peer.partition("#")
    link.open(Hello(run, engine, int(rank or 0), address.secret, host=host_identity()))
    link.await_welcome()
    return receiver


class TransportEnds:
    """Makes senders and receivers of the registered transport of `url`; leaving `stack` closes them."""

    url: str
    """The `transport` argument of a `Publisher`."""
    device = torch.device("cpu")
    """Device of the weights, at both ends."""

    stack: contextlib.ExitStack

    def sender(self, deadline_seconds: float = PATIENCE_SECONDS) -> Sender:
        """Make a sender of the transport."""
        made: Sender = make_sender(self.stack, self.url, device=self.device, deadline_seconds=deadline_seconds)
        return made

    def receiver(
        self, sender: Sender, peer: str = "a", *, run: str = RUN, deadline_seconds: float = PATIENCE_SECONDS
    ) -> Receiver:
        """Make a receiver that is connected to `sender` under the name `peer`."""
        address = address_of(sender, self.url)
        made: Receiver = make_receiver(
            self.stack, address, peer, run=run, device=self.device, deadline_seconds=deadline_seconds
        )
        return made


def version(number: int) -> WeightVersion:
    return WeightVersion(RUN, number)


def numbered(num_buckets: int = 5, bucket_bytes: int = 8192) -> Manifest:
    """Return a manifest of buckets of one tensor each, which `send` fills with numbers."""
    return plan([TensorSpec(f"t{i}", "uint8", (bucket_bytes,)) for i in range(num_buckets)], bucket_bytes)


def value_of(number: int, index: int) -> int:
    """Return the value of every payload byte of bucket `index` in version `number`."""
    return (number * 37 + index * 11 + 1) % 251


def write_raw_header(buffer: BucketBuffer, raw_bytes: int, version: WeightVersion, index: int, origin: int = 0) -> int:
    """Write the header of a payload that is in `buffer` already; return the number of bytes to send."""
    digest = queued_digest(buffer.payload[:raw_bytes])
    write_header(buffer.header, version, index, digest, raw_bytes=raw_bytes, origin=origin)
    return HEADER_BYTES + raw_bytes


def send(sender: Sender, manifest: Manifest, number: int, index: int) -> BucketBuffer:
    """Fill and send bucket `index`; return its buffer."""
    buffer, size = sender.buffer(index), manifest.buckets[index]
    buffer.payload[:size].fill_(value_of(number, index))
    sender.send(index, write_raw_header(buffer, size, version(number), index))
    return buffer


def send_all(sender: Sender, manifest: Manifest, number: int, start: int = 0) -> None:
    for index in range(start, len(manifest.buckets)):
        send(sender, manifest, number, index)


def send_payload(sender: Sender, payload: Payload, manifest: Manifest, version: WeightVersion) -> None:
    """Pack and send every bucket of a payload, as a publisher does."""
    packer = Packer(Layout(manifest), tiling(manifest.tensors, payload.regions()))
    for index in range(len(manifest.buckets)):
        pack_and_send(sender, packer, manifest, version, index)


def pack_and_send(sender: Sender, fill: Fill, manifest: Manifest, version: WeightVersion, index: int) -> None:
    """Pack and send a bucket, as a publisher does."""
    num_bytes, _ = pack(fill, manifest, version, index, sender.buffer(index))
    sender.send(index, num_bytes)


class RecoveringSender(SenderWrapper):
    """Passes all calls on to another sender. If that loses peers, it opens the update again, as a publish run does.

    It keeps copies of the sent buckets and sends them again, so that tests can send bucket by bucket after a loss.
    """

    def __init__(self, inner: Sender) -> None:
        super().__init__(inner)
        self._buffer: BucketBuffer | None = None
        self._sent: list[torch.Tensor] = []

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        self._open = functools.partial(self.inner.open, manifest, version, staged=staged)
        self._sent = []
        try:
            return self._open(peers=peers)
        except PeersLostError as exc:
            self._recover(exc.survivors)
            return 0

    def buffer(self, index: int) -> BucketBuffer:
        try:
            buffer = self._buffer = self.inner.buffer(index)
        except PeersLostError as exc:
            self._recover(exc.survivors)
            return self.buffer(index)
        return buffer

    def send(self, index: int, num_bytes: int) -> None:
        survivors: Sequence[str] | None = None
        try:
            self.inner.send(index, num_bytes)
        except PeersLostError as exc:
            survivors = exc.survivors
        assert self._buffer is not None
        self._sent.append(self._buffer.flat(num_bytes).clone())
        if survivors is not None:
            self._recover(survivors)

    def close(self) -> None:
        self._buffer = None
        self.inner.close()

    def _recover(self, survivors: Sequence[str]) -> None:
        """Open the update again, and send the buckets again that the survivors don't have."""
        while True:
            try:
                for index in range(self._open(peers=survivors), len(self._sent)):
                    bucket = self._sent[index]
                    self.inner.buffer(index).flat(bucket.numel()).copy_(bucket)
                    self.inner.send(index, bucket.numel())
                return
            except PeersLostError as exc:
                # Keep nothing else of the error: its traceback refers to frames that have buckets.
                survivors = exc.survivors


def check(bucket: Bucket, manifest: Manifest, number: int) -> None:
    """Raise unless the bucket has the bytes that `send` has sent in that version."""
    size = manifest.buckets[bucket.index]
    assert set(bucket.buffer.payload[:size].tolist()) <= {value_of(number, bucket.index)}
    check_bucket(bucket.buffer, size, version(number), bucket.index)


def read_all(receiver: Receiver, manifest: Manifest, number: int) -> list[Bucket]:
    """Iterate to the end, check each bucket, and return all."""
    buckets = []
    for bucket in receiver:
        check(bucket, manifest, number)
        buckets.append(bucket)
    return buckets


def unpack(manifest: Manifest, payloads: Sequence[bytes]) -> Mapping[str, bytes]:
    """Return the tensors' bytes by every name, from the payloads and the manifest alone."""
    found: dict[str, bytes] = {}
    for record in manifest.tensors:
        itemsize = DTYPES[record.dtype].itemsize
        out = np.zeros((*record.shape, itemsize), dtype=np.uint8)
        for piece in record.pieces:
            start, end = piece.offset_bytes, piece.offset_bytes + piece.region.numel * itemsize
            data = np.frombuffer(payloads[piece.bucket][start:end], dtype=np.uint8)
            out[region_slices(piece.region)] = data.reshape((*piece.region.sizes, itemsize))
        found |= dict.fromkeys(record.names, out.tobytes())
    return found


class Background(Generic[T]):
    """Runs a call in a thread; `result` waits for it, and returns its result or raises its error."""

    def __init__(self, call: Callable[..., T], *args: object) -> None:
        self._errors: list[BaseException] = []

        def run() -> None:
            try:
                self._outcome = call(*args)
            except BaseException as exc:
                self._errors.append(exc)

        self._thread = threading.Thread(target=run, name="weightcast test", daemon=True)
        self._thread.start()

    def is_done_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        assert self.is_done_within(PATIENCE_SECONDS), f"the call did not return within {PATIENCE_SECONDS:g} s"
        if self._errors:
            # Kept nowhere else, since its traceback refers to this frame, and to frames that have buckets.
            raise self._errors.pop()
        return self._outcome


class Reader(Background[list[bytes]]):
    """Receives one update in a thread, as a worker does; `result` returns copies of the buckets' payloads.

    It checks each bucket (IntegrityError), and ends the update after an error. At the bucket `pause_at` it sets
    `has_paused` and waits until `go_on` is set. It calls `on_bucket` with each checked bucket.
    """

    def __init__(
        self,
        receiver: Receiver,
        manifest: Manifest,
        version: WeightVersion,
        *,
        staged: bool,
        pause_at: int | None = None,
        on_bucket: Callable[[Bucket], object] = lambda bucket: None,
    ) -> None:
        self.has_paused, self.go_on = threading.Event(), threading.Event()

        def read() -> list[bytes]:
            payloads: list[bytes] = []
            with on_failure(receiver.end):
                for index, bucket in enumerate(receiver):
                    if index == pause_at:
                        self.has_paused.set()
                        self.go_on.wait(PATIENCE_SECONDS)
                    if bucket.index != index:
                        raise IntegrityError(f"bucket {bucket.index} arrived, expected bucket {index}")
                    size = manifest.buckets[index]
                    check_bucket(bucket.buffer, size, version, index)
                    payloads.append(bytes(bucket.buffer.payload[:size].cpu().numpy()))
                    on_bucket(bucket)
                if len(payloads) != len(manifest.buckets):
                    raise IntegrityError(f"{len(payloads)} of {len(manifest.buckets)} buckets arrived")
            return payloads

        receiver.open(manifest, version, staged=staged)
        super().__init__(read)
