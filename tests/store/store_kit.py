"""What the store's tests share: a model whose every value tells its version, a writer and readers over it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from weightcast.cli import exits
from weightcast.errors import IncompleteUpdateError
from weightcast.format.bucket import Layout, as_bytes
from weightcast.format.geometry import Region
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.seams.transport import Sender
from weightcast.sources.tensors import TensorSource
from weightcast.testing.transport_kit import pack_and_send
from weightcast.trainer.packer import Packer, pack, tiling
from weightcast.transports.store import JoinedStoreSender, StoreSender

RUN = "5c" * 16
OTHER_RUN = "d1" * 16
LONG_SECONDS = 60.0
SHORT_SECONDS = 0.3
FOLLOW = [sys.executable, "-m", "weightcast.cli", "follow", "--json"]


@contextlib.contextmanager
def follow_command(*words: str, stderr: Any = None) -> Iterator[Callable[[], Any]]:
    """`weightcast follow ... --json` in a process: gives what makes its next line an object; ended by SIGTERM."""
    process = subprocess.Popen([*FOLLOW, *words], stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        yield lambda: json.loads(process.stdout.readline())  # type: ignore[union-attr]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_SECONDS) == exits.OK
    finally:
        process.kill()
        process.wait(LONG_SECONDS)
        process.stdout.close()


def url(directory: Path, options: str = "") -> str:
    return f"file://{directory}{options}"


def model(number: int, num_tensors: int = 12, numel: int = 6000) -> dict[str, torch.Tensor]:
    """Every value of every tensor says which version it is of."""
    return {f"t{i}": torch.full((numel,), number * 100 + i, dtype=torch.int32) for i in range(num_tensors)}


def manifest_of(tensors: Mapping[str, torch.Tensor], bucket_bytes: int = 64 << 10) -> Manifest:
    specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]
    return plan(specs, bucket_bytes)


def send(sender: StoreSender, manifest: Manifest, version: WeightVersion, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one version as a publisher does."""
    sender.open(manifest, version, peers=[], staged=True)
    packer = Packer(Layout(manifest), tiling(manifest.tensors, TensorSource(tensors).regions()))
    for index in range(len(manifest.buckets)):
        pack_and_send(sender, packer, manifest, version, index)
    sender.commit()


def write(directory: Path, *numbers: int, run: str = RUN, options: str = "") -> None:
    """Write these versions of `model`, as one writer that closes then."""
    sender = StoreSender(url(directory, options), run=run, deadline_seconds=SHORT_SECONDS)
    manifest = manifest_of(model(0))
    try:
        for number in numbers:
            send(sender, manifest, WeightVersion(run, number), model(number))
    finally:
        sender.close()


def two_origins() -> Manifest:
    """Half of each tensor leaves from each of two origins."""
    tensors = model(0)
    specs = [TensorSpec(name, "int32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    halves = [{spec.name: [Region((start,), (3000,))] for spec in specs} for start in (0, 3000)]
    return plan(specs, 32 << 10, origins=halves)


def begin_shared(first: StoreSender, second: JoinedStoreSender, manifest: Manifest, number: int) -> None:
    version = WeightVersion(RUN, number)
    place = first.begin_together(manifest, version)
    first.open(manifest.of_origin(0), version, peers=[], staged=True)
    second.join(manifest, 1, place)
    second.open(manifest.of_origin(1), version, peers=[], staged=True)


def send_origin(
    sender: Sender, manifest: Manifest, origin: int, number: int, num_buckets: int | None = None
) -> list[bytes]:
    """Send these first buckets of an origin, by default all; return their digests."""
    packer, version = (
        Packer(Layout(manifest), tiling(manifest.tensors, TensorSource(model(number)).regions())),
        WeightVersion(RUN, number),
    )
    digests = []
    for at, index in enumerate(manifest.spans[origin][:num_buckets]):
        num_bytes, digest = pack(packer, manifest, version, index, sender.buffer(at))
        sender.send(at, num_bytes)
        digests.append(as_bytes(digest))
    return digests


class Holder:
    """An engine that keeps copies; `expected` is how many tensors make it whole. It takes anything."""

    def __init__(self, expected: int = 12) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.versions: list[WeightVersion] = []
        self.num_loads = 0
        self._expected = expected
        self._new: dict[str, torch.Tensor] = {}

    def specs(self) -> None:
        return None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_loads += 1
        self._new.update({name: tensor.clone() for name, tensor in tensors})

    def commit(self, version: WeightVersion) -> None:
        if len(self._new) != self._expected:
            raise IncompleteUpdateError(f"{len(self._new)} of {self._expected} tensors")
        self.held, self._new = self._new, {}
        self.versions.append(version)

    def discard(self) -> None:
        self._new = {}


def number_in(held: Mapping[str, torch.Tensor]) -> int:
    """The one version that all values are of. Raises AssertionError if they are of several."""
    numbers = set()
    for name, tensor in held.items():
        values = torch.unique(tensor)
        assert values.numel() == 1, f"{name} is torn: {values.tolist()[:8]}"
        number, index = divmod(int(values), 100)
        assert name == f"t{index}"
        numbers.add(number)
    assert len(numbers) == 1, f"versions {sorted(numbers)} are mixed"
    return numbers.pop()


def child(role: str, *args: object) -> subprocess.Popen[str]:
    """A process of `store_children` that is under way. The caller ends it."""
    process = launched(role, *args)
    await_ready(process)
    return process


def launched(role: str, *args: object) -> subprocess.Popen[str]:
    """The same, which may still be importing: call `await_ready` before anything else."""
    script = Path(__file__).with_name("store_children.py")
    return subprocess.Popen(
        [sys.executable, str(script), role, *map(str, args)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def await_ready(process: subprocess.Popen[str]) -> None:
    """A child's first line says that it is under way."""
    line = next(lines_of(process), "")
    assert line == "ready", line


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return map(str.strip, process.stdout)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(LONG_SECONDS)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@contextlib.contextmanager
def small_filesystem(path: Path, num_bytes: int, *options: str) -> Iterator[None]:
    """A tmpfs of that size; needs to be root."""
    path.mkdir()
    given = ",".join([f"size={num_bytes}", *options])
    subprocess.run(["mount", "-t", "tmpfs", "-o", given, "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def can_mount() -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    return False
