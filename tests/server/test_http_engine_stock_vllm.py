"""A Publisher on a vLLM server with stock routes: the order of calls, and never a resume of what is torn or mixed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from server.stock_vllm import StockVllm

import weightcast
from weightcast.control.server.app import EngineServer
from weightcast.engines.module import ModuleEngine
from weightcast.errors import IncompatibleWeightsError, InstallError, PeerTimeoutError, PublishError, RefusedError

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture(params=[1, 2], ids=["one engine", "two data-parallel engines"])
def vllm(request: pytest.FixtureRequest) -> Iterator[StockVllm]:
    with StockVllm(request.param).serve() as served:
        yield served


@pytest.fixture
def pair() -> Iterator[StockVllm]:
    with StockVllm(2).serve() as served:
        yield served


def filled(value: float) -> torch.nn.Module:
    module = torch.nn.Linear(8, 8)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def fill(module: torch.nn.Module, value: float) -> None:
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)


INSTALL = [
    "/pause?mode=keep&clear_cache=true",
    "install",
    "settle",
    "ask",
    "/update_weight_version",
    "/wake_up?tags=scheduling",
]


def test_versions_are_installed_in_a_pause_and_labelled_before_it_ends(vllm: StockVllm) -> None:
    trainer = filled(1.0)
    with weightcast.Publisher(weightcast.ModuleSource(trainer), engines=[vllm.url]) as publisher:
        for version in range(3):
            fill(trainer, version + 1.0)
            vllm.log.clear()
            report = publisher.publish()
            assert report.ok
            assert report.engines[vllm.url].pause_seconds >= report.engines[vllm.url].install_seconds > 0
            assert (vllm.label, vllm.is_paused, set(vllm.values())) == (str(version), False, {version + 1.0})
            assert vllm.log[-8:] == ["update offer", "update seal", *INSTALL]
        assert publisher._watchdog._held == {}


def test_one_publisher_updates_vllm_and_the_reference_server(vllm: StockVllm) -> None:
    serving = torch.nn.Linear(8, 8)
    with (
        EngineServer(ModuleEngine(serving)) as server,
        weightcast.Publisher(weightcast.ModuleSource(filled(5.0)), engines=[vllm.url, server.url]) as publisher,
    ):
        assert publisher.publish(version=7).ok
        assert (vllm.label, set(vllm.values())) == ("7", {5.0})
        assert float(serving.weight.detach()[0, 0]) == 5.0


def test_the_pause_mode_is_the_clients(vllm: StockVllm) -> None:
    client = weightcast.HttpEngine(vllm.url, pause="abort")
    with weightcast.Publisher(weightcast.ModuleSource(filled(1.0)), engines=[client]) as publisher:
        publisher.publish()
    assert "/pause?mode=abort&clear_cache=true" in vllm.log
    client.close()


def test_a_refused_offer_pauses_nothing(vllm: StockVllm) -> None:
    with (
        weightcast.Publisher(weightcast.ModuleSource(torch.nn.Linear(8, 9)), engines=[vllm.url]) as publisher,
        pytest.raises(PublishError) as caught,
    ):
        publisher.publish()
    assert isinstance(caught.value.failures[vllm.url], IncompatibleWeightsError)
    assert not [call for call in vllm.log if "pause" in call]
    assert vllm.label == "default"


def test_a_failed_install_that_was_undone_is_resumed_under_the_old_label(vllm: StockVllm) -> None:
    trainer = filled(1.0)
    with weightcast.Publisher(
        weightcast.ModuleSource(trainer), engines=[vllm.url], options=weightcast.PublishOptions(undo=True)
    ) as publisher:
        publisher.publish()
        fill(trainer, 2.0)
        for engine in vllm.engines:
            engine.is_broken = True
        with pytest.raises(PublishError) as caught:
            publisher.publish()
        assert isinstance(caught.value.failures[vllm.url], InstallError)
        assert (vllm.label, vllm.is_paused, set(vllm.values())) == ("0", False, {1.0})
        for engine in vllm.engines:
            engine.is_broken = False
        assert publisher.publish().ok
        assert (vllm.label, vllm.is_paused, set(vllm.values())) == ("2", False, {2.0})


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("undo", [True, False])
def test_an_install_on_one_of_two_engines_is_taken_back_on_the_other(pair: StockVllm, undo: bool, broken: int) -> None:
    """What the second engine answers is not in any reply: it is known from its link."""
    trainer = filled(1.0)
    with weightcast.Publisher(
        weightcast.ModuleSource(trainer), engines=[pair.url], options=weightcast.PublishOptions(undo=undo)
    ) as publisher:
        publisher.publish()
        fill(trainer, 2.0)
        pair.engines[broken].is_broken = True
        with pytest.raises(PublishError, match="the loader broke"):
            publisher.publish()
        assert pair.label == "0"
        assert pair.is_paused is not undo
        if undo:
            assert pair.values() == [1.0, 1.0]
        pair.engines[broken].is_broken = False
        assert publisher.publish().ok
        assert (pair.label, pair.is_paused, pair.values()) == ("2", False, [2.0, 2.0])


def test_a_torn_server_stays_paused_until_a_publish_heals_it(vllm: StockVllm) -> None:
    trainer = filled(1.0)
    with weightcast.Publisher(weightcast.ModuleSource(trainer), engines=[vllm.url]) as publisher:
        publisher.publish()
        for engine in vllm.engines:
            engine.is_broken = True
        with pytest.raises(PublishError) as caught:
            publisher.publish()
        error = caught.value.failures[vllm.url]
        assert isinstance(error, InstallError)
        assert error.torn
    assert vllm.is_paused, "closing the publisher resumed a torn server"
    client = weightcast.HttpEngine(vllm.url)
    assert client.connect().info().torn
    client.close()
    for engine in vllm.engines:
        engine.is_broken = False
    fill(trainer, 3.0)
    with weightcast.Publisher(
        weightcast.ModuleSource(trainer), engines=[vllm.url], options=weightcast.PublishOptions(takeover=True)
    ) as publisher:
        assert publisher.publish().ok
    assert (vllm.label, vllm.is_paused, set(vllm.values())) == ("1", False, {3.0})


def test_a_pause_that_takes_too_long_is_the_error_and_the_next_publish_ends_it(pair: StockVllm) -> None:
    source = weightcast.ModuleSource(filled(1.0))
    with weightcast.Publisher(
        source, engines=[pair.url], options=weightcast.PublishOptions(deadline_seconds=3.0)
    ) as publisher:
        publisher.publish()
        pair.may_pause.clear()
        with pytest.raises(PublishError) as caught:
            publisher.publish()
        pair.may_pause.set()
        assert isinstance(caught.value.failures[pair.url], PeerTimeoutError)
        assert publisher.publish().ok
        assert not pair.is_paused


def test_a_lost_reply_to_the_install_is_made_good_by_asking(vllm: StockVllm) -> None:
    vllm.lost_replies.add("install")
    with weightcast.Publisher(weightcast.ModuleSource(filled(4.0)), engines=[vllm.url]) as publisher:
        assert publisher.publish().ok
    assert (vllm.label, vllm.is_paused, set(vllm.values())) == ("0", False, {4.0})


def test_a_token_that_the_ranks_want_is_the_publishers() -> None:
    with StockVllm(token="a-secret").serve() as vllm:
        source = weightcast.ModuleSource(filled(1.0))
        with weightcast.Publisher(source, engines=[vllm.url], token="a-secret") as publisher:
            assert publisher.publish().ok
        with weightcast.Publisher(source, engines=[vllm.url]) as stranger, pytest.raises(PublishError) as caught:
            stranger.publish()
        assert isinstance(caught.value.failures[vllm.url], RefusedError)
        assert "a-secret" not in str(caught.value)


TRAINER = """
    import sys, torch, weightcast
    class Dying(weightcast.HttpEngine):
        def connect(self):
            client = super().connect()
            finish = client.finish
            def die(version):
                if {after!r}:
                    try:
                        finish(version)
                    except weightcast.InstallError:
                        pass
                print("now", flush=True)
                input()
            client.finish = die
            return client
    source = weightcast.ModuleSource(torch.nn.Linear(8, 8))
    with weightcast.Publisher(source, engines=[Dying({url!r})]) as publisher:
        publisher.publish()
"""


@pytest.mark.cluster
@pytest.mark.parametrize("tears", [False, True], ids=["whole", "torn"])
def test_a_publisher_that_dies_in_a_pause_leaves_it_only_where_a_rank_is_torn(pair: StockVllm, tears: bool) -> None:
    for engine in pair.engines:
        engine.is_broken = tears
    program = textwrap.dedent(TRAINER).format(url=pair.url, after=tears)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"now\n"
        assert pair.is_paused
        (guard,) = children_of(trainer.pid)
        trainer.send_signal(signal.SIGKILL)
    ended = os.pidfd_open(guard)
    try:
        import select

        assert select.select([ended], [], [], 20)[0], "the guard did not end"
    finally:
        os.close(ended)
    assert pair.is_paused is tears
    assert pair.resumed.is_set() is not tears


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(child) for child in children.read().split()]


def test_a_server_that_was_replaced_by_another_kind_is_asked_anew() -> None:
    """On the same port first vLLM, then the reference server."""
    source = weightcast.ModuleSource(filled(6.0))
    with StockVllm().serve() as vllm:
        publisher = weightcast.Publisher(source, engines=[vllm.url])
        assert publisher.publish().ok
    serving = torch.nn.Linear(8, 8)
    with EngineServer(ModuleEngine(serving), port=int(vllm.url.rpartition(":")[2])), publisher:
        assert publisher.publish().ok
        assert float(serving.weight.detach()[0, 0]) == 6.0
