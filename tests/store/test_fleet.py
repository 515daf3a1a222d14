"""Engines of a publisher whose transport is a store: the same update as over any other, read from the directory."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from pathlib import Path
from typing import Literal

import pytest
import torch
from core.direct import RecordingEngine, fleet
from store.store_kit import FOLLOW, Holder, follow_command, number_in, url

from weightcast import EngineServer, Publisher, TensorSource
from weightcast.errors import PublishError, WeightcastError
from weightcast.serving.follower import Follower
from weightcast.transports.store import StoreSender

INSTALLS: tuple[Literal["staged", "streaming"], ...] = ("staged", "streaming")


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> None:
    """Nothing is left open."""


def tensors() -> dict[str, torch.Tensor]:
    return {f"t{index}": torch.zeros(6000, dtype=torch.int32) for index in range(12)}


def fill(held: dict[str, torch.Tensor], number: int) -> None:
    for index, tensor in enumerate(held.values()):
        tensor.fill_(number * 100 + index)


@pytest.mark.parametrize("install", INSTALLS)
@pytest.mark.parametrize("options", ["", "?num_threads=3"])
def test_engines_and_a_follower_get_every_version(tmp_path: Path, install: str, options: str) -> None:
    source = TensorSource(tensors())
    engines = RecordingEngine(), RecordingEngine()
    address = url(tmp_path, options)
    with (
        fleet(source, *engines, transport=address, install=install, bucket_size_bytes=64 << 10) as (publisher, clients),
        Follower(address, follower_engine := Holder()) as follower,
    ):
        for number in range(1, 5):
            fill(source.tensors, number)
            report = publisher.publish()
            assert report.ok
            assert [client.gate.version.number for client in clients] == [report.version] * 2  # type: ignore[union-attr]
            for engine in engines:
                assert number_in(engine.held) == number
            followed = follower.poll()
            assert followed is not None
            assert (followed.version, number_in(follower_engine.held)) == (report.version, number)


@pytest.mark.cluster
def test_two_relays_feed_eight_engines_and_one_that_was_killed_catches_up(tmp_path: Path) -> None:
    """The trainer writes each version once, however many engines there are."""
    source, engines = TensorSource(tensors()), [Holder() for _ in range(8)]
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(Publisher(source, transport=url(tmp_path)))
        servers = [stack.enter_context(EngineServer(engine)) for engine in engines]
        first, second = (
            [url(tmp_path), *itertools.chain.from_iterable(("--engine", server.url) for server in half)]
            for half in (servers[:4], servers[4:])
        )
        fill(source.tensors, 1)
        publisher.publish()
        next_of_second = stack.enter_context(follow_command(*second))
        killed = subprocess.Popen([*FOLLOW, *first], stdout=subprocess.PIPE)
        with killed:
            assert killed.stdout is not None
            killed.stdout.readline()  # all its engines have the version
            killed.kill()
        assert next_of_second()["version"] == publisher.version
        assert [number_in(engine.held) for engine in engines] == [1] * 8
        fill(source.tensors, 2)
        publisher.publish()
        assert next_of_second()["version"] == publisher.version
        assert [number_in(engine.held) for engine in engines] == [1] * 4 + [2] * 4
        with follow_command(*first) as next_of_first:
            assert next_of_first()["version"] == publisher.version
        assert [number_in(engine.held) for engine in engines] == [2] * 8


def test_an_engine_that_fails_leaves_the_version_in_the_store(tmp_path: Path) -> None:
    source = TensorSource(tensors())
    good, bad = RecordingEngine(), RecordingEngine()
    with fleet(source, good, bad, transport=url(tmp_path)) as (publisher, _):
        fill(source.tensors, 1)
        publisher.publish()
        bad.fail_after = 3
        fill(source.tensors, 2)
        with pytest.raises(PublishError, match="engine-1"):
            publisher.publish()
        assert number_in(good.held) == 2
        bad.fail_after = None
        fill(source.tensors, 3)
        assert publisher.publish().ok
        assert number_in(bad.held) == 3


def test_the_number_is_above_the_store_and_the_engines(tmp_path: Path) -> None:
    source = TensorSource(tensors())
    with fleet(source, RecordingEngine(), transport=url(tmp_path)) as (publisher, _):
        publisher.publish(7)
    with fleet(source, RecordingEngine(), transport=url(tmp_path)) as (publisher, _):
        assert publisher.publish().version == 8


def test_an_error_while_it_is_written_leaves_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of a writing thread is raised, and engines are told."""
    source, engine = TensorSource(tensors()), RecordingEngine()
    with fleet(source, engine, transport=url(tmp_path, "?num_threads=4"), bucket_size_bytes=64 << 10) as (publisher, _):
        fill(source.tensors, 1)
        publisher.publish()
        wire = publisher._connections
        assert wire is not None
        assert isinstance(wire.sender, StoreSender)
        write, calls = wire.sender._writer.write, 0

        def failing(index: int, data: memoryview) -> None:
            nonlocal calls
            calls += 1
            if index == 2:
                raise OSError(5, "Input/output error")
            write(index, data)

        monkeypatch.setattr(wire.sender._writer, "write", failing)
        fill(source.tensors, 2)
        with pytest.raises(WeightcastError, match="Input/output error; its newest version stays"):
            publisher.publish()
        assert calls > 2
        assert number_in(engine.held) == 1
        monkeypatch.undo()
        fill(source.tensors, 3)
        publisher.publish()
        assert number_in(engine.held) == 3
