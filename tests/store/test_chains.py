"""A store in which versions are deltas on those before: `full_every`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from core.direct import DirectEngine, RecordingEngine
from publishers import publisher_of

from weightcast import StoreSource, TensorSource, follow, rollback
from weightcast.cli import main
from weightcast.errors import IntegrityError
from weightcast.store.address import DirectoryAddress
from weightcast.store.reading import StoreReader, pinned
from weightcast.testing.leftovers import nothing_left
from weightcast.trainer.publisher import Publisher

NAMES = [f"t{number}" for number in range(4)]


def weights_of(number: int) -> dict[str, torch.Tensor]:
    """Every tensor differs from the former version's in a few elements."""
    weights = {name: torch.arange(20_000, dtype=torch.float32).bfloat16() for name in NAMES}
    weights["t0"] = torch.arange(20_000, dtype=torch.float64)
    for each in range(number + 1):
        for tensor in weights.values():
            tensor[each * 7 : each * 7 + 5] += 1
    return weights


@contextlib.contextmanager
def writing(url: str, **options: object) -> Iterator[tuple[Publisher, dict[str, torch.Tensor]]]:
    weights = weights_of(-1)
    with publisher_of(TensorSource(weights), transport=url, bucket_size_bytes=65536, **options) as publisher:
        yield publisher, weights


def publish(publisher: Publisher, weights: dict[str, torch.Tensor], number: int) -> None:
    for name, tensor in weights_of(number).items():
        weights[name].copy_(tensor)
    assert publisher.publish(number).ok


def require(url: str, number: int, version: int | None = None) -> None:
    found = StoreSource(url, version=version).regions()
    for name, tensor in weights_of(number).items():
        assert torch.equal(found[name][0][1], tensor), name


def store_of(directory: Path, options: str = "full_every=3") -> str:
    return f"{directory.as_uri()}?{options}"


@pytest.mark.parametrize(
    "options",
    ["full_every=3", "full_every=3&num_threads=3", "full_every=2&num_slots=3", "full_every=3&by_classes=1"],
)
def test_every_version_can_be_read(tmp_path: Path, options: str) -> None:
    url, engine = store_of(tmp_path, options), RecordingEngine()
    with writing(url) as (publisher, weights):
        for number in range(8):
            publish(publisher, weights, number)
            require(url, number)
            if number and "full_every=3" in options:
                require(url, number - 1, number - 1)
            if number % 2:
                for update in follow(url, engine):
                    assert update.version == number
                    break
                assert all(torch.equal(engine.held[name], tensor) for name, tensor in weights.items())


def test_a_delta_takes_little_space(tmp_path: Path) -> None:
    url = store_of(tmp_path)
    with writing(url) as (publisher, weights):
        for number in range(7):
            publish(publisher, weights, number)
    found = {stored.number: stored for stored in StoreReader(DirectoryAddress(tmp_path)).complete_versions()}
    assert [number for number in sorted(found) if found[number].base is None] == [3, 6]
    sizes = {}
    for number, stored in found.items():
        folder = tmp_path / "slots" / str(stored.slot)
        sizes[number] = sum(path.stat().st_blocks * 512 for path in folder.glob("data.*"))
    assert max(sizes[4], sizes[5]) < sizes[3] / 4


def test_deltas_by_classes_are_shorter(tmp_path: Path) -> None:
    """Small weights change more often, as in training; what is read is right with both codecs."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(400_000, generator=generator).bfloat16()
    is_changed = torch.rand(400_000, generator=generator) < 0.002 / first.float().abs()
    second = (first.view(torch.int16) + is_changed.short()).view(torch.bfloat16)
    lengths = []
    for by_classes in (0, 1):
        weights, store = {"w": first.clone()}, tmp_path / str(by_classes)
        url = store_of(store, f"full_every=2&by_classes={by_classes}")
        with publisher_of(TensorSource(weights), transport=url) as publisher:
            publisher.publish()
            weights["w"].copy_(second)
            publisher.publish()
        assert torch.equal(StoreSource(url).regions()["w"][0][1], second)
        with pinned(DirectoryAddress(store)) as version:
            assert version.stored.base is not None
            lengths.append(len(version.read_stored(0)))
    assert lengths[1] < 0.9 * lengths[0]


def test_engines_of_a_publisher_read_chains(tmp_path: Path) -> None:
    engines = [RecordingEngine(), RecordingEngine()]
    clients = [DirectEngine(f"engine-{number}", engine) for number, engine in enumerate(engines)]
    with writing(store_of(tmp_path), engines=clients) as (publisher, weights):
        for number in range(5):
            publish(publisher, weights, number)
            for engine in engines:
                assert all(torch.equal(engine.held[name], tensor) for name, tensor in weights.items())
    for client in clients:
        client.close()


def test_rollback_verify_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = store_of(tmp_path / "store")
    with writing(url) as (publisher, weights):
        for number in range(5):
            publish(publisher, weights, number)
    assert main(["verify", url]) == 0
    assert main(["inspect", url]) == 0
    assert main(["export", url, str(tmp_path / "checkpoint")]) == 0
    assert rollback(url).version == 5
    require(url, 3)
    assert rollback(url, version=4).version == 6
    require(url, 4)
    capsys.readouterr()


def test_another_writer_begins_with_a_full_version(tmp_path: Path) -> None:
    url = store_of(tmp_path)
    for number in (0, 2):
        with writing(url) as (publisher, weights):
            publish(publisher, weights, number)
            publish(publisher, weights, number + 1)
            require(url, number + 1)
    found = {stored.number: stored.base for stored in StoreReader(DirectoryAddress(tmp_path)).complete_versions()}
    assert [number for number in found if found[number] is None] == [2, 0]
    require(url, 1, 1)


def test_a_version_that_was_aborted_is_no_base(tmp_path: Path) -> None:
    engine = RecordingEngine()
    client = DirectEngine("engine", engine)
    with writing(store_of(tmp_path), engines=[client], on_failure="report") as (publisher, weights):
        publish(publisher, weights, 0)
        engine.fail_after = 1
        weights["t1"] += 1
        assert not publisher.publish(1).ok
        engine.fail_after = None
        publish(publisher, weights, 2)
        require(store_of(tmp_path), 2)
    assert {stored.number: stored.base for stored in StoreReader(DirectoryAddress(tmp_path)).complete_versions()} == {
        0: None,
        2: None,
    }
    client.close()


@pytest.mark.parametrize("of", [0, 1, 2], ids=["the full version", "the first delta", "the last delta"])
def test_damage_is_found(tmp_path: Path, of: int) -> None:
    """Wherever in the chain: what is read from there on is refused; what lies before can be read."""
    url = store_of(tmp_path)
    with writing(url) as (publisher, weights):
        for number in range(3):
            publish(publisher, weights, number)
    stored = next(each for each in StoreReader(DirectoryAddress(tmp_path)).complete_versions() if each.number == of)
    path = tmp_path / "slots" / str(stored.slot) / "data.0"
    with path.open("r+b") as file:
        file.seek(256 if of == 0 else 512)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
    for number in range(3):
        if number < of:
            require(url, number, number)
            continue
        with pytest.raises(IntegrityError, match="bucket 0"):
            require(url, number, number)
    assert main(["verify", url]) != 0


@pytest.mark.parametrize(("of", "name"), [(0, "data.0"), (1, "data.0"), (2, "data.0"), (2, "manifest.json")])
def test_a_part_of_a_chain_that_is_missing(tmp_path: Path, of: int, name: str) -> None:
    """No lock or descriptor of the chain's other parts is left."""
    with writing(store_of(tmp_path)) as (publisher, weights):
        for number in range(3):
            publish(publisher, weights, number)
    stored = next(each for each in StoreReader(DirectoryAddress(tmp_path)).complete_versions() if each.number == of)
    (tmp_path / "slots" / str(stored.slot) / name).unlink()
    with nothing_left(), pytest.raises(IntegrityError, match=name):
        pinned(DirectoryAddress(tmp_path))


def test_a_pinned_chain_is_not_overwritten(tmp_path: Path) -> None:
    url = store_of(tmp_path, "full_every=2&num_slots=3&max_slots=8")
    with writing(url) as (publisher, weights):
        publish(publisher, weights, 0)
        publish(publisher, weights, 1)
        with contextlib.closing(pinned(DirectoryAddress(tmp_path))) as version:
            for number in range(2, 6):
                publish(publisher, weights, number)
            assert sum(payload.nbytes for payload in version.payloads()) > 0
        require(url, 5)


@pytest.mark.parametrize("options", ["full_every=0", "full_every=2&num_slots=2", "full_every=64"])
def test_options_that_can_not_be(tmp_path: Path, options: str) -> None:
    with (
        pytest.raises(ValueError, match=r"full_every|max_slots"),
        writing(store_of(tmp_path, options)) as (publisher, _),
    ):
        publisher.publish()
