"""vLLM's own trainer API with the backend "weightcast", into a real server.

The suite runs against the installed vLLM (0.32 or 0.33). Sources are vLLM's own, and some of the shapes that 0.32 and
0.33 ask for. `--full` also runs a trainer with the Python files of vLLM 0.33.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import vllm
from ports import free_port
from real_engines.setups import on
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import ParamMeta as ParamMeta032
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from real_vllm.cold import assert_serves
from real_vllm.models import make_model
from real_vllm.programs import PROGRAM_SECONDS
from real_vllm.servers import ONE, TESTS, Server, child_environment
from real_vllm.trainer import trainer
from real_vllm.trainer_ranks import ParamMeta, Source, placements_of
from weightcast import LocalEngine, PublishError
from weightcast.engines.tensors import TensorSink
from weightcast.integrations.vllm import WeightcastTrainerInitInfo
from weightcast.integrations.vllm.trainer_engine import region_of

PROGRAM = TESTS / "real_vllm" / "trainer_ranks.py"


@contextlib.contextmanager
def backend(source: Any, client: Any = None, *, rank: int = 0, **options: Any) -> Iterator[Any]:
    info = WeightcastTrainerInitInfo(rank=rank, **options)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    try:
        yield engine
    finally:
        engine.shutdown()
        engine.shutdown()


def install_seed_0(server: Server) -> None:
    """So that what a test publishes shows."""
    with trainer(server.setup, server.url) as it:
        it.publish(0)


# --- a real server ---


@on(ONE)
def test_the_pages_program_publishes_vllms_own_source_by_name(server: Server) -> None:
    install_seed_0(server)
    page = (TESTS.parent / "docs" / "vllm.md").read_text()
    (program,) = [body for body in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "TrainerFactory" in body]
    names: dict[str, Any] = {"rank": 0, "model": make_model(seed=1)}
    exec(program.replace("http://127.0.0.1:8000", server.url), names)
    engine = names["engine"]
    try:
        assert_serves(server, 1)
        names["model"].load_state_dict(make_model(seed=0).state_dict())
        engine.send_weights()
        assert_serves(server, 0)
        assert server.version() == str(engine.report.version)
    finally:
        engine.shutdown()


@on(ONE)
def test_a_source_that_does_not_fit_leaves_the_old_version(server: Server) -> None:
    install_seed_0(server)
    tensors = dict(make_model(seed=1).named_parameters())
    name = next(iter(tensors))
    source = Source(tensors | {name: torch.zeros(3)})
    with (
        backend(source, HTTPVLLMWeightSyncClient(server.url)) as it,
        pytest.raises(PublishError, match=name),
    ):
        it.send_weights()
    assert source.num_ended == 1, "other ranks would wait for this one in a gathering"
    assert_serves(server, 0)


def publish_by_ranks(server: Server, kind: str, *, path: Sequence[Path] = (), version: str) -> None:
    """Run the trainer's program on two ranks, with what is in `path` before this environment's packages."""
    install_seed_0(server)
    launch = ["torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launch += ["--nproc-per-node", "2", str(PROGRAM), server.url, kind, version]
    environment = child_environment(server.setup) | {"GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join((*map(str, path), environment["PYTHONPATH"]))
    with subprocess.Popen(
        [sys.executable, "-m", *launch],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=PROGRAM_SECONDS)
        finally:
            # A launcher that is asked to end ends its ranks.
            process.terminate()
    assert process.returncode == 0, out[-4000:]
    assert_serves(server, 1)


@on(ONE)
@pytest.mark.parametrize("kind", ["own", "pieces", pytest.param("stages", marks=pytest.mark.full)])
def test_ranks_publish_what_they_have(server: Server, kind: str) -> None:
    publish_by_ranks(server, kind, version=vllm.__version__)


@pytest.fixture(scope="module")
def vllm_0_33(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vLLM 0.33's Python files, out of a wheel of 340 MB for GPUs."""
    folder = tmp_path_factory.mktemp("vllm-0.33")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), "vllm==0.33.0"], check=True, timeout=PROGRAM_SECONDS)
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(folder, [name for name in names if name.startswith("vllm/") and name.endswith(".py")])
    wheel.unlink()
    return folder


@pytest.mark.full
@on(ONE)
@pytest.mark.parametrize("kind", ["own", "stages"])
def test_ranks_with_vllm_0_33_publish_what_they_have(server: Server, vllm_0_33: Path, kind: str) -> None:
    publish_by_ranks(server, kind, path=[vllm_0_33], version="0.33")


# --- in one process ---


@pytest.fixture
def sink() -> TensorSink:
    return TensorSink()


def into(sink: TensorSink) -> dict[str, Any]:
    return {"engines": [LocalEngine(sink)], "transport": "memory://"}


def tensors_of(start: int) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(start, start + 40.0).reshape(8, 5), "b": torch.tensor(3), "c": torch.ones(7).bfloat16()}


def assert_has(sink: TensorSink, tensors: Mapping[str, torch.Tensor]) -> None:
    assert sink.held.keys() == tensors.keys()
    assert all(torch.equal(sink.held[name], tensor) for name, tensor in tensors.items())


class Stages(WeightSource if vllm.__version__.startswith("0.32") else object):  # type: ignore[misc]
    """0.32's source of a rank that may have some of the tensors only; 0.33 refuses a `WeightSource` of this shape."""

    def __init__(self, tensors: dict[str, torch.Tensor], held: Sequence[str] | None) -> None:
        self._tensors, self._held = tensors, held

    def metadata(self) -> list[ParamMeta032]:
        return [ParamMeta032(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._tensors.items():
            yield name, tensor if self._held is None or name in self._held else None

    def held_names(self) -> Sequence[str] | None:
        return self._held


@pytest.mark.parametrize(
    "make",
    [
        lambda tensors: Stages(tensors, None),
        lambda tensors: Stages(tensors, list(tensors)),
        Source,
        lambda tensors: Source(tensors, owners=dict.fromkeys(tensors, (0,))),
    ],
    ids=["0.32", "0.32-held", "0.33", "0.33-owned"],
)
def test_each_version_is_of_the_tensors_as_they_are_then(make: Any, sink: TensorSink) -> None:
    tensors = tensors_of(0)
    with backend(make(tensors), **into(sink)) as it:
        for version in range(3):
            tensors["a"].add_(1)
            it.send_weights()
            assert it.report.version == version
            assert_has(sink, tensors)


def test_a_version_that_failed_is_followed_by_one_that_is_taken() -> None:
    class Failing(TensorSink):
        def load(self, tensors: Any) -> None:
            if not num_ended:
                raise RuntimeError("out of luck")
            super().load(tensors)

    sink, tensors = Failing(), tensors_of(0)
    source = Source(tensors)
    num_ended = 0
    with backend(source, **into(sink)) as it:
        with pytest.raises(PublishError, match="out of luck"):
            it.send_weights()
        num_ended = source.num_ended
        assert num_ended == 1
        it.send_weights()
        assert_has(sink, tensors)


def test_a_rank_that_does_not_publish_takes_part_in_gathering(sink: TensorSink) -> None:
    source = Source(tensors_of(0), rank=1)
    with backend(source, rank=1) as it:
        it.send_weights()
    assert source.num_ended == 1
    assert it.report is None


def test_a_tensor_that_is_gathered_is_not_kept(sink: TensorSink) -> None:
    num_alive: list[int] = []

    class Gathering(Source):
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            gathered = []
            for name, tensor in super().iter_full():
                num_alive.append(sum(memory() is not None for memory in gathered))
                array = tensor.numpy().copy()
                gathered.append(weakref.ref(array))
                view = torch.from_numpy(array)
                del array
                yield name, view
                del view

    tensors = {str(number): torch.full((300,), float(number)) for number in range(20)}
    with backend(Gathering(tensors), **into(sink)) as it:
        it.send_weights()
        it.send_weights()
    assert_has(sink, tensors)
    assert len(num_alive) == 40
    assert max(num_alive) == 1, "the one that was packed last"


def test_pieces_lie_where_torch_puts_them() -> None:
    """Every rank of a mesh of 2 x 3, one dim sharded, both, one dim by both axes, with sizes that do not divide."""
    layouts: Sequence[Sequence[Placement]] = [
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(1)),
        (Shard(0), Shard(0)),
    ]
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            mesh = DeviceMesh("cpu", torch.arange(6).reshape(2, 3))
            for placements in layouts:
                for shape in ((7, 5), (12, 6), (1, 13)):
                    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
                    grid = {"owners": tuple(range(6)), "mesh_shape": (2, 3), "placements": placements_of(placements)}
                    region = region_of(ParamMeta("a", torch.float32, shape, **grid), rank)
                    assert region.sizes == tuple(sizes)
                    assert not all(sizes) or region.offsets == tuple(offsets)
        finally:
            dist.destroy_process_group()


class SkyrlClient:
    """What SkyRL hands to vLLM's factory: vLLM's four calls, and nothing that says where its servers are."""

    def __getattr__(self, name: str) -> Any:
        assert name not in ("init_weight_transfer_engine", "start_weight_update", "update_weights")
        assert name != "finish_weight_update"
        raise AttributeError(name)


def test_skyrls_way_to_an_engine_with_our_init_info(sink: TensorSink) -> None:
    """Its contract, as it is on its main branch: `build_trainer_engine` makes an init info, and asks vLLM's factory.

    The page has `_build_init_info` replaced, which is all that is ours here.
    """
    tensors, urls = tensors_of(0), ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]

    def build_trainer_engine(build_init_info: Any, *, rank: int, server_urls: Sequence[str], source: Any) -> Any:
        init_info = build_init_info(rank=rank, server_urls=server_urls)
        return WeightTransferTrainerFactory.trainer_init(init_info, client=SkyrlClient(), source=source)

    def by_url(*, rank: int, server_urls: Sequence[str]) -> WeightcastTrainerInitInfo:
        return WeightcastTrainerInitInfo(rank=rank, engines=server_urls)

    def into_sink(*, rank: int, server_urls: Sequence[str]) -> WeightcastTrainerInitInfo:
        return WeightcastTrainerInitInfo(rank=rank, **into(sink))

    build_trainer_engine(by_url, rank=0, server_urls=urls, source=Source(tensors)).shutdown()
    engine = build_trainer_engine(into_sink, rank=0, server_urls=urls, source=Source(tensors))
    engine.send_weights()
    engine.shutdown()
    assert_has(sink, tensors)


# --- mistakes ---


def test_what_it_can_not_publish_is_said() -> None:
    source = Source(tensors_of(0))
    with pytest.raises(ValueError, match="source is a NoneType; pass a WeightSource"), backend(None):
        pass
    with (
        pytest.raises(ValueError, match=r"SimpleNamespace does not say where its engines are: pass .*engines=\[...\]"),
        backend(source, SimpleNamespace()),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"unsupported dtypes: 'a' is torch\.bits8; supported: "),
        backend(Source({"a": torch.empty(3, dtype=torch.bits8)}), engines=[]),
    ):
        pass


def test_a_rank_that_is_not_torchs_is_named() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        source = Source(tensors_of(0), owners={"a": (1,)}, rank=1)
        with pytest.raises(ValueError, match=r"rank is 1, and this process is rank 0 of"), backend(source, rank=1):
            pass
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("version", "is_named"), [("0.31.1", True), ("0.33.2", False), ("1.0.0", True)])
def test_a_vllm_that_was_not_tested_is_named(
    version: str,
    is_named: bool,
    sink: TensorSink,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with caplog.at_level(logging.WARNING), backend(Source(tensors_of(0)), **into(sink)):
        assert (f"was tested with vLLM 0.32 and 0.33, found vLLM {version}" in caplog.text) is is_named
