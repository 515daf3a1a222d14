"""The ranks of an engine on one host read and check a share each, and all of them install the whole version."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from publishers import publisher_of

from core.direct import RecordingEngine
from core.parallel import ParallelEngine
from weightcast import TensorSource, registry
from weightcast.errors import InsufficientMemoryError, PublishError, UnsupportedError
from weightcast.format.bucket import HEADER_BYTES
from weightcast.host.memory import SharedMemory
from weightcast.testing.faults import SCHEME, Corrupt, FaultyTransport
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")
TRANSPORTS = ["ipc://", "file://", "file://?num_threads=3"]
BUCKET_BYTES = 16 << 10


def tensors(number: int, num_tensors: int = 40) -> dict[str, torch.Tensor]:
    """Every value says which version it is of. The last tensor is cut over buckets."""
    found = {f"t{i}": torch.full((1000,), number * 100 + i, dtype=torch.int32) for i in range(num_tensors)}
    return found | {"long": torch.arange(20_000, dtype=torch.int32) + number}


def fill(source: TensorSource, number: int) -> None:
    for name, tensor in tensors(number).items():
        source.tensors[name].copy_(tensor)


TRANSPORT: object = None
"""What the registry finds under `faulty://`."""


@contextlib.contextmanager
def published(
    tmp_path: Path, transport: str, engines: Iterable[Any], source: TensorSource, **options: Any
) -> Iterator[tuple[Publisher, ParallelEngine]]:
    address = transport.replace("file://", f"file://{tmp_path}")
    engine = ParallelEngine("wide", list(engines))
    options = {"bucket_size_bytes": BUCKET_BYTES, "deadline_seconds": 10.0, **options}
    with (
        contextlib.closing(engine),
        publisher_of(source, engines=[engine], transport=address, **options) as publisher,
    ):
        yield publisher, engine


def assert_held(engines: Iterable[RecordingEngine], expected: dict[str, torch.Tensor]) -> None:
    for engine in engines:
        assert engine.held.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(engine.held[name], tensor), name


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_reads_its_share_once(tmp_path: Path, transport: str, num_ranks: int) -> None:
    source, engines = TensorSource(tensors(0)), [RecordingEngine() for _ in range(num_ranks)]
    with published(tmp_path, transport, engines, source) as (publisher, _):
        for number in range(4):
            fill(source, number)
            report = publisher.publish()
            assert_held(engines, tensors(number))
            result = report.engines["wide"]
            assert len(result.read_bytes) == num_ranks
            assert report.num_bytes <= sum(result.read_bytes) < report.num_bytes + report.num_buckets * 512
            assert max(result.read_bytes) - min(result.read_bytes) <= BUCKET_BYTES
            assert result.installed_bytes == [report.num_bytes] * num_ranks


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_streaming_leaves_every_check_to_every_rank(tmp_path: Path, transport: str) -> None:
    source, engines = TensorSource(tensors(3)), [RecordingEngine(), RecordingEngine()]
    with published(tmp_path, transport, engines, source, install="streaming") as (publisher, _):
        report = publisher.publish()
        assert_held(engines, tensors(3))
        assert min(report.engines["wide"].read_bytes) >= report.num_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_larger_model_follows(tmp_path: Path, transport: str) -> None:
    """The memory that the ranks fill together grows."""
    engines = [RecordingEngine(), RecordingEngine()]
    for number, size in enumerate((5, 80, 20)):
        source = TensorSource(tensors(number, size))
        for engine in engines:
            engine.held.clear()
        with published(tmp_path, transport, engines, source) as (publisher, _):
            for _ in range(2):
                assert publisher.publish().ok
            assert_held(engines, tensors(number, size))


class Spoiling(RecordingEngine):
    """A loader that writes into the tensors that it is given."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        taken = list(tensors)
        super().load(taken)
        for _, tensor in taken:
            tensor.zero_()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("spoiling_rank", [0, 1])
def test_what_a_loader_writes_into_its_tensors_reaches_no_version(
    tmp_path: Path, transport: str, spoiling_rank: int
) -> None:
    source, engines = TensorSource(tensors(0)), [RecordingEngine(), RecordingEngine()]
    engines[spoiling_rank] = Spoiling()
    with published(tmp_path, transport, engines, source) as (publisher, _):
        for number in range(4):
            fill(source, number)
            assert publisher.publish().ok
            assert_held(engines, tensors(number))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_changed_bit_is_found_by_the_rank_whose_share_it_is(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = transport.replace("file://", f"file://{tmp_path}")
    inner = registry.transport(url)
    faulty = FaultyTransport(inner, url)
    # Receivers of the transport's own: what they share is what is tried.
    made = dataclasses.replace(faulty.transport(), receiver=lambda _, **rest: inner.receiver(url, **rest))
    monkeypatch.setattr(f"{__name__}.TRANSPORT", made)
    monkeypatch.setitem(registry.TRANSPORTS, SCHEME, f"{__name__}:TRANSPORT")
    source, engines = TensorSource(tensors(0)), [RecordingEngine(), RecordingEngine()]
    with published(tmp_path, f"{SCHEME}://", engines, source) as (publisher, _):
        num_buckets = publisher.publish().num_buckets
        number = 0
        for bucket in range(num_buckets):
            for byte in (20, HEADER_BYTES + 100):
                fill(source, number + 1)
                faulty.senders[-1].fault = Corrupt(bucket, byte)
                with pytest.raises(PublishError, match=f"bucket {bucket}: "):
                    publisher.publish()
                assert_held(engines, tensors(number))
                assert publisher.publish().ok
                number += 1
                assert_held(engines, tensors(number))


def test_where_no_memory_is_to_be_found() -> None:
    own, fixed = SharedMemory.make(), SharedMemory.make(100)
    pid, number, size, name = own.location.split("/")
    _, fixed_number, fixed_size, fixed_name = fixed.location.split("/")
    unsealed, named_otherwise = os.memfd_create("weightcast-buckets-x"), os.memfd_create("other", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(named_otherwise, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    try:
        for place in (
            "",
            "1/2",
            f"{pid}/{number}/{name}",
            f"{pid}/{number}/{size}/other",
            f"{pid}/{named_otherwise}/0/other",
            f"{pid}/{number}/{size}/weightcast-buckets-x",
            f"{pid}/{unsealed}/0/weightcast-buckets-x",
            f"{pid}/../{number}/{size}/{name}",
            f"{1 << 40}/{number}/{size}/{name}",
            f"{pid}/{number}/4096/{name}",
            f"{pid}/{fixed_number}/{2 * int(fixed_size)}/{fixed_name}",
        ):
            with pytest.raises(UnsupportedError, match="processes of one host share can't be reached"):
                SharedMemory.open(place)
        assert len(SharedMemory.open(fixed.location).map()) == int(fixed_size)
        found = SharedMemory.open(own.location)
        found.grow(100, "this test")
        found.map()[:3] = b"abc"
        own.grow(1 << 20, "this test")
        shown = own.map(private=True)
        assert shown[:3] == b"abc"
        assert len(shown) == 1 << 20
        shown[:3] = b"xyz"
        assert found.map(private=True)[:3] == b"abc"
        shown.reread(shown.tensor()[1:2])
        assert shown[:3] == b"abc"
        found.close()
        found.close()
    finally:
        for descriptor in (unsealed, named_otherwise):
            os.close(descriptor)
        own.close()
        fixed.close()


def test_memory_is_asked_for_before_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcast.host.memory.available_bytes", lambda: 1 << 20)
    with pytest.raises(InsufficientMemoryError, match="this test needs 2097152 bytes"):
        SharedMemory.make(2 << 20, "this test")
    with contextlib.closing(SharedMemory.make()) as memory:
        memory.grow(1 << 20, "this test")
        with pytest.raises(InsufficientMemoryError, match="this test needs 2097152 bytes"):
            memory.grow(2 << 20, "this test")
        memory.map().tensor().fill_(1)
        memory.grow(2 << 20, "this test")
        for size_bytes in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.descriptor, size_bytes)
