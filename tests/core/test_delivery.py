"""What an engine is given: every byte once, under the right names, in whole tensors and whole load groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch

from core.direct import RecordingEngine, fleet
from weightcast import ModuleEngine, TensorSource
from weightcast.engines.gate import Gate
from weightcast.errors import IncompatibleWeightsError, PublishError, UnsupportedError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, narrow, payload_digest, write_header
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.messages import Offer, Seal
from weightcast.format.plan import plan
from weightcast.host.copy import PreparedCopies
from weightcast.seams.install_map import InstallMap
from weightcast.seams.transport import Bucket, Portion
from weightcast.serving import install as installs
from weightcast.serving.admission import admit
from weightcast.serving.update import Update

pytestmark = pytest.mark.usefixtures("leaves_nothing")

BIG = torch.arange(5000, dtype=torch.float32).view(100, 50)
TENSORS = {
    "small": torch.arange(10, dtype=torch.int16),
    "big": BIG,
    "scalar": torch.tensor(True),
    "empty": torch.empty(0, 3, dtype=torch.float64),
    "strided": torch.arange(64.0).view(8, 8).t(),
    "last": torch.full((700,), -0.0, dtype=torch.bfloat16),
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(held: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (held[name].dtype, held[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(held[name]) == bits(tensor), name


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("bucket_size_bytes", [256, 4096, 1 << 20])
def test_every_tensor_arrives_as_it_was(install: str, bucket_size_bytes: int) -> None:
    engines = RecordingEngine(), RecordingEngine(TensorSource(TENSORS).specs())
    with fleet(TensorSource(TENSORS), *engines, install=install, bucket_size_bytes=bucket_size_bytes) as (publisher, _):
        for _ in range(3):
            report = publisher.publish()
            assert report.ok
    for engine in engines:
        assert_same(engine.held, TENSORS)
        assert [v.number for v in engine.versions] == [0, 1, 2]
        if install == "staged":
            assert [call.keys() for call in engine.calls] == [TENSORS.keys()] * 3


class MappedEngine(RecordingEngine):
    """Copies `big` into memory of its own, and takes the others as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.big = torch.zeros(100, 50)
        self.install_map = InstallMap({"big": self.big})
        self.num_installs = 0

    def begin(self, copied: Collection[str]) -> None:
        assert set(copied) == {"big"}
        self.num_installs += 1

    def commit(self, version: WeightVersion) -> None:
        super().commit(version)
        self.held |= {"big": self.big.clone()}


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_what_an_engine_has_in_memory_is_copied_there_piece_by_piece(
    install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a tensor that is cut over buckets; what is copied where is found out once for all updates."""
    engine, prepared = MappedEngine(), list[list[torch.Size]]()

    class Counted(PreparedCopies):
        def __init__(
            self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor | int], *payloads: Any, **known: Any
        ) -> None:
            super().__init__(targets, sources, *payloads, **known)
            prepared.append([target.shape for target in targets])

    monkeypatch.setattr(installs, "PreparedCopies", Counted)
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    with fleet(TensorSource(tensors), engine, install=install) as (publisher, _):
        for number in range(4):
            tensors["big"].add_(1)
            publisher.publish()
            assert_same(engine.held, tensors)
            if number == 1:
                first = len(prepared)
    assert "big" not in {name for call in engine.calls for name in call}
    assert sum(shape.numel() for each in prepared for shape in each) == BIG.numel()
    assert len(prepared) == first, "the copies of one layout are prepared once"
    assert len(prepared) == 1 if install == "staged" else len(prepared) > 1
    assert engine.num_installs == 4


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_tensors_of_one_bucket_are_copied_as_they_are_or_cast(install: str) -> None:
    """As they are: by their addresses in the bucket, also to a parameter with strides."""
    module = torch.nn.Module()
    for name, tensor in TENSORS.items():
        live = torch.zeros(tensor.shape, dtype=torch.float32 if name == "last" else tensor.dtype)
        module.register_buffer(name, live.t().contiguous().t() if name == "big" else live)
    places = {name: live.data_ptr() for name, live in module.named_buffers()}
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    with fleet(TensorSource(tensors), ModuleEngine(module, cast=True), install=install) as (publisher, _):
        for _ in range(3):
            tensors["big"].add_(1)
            assert publisher.publish().ok
            for name, live in module.named_buffers():
                assert torch.equal(live, tensors[name].to(live.dtype)), name
    assert {name: live.data_ptr() for name, live in module.named_buffers()} == places


class SharedReceiver:
    """Hands out buckets in memory that other ranks fill as well."""

    def __init__(self, buffers: Sequence[BucketBuffer]) -> None:
        self._buffers = buffers

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        return True

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        assert staged

    def __iter__(self) -> Iterator[Bucket]:
        return (Bucket(index, buffer) for index, buffer in enumerate(self._buffers))

    def reread(self, bucket: Bucket) -> bool:
        return False

    def end(self) -> None:
        pass


def test_what_other_ranks_read_is_put_together_once_all_of_it_is_here() -> None:
    """Over a store, buckets are handed out that another rank is still reading into memory that the ranks share."""
    manifest, engine = plan([TensorSpec("big", "float32", (100, 50))], 4096), RecordingEngine()
    payloads = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in manifest.buckets]
    buffers = [BucketBuffer(torch.zeros(HEADER_BYTES, dtype=torch.uint8), payload) for payload in payloads]
    portion, install = Portion.of(manifest, 0, 2), admit(manifest, manifest.digest(), engine)

    def fill(index: int) -> None:
        views = install.layout.views(index, payloads[index])
        for entry, view in zip(install.layout.entries[index], views, strict=True):
            view.copy_(narrow(BIG, entry.piece.region))

    version, digests = WeightVersion("0" * 32, 1), []
    for index, (buffer, num_bytes) in enumerate(zip(buffers, manifest.buckets, strict=True)):
        fill(index)
        digests.append(payload_digest(buffer.payload))
        write_header(buffer.header, version, index, digests[-1], raw_bytes=num_bytes)
        if index not in portion.buckets:
            buffer.payload.zero_()
    receiver: Any = SharedReceiver(buffers)
    offer = Offer(version.run, version.number, manifest.digest())
    update = Update(offer, install, receiver=receiver, gate=Gate(), deadline_seconds=60.0, portion=portion)
    update.open()
    root = update.receive()
    for index in range(len(payloads)):
        fill(index)
    update.seal(Seal(version.run, version.number, len(payloads), root))
    update.install()
    assert_same(engine.held, {"big": BIG})


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_load_groups_reach_the_engine_in_one_call(install: str) -> None:
    tensors = {f"t{i}": torch.randn(30, 30) for i in range(8)}
    groups = {"t0": "a", "t5": "a", "t2": "b", "t3": "b", "t7": "b"}
    engine = RecordingEngine()
    with fleet(TensorSource(tensors, groups=groups), engine, install=install) as (publisher, _):
        publisher.publish()
    assert_same(engine.held, tensors)
    for group in "ab":
        members = {name for name, of in groups.items() if of == group}
        assert sum(1 for call in engine.calls if members & call.keys()) == 1
        assert any(members <= call.keys() for call in engine.calls)


def test_tied_names_are_given_out_as_the_engine_knows_them() -> None:
    embed = torch.randn(20, 20)
    source = TensorSource({"embed": embed}, aliases={"embed": ("head",)})
    tied = RecordingEngine([TensorSpec("embed", "float32", (20, 20), aliases=("head",))])
    untied = RecordingEngine([TensorSpec("embed", "float32", (20, 20)), TensorSpec("head", "float32", (20, 20))])
    only_head = RecordingEngine([TensorSpec("head", "float32", (20, 20))])
    unknowing = RecordingEngine()
    with fleet(source, tied, untied, only_head, unknowing) as (publisher, _):
        report = publisher.publish()
    assert report.num_bytes == embed.numel() * 4
    assert_same(tied.held, {"embed": embed})
    assert_same(untied.held, {"embed": embed, "head": embed})
    assert_same(only_head.held, {"head": embed})
    assert_same(unknowing.held, {"embed": embed, "head": embed})


def test_offenders_are_all_named_and_nothing_is_loaded() -> None:
    held = [
        TensorSpec("small", "int16", (10,)),
        TensorSpec("big", "float32", (100, 51)),
        TensorSpec("scalar", "uint8", ()),
        TensorSpec("missing", "float32", (1,)),
    ]
    picky, fine = RecordingEngine(held), RecordingEngine()
    with fleet(TensorSource(TENSORS), picky, fine) as (publisher, _):
        with pytest.raises(PublishError) as caught:
            publisher.publish()
        (error,) = caught.value.failures.values()
    assert isinstance(error, IncompatibleWeightsError)
    for name in ("big", "scalar", "missing", "empty", "strided", "last"):
        assert any(f"'{name}'" in problem for problem in error.problems), name
    assert not any("'small'" in problem for problem in error.problems)
    assert picky.calls == []
    assert_same(fine.held, TENSORS)
    assert caught.value.report.engines["engine-1"].ok  # type: ignore[attr-defined]


def test_untied_weights_for_a_tied_engine_are_refused() -> None:
    source = TensorSource({"embed": torch.randn(4), "head": torch.randn(4)})
    engine = RecordingEngine([TensorSpec("embed", "float32", (4,), aliases=("head",))])
    with fleet(source, engine, on_failure="report") as (publisher, _):
        result = publisher.publish().engines["engine-0"]
    assert result.error is not None
    assert "'head' and 'embed' both match the engine's 'embed'" in result.error.message
    assert engine.calls == []


def test_undo_is_refused_by_an_engine_that_has_none() -> None:
    engine = RecordingEngine()
    with fleet(TensorSource(TENSORS), engine, undo=True) as (publisher, _), pytest.raises(PublishError) as caught:
        publisher.publish()
    assert isinstance(caught.value.failures["engine-0"], UnsupportedError)


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_failed_load_tears_until_the_next_publish(install: str) -> None:
    engine = RecordingEngine()
    engine.fail_after = 0
    with fleet(TensorSource(TENSORS), engine, install=install) as (publisher, (client,)):
        with pytest.raises(PublishError):
            publisher.publish()
        assert client.gate.torn
        assert not client.gate.is_paused
        engine.fail_after = None
        publisher.publish()
        assert not client.gate.torn
    assert_same(engine.held, TENSORS)


def test_empty_model() -> None:
    engine = RecordingEngine()
    with fleet(TensorSource({}), engine) as (publisher, _):
        report = publisher.publish()
    assert (report.num_bytes, report.num_buckets, report.ok) == (0, 0, True)
    assert len(engine.versions) == 1


def test_source_that_lies_is_refused_before_anything_moves() -> None:
    source = TensorSource(TENSORS)
    source._regions.pop("big")
    engine = RecordingEngine()
    with fleet(source, engine) as (publisher, _), pytest.raises(IncompatibleWeightsError, match="big"):
        publisher.publish()
    assert engine.calls == []


def test_changed_specs_make_a_new_plan() -> None:
    source, engine = TensorSource({"a": torch.ones(3)}), RecordingEngine()
    with fleet(source, engine) as (publisher, _):
        publisher.publish()
        other = TensorSource({"a": torch.ones(3), "b": torch.zeros(5000)})
        source._specs, source._regions = other._specs, other._regions
        publisher.publish()
    assert_same(engine.held, other.tensors)
