"""A Publisher on a vLLM server that has no backend of ours: a store, a checkpoint folder, and the order of calls."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from publishers import publisher_of
from safetensors.torch import save_file
from server.stock_vllm import StockVllm

import weightcast
from weightcast.control.server.app import EngineServer
from weightcast.engines.module import ModuleEngine
from weightcast.errors import (
    ControlError,
    EngineTornError,
    IncompatibleWeightsError,
    InstallError,
    PublishError,
    UnsupportedError,
    WeightcastError,
)
from weightcast.integrations.stock_directory import FOLDER
from weightcast.integrations.vllm.stock_reload import StockVllmApi

pytestmark = pytest.mark.usefixtures("leaves_nothing")

INSTALL = ["/pause?mode=keep&clear_cache=true", "/update_weight_version", "reload of 2 tensors"]
LABEL_AND_RESUME = ["/update_weight_version", "/wake_up?tags=scheduling"]


@pytest.fixture
def vllm() -> Iterator[StockVllm]:
    with StockVllm(backend=None).serve() as served:
        yield served


class Trained:
    """A module that is published into a store, and from there to the servers."""

    def __init__(self, directory: Path, *servers: StockVllm, **options: object) -> None:
        self._module = torch.nn.Linear(8, 8)
        self.publisher = publisher_of(
            weightcast.ModuleSource(self._module),
            transport=f"file://{directory}/store",
            engines=[server.url for server in servers],
            **options,  # type: ignore[arg-type]
        )

    def publish(self, value: float) -> weightcast.PublishReport:
        for parameter in self._module.parameters():
            torch.nn.init.constant_(parameter, value)
        return self.publisher.publish()

    def failure(self, value: float) -> WeightcastError:
        with pytest.raises(PublishError) as caught:
            self.publish(value)
        (cause,) = caught.value.failures.values()
        return cause


@contextlib.contextmanager
def trained(directory: Path, *servers: StockVllm, **options: object) -> Iterator[Trained]:
    it = Trained(directory, *servers, **options)
    with it.publisher:
        yield it
    assert len(versions_of(directory)) <= 1


def versions_of(directory: Path) -> list[str]:
    """The versions that are written out, whole or not."""
    return [path.name for path in (directory / "store" / FOLDER).glob("*") if path.name != "empty"]


def test_versions_are_reloaded_in_a_pause_and_labelled_before_it_ends(vllm: StockVllm, tmp_path: Path) -> None:
    with trained(tmp_path, vllm) as it:
        for number in range(3):
            vllm.log.clear()
            report = it.publish(number + 1.0)
            assert report.ok
            assert report.engines[vllm.url].pause_seconds > 0
            assert vllm.log == [*INSTALL, *LABEL_AND_RESUME]
            assert (vllm.label, vllm.is_paused, vllm.values()) == (str(number), False, [number + 1.0])
            [version] = versions_of(tmp_path)
            assert version.startswith(f"{number}-")


def test_several_servers_share_one_folder(vllm: StockVllm, tmp_path: Path) -> None:
    with StockVllm(backend="nccl").serve() as other, trained(tmp_path, vllm, other) as it:
        for value in (1.0, 2.0):
            assert it.publish(value).ok
            assert [*vllm.values(), *other.values()] == [value, value]


def test_a_pause_that_fails_is_the_servers_and_the_next_publish_works(
    vllm: StockVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(api: StockVllmApi) -> None:
        raise ControlError("the pause failed", peer=vllm.url)

    with trained(tmp_path, vllm) as it:
        with monkeypatch.context() as patch:
            patch.setattr(StockVllmApi, "pause", fail)
            assert isinstance(it.failure(1.0), ControlError)
        assert it.publish(2.0).ok


def test_each_name_of_a_tied_tensor_that_the_servers_checkpoint_has_is_loaded(vllm: StockVllm, tmp_path: Path) -> None:
    (served,) = vllm.modules
    served.head = torch.nn.Parameter(torch.zeros(8, 8))
    save_file(served.state_dict(), tmp_path / "model.safetensors")
    vllm.model = str(tmp_path)
    tied = torch.nn.Linear(8, 8)
    tied.head = tied.weight
    torch.nn.init.constant_(tied.weight, 4.0)
    store = f"file://{tmp_path}/store"
    with weightcast.Publisher(weightcast.ModuleSource(tied), transport=store, engines=[vllm.url]) as publisher:
        assert publisher.publish().ok
    assert served.head is not served.weight
    assert (float(served.head.detach()[0, 0]), vllm.values()) == (4.0, [4.0])


def test_a_torn_server_is_cleared_before_it_reloads_again(vllm: StockVllm, tmp_path: Path) -> None:
    with trained(tmp_path, vllm) as it:
        it.publish(1.0)
        vllm.num_failing_reloads = 1
        error = it.failure(2.0)
        assert isinstance(error, InstallError)
        assert error.torn
        assert "the loader broke" in str(error)
        assert (vllm.label, vllm.is_paused) == ("incomplete, was 0", True)
    assert vllm.is_paused, "closing the publisher resumed a torn server"
    vllm.log.clear()
    with trained(tmp_path, vllm) as it:
        assert it.publish(3.0).ok
    assert vllm.log == [INSTALL[0], "reload of 0 tensors", INSTALL[2], *LABEL_AND_RESUME]
    assert (vllm.label, vllm.is_paused, vllm.values()) == ("2", False, [3.0])


def test_a_torn_server_of_several_ranks_must_be_started_again(vllm: StockVllm, tmp_path: Path) -> None:
    """vLLM leaves the other ranks' replies unread when one fails: what a later call answers is not its own."""
    vllm.num_ranks = 2
    with trained(tmp_path, vllm) as it:
        assert it.publish(1.0).ok
        vllm.num_failing_reloads = 1
        assert isinstance(it.failure(2.0), InstallError)
        vllm.log.clear()
        error = it.failure(3.0)
        assert isinstance(error, EngineTornError)
        assert "restart it" in str(error)
        assert vllm.log == []
        assert vllm.is_paused


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"weight": torch.zeros(8, 8)}, "unknown tensor 'bias'"),
        ({"weight": torch.zeros(8, 9), "bias": torch.zeros(8)}, r"'weight' has the shape \[8, 8\]"),
        ({"weight": torch.zeros(8, 8), "bias": torch.zeros(8), "more": torch.zeros(1)}, "missing tensor 'more'"),
        ({"weight": torch.zeros(8, 8).int(), "bias": torch.zeros(8)}, "'weight' is float32, the engine has int32"),
    ],
    ids=["unknown", "shape", "missing", "dtype"],
)
def test_an_offer_is_held_against_the_servers_own_checkpoint(
    vllm: StockVllm, tmp_path: Path, tensors: dict[str, torch.Tensor], problem: str
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    vllm.model = str(tmp_path)
    with trained(tmp_path, vllm) as it:
        error = it.failure(1.0)
    assert isinstance(error, IncompatibleWeightsError)
    with pytest.raises(IncompatibleWeightsError, match=problem):
        raise error
    assert vllm.log == []


def test_a_dtype_that_the_server_serves_in_is_taken(vllm: StockVllm, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(8, 8).half(), "bias": torch.zeros(8).half()}, tmp_path / "model.safetensors")
    vllm.model = str(tmp_path)
    with trained(tmp_path, vllm) as it:
        assert it.publish(1.0).ok


@pytest.mark.parametrize("options", [{"undo": True}, {"install": "streaming"}], ids=["undo", "streaming"])
def test_what_it_can_not_do_is_refused(vllm: StockVllm, tmp_path: Path, options: dict[str, object]) -> None:
    with trained(tmp_path, vllm, **options) as it:
        assert isinstance(it.failure(1.0), UnsupportedError)
    assert not vllm.is_paused


def test_on_a_cpu_a_model_without_an_lm_head_of_its_own_is_refused(vllm: StockVllm, tmp_path: Path) -> None:
    vllm.device = "cpu"
    with trained(tmp_path, vllm) as it:
        error = it.failure(1.0)
    assert isinstance(error, UnsupportedError)
    assert "tied to the embeddings" in str(error)
    assert vllm.log == []


TRAINER = """
    import os, signal, sys, torch, weightcast
    class Dying(weightcast.HttpEngine):
        def connect(self):
            client = super().connect()
            client.finish = lambda version: os.kill(os.getpid(), signal.SIGKILL)
            return client
    source = weightcast.ModuleSource(torch.nn.Linear(8, 8))
    with weightcast.Publisher(source, transport={store!r}, engines=[Dying({url!r})]) as publisher:
        publisher.publish(5)
"""


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "torn"])
def test_if_the_publisher_dies_in_a_pause_its_guard_installs_what_was_sealed(
    vllm: StockVllm, tmp_path: Path, fails: bool
) -> None:
    vllm.num_failing_reloads = int(fails)
    program = textwrap.dedent(TRAINER).format(url=vllm.url, store=f"file://{tmp_path}/store")
    died = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert died.returncode < 0
    if fails:
        with trained(tmp_path, vllm) as it:
            while "reload of 2 tensors" not in vllm.log:
                assert not vllm.resumed.wait(0.05)
            assert (vllm.label, vllm.is_paused) == ("incomplete, was default", True)
            assert it.publish(1.0).ok
    else:
        assert vllm.resumed.wait(30)
    assert vllm.is_paused is False
    assert vllm.label == ("6" if fails else "5")


def test_a_version_that_can_not_be_written_out_leaves_no_folder(vllm: StockVllm, tmp_path: Path) -> None:
    """Safetensors files have no complex32, which a store takes."""
    source = weightcast.ModuleSource(torch.nn.ParameterDict({"odd": torch.zeros(2, dtype=torch.complex32)}))
    store = f"file://{tmp_path}/store"
    with weightcast.Publisher(source, transport=store, engines=[vllm.url]) as publisher:
        with pytest.raises(PublishError) as caught:
            publisher.publish()
        assert isinstance(caught.value.failures[vllm.url], UnsupportedError)
        assert not versions_of(tmp_path)
    assert (vllm.log, vllm.is_paused) == ([], False)


def test_a_server_that_was_replaced_by_another_kind_is_asked_anew(vllm: StockVllm, tmp_path: Path) -> None:
    """On the same port first vLLM, then the reference server; beside it a vLLM all the while."""
    serving = torch.nn.Linear(8, 8)
    with StockVllm(backend=None).serve() as replaced:
        it = Trained(tmp_path, vllm, replaced)
        assert it.publish(1.0).ok
    with EngineServer(ModuleEngine(serving), port=int(replaced.url.rpartition(":")[2])), it.publisher:
        assert "was restarted with another configuration: publish again" in str(it.failure(5.0))
        assert it.publish(6.0).ok
        assert (float(serving.weight.detach()[0, 0]), vllm.values()) == (6.0, [6.0])
