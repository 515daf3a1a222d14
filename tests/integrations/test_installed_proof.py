"""`verify="installed"`: an engine's live memory holds what was sent, or the engine is found and refuses to serve."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from core.direct import DirectEngine, fleet
from publishers import publisher_of

from integrations.loader_model import FUSED, HIDDEN, Model, ModelEngine, Norm, checkpoint, specs
from weightcast import LocalEngine, ModuleEngine, ModuleSource, TensorSource
from weightcast.errors import EngineTornError, InstallError, PeerDiedError, PublishError, UnsupportedError
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.messages import HeldWeights
from weightcast.format.plan import plan
from weightcast.format.tensor_digest import tensor_digest
from weightcast.serving.install_map import HeldTensor, RegionDigest, held_weights, whole_digest

pytestmark = pytest.mark.usefixtures("leaves_nothing")
OPAQUE = {"mixer.A", "latent.kv", *FUSED}


def flip(model: Model, name: str, *index: int) -> None:
    """One bit of one element."""
    bits = model.get_parameter(name).data[index].view(torch.int16 if "experts" in name else torch.int32)
    bits ^= 1


def swap_gate_and_up(model: Model) -> None:
    half = model.experts.w13.data.shape[1] // 2
    w13 = model.experts.w13.data[1]
    w13.copy_(torch.cat([w13[half:], w13[:half]]))


def stale_expert(model: Model) -> None:
    model.experts.w2.data[2].copy_(checkpoint(0)["experts.2.w2"])


CORRUPTIONS: dict[str, tuple[Callable[[Model], None], set[str]]] = {
    "one bit": (lambda m: flip(m, "attention.qkv", HIDDEN + 3, 5), {"attention.k"}),
    "one bit of an expert": (lambda m: flip(m, "experts.w13", 3, 0, 0), {"experts.3.w1"}),
    "a swapped gate and up": (swap_gate_and_up, {"experts.1.w1", "experts.1.w3"}),
    "a stale expert": (stale_expert, {"experts.2.w2"}),
    "a zeroed norm": (lambda m: m.norm.weight.data.zero_(), {"norm.weight"}),
    "a row of the embedding": (lambda m: m.embed.table.data[9].zero_(), {"embed.table"}),
    "a transposed weight": (lambda m: flip(m, "turned.weight", 1, 2), {"turned.weight"}),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corruption_is_found_by_name_and_block(corruption: str) -> None:
    """Put into the live memory after the copies of an install, as a faulty engine would."""
    corrupt, names = CORRUPTIONS[corruption]
    model, tensors = Model(), checkpoint(1)
    engine = ModelEngine(model)
    with fleet(TensorSource(tensors), engine, verify="installed") as (publisher, (client,)):
        for number in (1, 2):
            assert publisher.publish(number).ok
        engine.after_copy = corrupt
        with pytest.raises(PublishError, match="its live memory is not what was sent") as failed:
            publisher.publish(3)
        assert all(f"'{name}'" in str(failed.value) for name in names)
        assert not any(f"'{name}'" in str(failed.value) for name in tensors.keys() - names)
        assert "on rank 0 at [" in str(failed.value)
        with pytest.raises(EngineTornError), client.gate.step(timeout_seconds=0):
            pass
        engine.after_copy = lambda model: None
        assert publisher.publish(4).ok
        with client.gate.step(timeout_seconds=0) as version:
            assert version is not None


class TiedModel(Model):
    """The head has the embedding's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Module()
        self.head.table = self.embed.table


def test_a_head_that_is_no_longer_tied_is_found() -> None:
    model, tensors = TiedModel(), checkpoint(1)
    tensors["head.table"] = tensors["embed.table"]
    engine = ModelEngine(model, reference=tensors)

    def untie(model: Model) -> None:
        model.head.table = torch.nn.Parameter(model.embed.table + 1, requires_grad=False)

    with fleet(TensorSource(tensors), engine, verify="installed") as (publisher, _):
        for number in (1, 2):
            assert publisher.publish(number).ok
        engine.after_copy = untie
        with pytest.raises(PublishError, match=r"'head\.table' on rank 0"):
            publisher.publish(3)


class SharedHead(Model):
    """The head is the embedding's module, as in SGLang."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.embed


def without_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}


@pytest.mark.parametrize("kind", [TiedModel, SharedHead])
@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_a_packed_copy_that_is_not_its_table_is_found(kind: type[Model], install: str) -> None:
    """The engine makes it from the table after each load, and computes with it."""
    model, tensors = kind(), without_head(checkpoint(1))
    made: list[torch.Tensor] = []

    def pack(model: Model) -> None:
        made[:] = [model.embed.table.data.t().contiguous()]

    def fault() -> str:
        return "" if torch.equal(made[0].t(), model.embed.table.data) else "has a packed copy of something else"

    engine = ModelEngine(model, packed_copies={"head.table": fault, "embed.table": lambda: ""})
    engine.after_copy = pack
    with fleet(TensorSource(tensors), engine, verify="installed", install=install) as (publisher, (client,)):
        for number in (1, 2, 3):
            tensors["embed.table"] += 1
            (result,) = publisher.publish(number).engines.values()
            assert result.unproven.keys() == OPAQUE | {"turned.router"}
            assert "embed.table" in engine.install_map.opaque, "the loader would not make the packed copy again"
        engine.after_copy = lambda model: None
        tensors["embed.table"] += 1
        with pytest.raises(
            PublishError, match=r"'head\.table' on rank 0 has a packed copy of something else"
        ) as failed:
            publisher.publish(4)
        assert "'embed.table'" not in str(failed.value)
        assert client.gate.torn
        engine.after_copy = pack
        assert publisher.publish(5).ok
        assert not client.held().differing
        engine.after_copy = lambda model: (pack(model), CORRUPTIONS["a row of the embedding"][0](model))
        with pytest.raises(PublishError, match=r"something else.*'embed\.table' on rank 0 at.*'head\.table' on rank 0"):
            publisher.publish(6)


@pytest.mark.parametrize("kind", [TiedModel, SharedHead])
def test_a_tied_head_is_proven_by_a_source_that_does_not_name_it(kind: type[Model]) -> None:
    """As a checkpoint of Hugging Face's does not."""
    model, tensors = kind(), without_head(checkpoint(1))
    engine = ModelEngine(model)

    def untie(model: Model) -> None:
        model.head = torch.nn.Module()
        model.head.table = torch.nn.Parameter(model.embed.table + 1, requires_grad=False)

    with fleet(TensorSource(tensors), engine, verify="installed") as (publisher, (client,)):
        for number in (1, 2):
            (result,) = publisher.publish(number).engines.values()
            assert result.unproven.keys() == OPAQUE | {"turned.router"}
        assert client.held().digests["head.table"] == tensor_digest(tensors["embed.table"])
        engine.after_copy = CORRUPTIONS["a row of the embedding"][0]
        with pytest.raises(PublishError, match=r"'embed\.table' on rank 0.*'head\.table' on rank 0"):
            publisher.publish(3)
        assert client.gate.torn
        engine.after_copy = lambda model: None
        assert publisher.publish(4).ok
        engine.after_copy = untie
        with pytest.raises(PublishError, match=r"'head\.table' on rank 0"):
            publisher.publish(5)
        assert client.gate.torn


@pytest.mark.parametrize("kind", [TiedModel, SharedHead])
def test_a_head_that_was_untied_is_refused_at_the_next_offer(kind: type[Model]) -> None:
    """Its loader sets the embedding alone, and would leave the head as it is in every later version."""
    model = kind()
    engine = ModelEngine(model)
    tensors = without_head(checkpoint(1))
    with fleet(TensorSource(tensors), engine) as (publisher, (client,)):
        assert publisher.publish(1).ok
        tied = model.head
        model.head = torch.nn.Module()
        model.head.table = torch.nn.Parameter(model.embed.table.clone(), requires_grad=False)
        with pytest.raises(PublishError, match=r"'head\.table' was 'embed\.table'.*tie them again"):
            publisher.publish(2)
        assert (client.gate.torn, client.gate.version.number) == ("", 1)
        model.head = tied
        assert publisher.publish(3).ok


def test_layers_that_are_exchanged_between_offer_and_install_are_noticed() -> None:
    model, tensors = Model(), checkpoint(1)
    engine = ModelEngine(model)
    engine.validate(plan(specs(tensors), 1 << 20))
    model.norm = Norm()
    with pytest.raises(InstallError, match="replaced since the offer"):
        engine.load(tensors.items())
    assert not model.norm.weight.any()


@pytest.mark.parametrize("error", [StopIteration, RuntimeError, PeerDiedError, KeyboardInterrupt])
def test_what_differs_is_quarantined_whatever_fails_then(error: type[BaseException]) -> None:
    engine = ModelEngine(Model())
    with fleet(TensorSource(checkpoint(1)), engine, verify="installed") as (publisher, (client,)):
        for number in (1, 2):
            assert publisher.publish(number).ok
        engine.after_copy = stale_expert
        held = client.held

        def failing(names: Sequence[str] = ()) -> HeldWeights | None:
            if names:
                raise error("while it is asked where it differs")
            return held(names)

        client.held = failing  # type: ignore[method-assign]
        with pytest.raises((PublishError, KeyboardInterrupt)):
            publisher.publish(3)
        assert "experts.2.w2" in client.gate.torn
        client.held = held  # type: ignore[method-assign]
        engine.after_copy = lambda model: None
        assert publisher.publish(4).ok


def test_a_quarantine_is_made_in_spite_of_a_ctrl_c() -> None:
    engine = ModelEngine(Model())
    with fleet(TensorSource(checkpoint(1)), engine, verify="installed") as (publisher, (client,)):
        for number in (1, 2):
            assert publisher.publish(number).ok
        engine.after_copy = stale_expert
        quarantine, asked, interrupted = client.quarantine, threading.Event(), threading.Event()
        main = threading.main_thread().ident
        assert main is not None

        def slow(reason: str) -> None:
            asked.set()
            signal.pthread_kill(main, signal.SIGINT)
            assert interrupted.wait(60)
            quarantine(reason)

        def on_interrupt(*_: object) -> None:
            interrupted.set()
            raise KeyboardInterrupt

        client.quarantine = slow  # type: ignore[method-assign]
        former = signal.signal(signal.SIGINT, on_interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(3)
        finally:
            signal.signal(signal.SIGINT, former)
        assert asked.is_set()
        assert "experts.2.w2" in client.gate.torn


def test_clean_updates_are_clean_and_name_what_is_not_proven() -> None:
    model, tensors = Model(), checkpoint(1)
    with fleet(TensorSource(tensors), ModelEngine(model), verify="installed", bucket_size_bytes=700) as (publisher, _):
        for number in range(1, 20):
            for name, tensor in checkpoint(number).items():
                tensors[name].copy_(tensor)
            report = publisher.publish(number)
            (result,) = report.engines.values()
            # The router is held in another dtype than it was sent in.
            assert result.unproven.keys() == OPAQUE | {"turned.router"}
    assert "exp" in result.unproven["mixer.A"] or "computed" in result.unproven["mixer.A"]
    assert "the engine has it as float32" in result.unproven["turned.router"]


class Corrupt(ModuleEngine):
    """Changes a bit of what it has installed, as long as `is_faulty`."""

    def __init__(self, *, is_faulty: bool = True) -> None:
        self.linear, self.is_faulty = torch.nn.Linear(4, 3), is_faulty
        super().__init__(self.linear)

    def commit(self, version: WeightVersion) -> None:
        super().commit(version)
        self.linear.weight.data[1, 2] += self.is_faulty


@pytest.mark.parametrize("versions", [(1, 2, 3, 4, 5, 6, 7), (5, 15, 25, 35, 45, 55, 65), (2, 4, 6, 9, 12, 15, 18)])
def test_the_first_publish_and_each_nth_after_it_is_proven_whatever_the_versions(versions: tuple[int, ...]) -> None:
    engine, source = Corrupt(is_faulty=False), ModuleSource(torch.nn.Linear(4, 3))
    options = {"verify": "installed", "verify_every": 3, "on_failure": "report"}
    with fleet(source, engine, **options) as (publisher, _):
        found = []
        for version in versions:
            engine.is_faulty = bool(found)
            found.append(publisher.publish(version).ok)
            if not found[-1]:
                engine.is_faulty = False
                assert publisher.publish(version + 1).ok, "a quarantined engine is proven again when it is healed"
                break
    assert found == [True, True, True, False]
    with fleet(source, Corrupt(), **options) as (publisher, _):
        assert not publisher.publish(versions[0]).ok


@pytest.mark.parametrize("is_first_wrong", [True, False])
def test_the_wrong_engine_is_found_wherever_it_is_in_the_list(is_first_wrong: bool) -> None:
    engines = [Corrupt(is_faulty=is_wrong) for is_wrong in (is_first_wrong, False, False, not is_first_wrong)]
    source = ModuleSource(torch.nn.Linear(4, 3))
    with fleet(source, *engines, verify="installed", on_failure="report") as (publisher, clients):
        report = publisher.publish()
        wrong = f"engine-{0 if is_first_wrong else 3}"
        assert [name for name, result in report.engines.items() if not result.ok] == [wrong]
        assert [client.name for client in clients if client.gate.torn] == [wrong]


def test_an_engine_that_has_connected_since_is_proven_between_two_such_publishes() -> None:
    source, late = ModuleSource(torch.nn.Linear(4, 3)), DirectEngine("late", Corrupt())
    options = {"verify": "installed", "verify_every": 100, "on_failure": "report"}
    num_asked = 0

    class Asked(DirectEngine):
        def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
            nonlocal num_asked
            num_asked += 1
            return super().held(names)

    first = Asked("first", Corrupt(is_faulty=False))
    with contextlib.closing(late), contextlib.closing(first), publisher_of(source, engines=[first], **options) as made:
        assert made.publish().ok
        assert made.publish().ok
        made.add_engine(late, sync=True)  # its version was not proven when it was published
        assert late.gate.torn == ""
        report = made.publish()
        assert [name for name, result in report.engines.items() if not result.ok] == ["late"]
        late.engine.is_faulty = False
        assert made.publish().ok
        late.engine.is_faulty = True
        assert made.publish().ok, "it was proven, and the next one is far away"
    assert num_asked == 1


def test_a_publish_that_sends_nothing_is_not_counted() -> None:
    source, engine = TensorSource({"weight": torch.ones(3, 4), "bias": torch.ones(3)}), Corrupt()
    with fleet(source, engine, verify="installed", verify_every=100, on_failure="report") as (publisher, _):
        with pytest.raises(ZeroDivisionError):
            publisher.publish(on_progress=lambda done, total: 1 // 0)
        assert not publisher.publish().ok


def test_a_module_in_process_is_proven_too() -> None:
    module = torch.nn.Linear(4, 3)

    class Faulty(ModuleEngine):
        def commit(self, version: object) -> None:
            super().commit(version)  # type: ignore[arg-type]
            if is_faulty:
                module.weight.data[1, 2] += 1

    is_faulty = False
    tensors = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    with fleet(TensorSource(tensors), Faulty(module), verify="installed", on_failure="report") as (publisher, _):
        assert publisher.publish(1).ok
        is_faulty = True
        report = publisher.publish(2)
    assert not report.ok
    (result,) = report.engines.values()
    assert result.error is not None
    assert "'weight'" in result.error.message


def test_a_run_that_has_taken_the_engine_over_is_not_taken_for_a_corruption() -> None:
    """Between an install and its proof, or between two pages of it."""
    module, clients = torch.nn.Linear(4, 3), list[LocalEngine]()

    class TakenOver(LocalEngine):
        def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
            if not clients:
                second = LocalEngine(ModuleEngine(torch.nn.Linear(4, 3)), name="second")
                second.worker.close()
                second.worker = self.worker
                clients.append(second)
                with publisher_of(ModuleSource(torch.nn.Linear(4, 3)), engines=clients, takeover=True) as other:
                    assert other.publish(7).ok
            return super().held(names)

    engine = TakenOver(ModuleEngine(module))
    try:
        with (
            publisher_of(ModuleSource(torch.nn.Linear(4, 3)), engines=[engine], verify="installed") as publisher,
            pytest.raises(PublishError, match="serves version 7 of run"),
        ):
            publisher.publish(1)
        assert engine.info().torn == ""
    finally:
        engine.close()


def test_an_engine_that_cannot_be_told_to_refuse_has_failed_for_what_it_holds() -> None:
    module = torch.nn.Linear(4, 3)

    class Faulty(ModuleEngine):
        def commit(self, version: WeightVersion) -> None:
            super().commit(version)
            module.weight.data[1, 2] += 1

    class Gone(LocalEngine):
        def quarantine(self, reason: str) -> None:
            raise PeerDiedError("gone", peer=self.name)

    engine = Gone(Faulty(module))
    try:
        with (
            publisher_of(ModuleSource(torch.nn.Linear(4, 3)), engines=[engine], verify="installed") as publisher,
            pytest.raises(PublishError, match=r"live memory is not what was sent: 'weight'; .*not reached .* gone"),
        ):
            publisher.publish(1)
    finally:
        engine.close()


def test_engines_that_cannot_be_read_are_named() -> None:
    class Blind:
        def specs(self) -> None: ...
        def load(self, tensors: object) -> None: ...
        def commit(self, version: object) -> None: ...
        def discard(self) -> None: ...

    with fleet(TensorSource({"a": torch.zeros(2)}), Blind(), verify="installed") as (publisher, _):
        (result,) = publisher.publish(1).engines.values()
    assert result.unproven == {"a": "this engine's weights can't be read"}


def held(rank: int, offset: int, tensor: torch.Tensor, size: int = 4, *, step: int = 2) -> HeldTensor:
    region = Region((offset,), (step,))
    digest = tensor_digest(tensor[offset : offset + step], region, (size,))
    return HeldTensor(TensorSpec("a", "float32", (size,)), [RegionDigest(region, digest)])


def test_ranks_of_a_pipeline_list_what_each_has_tied() -> None:
    """A rank without a part of a tensor knows only the checkpoint's dtype of it."""
    tensor = torch.arange(4.0)
    whole = held(0, 0, tensor, step=4)
    absent = HeldTensor(msgspec.structs.replace(whole.spec, dtype="bfloat16"))
    tied = msgspec.structs.replace(whole, spec=msgspec.structs.replace(whole.spec, name="head", aliases=("a",)))
    found = held_weights("", "7", {0: [absent], 1: [whole, tied]}, with_blocks=False)
    assert found.tensors == [whole.spec, tied.spec]
    assert found.digests == dict.fromkeys(("a", "head"), tensor_digest(tensor))
    assert not found.differing
    assert not found.unproven


def test_ranks_are_added_up_and_replicas_compared() -> None:
    tensor = torch.arange(4.0)
    assert whole_digest({0: held(0, 0, tensor), 1: held(1, 2, tensor)}) == tensor_digest(tensor)
    both = {0: held(0, 0, tensor), 1: held(1, 2, tensor), 2: held(2, 0, tensor), 3: held(3, 2, tensor)}
    assert whole_digest(both) == tensor_digest(tensor)
    with pytest.raises(UnsupportedError, match="do not have all of it"):
        whole_digest({0: held(0, 0, tensor), 1: held(1, 0, tensor)})
    with pytest.raises(Exception, match=r"at \[2\], sizes \[2\]: rank 1 has digest .*, rank 3 has"):
        whole_digest(both | {3: held(3, 2, tensor + 1)})
