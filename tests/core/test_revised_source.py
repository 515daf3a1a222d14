"""Deltas of a source that knows which tensors may have changed: what is read, and that false numbers are found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from core.direct import DirectEngine, RecordingEngine
from core.test_delta_publish import model_of, publishing, require_equal, step
from weightcast import ModuleEngine, ModuleSource, TensorSource
from weightcast.errors import PublishError
from weightcast.native.deltas import encode, without_changes
from weightcast.seams.source import RevisedSource
from weightcast.trainer.packer import Packer

TRANSPORTS = ("memory://", "ipc://", "gloo://127.0.0.1:0")
NAMES = [f"t{number:02}" for number in range(40)]


class Revised(TensorSource):
    """Forty tensors of a bucket each; `change` gives one other values and a new number."""

    def __init__(self, *unknown: str) -> None:
        super().__init__({name: torch.randn(1024) for name in NAMES})
        self.numbers = {name: 0 for name in NAMES if name not in unknown}

    def revisions(self) -> Mapping[str, int]:
        return self.numbers

    def change(self, *names: str) -> None:
        for name in names:
            self.tensors[name][::100] += 1.0
            if name in self.numbers:
                self.numbers[name] += 1


class FrozenEmbedding(ModuleSource):
    def revisions(self) -> Mapping[str, int]:
        return {"0.weight": 0}


class Filled:
    """The buckets that packers have filled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.indices: list[int] = []
        fill = Packer.fill

        def noted(packer: Packer, index: int, *arguments: Any) -> Any:
            self.indices.append(index)
            return fill(packer, index, *arguments)

        monkeypatch.setattr(Packer, "fill", noted)

    def taken(self) -> list[int]:
        taken, self.indices = self.indices, []
        return taken


def require_served(source: Revised, engine: RecordingEngine) -> None:
    for name, tensor in source.tensors.items():
        assert torch.equal(engine.held[name], tensor), name


def test_it_is_an_ability() -> None:
    assert isinstance(Revised(), RevisedSource)
    assert not isinstance(TensorSource({}), RevisedSource)


@pytest.mark.parametrize("num_words", [0, 1, 4, 5, 1 << 20, (1 << 20) + 1, 5 << 19])
def test_a_delta_without_changes_is_what_the_codec_makes(num_words: int) -> None:
    payload = torch.ones(num_words * 2, dtype=torch.uint8)
    delta, num_changed = encode(payload, payload, 2)
    made = without_changes(num_words)
    assert num_changed == 0
    assert made.nbytes >= payload.nbytes if delta is None else torch.equal(delta, made)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_what_may_have_changed_and_a_sample_is_read(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, engine, filled = Revised("t39"), RecordingEngine(), Filled(monkeypatch)
    with publishing(source, [DirectEngine("engine", engine)], transport=transport, bucket_size_bytes=4096) as publisher:
        publisher.publish()
        assert len(filled.taken()) == 40
        for changed in (["t00"], ["t05", "t39"], [], ["t00", "t07"]):
            source.change(*changed)
            report = publisher.publish()
            taken = filled.taken()
            read = {*changed, "t39"}
            assert report.delta is not None
            assert (report.delta.num_engines, report.delta.num_words) == (1, 40 * 1024)
            assert report.delta.num_changed == 11 * len(changed)
            assert {int(name[1:]) for name in read} <= set(taken)
            assert len(taken) == len(read) + math.ceil((40 - len(read)) / 16)
            require_served(source, engine)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_that_are_frozen(transport: str) -> None:
    model, served = model_of(0), model_of(1)
    client = DirectEngine("engine", ModuleEngine(served))
    with publishing(FrozenEmbedding(model), [client], transport=transport) as publisher:
        publisher.publish()
        for _ in range(3):
            step(model[1:])
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == 1
            require_equal(model, served)


def test_a_false_number_is_an_error_and_the_next_publish_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    source, engine, filled = Revised(), RecordingEngine(), Filled(monkeypatch)
    with publishing(source, [DirectEngine("engine", engine)], bucket_size_bytes=4096) as publisher:
        publisher.publish()
        former = {name: tensor.clone() for name, tensor in source.tensors.items()}
        for name in NAMES[1:]:
            source.tensors[name][7] += 1.0
        source.change("t00")
        with pytest.raises(ValueError, match=r"whose values have changed: 't\d\d'\. Return a new number"):
            publisher.publish()
        for name in NAMES:
            assert torch.equal(engine.held[name], former[name])
        filled.taken()
        report = publisher.publish()
        assert len(filled.taken()) == 40
        assert report.delta is not None
        assert (report.delta.num_engines, report.delta.base) == (0, None)
        require_served(source, engine)
        source.change("t01")
        report = publisher.publish()
        assert report.delta is not None
        assert (report.delta.num_engines, report.delta.num_changed) == (1, 11)
        require_served(source, engine)


def test_one_false_number_is_found_within_some_publishes() -> None:
    source, engine = Revised(), RecordingEngine()
    with publishing(source, [DirectEngine("engine", engine)], bucket_size_bytes=4096) as publisher:
        publisher.publish()
        source.tensors["t20"][7] += 1.0
        publishes = (publisher.publish() for _ in range(1000))
        with pytest.raises(ValueError, match="'t20'"):
            list(publishes)


def test_verify_installed_compares_everything() -> None:
    source, engine = Revised(), RecordingEngine()
    options = {"verify": "installed", "bucket_size_bytes": 4096}
    with publishing(source, [DirectEngine("engine", engine)], **options) as publisher:
        publisher.publish()
        source.change("t00")
        assert publisher.publish().ok
        require_served(source, engine)
        source.tensors["t20"][7] += 1.0
        with pytest.raises(ValueError, match="'t20'"):
            publisher.publish()
        publisher.publish()
        require_served(source, engine)


def test_changes_of_a_failed_publish_are_not_lost() -> None:
    class Failing(RecordingEngine):
        fails = False

        def commit(self, version: Any) -> None:
            if self.fails:
                raise RuntimeError("this engine was told to fail")
            super().commit(version)

    source, engine = Revised(), Failing()
    with publishing(source, [DirectEngine("engine", engine)], bucket_size_bytes=4096) as publisher:
        publisher.publish()
        source.change("t00")
        engine.fails = True
        with pytest.raises(PublishError):
            publisher.publish()
        engine.fails = False
        source.change("t01")
        publisher.publish()
        require_served(source, engine)
        source.change("t02")
        report = publisher.publish()
        assert report.delta is not None
        assert report.delta.num_engines == 1
        require_served(source, engine)


def test_the_mapping_may_be_changed_in_place_and_numbers_may_be_left_out() -> None:
    source, engine = Revised(), RecordingEngine()
    with publishing(source, [DirectEngine("engine", engine)], bucket_size_bytes=4096) as publisher:
        publisher.publish()
        source.tensors["t03"][0] = 5.0
        number = source.numbers.pop("t03")
        publisher.publish()
        require_served(source, engine)
        source.tensors["t03"][1] = 5.0
        source.numbers["t03"] = number
        publisher.publish()
        require_served(source, engine)
