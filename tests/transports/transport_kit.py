"""What the transport tests share: small manifests whose every byte tells version and bucket, senders, readers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from weightcast.format.bucket import check_trailer, write_trailer
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.seams.transport import Bucket, Receiver, Sender

RUN = "5e" * 16
OTHER_RUN = "a7" * 16
BUCKET_BYTES = 8192
LONG_SECONDS = 60.0


def make_manifest(num_buckets: int = 5, bucket_bytes: int = BUCKET_BYTES) -> Manifest:
    specs = [TensorSpec(f"t{index}", "uint8", (bucket_bytes,)) for index in range(num_buckets)]
    return plan(specs, bucket_bytes)


def version(number: int) -> WeightVersion:
    return WeightVersion(RUN, number)


def value_of(number: int, index: int) -> int:
    return (number * 37 + index * 11 + 1) % 251


def send(sender: Sender, manifest: Manifest, number: int, index: int) -> torch.Tensor:
    """Pack and send one bucket; return its buffer."""
    buffer, size = sender.buffer(index), manifest.buckets[index]
    buffer[:size].fill_(value_of(number, index))
    write_trailer(buffer, size, version(number), index, manifest.digest_kind)
    sender.send(index)
    return buffer


def send_all(sender: Sender, manifest: Manifest, number: int, start: int = 0) -> None:
    for index in range(start, len(manifest.buckets)):
        send(sender, manifest, number, index)


def check(bucket: Bucket, manifest: Manifest, number: int) -> None:
    """The bucket is bucket `index` of that version, whole and unharmed."""
    size = manifest.buckets[bucket.index]
    check_trailer(bucket.buffer, size, version(number), bucket.index, manifest.digest_kind)
    expected = torch.full((size,), value_of(number, bucket.index), dtype=torch.uint8)
    assert torch.equal(bucket.buffer[:size], expected)


def read_all(receiver: Receiver, manifest: Manifest, number: int) -> list[Bucket]:
    """Iterate to the end, checking each bucket in its turn."""
    buckets = []
    for bucket in receiver:
        check(bucket, manifest, number)
        buckets.append(bucket)
    return buckets


class Background:
    """Runs a call in a thread; `result` waits for it by a deadline, and raises what it raised."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call, args), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._outcome = call(*args)
        except BaseException as exc:
            # Without its traceback, whose frames hold buckets and this object in a circle.
            self._error = exc.with_traceback(None)

    def is_done_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        assert self.is_done_within(LONG_SECONDS), "the call did not return"
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            # Else error, traceback and this frame hold each other, and with them the caller's buckets.
            del error
        return self._outcome
