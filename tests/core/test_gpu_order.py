"""Every order that a GPU does not keep by itself, on a GPU whose work is done only when it is waited for."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from pretended import lazy_gpu
from pretended.lazy_gpu import POISON, LazyGpu
from pretended.lazy_nccl import LazyNccl, LazyWork
from publishers import publisher_of

from core.direct import fleet
from core.parallel import ParallelEngine
from weightcast import ModuleEngine, TensorSource
from weightcast.errors import ClosedError, InsufficientMemoryError, PeerTimeoutError, PublishError
from weightcast.format import device_digest
from weightcast.format.bucket import TORCH_DTYPES, root_digest
from weightcast.format.bucket_digest import torch_digest
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.host import copy as host_copy
from weightcast.host import device as host_device
from weightcast.host.copy import copy_all
from weightcast.host.deadline import Deadline
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    SHORT_SECONDS,
    Background,
    TransportEnds,
    send,
    version,
)
from weightcast.trainer.packer import pack
from weightcast.trainer.publish_run import Connections

pytestmark = pytest.mark.usefixtures("leaves_nothing")
NCCL = "nccl://127.0.0.1:0"
NAMES = [f"t{number}" for number in range(6)]
SPECS = [TensorSpec(name, "float32", (700,)) for name in NAMES]


class OnGpu:
    """Copies what it is given into its own tensors, as an engine on a GPU does: queued, and not waited for."""

    def __init__(self, gpu: LazyGpu) -> None:
        self.gpu = gpu
        self.devices = [gpu.device]
        self.weights = {name: gpu.tensor(torch.zeros(700)) for name in NAMES}
        self.streams: set[object] = set()

    def specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.streams.add(self.gpu.current_stream(self.gpu.device))
        pairs = [(self.weights[name], tensor) for name, tensor in tensors]
        copy_all(*map(list, zip(*pairs, strict=True)))

    def commit(self, version: WeightVersion) -> None:
        self.committed = {name: self.gpu.read(tensor) for name, tensor in self.weights.items()}

    def discard(self) -> None: ...


@pytest.fixture
def gpu() -> Iterator[LazyGpu]:
    with LazyGpu() as made:
        yield made


@pytest.fixture
def nccl(gpu: LazyGpu) -> Iterator[LazyNccl]:
    with LazyNccl(gpu) as made:
        yield made


def values(number: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((700,), 10.0 * number + index) for index, name in enumerate(NAMES)}


@contextlib.contextmanager
def published(
    gpu: LazyGpu, install: str, *engines: OnGpu, transport: str = "memory://"
) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    weights = {name: gpu.tensor(tensor) for name, tensor in values(1).items()}
    with fleet(TensorSource(weights), *engines, transport=transport, install=install) as (publisher, _):
        yield publisher, weights


@contextlib.contextmanager
def ends_on(gpu: LazyGpu, deadline_seconds: float = 60.0) -> Iterator[tuple[Any, Any, Manifest]]:
    """Both ends of memory://, in an update of four buckets."""
    ends = TransportEnds()
    ends.url, ends.device = "memory://", gpu.device
    specs = [TensorSpec(f"t{number}", "uint8", (4096,)) for number in range(4)]
    manifest = plan(specs, 4096)
    with contextlib.ExitStack() as ends.stack:
        sender = ends.sender(deadline_seconds)
        receiver = ends.receiver(sender)
        receiver.open(manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["a"], staged=False)
        yield sender, receiver, manifest


def test_what_nobody_has_waited_for_is_not_there(gpu: LazyGpu) -> None:
    a = gpu.tensor(torch.arange(8))
    side = gpu.Stream(gpu.device)
    with gpu.stream(side):
        b = a * 2
        a.zero_()
    assert set(gpu.read(b).view(torch.uint8).tolist()) == {POISON}
    assert gpu.read(a).tolist() == list(range(8))
    assert a[:3].cpu().tolist() == [0, 1, 2], "the default stream waits for no other"
    side.synchronize()
    assert gpu.read(b).tolist() == list(range(0, 16, 2))
    assert a.cpu().sum() == 0


@pytest.mark.parametrize("transport", ["memory://", "ipc://", NCCL])
@pytest.mark.parametrize("install", ["streaming", "staged"])
def test_every_version_is_whole_although_the_trainer_goes_on_at_once(
    gpu: LazyGpu, nccl: LazyNccl, install: str, transport: str
) -> None:
    """The digests are those of what was packed, and the next step does not write what is still to be packed."""
    engine = OnGpu(gpu)
    with published(gpu, install, engine, transport=transport) as (publisher, weights):
        every_version_is_whole(gpu, publisher, weights, engine)


@pytest.mark.parametrize(("install", "num_members"), [("streaming", 3), ("staged", 2)])
def test_every_version_is_whole_in_two_workers_of_one_engine(
    gpu: LazyGpu, nccl: LazyNccl, install: str, num_members: int
) -> None:
    """Staged, one of them receives for both."""
    engines = OnGpu(gpu), OnGpu(gpu)
    weights = {name: gpu.tensor(tensor) for name, tensor in values(1).items()}
    with contextlib.closing(ParallelEngine("wide", engines)) as client:
        options: dict[str, Any] = {"transport": NCCL, "install": install, "bucket_size_bytes": 4096}
        with publisher_of(TensorSource(weights), engines=[client], **options) as publisher:
            every_version_is_whole(gpu, publisher, weights, *engines)
    assert len(nccl.groups) == num_members


def every_version_is_whole(gpu: LazyGpu, publisher: Any, weights: dict[str, torch.Tensor], *engines: OnGpu) -> None:
    for number in (2, 3, 4):
        for name, tensor in values(number).items():
            weights[name].copy_(tensor)
        assert publisher.publish().ok
        for tensor in weights.values():
            tensor.fill_(-1.0)
        gpu.synchronize(gpu.device)
        for engine in engines:
            for name, tensor in values(number).items():
                assert torch.equal(engine.committed[name], tensor), name
                assert torch.equal(gpu.read(engine.weights[name]), tensor), name


def test_a_bucket_is_loaded_while_the_trainer_is_late_with_the_next(
    gpu: LazyGpu, nccl: LazyNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's device is busy with broadcasts of buckets that are not packed yet: nothing may wait for it."""
    loaded = threading.Event()

    class Engine(OnGpu):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load(tensors)
            loaded.set()

    def pack_late(*args: Any) -> Any:
        if args[3] == 1:
            assert loaded.wait(PATIENCE_SECONDS)
        return pack(*args)

    monkeypatch.setattr("weightcast.trainer.publish_run.pack", pack_late)
    with published(gpu, "streaming", engine := Engine(gpu), transport=NCCL) as (publisher, _):
        assert publisher.publish().ok
    assert torch.equal(engine.committed["t5"], values(1)["t5"])


@pytest.mark.parametrize("undo", [False, True])
def test_an_engine_gives_an_update_up_although_the_trainer_stands_still(
    gpu: LazyGpu, nccl: LazyNccl, undo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on its device then ends by its own abort, which comes before the wait for that device."""
    loaded = threading.Event()

    class Engine(OnGpu):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load(tensors)
            loaded.set()

        def snapshot(self) -> object:
            copies = {name: tensor.cpu() for name, tensor in self.weights.items()}
            return lambda: [self.weights[name].copy_(copy) for name, copy in copies.items()]

    def pack_until_the_engine_has_ended(*args: Any) -> Any:
        if args[3] == 3:
            assert loaded.wait(PATIENCE_SECONDS)
            trainers, engines = sorted(nccl.groups, key=lambda group: group.rank)
            # Here the device is the trainer's as well, who has nothing under way.
            gpu.wait_until(lambda: all(work.is_completed() for work in list(trainers.under_way)))
            gpu.wait_until(lambda: not all(work.is_completed() for work in list(engines.under_way)))
            client.worker.shutdown()
            torn.append(client.gate.torn)
            assert not client.gate.is_paused
        return pack(*args)

    torn: list[str] = []
    weights = {name: gpu.tensor(tensor) for name, tensor in values(1).items()}
    options: dict[str, Any] = {"transport": NCCL, "install": "streaming", "undo": undo}
    with fleet(TensorSource(weights), engine := Engine(gpu), **options) as (publisher, [client]):
        publisher.publish()
        loaded.clear()
        for name, tensor in values(2).items():
            weights[name].copy_(tensor)
        with monkeypatch.context() as late:
            late.setattr("weightcast.trainer.publish_run.pack", pack_until_the_engine_has_ended)
            with pytest.raises(PublishError):
                publisher.publish()
        gpu.synchronize(gpu.device)
        [reason] = torn
        if undo:
            assert not reason
            assert all(torch.equal(gpu.read(engine.weights[name]), tensor) for name, tensor in values(1).items())
        else:
            assert "aborted half-way" in reason
            assert "restoring the former version failed" not in reason
        assert publisher.publish().ok
    assert torch.equal(engine.committed["t5"], values(2)["t5"])


def test_the_trainers_stream_goes_on_after_packing(gpu: LazyGpu) -> None:
    """Also where a publish raises before its sender has waited for what was queued."""
    weights, bucket = gpu.tensor(torch.ones(8)), gpu.tensor(torch.zeros(8))
    connections = Connections("memory://", "0" * 32, gpu.device, deadline_seconds=60.0, lease_seconds=60.0)
    with (
        contextlib.closing(connections),
        contextlib.suppress(KeyboardInterrupt),
        connections.packing_stream(),
    ):
        bucket.copy_(weights)
        raise KeyboardInterrupt
    weights.zero_()
    gpu.default_stream.synchronize()
    assert gpu.read(bucket).tolist() == [1.0] * 8


def test_the_digests_are_read_on_the_stream_that_makes_them(gpu: LazyGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[object] = []

    def spy(*args: Any) -> str:
        streams.append(gpu.current_stream(gpu.device))
        return root_digest(*args)

    monkeypatch.setattr("weightcast.trainer.publish_run.root_digest", spy)
    with published(gpu, "streaming", OnGpu(gpu)) as (publisher, _):
        publisher.publish()
    assert streams
    assert gpu.default_stream not in streams


def test_a_slot_is_packed_again_only_once_it_was_read(gpu: LazyGpu) -> None:
    """What reads it may still be queued when the reader asks for the next bucket."""
    with ends_on(gpu) as (sender, receiver, manifest):
        for index in range(3):
            send(sender, manifest, 1, index)
        reading = gpu.Stream(gpu.device)
        with gpu.stream(reading):
            buckets = iter(receiver)
            next(buckets)
            over = gpu.hold(reading)
            next(buckets)
        assert sender._readers[0] == {"a"}
        over.set()
        next(buckets)
        assert not sender.failures  # which takes in what the receiver has said
        assert not sender._readers[0]


@pytest.mark.parametrize("transport", ["memory://", NCCL])
def test_the_last_step_of_generation_reads_the_former_weights(gpu: LazyGpu, nccl: LazyNccl, transport: str) -> None:
    """It may still run when the engine has left it: its kernels are on another stream."""
    engine = OnGpu(gpu)
    client_gate: list[torch.Tensor] = []
    with published(gpu, "streaming", engine, transport=transport) as (publisher, weights):
        publisher.publish()
        with gpu.stream(gpu.Stream(gpu.device)):
            client_gate += [tensor.clone() for tensor in engine.weights.values()]
        for name, tensor in values(2).items():
            weights[name].copy_(tensor)
        publisher.publish()
        gpu.synchronize(gpu.device)
    for found, expected in zip(client_gate, values(1).values(), strict=True):
        assert torch.equal(gpu.read(found), expected)


def test_buckets_arrive_on_a_stream_of_their_own_beside_a_captured_graph(gpu: LazyGpu) -> None:
    engine = OnGpu(gpu)
    with published(gpu, "streaming", engine) as (publisher, _):
        publisher.publish()
    assert engine.streams
    assert gpu.default_stream not in engine.streams
    assert "weightcast-receive" in gpu.libcuda.relaxed


def test_all_versions_are_loaded_on_one_stream(gpu: LazyGpu) -> None:
    """torch has few, and gives each out again: one for each version would be the engine's own, or NCCL's, one day."""
    engine = OnGpu(gpu)
    with published(gpu, "streaming", engine) as (publisher, _):
        for _ in range(3):
            assert publisher.publish().ok
    assert len(engine.streams) == 1


def test_a_module_is_loaded_when_its_engine_commits(gpu: LazyGpu) -> None:
    net = torch.nn.Linear(8, 8)
    for name, parameter in list(net.named_parameters()):
        setattr(net, name, torch.nn.Parameter(gpu.tensor(parameter), requires_grad=False))
    engine = ModuleEngine(net)
    assert list(engine.devices) == [gpu.device]
    update = {name: torch.full_like(tensor.cpu(), 3.0) for name, tensor in engine.tensors()}
    with gpu.stream(gpu.Stream(gpu.device)):
        engine.load({name: gpu.tensor(tensor) for name, tensor in update.items()}.items())
        assert not any((gpu.read(tensor) == 3.0).all() for tensor in net.parameters())
        engine.commit(version(1))
    assert all((gpu.read(tensor) == 3.0).all() for tensor in net.parameters())


def test_an_engine_may_call_its_gpu_by_no_index(gpu: LazyGpu) -> None:
    engine = OnGpu(gpu)
    engine.devices = [torch.device("cuda")]
    with published(gpu, "streaming", engine) as (publisher, _):
        assert publisher.publish().ok


def test_an_undo_comes_after_what_was_already_queued(gpu: LazyGpu) -> None:
    """A streaming update that fails half-way has copies queued on another thread's stream."""

    class Failing(OnGpu):
        fails = False

        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load(tensors)
            if self.fails:
                raise RuntimeError("this loader was told to fail")

        def snapshot(self) -> object:
            copies = {name: tensor.cpu() for name, tensor in self.weights.items()}
            return lambda: [self.weights[name].copy_(copy) for name, copy in copies.items()]

    engine = Failing(gpu)
    weights = {name: gpu.tensor(tensor) for name, tensor in values(1).items()}
    with fleet(TensorSource(weights), engine, transport="memory://", install="streaming", undo=True) as (publisher, _):
        publisher.publish()
        engine.fails = True
        for name, tensor in values(2).items():
            weights[name].copy_(tensor)
        with pytest.raises(PublishError):
            publisher.publish()
        gpu.synchronize(gpu.device)
        for name, tensor in values(1).items():
            assert torch.equal(gpu.read(engine.weights[name]), tensor), name


@pytest.mark.parametrize("install", ["streaming", "staged"])
def test_an_install_waits_for_every_gpu_of_the_engine(
    gpu: LazyGpu, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that has returned may still run on each of them."""
    waited: list[torch.device] = []
    synchronize = gpu.synchronize
    monkeypatch.setattr(gpu, "synchronize", lambda device: (waited.append(device), synchronize(device)))

    class OnTwo(OnGpu):
        load_after: list[torch.device] | None = None

        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.load_after = self.load_after or list(waited)
            super().load(tensors)

    engine = OnTwo(gpu)
    engine.devices = [gpu.device, torch.device("cuda", 1)]
    with published(gpu, install, engine) as (publisher, _):
        publisher.publish()
    assert engine.load_after == engine.devices


def test_a_modules_devices_are_those_of_its_weights(gpu: LazyGpu) -> None:
    model = torch.nn.Module()
    model.register_buffer("a", gpu.tensor(torch.zeros(8)))
    model.register_buffer("b", torch.zeros(8))
    assert list(ModuleEngine(model).devices) == [gpu.device, torch.device("cpu")]


def test_an_engine_whose_module_moves_says_where_it_is_now(gpu: LazyGpu) -> None:
    net = torch.nn.Linear(8, 8)
    engine = ModuleEngine(net)
    assert list(engine.devices) == [torch.device("cpu")]
    for name, parameter in list(net.named_parameters()):
        setattr(net, name, torch.nn.Parameter(gpu.tensor(parameter), requires_grad=False))
    assert list(engine.devices) == [gpu.device]


class Moving(ModuleEngine):
    """Its model moves to the GPU right after it was asked so many times where it is."""

    num_asked = -1
    moved_to: torch.device | None = None

    @property
    def devices(self) -> list[torch.device]:
        self.num_asked -= 1
        found = [self.moved_to or torch.device("cpu")]
        if self.num_asked == 0:
            self.move(torch.device("cuda", 0))
        return found

    def move(self, device: torch.device) -> None:
        self.moved_to = device
        for parameter in self._model.parameters():
            parameter.data = parameter.clone()


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_a_module_that_moved_since_the_last_publish_is_waited_for(
    gpu: LazyGpu, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work on the GPU may still read its weights, when these are copied for the undo or written."""
    waited: list[torch.device] = []
    monkeypatch.setattr(host_device, "synchronize", waited.append)
    net = torch.nn.Linear(8, 8).requires_grad_(False)
    weights = {name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()}
    engine, known = Moving(net), list[list[torch.device]]()
    snapshot = engine.snapshot
    monkeypatch.setattr(engine, "snapshot", lambda: (known.append(list(waited)), snapshot())[1])
    with fleet(TensorSource(weights), engine, install=install, undo=True) as (publisher, _):
        publisher.publish()
        weights["bias"].fill_(3.0)
        engine.move(gpu.device)
        publisher.publish()
    assert known == [[], [gpu.device]]
    assert torch.equal(net.bias, torch.full((8,), 3.0))


def test_a_module_that_moves_while_a_version_streams_is_not_written_to(gpu: LazyGpu) -> None:
    """Nobody has waited for the GPU, and with NCCL it is too late for that."""
    net = torch.nn.Linear(8, 8).requires_grad_(False)
    weights = {name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()}
    engine = Moving(net)
    with fleet(TensorSource(weights), engine, install="streaming") as (publisher, (client,)):
        publisher.publish()
        weights["bias"].fill_(3.0)
        engine.num_asked = 1
        with pytest.raises(PublishError, match=f"moved from cpu to {gpu.device} since the offer: publish again"):
            publisher.publish()
        assert not client.gate.torn
        assert torch.equal(net.bias, torch.full((8,), 2.0))
        publisher.publish()
        assert torch.equal(net.bias, torch.full((8,), 3.0))


def test_targets_of_several_dtypes_are_copied_in_batches_of_their_own(gpu: LazyGpu) -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    targets = [gpu.tensor(torch.zeros(64, dtype=dtype)) for dtype in dtypes]
    sources = [gpu.tensor(torch.full((64,), float(number), dtype=torch.bfloat16)) for number in range(4)]
    copy_all(targets, sources)
    gpu.synchronize(gpu.device)
    assert [gpu.read(target).tolist() for target in targets] == [[float(number)] * 64 for number in range(4)]


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES.values()), ids=list(TORCH_DTYPES))
def test_every_dtype_is_copied_in_batches(gpu: LazyGpu, dtype: torch.dtype) -> None:
    """Of several of these torch's own batch copy knows nothing on a GPU."""
    size = 64 * dtype.itemsize
    made = [torch.arange(start, start + size).remainder(2).to(torch.uint8).view(dtype) for start in range(3)]
    sources = [gpu.tensor(tensor) for tensor in made]
    targets = [gpu.tensor(torch.zeros(size, dtype=torch.uint8).view(dtype)) for _ in made]
    num_launches = gpu.num_launches
    copy_all(targets, sources)
    assert gpu.num_launches == num_launches + 1
    gpu.default_stream.synchronize()
    for target, expected in zip(targets, made, strict=True):
        assert torch.equal(gpu.read(target).view(torch.uint8), expected.view(torch.uint8))


def test_casts_that_torch_has_no_batch_for_are_made_one_by_one(gpu: LazyGpu) -> None:
    sources = [gpu.tensor(torch.full((64,), number, dtype=torch.uint16)) for number in range(3)]
    targets = [gpu.tensor(torch.zeros(64, dtype=torch.int32)) for _ in sources]
    copy_all(targets, sources)
    gpu.default_stream.synchronize()
    assert [gpu.read(target).unique().tolist() for target in targets] == [[0], [1], [2]]


def test_conjugated_and_negated_views_are_copied_by_value(gpu: LazyGpu) -> None:
    whole = torch.arange(4.0) + 1j * torch.arange(4.0)
    base = gpu.tensor(whole)
    views = [base.conj(), base.conj()]
    targets = [gpu.tensor(torch.zeros(4, dtype=torch.complex64)) for _ in views]
    copy_all(targets, views)
    gpu.default_stream.synchronize()
    assert all(torch.equal(gpu.read(target), whole.conj().resolve_conj()) for target in targets)


@pytest.mark.parametrize("to_host", [True, False], ids=["to the host", "to the GPU"])
def test_copies_between_host_memory_and_a_gpu_take_turns_in_two_slots_of_pinned_memory(
    gpu: LazyGpu, to_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is read once it was written and written once it was read; the host waits for slots, not for tensors."""
    monkeypatch.setattr(host_copy, "_PINNED_SLOT_BYTES", slot_bytes := 4096)
    whole = torch.randn(70, 100)
    sources = [*torch.randn(40, 30).unbind(), torch.randn(60, 7).t(), whole[:, 20:90], torch.randn(1, 1, 3000)]
    sources += [torch.tensor(3.0), torch.randn(0, 5), torch.randn(9, 11, dtype=torch.complex64).conj(), torch.ones(5)]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources[:-1]] + [torch.zeros(3, 5)]
    targets[1], targets[41] = torch.zeros(30, dtype=torch.bfloat16), torch.zeros(70, 140)[:, ::2]
    expected = [
        source.expand(target.shape).to(target.dtype, copy=True) for target, source in zip(targets, sources, strict=True)
    ]
    if to_host:
        sources = [gpu.tensor(source) if source.is_contiguous() else gpu.tensor(source.t()).t() for source in sources]
    else:
        targets = [gpu.tensor(torch.zeros(target.shape, dtype=target.dtype)) for target in targets]
    with gpu.stream(gpu.Stream(gpu.device)):
        copy_all(targets, sources)
        num_waits = gpu.num_waits
        if to_host:
            found = targets
        else:
            # What was read of the host may be written from now on.
            for source in sources:
                source.zero_()
            gpu.current_stream(gpu.device).synchronize()
            found = [gpu.read(target) for target in targets]
    for target, value in zip(found, expected, strict=True):
        assert torch.equal(target, value)
    num_bytes = sum(16 * -(-value.nbytes // 16) for value in expected)
    assert num_waits <= 2 * num_bytes / slot_bytes + 4
    assert gpu.pinned_bytes <= 3 * 2 * slot_bytes, "two slots for each pair of dtypes"


@pytest.mark.parametrize("undo", [False, True])
def test_a_staged_publish_waits_for_slots_of_pinned_memory_and_not_for_tensors(gpu: LazyGpu, undo: bool) -> None:
    """Out of the trainer's GPU, and into the engine's module; and to the undo copy."""
    waits = []
    for num_tensors in (4, 64):
        names = [f"t{number}" for number in range(num_tensors)]
        weights = {name: gpu.tensor(torch.randn(4096 // num_tensors)) for name in names}
        model = torch.nn.Module()
        for name, tensor in weights.items():
            model.register_buffer(name, gpu.tensor(torch.zeros(tensor.shape)))
        engine = ModuleEngine(model)
        options = {"transport": "ipc://", "undo": undo, "bucket_size_bytes": 1 << 20}
        with fleet(TensorSource(weights), engine, **options) as (publisher, _):
            publisher.publish()
            before = gpu.num_waits
            for tensor in weights.values():
                tensor.add_(1)
            assert publisher.publish().num_buckets == 1
            waits.append(gpu.num_waits - before)
        gpu.synchronize(gpu.device)
        for name, tensor in weights.items():
            assert torch.equal(gpu.read(model.get_buffer(name)), gpu.read(tensor)), name
    assert waits[0] == waits[1]


def test_the_host_waits_once_for_each_bucket(gpu: LazyGpu) -> None:
    """Three slots, so that a bucket is packed, one is announced and one is read at a time."""
    waits, buckets = [], []
    for size in (4096, 1024 * 16):
        engine = OnGpu(gpu)
        weights = {name: gpu.tensor(tensor) for name, tensor in values(1).items()}
        source = TensorSource(weights)
        options = {"transport": "memory://", "install": "streaming", "bucket_size_bytes": size}
        with fleet(source, engine, **options) as (publisher, _):
            publisher.publish()
            before = gpu.num_waits
            buckets.append(publisher.publish().num_buckets)
            waits.append(gpu.num_waits - before)
    assert buckets[0] >= 3 * buckets[1]
    assert waits[0] - waits[1] <= buckets[0] - buckets[1]


def test_a_bucket_is_announced_once_it_is_packed_and_not_before(gpu: LazyGpu) -> None:
    """A receiver never waits for what a trainer that was killed has not done."""
    with ends_on(gpu, deadline_seconds=0.2) as (sender, receiver, manifest):
        over = gpu.hold(gpu.default_stream)
        with pytest.raises(PeerTimeoutError, match="did not finish packing bucket 0 within"):
            send(sender, manifest, 1, 0)
        with receiver._condition:
            receiver._link.condition.read()
        assert not receiver._wanted.announced
        over.set()


def test_a_publisher_closes_all_that_it_has_although_its_gpu_has_failed(
    gpu: LazyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access every call to that GPU raises. `leaves_nothing` looks for what would be left."""

    def failed(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with published(gpu, "streaming", OnGpu(gpu), transport="ipc://") as (publisher, _):
        publisher.publish()
        gpu.synchronize(gpu.device)
        with monkeypatch.context() as broken:
            broken.setattr(gpu, "synchronize", failed)
            publisher.close()
    with pytest.raises(ClosedError):
        publisher.publish()


def test_a_publisher_closes_all_that_it_has_although_its_gpu_has_failed_in_a_broadcast(
    gpu: LazyGpu, nccl: LazyNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(work: LazyWork) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def pack_and_fail(*args: Any) -> Any:
        if args[3] == 2:
            monkeypatch.setattr(LazyWork, "is_completed", failed)
        return pack(*args)

    monkeypatch.setattr("weightcast.trainer.publish_run.pack", pack_and_fail)
    with published(gpu, "streaming", OnGpu(gpu), transport=NCCL) as (publisher, _):
        with pytest.raises(PublishError, match="illegal memory access"):
            publisher.publish()
        publisher.close()
    gpu.wait_until(lambda: all(group.is_aborted for group in nccl.groups))


@pytest.mark.parametrize(("transport", "is_capturing"), [("memory://", False), ("ipc://", False), ("ipc://", True)])
def test_memory_that_the_device_has_not_is_an_error_of_ours(gpu: LazyGpu, transport: str, is_capturing: bool) -> None:
    """Also while another thread captures a graph, and torch gives nothing back of what it keeps."""
    engine = OnGpu(gpu)
    with published(gpu, "streaming", engine, transport=transport) as (publisher, _):
        gpu.free_bytes, gpu.is_capturing = 4096, is_capturing
        with pytest.raises((InsufficientMemoryError, PublishError), match=r"cuda:0 has 4096 left"):
            publisher.publish()


def test_host_memory_that_can_not_be_pinned_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself can't pin any here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InsufficientMemoryError, match="4096 bytes of pinned host memory could not be allocated"):
        host_device.pinned(4096)


@pytest.mark.parametrize("install", ["streaming", "staged"])
def test_release_gives_the_arena_back_at_both_ends_and_the_next_publish_takes_another(
    gpu: LazyGpu, install: str
) -> None:
    """Streaming, memory of the GPU; staged, host memory, which is given back likewise."""
    engines = OnGpu(gpu), OnGpu(gpu)

    def arenas() -> int:
        with open("/proc/self/maps") as maps:
            return sum("fake-libcuda" in line or "weightcast-buckets" in line for line in maps)

    with published(gpu, install, *engines, transport="ipc://") as (publisher, weights):
        publisher.release()
        for number in (1, 2):
            for name, tensor in values(number).items():
                weights[name].copy_(tensor)
            assert publisher.publish().ok
            assert arenas() == 3
            publisher.release()
            for _ in Deadline(PATIENCE_SECONDS).polls(0.001, 0.05):
                # Workers let go in the background; what is queued, and nobody has waited for, refers to its memory.
                gpu.synchronize(gpu.device)
                if not arenas() and gpu.libcuda.is_clean:
                    break
            assert arenas() == 0
            assert gpu.libcuda.is_clean
            for engine in engines:
                assert torch.equal(engine.committed["t1"], values(number)["t1"])
    with pytest.raises(ClosedError):
        publisher.release()


def test_memory_is_given_back_once_an_update_that_is_given_up_reads_nothing(
    gpu: LazyGpu, nccl: LazyNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loads may still be queued when it counts as given up."""

    class Failing(OnGpu):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            named = list(tensors)
            super().load(named)
            # At the last bucket: a broadcast of the publisher's that nobody takes would keep the GPU, which is the
            # engine's too here.
            if NAMES[-1] in dict(named):
                raise RuntimeError("this loader was told to fail")

        def discard(self) -> None:
            session = client.worker._session
            release = session.receiver.release
            monkeypatch.setattr(session.receiver, "release", lambda: (has_begun.set(), release()))
            releasing.append(Background(session.release, session.last_offered))
            is_early.append(releasing[0].is_done_within(SHORT_SECONDS) or has_begun.is_set())

    has_begun, releasing, is_early = threading.Event(), list[Background[None]](), list[bool]()
    weights = {name: gpu.tensor(tensor) for name, tensor in values(1).items()}
    options: dict[str, Any] = {"transport": NCCL, "install": "streaming"}
    with fleet(TensorSource(weights), Failing(gpu), **options) as (publisher, [client]):
        with pytest.raises(PublishError, match="told to fail"):
            publisher.publish()
        releasing[0].result()
        assert has_begun.is_set()
    assert is_early == [False]


@pytest.mark.parametrize("install", ["streaming", "staged"])
def test_kernels_are_launched_on_the_gpu_of_what_they_read(install: str) -> None:
    """The current one may be another: an engine on cuda:0 checks buckets in arenas of cuda:1 too."""
    with LazyGpu(index=1) as gpu, published(gpu, install, engine := OnGpu(gpu)) as (publisher, _):
        words = torch.ones(8, dtype=torch.int64)
        assert device_digest.device_digest(gpu.tensor(words)).tolist() == torch_digest(words).tolist()
        publisher.publish()
        assert torch.equal(engine.committed["t1"], values(1)["t1"])


@pytest.mark.parametrize("broken", [None, "digests", "copies", "compiler"])
def test_the_kernel_is_tried_with_and_without_tables_before_it_is_used(
    broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails with tables alone would fail in a publish, where torch is no way out any more."""
    kernel = device_digest.kernel.__wrapped__
    with LazyGpu(index=1) as gpu:

        def launch(bucket: torch.Tensor, partial: torch.Tensor, size: int, number: int, *tables: torch.Tensor) -> None:
            if broken == "compiler" and tables:
                raise RuntimeError("PassManager::run failed")
            gpu.copy_and_digest(bucket, partial, size, number, *tables)
            if broken == "copies" and tables:
                bucket[0] += 1
            if broken == "digests" and tables:
                partial[0] += 1

        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
        sys.modules["triton"].__spec__ = importlib.machinery.ModuleSpec("triton", None)
        monkeypatch.setitem(sys.modules, "weightcast.format.digest_kernel", types.SimpleNamespace(launch=launch))
        assert kernel(gpu.device) is (None if broken else launch)


@pytest.mark.parametrize(
    ("sizes", "num_kernels"),
    [
        ([], 0),
        ([1] * 64, 1),
        ([1] * 65, 2),
        ([320 << 16], 1),
        ([(320 << 16) + 1], 2),
        ([300 << 16, 30 << 16, 5], 2),
        ([1 << 20] * 256, 13),
        ([1 << 16] * 130, 3),
    ],
)
def test_of_how_many_kernels_torch_makes_a_batch_of_copies(sizes: list[int], num_kernels: int) -> None:
    """64 tensors or 320 chunks of 65,536 elements each: 13 for the 512 MiB of bfloat16 that a bucket has."""
    assert lazy_gpu.num_chunked_kernels(sizes) == num_kernels


@pytest.mark.parametrize(
    ("has_kernel", "gap_elements"), [(True, 0), (True, 2), (False, 0)], ids=["triton", "triton, gaps", "torch"]
)
def test_how_often_a_byte_is_read_and_written_and_how_much_is_launched(
    gpu: LazyGpu, has_kernel: bool, gap_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel: read to pack, to check and to load, written into the bucket and the model. Per bucket and side
    at most five calls that launch; of a batch of copies, which is one of them, torch makes several kernels.
    """
    gpu.has_kernel = has_kernel
    launch, trainer, own = gpu.launch, threading.current_thread(), [0]

    def noted(call: Callable[[], object], num_kernels: int = 1) -> None:
        own[0] += threading.current_thread() is trainer
        launch(call, num_kernels)

    monkeypatch.setattr(gpu, "launch", noted)
    size = 1 << 20
    specs = [TensorSpec(name, "float32", (size // 4 - gap_elements,)) for name in NAMES]
    weights = {spec.name: gpu.tensor(torch.randn(spec.shape)) for spec in specs}
    reads, writes, launches, owns, kernels, waits = [], [], [], [], [], []

    def counts_now() -> tuple[int, ...]:
        launched = gpu.num_launches, own[0], gpu.num_kernels
        return gpu.num_read_bytes, gpu.num_written_bytes, *launched, gpu.num_waits

    # Each tensor in a bucket of its own, and all in one: the difference is of buckets alone.
    for bucket_bytes in (size, 8 * size):
        engine = OnGpu(gpu)
        engine.weights = {spec.name: gpu.tensor(torch.zeros(spec.shape)) for spec in specs}
        engine.specs = lambda: specs  # type: ignore[method-assign]
        options = {"transport": "ipc://", "install": "streaming", "bucket_size_bytes": bucket_bytes}
        with fleet(TensorSource(weights), engine, **options) as (publisher, _):
            publisher.publish()
            gpu.synchronize(gpu.device)
            before = counts_now()
            assert publisher.publish().num_buckets == (6 if bucket_bytes == size else 1)
            gpu.synchronize(gpu.device)
        for counts, now, then in zip(
            (reads, writes, launches, owns, kernels, waits), counts_now(), before, strict=True
        ):
            counts.append(now - then)
        for name, tensor in weights.items():
            assert torch.equal(gpu.read(engine.weights[name]), gpu.read(tensor)), name
    num_bytes = size * len(NAMES)
    per_byte = [round(max(reads) / num_bytes, 1), round(max(writes) / num_bytes, 1)]
    trainers = (owns[0] - owns[1]) / 5
    engines = (launches[0] - launches[1]) / 5 - trainers
    assert (waits[0] - waits[1]) / 5 <= 1
    if has_kernel:
        assert per_byte == [3, 2]
        assert (trainers, engines) == (5 if gap_elements else 4, 4)
        assert kernels == launches, "tensors of 1 MiB are one kernel"
    else:
        # torch reads many times, on each side.
        assert per_byte[0] > 6
