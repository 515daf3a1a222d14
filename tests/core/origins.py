"""A trainer of several hosts, made by hand: a sender for each origin, one link, and the worker that they update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from core.direct import DirectEngine
from weightcast.errors import ClosedError
from weightcast.format.bucket import BucketBuffer, Layout, header_digest, narrow, root_digest
from weightcast.format.geometry import Region, split, whole
from weightcast.format.manifest import Manifest, TensorSpec
from weightcast.format.messages import Abort, Accepted, InitInfo, InstallMode, Offer, Received, Seal
from weightcast.format.plan import plan
from weightcast.host.deadline import Deadline
from weightcast.host.memory import host_identity
from weightcast.links.link import Link
from weightcast.seams.transport import Sender
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    RUN,
    listener_of,
    make_sender,
    version,
    write_raw_header,
)

SHAPES = {"rows": (64, 32), "columns": (48, 40), "first": (700,), "second": (3, 5), "q_a": (40, 30), "kv_a": (20, 30)}
SPECS = [
    TensorSpec(name, "float32", shape, group="attention" if name.endswith("_a") else "")
    for name, shape in SHAPES.items()
]

SECRET = "5e" * 32
"""Of the links of all hosts."""

Spoil = Callable[[BucketBuffer], object]


class Weights(torch.nn.Module):
    """Parameters of these shapes. The load group is of two tensors that leave, in part, from different origins."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator), False))


def weights(seed: int) -> dict[str, torch.Tensor]:
    return dict(Weights(seed).state_dict())


def over(specs: Sequence[TensorSpec], bucket_size_bytes: int, num_origins: int) -> Manifest:
    """A plan in which tensors are cut by rows, cut by columns, or lie whole in one origin or another, in turn."""
    origins: list[dict[str, list[Region]]] = [{} for _ in range(num_origins)]
    for number, spec in enumerate(specs):
        region, first = whole(spec.shape), number // 4
        if number % 4 < 2 and spec.shape:
            parts = split(region, num_origins) if number % 4 == 0 else _columns(region, num_origins)
        else:
            parts, first = [region], number
        for position, part in enumerate(parts):
            origins[(first + position) % num_origins].setdefault(spec.name, []).append(part)
    shapes = {spec.name for spec in specs if 0 not in spec.shape}
    return plan(specs, bucket_size_bytes, origins=[held for held in origins if shapes & held.keys()])


def _columns(region: Region, num_parts: int) -> list[Region]:
    """Cut across the last dim."""
    swapped = Region(region.offsets[::-1], region.sizes[::-1])
    return [Region(part.offsets[::-1], part.sizes[::-1]) for part in split(swapped, num_parts)]


def fill_and_send(
    sender: Sender,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    number: int,
    index: int,
    *,
    spoil: Spoil = lambda buffer: None,
    header: Mapping[str, Any] | None = None,
) -> bytes:
    """See `Hosts.send`. `sender` is that of the bucket's origin."""
    origin, size = manifest.bucket_origins[index], manifest.buckets[index]
    local = index - manifest.spans[origin].start
    buffer = sender.buffer(local)
    payload = buffer.payload[:size].zero_()
    layout = Layout(manifest)
    for entry, view in zip(layout.entries[index], layout.views(index, payload), strict=True):
        view.copy_(narrow(tensors[entry.record.name], entry.piece.region))
    said: dict[str, Any] = {"version": version(number), "index": index, "origin": origin, **(header or {})}
    num_bytes = write_raw_header(buffer, size, **said)
    digest = header_digest(buffer.header)
    spoil(buffer)
    sender.send(local, num_bytes)
    return digest


def drive(pipe: Connection, url: str, encoded: bytes, origin: int, install: InstallMode) -> None:
    """A trainer host of its own process: version 2 of `weights(2)`, from one origin, bucket by bucket as it is told."""
    manifest = Manifest.decode(encoded)
    sender = make_sender(contextlib.ExitStack(), url, secret=SECRET)
    pipe.send(listener_of(sender).address)
    pipe.recv()
    sender.open(manifest.of_origin(origin), version(2), peers=["a"], staged=install == "staged")
    pipe.send("open")
    while True:
        index = pipe.recv()
        fill_and_send(sender, manifest, weights(2), 2, index)
        pipe.send(index)


class Hosts:
    """`senders[o]` is origin o's. Leaving `stack` closes everything."""

    def __init__(self, url: str, client: DirectEngine, stack: contextlib.ExitStack, *, num_origins: int = 2) -> None:
        self.client = client
        self._url, self._stack = url, stack
        self.senders = [self._sender() for _ in range(num_origins)]
        self._listener = listener_of(self.senders[0])
        stack.callback(client.close)
        self.connect()

    def _sender(self) -> Sender:
        sender: Sender = make_sender(self._stack, self._url, secret=SECRET)
        return sender

    def replace(self, origin: int) -> None:
        """Another sender in the place of one that was closed, and another session of the same run."""
        self.senders[origin] = self._sender()
        self.connect()

    def connect(self) -> None:
        self.connect_to({origin: listener_of(sender).address for origin, sender in enumerate(self.senders)})

    def connect_to(self, addresses: Mapping[int, str]) -> None:
        """Have the worker connect to the senders whose links have these addresses, by origin.

        `link` is None where origin 0, which hears the worker's verdicts, is another process.
        """
        first, *others = (addresses[origin] for origin in sorted(addresses))
        self._listener.end_links("the test connects again", self.client.name)
        info = InitInfo(RUN, self.client.name, self._url, first, SECRET, lease_seconds=60.0, origins=tuple(others))
        self.client.init(info)
        self.link: Link | None = None
        if first != listener_of(self.senders[0]).address:
            return
        self._listener = listener = listener_of(self.senders[0])
        (self.link,) = listener.wait(self.client.name, 1, PATIENCE_SECONDS)

    def offer(
        self, manifest: Manifest, number: int, install: InstallMode, *, undo: bool = False, num_workers: int = 1
    ) -> None:
        """Offer a version, to so many workers of this host, and wait until it is accepted.

        Raises what the worker refuses it with.
        """
        offer = Offer(RUN, number, manifest.digest(), manifest.text, install=install, undo=undo)
        workers = {host_identity(): num_workers, "another host": 9}
        self.client.update(msgspec.structs.replace(offer, secret=SECRET, workers=workers))
        if self.link is not None:
            self.link.wait(Accepted, number, Deadline(PATIENCE_SECONDS))

    def open(self, manifest: Manifest, number: int, install: InstallMode) -> None:
        for origin, _ in enumerate(manifest.spans):
            part = manifest.of_origin(origin) if manifest.origins else manifest
            staged = install == "staged"
            self.senders[origin].open(part, version(number), peers=[self.client.name], staged=staged)

    def send(
        self,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        number: int,
        index: int,
        *,
        spoil: Spoil = lambda buffer: None,
        header: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Fill and send one bucket; return its digest. `spoil` changes it last; `header` what its header says."""
        sender = self.senders[manifest.bucket_origins[index]]
        return fill_and_send(sender, manifest, tensors, number, index, spoil=spoil, header=header)

    def send_all(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor], number: int) -> str:
        """Send every bucket in its turn, as trainer ranks do; return the root."""
        digests = {index: self.send(manifest, tensors, number, index) for index in manifest.rounds}
        return root_digest(manifest.digest(), [digests[index] for index in range(len(manifest.buckets))])

    def publish(
        self,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        number: int,
        install: InstallMode,
        *,
        undo: bool = False,
    ) -> None:
        """All of an update. Raises whatever the worker says of it."""
        self.offer(manifest, number, install, undo=undo)
        self.open(manifest, number, install)
        root = self.send_all(manifest, tensors, number)
        received = self.link.wait(Received, number, Deadline(PATIENCE_SECONDS))
        assert received.root == root
        self.seal(manifest, number, root)
        self.client.finish(number)

    def seal(self, manifest: Manifest, number: int, root: str) -> None:
        self.client.update(Seal(RUN, number, len(manifest.buckets), root, SECRET))

    def give_up(self, number: int) -> None:
        """What a publisher does when one origin has failed: end the update on every one of them."""
        for sender in self.senders:
            sender.abort("another origin has failed")
        with contextlib.suppress(ClosedError):  # the session has ended with origin 0's link
            self.client.update(Abort(RUN, number, "an origin has failed", SECRET))

    def await_free(self) -> None:
        """Wait until the worker's session has ended, as it does with origin 0's link."""
        deadline = Deadline(PATIENCE_SECONDS)
        while self.client.info().holder:
            assert not deadline.has_passed
            time.sleep(0.01)
