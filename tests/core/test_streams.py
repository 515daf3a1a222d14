"""A source whose tensors exist one at a time: each is packed once, and nothing is sent that its specs don't say."""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from publishers import publisher_of

from core.direct import DirectEngine, RecordingEngine, fleet
from core.test_brought_sender import Bringing
from weightcast import IteratorSource
from weightcast.errors import IncompatibleWeightsError, InsufficientMemoryError, PublishError, UpdateAbortedError
from weightcast.host import memory as host_memory
from weightcast.host.deadline import Deadline
from weightcast.testing.leftovers import leftovers
from weightcast.testing.transport_kit import PATIENCE_SECONDS
from weightcast.trainer import publisher as publisher_module

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SHAPES = {
    "embedding": (60, 50),
    "empty": (0, 4),
    "scalar": (),
    **{f"layer.{n}": (40, 10) for n in range(6)},
    "last": (0,),
}
MODES = [(transport, install) for transport in ("memory", "ipc", "gloo", "file") for install in ("staged", "streaming")]
Stream = Iterator[tuple[str, torch.Tensor]]


def url(transport: str, folder: Path) -> str:
    return {"gloo": "gloo://127.0.0.1:0", "file": f"file://{folder}/store"}.get(transport, f"{transport}://")


def value(step: int, number: int) -> float:
    return step * 100.0 + number


def exported(step: int, **changes: Any) -> Stream:
    """As an exporter does, each tensor in the memory of the one before. `changes`: by name, what comes in its place."""
    room = torch.empty(3000)
    for number, (name, shape) in enumerate(SHAPES.items()):
        tensor = room[: torch.Size(shape).numel()].view(shape).fill_(value(step, number))
        if (change := changes.get(name.replace(".", "_"))) is not None:
            yield from change(name, tensor)
        else:
            yield name, tensor if number % 2 else tensor.bfloat16()
    yield from changes.get("more", lambda: ())()


def assert_serves(engine: RecordingEngine, *steps: int) -> None:
    """It has taken these versions, and holds the last of them bit for bit."""
    assert [version.number for version in engine.versions] == list(range(len(steps)))
    expected = {
        name: torch.full(shape, value(steps[-1], number), dtype=torch.float32 if number % 2 else torch.bfloat16)
        for number, (name, shape) in enumerate(SHAPES.items())
    }
    assert engine.held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert engine.held[name].dtype == tensor.dtype
        assert torch.equal(engine.held[name], tensor), name


@pytest.mark.parametrize(("transport", "install"), MODES)
def test_each_version_is_a_new_iterator(tmp_path: Path, transport: str, install: str) -> None:
    source, engines = IteratorSource(), (RecordingEngine(), RecordingEngine())
    with fleet(source, *engines, transport=url(transport, tmp_path), install=install) as (publisher, _):
        for step in range(3):
            source.use(exported(step))
            assert publisher.publish().ok
    for engine in engines:
        assert_serves(engine, 0, 1, 2)


def test_without_an_iterator_there_is_nothing_to_publish() -> None:
    source, engine = IteratorSource(), RecordingEngine()
    with fleet(source, engine) as (publisher, _):
        for step in range(2):
            with pytest.raises(ValueError, match=r"no tensors: call use\(iterator\) before each version"):
                publisher.publish()
            source.use(exported(step))
            publisher.publish()
    assert_serves(engine, 0, 1)


def fails(name: str, tensor: torch.Tensor) -> Stream:
    raise RuntimeError("the exporter failed")
    yield name, tensor


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As frameworks leave a gathered parameter."""
    emptied = tensor.clone()
    emptied.untyped_storage().resize_(0)
    return emptied


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "renamed": (
        {"layer_4": lambda n, t: [("other", t)]},
        IncompatibleWeightsError,
        "found 'other' .*expected 'layer.4'",
    ),
    "of another shape": (
        {"layer_4": lambda n, t: [(n, t.T)]},
        IncompatibleWeightsError,
        r"found .*\[10, 40\], expected",
    ),
    "of another dtype": (
        {"scalar": lambda n, t: [(n, t.int())]},
        IncompatibleWeightsError,
        r"found 'scalar' int32\[\], expected 'scalar' bfloat16",
    ),
    "of a dtype that can't travel": (
        {"scalar": lambda n, t: [(n, torch.empty(t.shape, dtype=torch.bits8))]},
        IncompatibleWeightsError,
        r"torch.bits8\[\], expected 'scalar' bfloat16\[\]",
    ),
    "freed": (
        {"layer_4": lambda n, t: [(n, freed(t))]},
        IncompatibleWeightsError,
        "found 'layer.4'.*which has no memory",
    ),
    "left out": ({"layer_3": lambda n, t: []}, IncompatibleWeightsError, "found 'layer.4'.*expected 'layer.3'"),
    "without elements and left out": ({"empty": lambda n, t: []}, IncompatibleWeightsError, "expected 'empty'"),
    "shorter": (
        {"layer_5": lambda n, t: [], "last": lambda n, t: []},
        IncompatibleWeightsError,
        "it ended before 'layer.5'",
    ),
    "shorter by a tensor without elements": (
        {"last": lambda n, t: []},
        IncompatibleWeightsError,
        "it ended before 'last'",
    ),
    "longer": ({"more": lambda: [("more", torch.ones(1))]}, IncompatibleWeightsError, "found 'more' after the last"),
    "doubled": (
        {"layer_4": lambda n, t: [(n, t), (n, t)]},
        IncompatibleWeightsError,
        "found 'layer.4'.*expected 'layer.5'",
    ),
    "failing": ({"layer_3": fails}, RuntimeError, "the exporter failed"),
}


@pytest.mark.parametrize("transport", ["ipc", "gloo", "file"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_stream_is_never_installed(tmp_path: Path, wrong: str, transport: str) -> None:
    source, engine = IteratorSource(), RecordingEngine()
    changes, error, words = WRONG[wrong]
    with fleet(source, engine, transport=url(transport, tmp_path)) as (publisher, (client,)):
        source.use(exported(0))
        publisher.publish()
        source.use(exported(1, **changes))
        with pytest.raises(error, match=words):
            publisher.publish()
        assert_serves(engine, 0)
        assert client.gate.is_open
        source.use(exported(2))
        assert publisher.publish(publisher.version + 1).ok
        assert engine.versions[-1].number == 2
        del engine.versions[-1]
        assert torch.equal(engine.held["layer.0"], torch.full((40, 10), value(2, 3)))


def test_a_freed_tensor_is_not_learned() -> None:
    source = IteratorSource()
    with pytest.raises(ValueError, match=r"'layer.4' on cpu has no memory"):
        source.use(exported(0, layer_4=lambda n, t: [(n, freed(t))]))


def test_a_stream_that_fails_half_way_into_a_streaming_install_is_healed_by_the_next() -> None:
    source, engine = IteratorSource(), RecordingEngine()
    with fleet(source, engine, install="streaming") as (publisher, (client,)):
        source.use(exported(0))
        publisher.publish()
        source.use(exported(1, layer_3=fails))
        with pytest.raises(RuntimeError, match="the exporter failed"):
            publisher.publish()
        assert not client.gate.is_paused
        assert client.gate.torn
        source.use(exported(2))
        assert publisher.publish().ok
        assert client.gate.is_open


def test_of_a_first_iterator_that_fails_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    source, engine = IteratorSource(), RecordingEngine()
    with pytest.raises(RuntimeError, match="the exporter failed"):
        source.use(exported(0, layer_3=fails))
    with pytest.raises(
        ValueError, match=r"'scalar' has dtype torch.bits8, which is not supported; supported: .*bfloat16"
    ):
        source.use(exported(0, scalar=lambda n, t: [(n, torch.empty(t.shape, dtype=torch.bits8))]))
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: 1000)
        patch.setattr("weightcast.sources.stream._CHECKED_BYTES", 2000)
        with pytest.raises(InsufficientMemoryError, match="copy of the first version"):
            source.use(exported(0))
    assert not source.specs()
    with fleet(source, engine) as (publisher, _):
        with pytest.raises(ValueError, match="no tensors"):
            publisher.publish()
        source.use(exported(0))
        assert publisher.publish().ok
    assert_serves(engine, 0)


def test_no_tensor_outlives_its_publish() -> None:
    def watched(name: str, tensor: torch.Tensor) -> Stream:
        kept.append(weakref.ref(own := tensor.clone()))
        yield name, own

    kept: list[Any] = []
    source = IteratorSource()
    with fleet(source, RecordingEngine()) as (publisher, _):
        for step, end in enumerate((watched, watched, fails)):
            source.use(exported(step, layer_1=watched, layer_5=end))
            if end is fails:
                with pytest.raises(RuntimeError):
                    publisher.publish()
            else:
                publisher.publish()
            gc.collect()
            assert kept
            assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("transport", "install"), MODES)
def test_a_late_engine_gets_what_is_staged_or_stored_and_no_stream_is_taken(
    tmp_path: Path, transport: str, install: str, adds: bool
) -> None:
    source, first, late = IteratorSource(), RecordingEngine(), RecordingEngine()
    newcomer = DirectEngine("late", late)
    keeps = transport == "file" or (install == "staged" and transport != "gloo")
    with fleet(source, first, transport=url(transport, tmp_path), install=install) as (publisher, _):
        source.use(exported(0))
        publisher.publish()
        source.use(exported(1))
        if not adds:
            publisher.add_engine(newcomer)
        sync = functools.partial(publisher.add_engine, sync=True) if adds else publisher.sync
        if keeps:
            sync(newcomer)
            assert_serves(late, 0)
        else:
            with pytest.raises((UpdateAbortedError, ValueError), match=r"version 0 (was streamed|can't be sent again)"):
                sync(newcomer)
            assert not late.calls
            assert newcomer.gate.is_open
        assert publisher.version == 0
        assert set(publisher.publish().engines) == {"engine-0", "late"}
        assert_serves(first, 0, 1)
        assert torch.equal(late.held["layer.0"], first.held["layer.0"])
        assert late.versions[-1].number == 1
    newcomer.close()


def test_an_engine_that_is_lost_in_a_broadcast_costs_the_version_and_nothing_else() -> None:
    def lose(name: str, tensor: torch.Tensor) -> Stream:
        lost.worker.close()
        yield name, tensor

    source, engines = IteratorSource(), (RecordingEngine(), RecordingEngine(), RecordingEngine())
    with fleet(source, *engines, transport="gloo://127.0.0.1:0", bucket_size_bytes=1024) as (publisher, clients):
        lost = clients[1]
        source.use(exported(0))
        publisher.publish()
        source.use(exported(1, layer_2=lose))
        with pytest.raises((UpdateAbortedError, PublishError)) as caught:
            publisher.publish()
        for engine, client in ((engines[0], clients[0]), (engines[2], clients[2])):
            assert client.gate.is_open
            # A loss that no receiver was in the way of costs the lost one alone.
            assert_serves(engine, *((0,) if isinstance(caught.value, UpdateAbortedError) else (0, 1)))
        publisher.remove_engine(lost)
        source.use(exported(2))
        assert publisher.publish().ok


def memory_bytes(of: str) -> int:
    """Of this process's shared memory that is of this kind, what takes memory."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if of in os.readlink(entry):
                found[entry.stat().st_ino] = 512 * entry.stat().st_blocks
    return sum(found.values())


@pytest.mark.parametrize("transport", ["ipc", "gloo", "file"])
def test_an_error_that_is_kept_is_whole_and_keeps_nothing_of_a_closed_publisher_open(
    tmp_path: Path, transport: str
) -> None:
    """Its frames refer to buffers: to addresses, which cost nothing."""
    source, before = IteratorSource(), memory_bytes("weightcast-buckets")
    had = {each for each in leftovers() if "memfd" not in each and "mapping" not in each}
    with fleet(source, RecordingEngine(), transport=url(transport, tmp_path)) as (publisher, _):
        source.use(exported(0))
        publisher.publish()
        source.use(exported(1, layer_4=fails))
        with pytest.raises(RuntimeError, match="the exporter failed") as caught:
            publisher.publish()
        assert memory_bytes("weightcast-buckets") > before
    # gloo can't end a broadcast that is under way, which may read its bucket's pages once more.
    read_again = 2 * mmap.PAGESIZE if transport == "gloo" else 0
    assert memory_bytes("weightcast-buckets") <= before + read_again
    for _ in Deadline(PATIENCE_SECONDS).polls(0.01, 0.01):  # threads of a group that was closed
        if not (left := {each for each in leftovers() if "memfd" not in each and "mapping" not in each} - had):
            break
    assert not left
    names = [entry.name for entry in caught.traceback]
    assert names.index("publish") < names.index("_send_buckets") < names.index("exported") < names.index("fails")
    assert "buffer" in caught.traceback[names.index("_send_buckets")].frame.f_locals
    assert caught.traceback[-1].frame.f_locals["name"] == "layer.4"
    del caught  # this frame is one of its


def test_engines_of_another_route_are_refused_by_name_before_anything_is_sent() -> None:
    source, engine, brought = IteratorSource(), RecordingEngine(), Bringing()
    brought.name = "stock"
    client = DirectEngine("ours", engine)
    with publisher_of(source, engines=[client, brought]) as publisher:
        for step in range(2):
            source.use(exported(step))
            with pytest.raises(
                PublishError, match=r"stock takes weights by its server's own routes.*another publisher"
            ) as caught:
                publisher.publish()
            assert list(caught.value.failures) == ["stock"]
            assert_serves(engine, *range(step + 1))
        assert not brought.calls
        publisher.remove_engine(client)
        source.use(exported(2))
        assert publisher.publish().ok, "alone it takes the stream"
        assert brought.calls == ["pause", "finish", "resume"]
    client.close()


def test_other_tensors_of_another_source_are_another_plan() -> None:
    """The specs are asked for at each publish: a source of its own may change them."""

    class Changing(IteratorSource):
        def begin_again(self) -> None:
            self.__init__()  # type: ignore[misc]

    source, engine = Changing(), RecordingEngine()
    with fleet(source, engine) as (publisher, _):
        source.use(exported(0))
        publisher.publish()
        source.begin_again()
        source.use(iter([("other", torch.ones(3))]))
        assert publisher.publish().ok
        assert engine.calls[-1].keys() == {"other"}


def test_several_trainer_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in {"is_available": True, "is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(publisher_module.dist, name, lambda *args, found=found: found)
    words = "IteratorSource streams its tensors, which only one rank can publish"
    with publisher_of(IteratorSource(), engines=[]) as publisher, pytest.raises(ValueError, match=words):
        publisher.publish()
