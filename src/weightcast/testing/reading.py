"""The receiving half of a transport's test: reads as a worker does, and keeps copies of the bytes it was given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weightcast.errors import IntegrityError
from weightcast.format.bucket import Layout, check_trailer
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Bucket, Receiver, Sender
from weightcast.testing.payloads import DTYPES, Payload
from weightcast.trainer.packer import Packer

PATIENCE_SECONDS = 30.0


def send_all(sender: Sender, payload: Payload, manifest: Manifest, version: WeightVersion) -> None:
    """Pack and send every bucket of a payload, as a publisher does."""
    packer = Packer(Layout(manifest), payload.tensors())
    index = 0
    while index < len(manifest.buckets):
        packer.pack(index, sender.buffer(index), version)
        index = sender.send(index)


def checked(bucket: Bucket, manifest: Manifest, version: WeightVersion, index: int) -> bytes:
    """A copy of the payload of what must be bucket `index`. Raises IntegrityError if it is not."""
    if bucket.index != index:
        raise IntegrityError(f"bucket {bucket.index} came, bucket {index} is the next")
    size = manifest.buckets[index]
    check_trailer(bucket.buffer, size, version, index, manifest.digest_kind)
    return bytes(bucket.buffer[:size].cpu().numpy())


def unpack(manifest: Manifest, payloads: Sequence[bytes]) -> Mapping[str, bytes]:
    """The tensors' bytes by every name, from the buckets' bytes and the manifest alone."""
    found: dict[str, bytes] = {}
    for record in manifest.tensors:
        itemsize = DTYPES[record.dtype].itemsize
        out = np.zeros((*record.shape, itemsize), dtype=np.uint8)
        for piece in record.pieces:
            start, end = piece.offset_bytes, piece.offset_bytes + piece.region.numel * itemsize
            data = np.frombuffer(payloads[piece.bucket][start:end], dtype=np.uint8)
            where = zip(piece.region.offsets, piece.region.sizes, strict=True)
            out[tuple(slice(o, o + s) for o, s in where)] = data.reshape((*piece.region.sizes, itemsize))
        found |= dict.fromkeys(record.names, out.tobytes())
    return found


class Reader:
    """Receives one update in a thread of its own; `result` gives the buckets' bytes, or raises what it raised.

    After an error it ends the update, as a worker does. `pause_at`: stand still while holding that bucket, until
    `go_on` is set.
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
        self.holds = threading.Event()
        self.go_on = threading.Event()
        self._receiver, self._manifest, self._version = receiver, manifest, version
        self._pause_at, self._on_bucket = pause_at, on_bucket
        self._payloads: list[bytes] = []
        self._error: BaseException | None = None
        receiver.open(manifest, version, staged=staged)
        self._thread = threading.Thread(target=self._run, name="weightcast test reader", daemon=True)
        self._thread.start()

    def result(self, timeout_seconds: float = PATIENCE_SECONDS) -> list[bytes]:
        self._thread.join(timeout_seconds)
        assert not self._thread.is_alive(), f"the receiver neither ended nor failed within {timeout_seconds:g} s"
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            # Else error, traceback and this frame hold each other, and with them the caller's buckets.
            del error
        return self._payloads

    def is_waiting(self, seconds: float) -> bool:
        """Whether it has neither ended nor failed after that time."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            for index, bucket in enumerate(self._receiver):
                if index == self._pause_at:
                    self.holds.set()
                    self.go_on.wait(PATIENCE_SECONDS)
                self._payloads.append(checked(bucket, self._manifest, self._version, index))
                self._on_bucket(bucket)
            if len(self._payloads) != len(self._manifest.buckets):
                raise IntegrityError(f"{len(self._payloads)} of {len(self._manifest.buckets)} buckets came")
        except BaseException as exc:
            # Without its traceback, whose frames hold buckets.
            self._error = exc.with_traceback(None)
            self._receiver.end()
