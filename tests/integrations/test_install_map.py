"""Installs by a recorded map: equal to the loader's, only for what was proven, and undone bit for bit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from core.direct import fleet

from integrations.loader_model import EXPERTS, FUSED, HIDDEN, Model, ModelEngine, checkpoint, specs, without_memory
from weightcast import Publisher, TensorSource
from weightcast.errors import PublishError
from weightcast.format.manifest import WeightVersion
from weightcast.format.plan import plan
from weightcast.integrations.plugin.dry_run import dry_run
from weightcast.integrations.plugin.rank_consensus import RankConsensus
from weightcast.integrations.plugin.rank_worker import RankWorker
from weightcast.serving.admission import admit, replacement_of
from weightcast.serving.follower import Follower
from weightcast.serving.install import Assembly, BlockCopies
from weightcast.serving.install_map import StridedBlock

pytestmark = pytest.mark.usefixtures("leaves_nothing")
OPAQUE = {"mixer.A", "latent.kv", *FUSED}
"""What the loader computes from, or makes other tensors of."""


def cold(tensors: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> dict[str, torch.Tensor]:
    model = Model(rank, size)
    model.load_weights(tensors.items())
    return model.live()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("bucket_size_bytes", [512, 4096, 1 << 20])
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_is_as_if_it_was_loaded(size: int, bucket_size_bytes: int, install: str) -> None:
    models = [Model(rank, size) for rank in range(size)]
    engines = [ModelEngine(model) for model in models]
    tensors = checkpoint(1)
    options = {"bucket_size_bytes": bucket_size_bytes, "install": install}
    with fleet(TensorSource(tensors), *engines, **options) as (publisher, _):
        for number in range(1, 5):
            for name, tensor in checkpoint(number).items():
                tensors[name].copy_(tensor)
            publisher.publish(number)
            for rank, model in enumerate(models):
                assert same(model.live(), cold(tensors, rank, size))
    for model in models:
        # Once for the proof; then only what stays with the loader.
        assert model.num_loads == len(tensors) + 3 * len(OPAQUE)


def test_buckets_that_a_streamed_version_lent_to_the_loader_may_have_been_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a later staged version does not check itself it reads again then, into this process's view of the bucket."""

    class Copied(Model):
        """All of it can be copied."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.size, self.num_loads, self.weight = 1, 0, torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)

        def load_weights(self, tensors: object) -> None:
            for _, tensor in tensors:  # type: ignore[attr-defined]
                self.weight.data.copy_(tensor)

    described = specs({"weight": torch.ones(8, 8)})
    manifest = plan(described, 4096)
    engine = ModelEngine(Copied(), reference={"weight": torch.ones(8, 8)})
    payload = torch.ones(64).view(torch.uint8)
    for has_lent in (True, False):
        install = admit(manifest, manifest.digest(), engine)
        assert install.is_bound()
        install.begin()
        staged = Assembly(install.num_joined, is_staged=True)
        install.stage(0, payload, staged)
        install.load_staged(staged)
        engine.commit(WeightVersion("0" * 16, 1))
        if staged.to_prove:
            install.prove(staged)
        assert install.has_lent_views is has_lent
    # The model is no longer what was recorded: its loader gets all of it.
    assert engine.install_map is not None
    monkeypatch.setattr(engine.install_map, "bind", lambda: False)
    assert not install.is_bound()
    install = replacement_of(install)
    install.begin()
    install.load_bucket(Assembly(install.num_joined, is_staged=False), 0, payload)
    assert install.has_lent_views
    # A delta is added to other memory, so that the buckets are not read again before the next full version.
    staged = Assembly(install.num_joined, is_staged=True)
    install.stage(0, payload, staged)
    install.load_staged(staged, lends=False)
    assert install.has_lent_views


def test_what_is_no_copy_stays_with_the_loader_with_a_reason() -> None:
    engine = ModelEngine(Model())
    with fleet(TensorSource(checkpoint(1)), engine) as (publisher, _):
        publisher.publish(1)
    install_map = engine.install_map
    assert install_map is not None
    assert install_map.opaque.keys() == OPAQUE
    assert "mixer.A is computed from it" in install_map.opaque["mixer.A"] or "exp" in install_map.opaque["mixer.A"]
    assert "other tensors are made from latent.kv" in install_map.opaque["latent.kv"]
    assert set(install_map.proven) == checkpoint(1).keys() - OPAQUE


def test_a_loader_that_lies_to_the_recording_is_found_by_the_proof(caplog: pytest.LogCaptureFixture) -> None:
    """It copies, then changes what it has copied where no recording sees it."""

    class Lying(Model):
        def load_weights(self, tensors: object) -> None:
            super().load_weights(tensors)  # type: ignore[arg-type]
            if not self.norm.weight.is_meta:
                self.norm.weight.data += 1.0

    model = Lying()
    engine = ModelEngine(model)
    with fleet(TensorSource(checkpoint(1)), engine) as (publisher, _), caplog.at_level(logging.WARNING):
        for number in (1, 2):
            publisher.publish(number)
            assert torch.equal(model.norm.weight, checkpoint(1)["norm.weight"] + 1.0)
    assert "'norm.weight' can't be installed by copies" in caplog.text
    assert engine.install_map is not None
    assert "norm.weight" in engine.install_map.opaque


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("write", ["zero_", "mul_", "data.mul_"])
def test_a_loader_that_writes_to_what_it_is_given_gets_all_of_it(write: str, install: str) -> None:
    """As gpt-oss's does on every rank but the first; the other engines read the same buckets."""

    class Writing(torch.nn.Module):
        def __init__(self, *, is_first: bool) -> None:
            super().__init__()
            self.size, self.num_loads, self.is_first = 1, 0, is_first
            self.weight = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)

        def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in tensors:
                if not self.is_first:
                    held = tensor.data if write.startswith("data") else tensor
                    _ = held.zero_() if write == "zero_" else held.mul_(2)
                self.weight.data.copy_(tensor)

    models = [Writing(is_first=False), Writing(is_first=True)]
    tensors = {"weight": torch.zeros(8, 8)}
    engines = [ModelEngine(model, reference=tensors) for model in models]  # type: ignore[arg-type]
    with fleet(TensorSource(tensors), *engines, install=install) as (publisher, _):
        for number in (1, 2, 3):
            tensors["weight"].fill_(number)
            publisher.publish(number)
            assert models[0].weight.eq(0 if write == "zero_" else 2 * number).all()
            if not write.startswith("data"):  # which is not seen before the first install
                assert models[1].weight.eq(number).all()


class OneWeight(torch.nn.Module):
    """`load` puts what comes into the parameter."""

    def __init__(self, load: Callable[[torch.Tensor, torch.Tensor], object], dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.num_loads, self.load, self.count = 1, 0, load, torch.zeros(())
        self.weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=dtype), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self.load(self.weight.data, tensor)


def in_a_thread(operation: Callable[..., object], *operands: object) -> None:
    thread = threading.Thread(target=operation, args=operands)
    thread.start()
    thread.join()


def installs_as_it_loads(load: Callable[[torch.Tensor, torch.Tensor], object], *, source: str, target: str) -> bool:
    """Zeros first, of which many loaders make what a copy makes; then other values."""
    held, tensors = getattr(torch, target), {"weight": torch.zeros(8, 8, dtype=getattr(torch, source))}
    model, cold = OneWeight(load, held), OneWeight(load, held)
    engine = ModelEngine(model, reference=tensors)  # type: ignore[arg-type]
    with fleet(TensorSource(tensors), engine) as (publisher, _):
        for number in (0, 1, 2):
            tensors["weight"].copy_(number * torch.arange(64).reshape(8, 8))
            publisher.publish(number)
            cold.load_weights(tensors.items())
            if not torch.equal(model.weight.view(torch.uint8), cold.weight.view(torch.uint8)):
                return False
    return True


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(4),
        lambda weight: weight.div_(4),
        lambda weight: weight.masked_fill_(weight > 3, 7),
        lambda weight: weight.scatter_(0, torch.zeros(1, 8, dtype=torch.long, device=weight.device), 2 * weight[1:2]),
        lambda weight: weight.index_put_((torch.tensor([0], device=weight.device),), 2 * weight[1]),
        lambda weight: weight.lerp_(3 * weight, 0.5),
        lambda weight: torch._foreach_mul_([weight], 4),
        lambda weight: torch.mul(weight, 4, out=weight),
        lambda weight: torch.nn.functional.hardtanh(weight, inplace=True),
        lambda weight: in_a_thread(weight.lerp_, 3 * weight, 0.5),
        lambda weight: weight[0].zero_(),
        lambda weight: weight[:, 1].copy_(torch.zeros(8, device=weight.device)),
        lambda weight: weight.view(torch.int16)[:2].fill_(0),
    ],
    ids=["mul_", "div_", "masked_fill_", "scatter_", "index_put_", "lerp_", "foreach", "out", "inplace", "thread"]
    + ["constant", "copied constant", "constant bits"],
)
def test_what_changes_a_copy_in_place_is_seen_before_zeros_could_prove_it(
    change: Callable[[torch.Tensor], object],
) -> None:
    def load(weight: torch.Tensor, tensor: torch.Tensor) -> None:
        weight.copy_(tensor)
        change(weight)

    assert installs_as_it_loads(load, source="float32", target="float32")
    assert torch.ones(2, device="meta").mul_(3).is_meta


@pytest.mark.parametrize(
    ("load", "source", "target"),
    [
        (lambda weight, tensor: weight.copy_(tensor.view(torch.uint8)), "float8_e4m3fn", "uint8"),
        (lambda weight, tensor: weight.view(torch.uint8).copy_(tensor), "uint8", "float8_e4m3fn"),
        (lambda weight, tensor: weight.copy_(tensor.clone().view(torch.bfloat16)), "int16", "bfloat16"),
        (lambda weight, tensor: weight.copy_(tensor.view(torch.int32)), "float32", "float32"),
        (lambda weight, tensor: weight.copy_(torch._neg_view(tensor)), "int32", "int32"),
    ],
)
def test_bits_that_are_taken_for_other_values_are_no_copy(
    load: Callable[[torch.Tensor, torch.Tensor], object], source: str, target: str
) -> None:
    assert installs_as_it_loads(load, source=source, target=target)


def test_what_a_loader_changes_by_itself_is_named_and_undone(caplog: pytest.LogCaptureFixture) -> None:
    def load(weight: torch.Tensor, tensor: torch.Tensor) -> None:
        weight.copy_(tensor)
        model.count.add_(1)

    ModelEngine(Model())  # whose copies to what lies beside its parameters are not made
    assert "by itself" not in caplog.text
    model, tensors = OneWeight(load, torch.float32), {"weight": torch.ones(8, 8)}
    engine = ModelEngine(model, reference=tensors)  # type: ignore[arg-type]
    assert "writes to count even in a dry run" in caplog.text
    with fleet(TensorSource(tensors), engine, undo=True) as (publisher, _):
        publisher.publish(1)
        before, tensors["weight"][:] = model.count.item(), 2
        engine.after_copy = lambda _: 1 / 0
        with pytest.raises(PublishError, match="division by zero"):
            publisher.publish(2)
        assert model.weight.eq(1).all()
        assert model.count.item() == before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_parameters_with_other_memory_are_found(number: int) -> None:
    """As an engine does it that wakes up: other memory behind the same parameters, whatever was kept."""
    model, tensors = Model(), checkpoint(1)
    with fleet(TensorSource(tensors), ModelEngine(model)) as (publisher, _):
        for version in range(1, number + 1):
            publisher.publish(version)
        for parameter in model.parameters():
            parameter.data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
        loads = model.num_loads
        publisher.publish(number + 1)
        assert model.num_loads == loads + len(OPAQUE)
    expected = cold(tensors)
    assert all(torch.equal(model.live()[name], expected[name]) for name in expected if name != "embed.table")


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("replace", ["memory", "parameter"])
def test_what_was_copied_to_is_the_models_when_it_is_committed(
    replace: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other memory since the copies, also between two buckets: the version is refused, and the next one heals."""
    model, tensors, is_due = Model(), checkpoint(1), [False]
    engine = ModelEngine(model)

    def replace_once() -> None:
        if is_due.pop():
            moved = model.attention.qkv.detach().clone()
            if replace == "memory":
                model.attention.qkv.data = moved
            else:
                model.attention.qkv = torch.nn.Parameter(moved, requires_grad=False)
        is_due.append(False)

    run = BlockCopies.run

    def run_then_replace(copies: BlockCopies, **options: bool) -> None:
        run(copies, **options)
        replace_once()

    monkeypatch.setattr(BlockCopies, "run", run_then_replace)
    with fleet(TensorSource(tensors), engine, install=install, bucket_size_bytes=1024) as (publisher, clients):
        for number in (1, 2):
            publisher.publish(number)
            assert same(model.live(), cold(tensors))
        for name, tensor in checkpoint(3).items():
            tensors[name].copy_(tensor)
        is_due[:] = [True]
        with pytest.raises(PublishError, match="replaced during the update"):
            publisher.publish(3)
        assert clients[0].gate.torn
        publisher.publish(4)
        assert same(model.live(), cold(tensors))


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_an_exchanged_layer_is_recorded_again(install: str) -> None:
    model, tensors = Model(), checkpoint(1)
    with fleet(TensorSource(tensors), ModelEngine(model), install=install) as (publisher, _):
        publisher.publish(1)
        model.turned.weight = torch.nn.Parameter(torch.zeros(2 * HIDDEN, HIDDEN), requires_grad=False)
        for number, num_loads in ((2, len(tensors)), (3, len(tensors)), (4, len(OPAQUE))):
            # By the loader; tried again, and proven; by the new map.
            model.num_loads = 0
            publisher.publish(number)
            assert same(model.live(), cold(tensors))
            assert model.num_loads in (num_loads, num_loads + len(tensors)), number


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_what_the_loader_pads_is_set_again_where_all_was_lost(install: str) -> None:
    """As in a sleep that drops the weights: a map copies only what comes."""
    model, tensors = Model(), checkpoint(1)
    rank = RankWorker(ModelEngine(model), RankConsensus([]), engine_rank=0, world_size=1)
    with fleet(TensorSource(tensors), rank._worker.engine, install=install) as (publisher, _):
        for number, is_lost in enumerate((False, False, True, False, False)):
            if is_lost:
                rank.interrupt("the test has dropped the weights", loses_weights=True)
                for live in model.parameters():
                    live.data.fill_(float("nan"))
            model.num_loads = 0
            publisher.publish(number)
            assert same(model.live(), cold(tensors))
    assert model.num_loads == len(OPAQUE)


def test_a_follower_records_an_exchanged_layer_again(tmp_path: Path) -> None:
    model, tensors, url = Model(), checkpoint(1), f"file://{tmp_path}"
    with Publisher(TensorSource(tensors), transport=url) as publisher, Follower(url, ModelEngine(model)) as follower:
        for number, num_loads in ((1, len(tensors)), (2, len(tensors)), (3, len(tensors)), (4, len(OPAQUE))):
            if number == 2:
                model.turned.weight = torch.nn.Parameter(torch.zeros(2 * HIDDEN, HIDDEN), requires_grad=False)
            model.num_loads = 0
            publisher.publish(number)
            assert follower.poll() is not None
            assert same(model.live(), cold(tensors))
            assert model.num_loads in (num_loads, num_loads + len(tensors)), number


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_install_that_fails_at_its_end_is_undone(number: int) -> None:
    model, tensors = Model(), checkpoint(0)
    engine = ModelEngine(model)
    model.load_weights(tensors.items())
    with fleet(TensorSource(tensors), engine, undo=True) as (publisher, _):
        for version in range(1, number):
            publisher.publish(version)
        before = model.live()
        for name, tensor in checkpoint(7).items():
            tensors[name].copy_(tensor)
        engine.fail_in_copy = True
        with pytest.raises(PublishError, match="told to fail"):
            publisher.publish(number)
        after = model.live()
        assert same(after, before)
        engine.fail_in_copy = False
        publisher.publish(number + 1)
        assert same(model.live(), cold(tensors))


def test_a_recording_has_every_element_that_the_loader_sets() -> None:
    model, tensors = Model(1, 2), checkpoint(3)
    outcome = dry_run(model, without_memory, specs(tensors))
    for copy in outcome.copies:
        if copy.name not in outcome.opaque:
            target = model.get_parameter(copy.target)
            copy.block.of(target.data).copy_(copy.source.of(tensors[copy.name]))
    expected = cold(tensors, 1, 2)
    found = model.live()
    assert all(
        torch.equal(found[name], expected[name])
        for name in expected
        if name not in ("mixer.A", "latent.kv", "latent.fused", "absorbed", "bound")
    )
    assert len([copy for copy in outcome.copies if copy.name.startswith("experts.")]) == 3 * EXPERTS


def test_blocks_are_regions_where_they_are() -> None:
    shape, strides = (4, 6), (6, 1)
    found = StridedBlock(8, (2, 3), (6, 1)).region(shape, strides)
    assert found is not None
    assert (found[0].offsets, found[0].sizes, found[1]) == ((1, 2), (2, 3), (0, 1))
    turned = StridedBlock(8, (3, 2), (1, 6)).region(shape, strides)
    assert turned is not None
    assert (turned[0], turned[1]) == (found[0], (1, 0))
    assert StridedBlock(0, (2, 3), (12, 1)).region(shape, strides) is None  # every other row
    assert StridedBlock(4, (2, 3), (6, 1)).region(shape, strides) is None  # around the edge
    assert StridedBlock(0, (24,), (1,)).region(shape, strides) is None
