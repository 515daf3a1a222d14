"""What a client can cause on a stock SGLang: the server lives, a whole version serves, the next publish works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from real_engines.setups import on
from real_vllm.models import save
from real_vllm.oracle import PROMPT
from real_vllm.trainer import FILE, GLOO, IPC, Tensors, checkpoint_tensors, trainer
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang_dialect.dying import MOMENTS, Moment
from warm_python import WarmPython

from real_sglang.oracle import assert_drops_caches, assert_serves
from real_sglang.servers import STOCK, STOCK_TWO, Server, Setup
from weightcast import Publisher
from weightcast.errors import IncompatibleWeightsError, PublishError, WeightcastError
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec
from weightcast.host.deadline import Deadline
from weightcast.integrations.sglang.stock.buckets import lay_out
from weightcast.integrations.sglang.stock.route_tensor import TESTED_VERSIONS, TensorRoute, shared
from weightcast.seams.client import SenderContext

Spoil = Callable[[dict[str, torch.Tensor]], None]
LATE: tuple[Moment, ...] = ("after the join",)
NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


def publish(server: Server, tensors: dict[str, torch.Tensor], transport: str = GLOO) -> None:
    with Publisher(Tensors(tensors), transport=transport, engines=[server.url], trainer_group=None) as publisher:
        publisher.publish()


def bad_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.nrom.weight"] = tensors.pop(NORM)


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[UP]


def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


def too_long(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = torch.cat([tensors[UP], tensors[UP][:1]])


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = tensors[UP].t().contiguous()


def wrong_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = tensors[UP].to(torch.float16)


SPOILS = [bad_name, missing, wrong_shape, too_long, transposed, wrong_dtype]


@pytest.mark.parametrize("transport", [GLOO, IPC, FILE])
@on(STOCK)
def test_unfit_weights_are_refused_by_name_before_anything_is_sent(
    server: Server, transport: str, tmp_path: Path
) -> None:
    with trainer(server.setup, server.url, transport=GLOO) as it:
        it.publish(0)
        before = server.checksum()
        for spoil in SPOILS:
            tensors = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(it.of(1)).items()}
            spoil(tensors)
            with pytest.raises(PublishError) as caught:
                publish(server, tensors, transport.format(tmp_path))
            (error,) = caught.value.failures.values()
            assert isinstance(error, IncompatibleWeightsError), spoil
            assert any("norm" in problem or "up_proj" in problem for problem in error.problems)
            assert server.checksum() == before
        assert_serves(server, 0)
        it.publish(1)
        assert_serves(server, 1)


@on(STOCK)
def test_the_order_of_tensors_is_nobodys_business(server: Server) -> None:
    with trainer(server.setup, server.url, transport=GLOO) as it:
        publish(server, dict(reversed(checkpoint_tensors(it.of(2)).items())))
        assert_serves(server, 2)


@on(STOCK)
def test_a_nan_is_a_value_and_the_next_publish_heals_it(server: Server) -> None:
    with trainer(server.setup, server.url, transport=GLOO) as it:
        tensors = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(it.of(1)).items()}
        tensors[NORM][0] = float("nan")
        publish(server, tensors)
        it.publish(0)
        assert_serves(server, 0)


@on(STOCK, full=[STOCK_TWO])
def test_every_route_leaves_the_very_weights_that_a_load_from_disk_leaves(server: Server, tmp_path: Path) -> None:
    found = {}
    for transport in (GLOO, IPC, FILE):
        with trainer(server.setup, server.url, transport=transport.format(tmp_path)) as it:
            it.publish(0)
            it.publish(3)
            found[transport] = server.checksum()
            folder = save(it.of(3), tmp_path / "reference")
            it.publish(0)
            assert server.checksum() != found[transport]
    server.post("/update_weights_from_disk", {"model_path": str(folder)}).raise_for_status()
    assert set(found.values()) == {server.checksum()}


@on(STOCK)
def test_no_cache_of_the_old_version_is_used(server: Server) -> None:
    prompt = [*PROMPT, *range(20, 60)]
    with trainer(server.setup, server.url, transport=GLOO) as it:
        assert_drops_caches(server, it.publish, prompt)


@on(STOCK)
def test_the_session_of_a_dead_trainer_is_closed(server: Server) -> None:
    server.post("/begin_weight_update").raise_for_status()
    with trainer(server.setup, server.url, transport=GLOO) as it:
        it.publish(2)
        assert_serves(server, 2)


SCRIPT = """
import os, signal, sys
from real_sglang.servers import Setup
from real_vllm.trainer import GLOO, trainer
from weightcast.integrations.sglang.stock.server import SglangStockServer
from weightcast.integrations.sglang.stock.group import StockGroup
url, when, tp, version = sys.argv[1:]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
num_sent = 0
send = StockGroup.broadcast
def broadcast(group, flat):
    global num_sent
    num_sent += 1
    if when == "before its first broadcast" or (when == "before another broadcast" and num_sent == 3):
        die()
    send(group, flat)
StockGroup.broadcast = broadcast
if when == "before the server resumes":
    SglangStockServer.resume = die
with trainer(Setup(plugin=False, tp=int(tp)), url, transport=GLOO, bucket_size_bytes=1 << 15) as it:
    it.publish(2, version=int(version))
"""


@pytest.mark.parametrize(
    "when", ["before its first broadcast", "before another broadcast", "before the server resumes"]
)
@on(STOCK, full=[STOCK_TWO])
def test_a_trainer_that_is_killed_leaves_a_whole_version_or_nothing(
    server: Server, when: str, python: WarmPython
) -> None:
    with trainer(server.setup, server.url, transport=GLOO) as it:
        old = it.publish(0).version
        former = server.checksum()
        assert python.run(SCRIPT, server.url, when, str(server.setup.tp), str(old + 1000)) == -signal.SIGKILL
        match when:
            case "before its first broadcast":
                wait_until_settled(server, str(old))
                assert server.checksum() == former
                assert_serves(server, 0)
            case "before another broadcast":
                wait_until_settled(server, f"incomplete, was {old}")
                reply = waits(server)
                it.publish(1, version=old + 2000)
                reply.join(60)
            case "before the server resumes":
                wait_until_settled(server, str(old + 1000))
                assert_serves(server, 2)
        newest = it.publish(1, version=old + 3000).version
        assert server.version() == str(newest)
        assert_serves(server, 1)


DIE_IN_JOIN = """
import sys
from real_sglang.servers import Setup
from real_vllm.trainer import GLOO, trainer
from sglang_dialect.dying import die_in_join
url, moment, tp, version = sys.argv[1:]
die_in_join(moment)
with trainer(Setup(plugin=False, tp=int(tp)), url, transport=GLOO, bucket_size_bytes=1 << 15) as it:
    it.publish(2, version=int(version))
"""


@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=pytest.mark.full if moment in LATE else ()) for moment in MOMENTS]
)
@on(STOCK, full=[STOCK_TWO])
def test_a_trainer_that_is_killed_while_the_server_joins_its_group_leaves_it_serving(
    server: Server, moment: Moment, python: WarmPython
) -> None:
    with trainer(server.setup, server.url, transport=GLOO) as it:
        old = it.publish(0).version
        former = server.checksum()
        arguments = [server.url, moment, str(server.setup.tp), str(old + 1000)]
        assert python.run(DIE_IN_JOIN, *arguments) == -signal.SIGKILL
        wait_until_settled(server, str(old))
        assert server.checksum() == former
        assert_serves(server, 0)
        newest = it.publish(1, version=old + 2000).version
        assert server.version() == str(newest)
        assert_serves(server, 1)


def wait_until_settled(server: Server, label: str) -> None:
    """Until the guard has ended the session, and then decided on this label."""
    for _ in Deadline(60.0).polls(0.2, 0.5):
        reply = server.post("/end_weight_update")
        if reply.status_code == 400 and "no weight-update session" in reply.text and server.version() == label:
            return
    raise AssertionError(f"the label is {server.version()!r}, the session ended or not: {reply.text}")


def waits(server: Server) -> threading.Thread:
    """A request to a server that stands still, which must not be answered."""
    done = threading.Event()

    def ask() -> None:
        server.ask(PROMPT, 4)
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert not done.wait(2.0)
    return thread


@on(full=[Setup(plugin=False, admin_key="sesame")])
def test_keys_are_sglangs_own(server: Server) -> None:
    with trainer(server.setup, server.url, transport=GLOO, token="sesame") as it:
        it.publish(1)
        assert_serves(server, 1)
    with trainer(server.setup, server.url, transport=GLOO) as it:
        error: WeightcastError = it.failure(2)
        assert "token" in str(error)
        assert_serves(server, 1)


FAMILIES = [Setup("qwen2", plugin=False), Setup("llama-tied", plugin=False), Setup(dtype=torch.bfloat16, plugin=False)]


@on(full=FAMILIES)
def test_families(server: Server) -> None:
    with trainer(server.setup, server.url, transport=GLOO) as it:
        it.publish(1)
        assert_serves(server, 1)


# --- SGLang's own buckets ---


def test_ours_is_laid_out_as_sglang_expects_a_broadcast() -> None:
    held = {"m": torch.arange(3, dtype=torch.uint8), "w": torch.randn(5, 3), "b": torch.randn(3).to(torch.bfloat16)}
    places = lay_out(TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in held.items())
    flat = torch.empty(places[-1].end, dtype=torch.uint8)
    for place in places:
        place.view(flat).copy_(held[place.name])
    names, dtypes, shapes = zip(*((p.name, p.dtype, list(p.shape)) for p in places), strict=True)
    expected = FlattenedTensorBucket.empty(names, dtypes, shapes, "cpu")
    assert expected.get_flattened_tensor().numel() == flat.numel()
    expected.get_flattened_tensor().copy_(flat)
    assert all(torch.equal(tensor, held[name]) for name, tensor in expected.reconstruct_tensors())
    with pytest.raises(ValueError, match="Unaligned"):
        FlattenedTensorBucket.empty(["m", "w"], ["uint8", "float32"], [[3], [5, 3]], "cpu")


def test_sglangs_own_reader_reads_a_handle() -> None:
    held = {"m": torch.arange(3, dtype=torch.uint8), "w": torch.randn(5, 3), "b": torch.randn(3).to(torch.bfloat16)}
    places = lay_out(TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in held.items())
    flat = shared(places[-1].end)
    for place in places:
        place.view(flat).copy_(held[place.name])
    route = TensorRoute(SenderContext("ipc://", "0" * 32, torch.device("cpu"), 10.0))
    read = MultiprocessingSerializer.deserialize(route.handle(flat, places, "http://server", 0))
    bucket = FlattenedTensorBucket(flattened_tensor=read["flattened_tensor"], metadata=read["metadata"])
    found = dict(bucket.reconstruct_tensors())
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())


GPU_HANDLE = """
import types, torch
from sglang.srt.utils import common, patch_torch
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.sglang.stock.buckets import lay_out
from weightcast.integrations.sglang.stock.route_tensor import TensorRoute
storage = types.SimpleNamespace(
    data_ptr=lambda: 8, _share_cuda_=lambda: (0, b"handle", 64, 512, b"counter", 3, b"event", True)
)
flat = types.SimpleNamespace(
    is_cuda=True, device=0, numel=lambda: 25, storage_offset=lambda: 16, untyped_storage=lambda: storage
)
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=f"GPU-{device}")
torch.cuda.device_count = lambda: 2
route = TensorRoute(types.SimpleNamespace(device=None))
handle = route.handle(flat, lay_out([TensorSpec("w", "uint8", (25,))]), "http://server", 0)
patch_torch.monkey_patch_torch_reductions()  # as SGLang does before it reads one
patch_torch.reductions._rebuild_cuda_tensor_original = lambda *arguments: arguments
read = common.MultiprocessingSerializer.deserialize(handle)["flattened_tensor"]
storage_of_gpu = (torch.storage.TypedStorage, torch.uint8, 0, b"handle", 64, 512, False)
assert read == (torch.Tensor, (25,), (1,), 16, *storage_of_gpu, b"counter", 3, b"event", True), read
"""


def test_sglangs_own_reader_reads_a_handle_for_a_gpu(python: WarmPython) -> None:
    """It finds the GPU by its UUID, and torch then gets what it would get from SGLang's own handle."""
    assert python.run(GPU_HANDLE) == 0
    assert version("sglang") in TESTED_VERSIONS
