"""SGLang's flattened buckets: what is written can be read, what is laid out is aligned, what is malformed is named."""

from __future__ import annotations

import base64
import io
import pickle
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretended.lazy_gpu import LazyGpu

from weightcast import TensorSource
from weightcast.errors import ClosedError, PeerDiedError, UnsupportedError
from weightcast.format.bucket import TORCH_DTYPES, Layout
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.integrations.sglang.stock import route_distributed
from weightcast.integrations.sglang.stock.buckets import FlatBuckets, buckets, lay_out
from weightcast.integrations.sglang.stock.route_tensor import TensorRoute, shared
from weightcast.integrations.sglang.stock.server import StockSender
from weightcast.seams.client import SenderContext
from weightcast.trainer.packer import Packer, tiling

DTYPES = ["uint8", "bool", "bfloat16", "float16", "float32", "int64", "float8_e4m3fn"]
VERSION = WeightVersion("0" * 32, 1)
SPECS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=12
).map(lambda drawn: [TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(drawn)])


def random_tensor(spec: TensorSpec, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((spec.name, seed)) % (1 << 31))
    raw = torch.randint(0, 2, (spec.num_bytes,), generator=generator, dtype=torch.uint8)
    return raw.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@given(SPECS)
def test_every_place_is_aligned_and_nothing_lies_between(specs: list[TensorSpec]) -> None:
    places, end = lay_out(specs), 0
    for place in places:
        assert place.start == end
        assert place.start % ITEMSIZE_BYTES[place.dtype] == 0
        end = place.end
    assert end == sum(spec.num_bytes for spec in specs)
    assert sorted(place.name for place in places) == sorted(spec.name for spec in specs)


@given(SPECS, st.integers(1, 400))
def test_buckets_keep_order_and_size(specs: list[TensorSpec], capacity: int) -> None:
    cut = list(buckets(specs, capacity))
    assert [spec for held in cut for spec in held] == specs
    for held in cut:
        assert len(held) == 1 or sum(spec.num_bytes for spec in held) <= capacity


def test_a_load_group_is_not_cut() -> None:
    specs = [TensorSpec(name, "float32", (10,), group="g" if name in "bc" else "") for name in "abcd"]
    assert [[spec.name for spec in held] for held in buckets(specs, 80)] == [["a"], ["b", "c"], ["d"]]


def memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@given(SPECS)
def test_a_publishers_buckets_become_flattened_ones(specs: list[TensorSpec]) -> None:
    """Whatever is cut or straddles: every flattened bucket holds its tensors, bit by bit, when it is full."""
    manifest = plan(specs, 256)
    if not manifest.buckets:
        return
    held = {spec.name: random_tensor(spec) for spec in specs}
    layout = Layout(manifest)
    packer, flat = (
        Packer(layout, tiling(layout.manifest.tensors, TensorSource(held).regions())),
        FlatBuckets(manifest, (), memory),
    )
    payload = torch.empty(manifest.max_bucket_bytes, dtype=torch.uint8)
    seen: dict[str, bytes] = {}

    def take(number: int) -> None:
        seen.update({place.name: bits(place.view(flat.bucket(number))) for place in flat.places[number]})

    current = 0
    for index in range(len(manifest.buckets)):
        packer.fill(index, payload, VERSION)
        for number in flat.parts[index]:
            while current < number:
                take(current)
                current += 1
            flat.fill(number, index, payload)
    for number in range(current, len(flat.places)):
        take(number)
    assert seen == {name: bits(tensor) for name, tensor in held.items()}


def test_a_tied_tensor_is_sent_under_each_name_that_a_server_has() -> None:
    specs = [TensorSpec("embed", "float32", (4, 4), aliases=("head", "other")), TensorSpec("norm", "float32", (4,))]
    flat = FlatBuckets(plan(specs, 4096), frozenset({"head"}), memory)
    assert sorted(place.name for places in flat.places for place in places) == ["embed", "head", "norm"]


PLACES = lay_out([TensorSpec("w", "float32", (2, 3)), TensorSpec("m", "uint8", (1,))])


def test_a_handle_is_a_pickle_of_what_sglang_reads_and_of_nothing_else() -> None:
    flat = shared(PLACES[-1].end)
    for place, tensor in zip(PLACES, (torch.arange(6.0).view(2, 3), torch.tensor([7])), strict=True):
        place.view(flat).copy_(tensor)
    route = TensorRoute(SenderContext("ipc://", VERSION.run, torch.device("cpu"), 10.0))
    data = base64.b64decode(route.handle(flat, PLACES, "http://server", 0))
    found: set[tuple[str, str]] = set()

    class Watching(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    bucket = Watching(io.BytesIO(data)).load()
    received = bucket["flattened_tensor"]
    tensors = {m.name: received[m.start_idx : m.end_idx].view(m.dtype).view(m.shape) for m in bucket["metadata"]}
    assert [m.numel for m in bucket["metadata"]] == [24, 1]
    assert torch.equal(tensors["w"], torch.arange(6.0).view(2, 3))
    assert tensors["m"].tolist() == [7]
    flat[:4].copy_(torch.tensor([9.0]).view(torch.uint8))
    assert float(tensors["w"][0, 0]) == 9.0, "it is not the same memory"
    assert {module.partition(".")[0] for module, _ in found} == {"torch", "types"}
    assert len(data) < 2000


@pytest.mark.parametrize("version", ["unknown", "0.5.24", "0.6.0"])
def test_a_version_whose_reader_is_not_known_is_refused_by_name(version: str) -> None:
    route = TensorRoute(SenderContext("ipc://", VERSION.run, torch.device("cpu"), 10.0))
    server: Any = types.SimpleNamespace(name="http://127.0.0.1:1", listens_on="127.0.0.1", version="0.5.23")
    route.open(server)
    server.version = version
    with pytest.raises(UnsupportedError, match=rf"127.0.0.1:1 is SGLang {version}; .* is known only for 0\.5\.23"):
        route.open(server)


def test_a_closed_sender_opens_no_update() -> None:
    sender = StockSender(SenderContext("ipc://", VERSION.run, torch.device("cpu"), 10.0))
    sender.close()
    with pytest.raises(ClosedError):
        sender.open(plan(TensorSource({"a": torch.zeros(1)}).specs(), 1 << 20), VERSION, peers=[], staged=False)


def test_memory_of_a_gpu_is_shared_once_with_each_rank_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps every share of a storage inside of the one before: thousands of them end the process."""
    shares: list[int] = []

    def share(storage: torch.UntypedStorage) -> tuple[object, ...]:
        shares.append(len(shares))
        return 0, b"handle", 64, 0, b"counter %d" % len(shares), 0, b"event", False

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="GPU-0"))
    sent: dict[str, list[list[str]]] = {"a": [], "b": []}
    servers: list[Any] = [
        types.SimpleNamespace(name=n, num_ranks=2, map=lambda handles, is_last, n=n: sent[n].append(handles))
        for n in sent
    ]
    with LazyGpu() as gpu:
        context: Any = types.SimpleNamespace(device=gpu.device)
        route = TensorRoute(context)
        slot, places = route.allocate(64), lay_out([TensorSpec("t", "uint8", (8,))])
        for size in (64, 32, 64):
            for server in servers:
                route.ship(server, places, slot[:size], is_last=False)
        assert len(shares) == 4
        handles = [handle for messages in sent.values() for handle in messages[0]]
        assert len(set(handles)) == 4
        assert sent["a"][0] == sent["a"][2]

        class Reading(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                return (lambda *args: args) if name == "rebuild_cuda_tensor" else super().find_class(module, name)

        share_of_a = (b"counter 1", 0, b"event", False)
        expected = (
            torch.Tensor,
            (64,),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            "GPU-0",
            b"handle",
            64,
            0,
            False,
        )
        read = Reading(io.BytesIO(base64.b64decode(sent["a"][0][0]))).load()
        assert read["flattened_tensor"] == (*expected, *share_of_a)
        route.allocate(64)
        for server in servers:
            route.ship(server, places, slot, is_last=True)
        assert len(shares) == 8


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_group_that_breaks_each_time_asks_for_what_may_differ(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL of two versions fails without a word about versions."""
    monkeypatch.setattr(route_distributed, "require", lambda backend: None)
    monkeypatch.setattr(route_distributed.DistributedRoute, "_both", _broken)
    with LazyGpu() as gpu:
        context = SenderContext(f"{backend}://127.0.0.1:0", VERSION.run, gpu.device, 10.0)
        route = route_distributed.DistributedRoute(context)
        server: Any = types.SimpleNamespace(name="http://server", num_ranks=1, group=None, join=None)
        with pytest.raises(PeerDiedError, match="lost its group 3 times") as caught:
            route.open(server)
        assert ("this process's version of NCCL" in str(caught.value)) is (backend == "nccl")
        route.close()


def _broken(_: object, server: Any, *rest: object) -> None:
    server.group = None
    raise route_distributed._Broken("unhandled system error")
