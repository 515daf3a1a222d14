"""A Publisher on stock SGLang servers: the order of calls, who is named for what, and what is left after each fault."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from publishers import publisher_of
from real_vllm.trainer import Tensors
from warm_python import WarmPython

from sglang_dialect.conftest import BUCKET_BYTES, Start, tensors
from sglang_dialect.dying import MOMENTS, Moment
from sglang_dialect.stock_sglang import StockSglang
from weightcast import Publisher, PublishError, TensorSource
from weightcast.control.server.app import EngineServer
from weightcast.errors import (
    ControlError,
    IncompatibleWeightsError,
    InstallError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
    WeightcastError,
)
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Regions

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.sglang,  # needs none, but each test starts servers: run with those that have one
]
TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))}
GLOO = "gloo://127.0.0.1:0"
DEADLINE_SECONDS = 20.0
JOIN_SECONDS = 40.0
"""A deadline where a group is waited for in vain, for half of it."""
UPDATE = ["pause_generation", "update_weight_version", "begin_weight_update"]
DONE = ["end_weight_update", "update_weight_version", "continue_generation"]


class Trained:
    """A source whose values are those of the last `step`."""

    def __init__(self) -> None:
        self.held = tensors(0)
        self._inner = Tensors(self.held)
        self.broken_at = -1

    def step(self, value: float) -> Trained:
        for tensor in self.held.values():
            tensor.fill_(int(value) if tensor.dtype == torch.uint8 else value)
        return self

    def specs(self) -> Sequence[TensorSpec]:
        return self._inner.specs()

    def regions(self) -> Regions:
        return self._inner.regions()


@contextlib.contextmanager
def publisher(source: Any, *servers: Any, transport: str = GLOO, **options: Any) -> Iterator[Publisher]:
    options = {"bucket_size_bytes": BUCKET_BYTES, "deadline_seconds": DEADLINE_SECONDS} | options
    engines = [server if isinstance(server, str) else server.url for server in servers]
    made = publisher_of(source, transport=transport, engines=engines, trainer_group=None, **options)
    with contextlib.closing(made):
        yield made


def assert_serves(server: StockSglang, value: float, version: int) -> None:
    state = server.state()
    assert set(state["values"]) == {value}
    assert (state["label"], state["is_paused"], state["has_session"]) == (str(version), False, False)


def failures(made: Publisher, **options: Any) -> Mapping[str, WeightcastError]:
    with pytest.raises(PublishError) as caught:
        made.publish(**options)
    return caught.value.failures


@pytest.mark.parametrize("transport", [GLOO, "ipc://", "file://{}/store"])
def test_two_servers_take_each_version(start: Start, transport: str, tmp_path: Path) -> None:
    one, two, source = start(), start(num_ranks=2), Trained()
    with publisher(source, one, two, transport=transport.format(tmp_path)) as made:
        for value in (1, 2, 3):
            source.step(value)
            report = made.publish(version=value)
            assert report.ok
            for server in (one, two):
                assert_serves(server, value, value)
                assert server.state()["num_flushed"] == value
    assert not one.state()["groups"]


def test_a_server_without_weightcast_is_named_with_what_it_lacks(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    with publisher(Trained().step(1), server) as made:
        made.publish()
        made.publish()
        [line] = [line for line in caplog.messages if "is stock SGLang" in line]
        assert line.startswith(f"{server.url} is stock SGLang: each update pauses it for the whole transfer")
        assert "install weightcast in its environment (if SGLANG_PLUGINS is set there, it must name weightcast)" in line


def test_the_calls_come_in_their_order(start: Start) -> None:
    server, source = start(), Trained()
    with publisher(source.step(1), server) as made:
        made.publish()
        source.step(2)
        made.publish()
    log = server.state()["log"]
    assert log[-1] == "destroy_weights_update_group"
    joined = log.index("init_weights_update_group")
    assert log[:joined] == ["pause_generation"]
    first = log[: log.index("continue_generation") + 1]
    buckets = [name for name in first if name == "update_weights_from_distributed"]
    assert len(buckets) > 2
    assert first == [UPDATE[0], "init_weights_update_group", *UPDATE[1:], *buckets, *DONE]
    assert log[len(first) : -1] == [*UPDATE, *buckets, *DONE]


FAULTS = {
    "die at a bucket": PeerDiedError,
    "die after its request": PeerDiedError,
    "refuse without receiving": ControlError,
    "refuse after loading": ControlError,
    "die joining": PeerDiedError,
}


@pytest.mark.parametrize(("fault", "bucket"), [(f, b) for f in FAULTS for b in (0, 2) if "join" not in f or not b])
def test_a_fault_of_one_server_is_its_own(start: Start, fault: str, bucket: int) -> None:
    victim, other, source = start(num_ranks=2), start(), Trained()
    victim.fault(fault, bucket)
    with publisher(source.step(5), victim, other, deadline_seconds=JOIN_SECONDS) as made:
        found = failures(made, version=5)
        assert list(found) == [victim.url]
        assert isinstance(found[victim.url], FAULTS[fault])
        assert_serves(other, 5, 5)
        if "die" in fault:
            assert victim.has_ended()
            made.remove_engine(victim.url)
        else:
            assert_whole_or_paused(victim, 5)
        source.step(6)
        assert made.publish(version=6).ok
        assert_serves(other, 6, 6)
        if "die" not in fault:
            assert_serves(victim, 6, 6)


def test_a_group_that_could_not_be_made_is_made_again(start: Start) -> None:
    server, source = start(num_ranks=2), Trained()
    server.fault("refuse to join")
    with publisher(source.step(1), server, deadline_seconds=JOIN_SECONDS) as made:
        assert made.publish(version=1).ok
    assert_serves(server, 1, 1)


def assert_whole_or_paused(server: StockSglang, value: float) -> None:
    """It serves the version from before; or it holds parts of another, says so, and serves nobody."""
    state = server.state()
    if state["is_paused"]:
        assert state["label"] == "incomplete, was default"
    else:
        assert (state["label"], set(state["values"])) == ("default", {0.0})
        assert value not in state["values"]


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_server_that_does_not_answer_is_named_and_left_out(start: Start, kind: signal.Signals, when: str) -> None:
    victim, other, source = start(), start(), Trained()
    with publisher(source.step(1), victim, other, deadline_seconds=6.0) as made:
        if when == "between":
            assert made.publish(version=1).ok
        victim.signal(kind)
        source.step(2)
        begun = time.monotonic()
        found = failures(made, version=2)
        assert time.monotonic() - begun < 30
        assert list(found) == [victim.url]
        assert isinstance(found[victim.url], PeerTimeoutError if kind == signal.SIGSTOP else PeerDiedError)
        assert_serves(other, 2, 2)
        victim.signal(signal.SIGCONT)
        if kind == signal.SIGKILL:
            made.remove_engine(victim.url)
        else:
            source.step(3)
            assert made.publish(version=3).ok
            assert_serves(victim, 3, 3)
            assert_serves(other, 3, 3)


def wrong(name: str) -> dict[str, torch.Tensor]:
    held = tensors(1)
    match name:
        case "bad name":
            held["layers.0.wieght"] = held.pop("layers.0.weight")
        case "another name":
            held["extra"] = torch.ones(3)
        case "wrong shape":
            held["layers.3.weight"] = torch.ones(32, 31)
        case "transposed":
            held["layers.3.weight"] = torch.ones(16, 64)
        case "wrong dtype":
            held["layers.0.scale"] = held["layers.0.scale"].to(torch.float16)
        case "missing":
            del held["layers.5.scale"]
    return held


@pytest.mark.parametrize("fault", ["bad name", "another name", "wrong shape", "transposed", "wrong dtype", "missing"])
def test_what_does_not_fit_is_refused_before_anything_is_touched(start: Start, fault: str) -> None:
    server = start()
    with publisher(Tensors(wrong(fault)), server) as made:
        error = failures(made)[server.url]
    assert isinstance(error, IncompatibleWeightsError)
    assert any("layers." in problem or "extra" in problem for problem in error.problems)
    assert server.state()["log"] == []
    with publisher(Trained().step(2), server) as made:
        made.publish(version=2)
    assert_serves(server, 2, 2)


def test_the_servers_own_dtype_is_taken_as_well(start: Start) -> None:
    server, held = start(), tensors(3)
    held["layers.0.scale"] = held["layers.0.scale"].float()
    with publisher(Tensors(held), server) as made:
        assert made.publish(version=3).ok
    assert_serves(server, 3, 3)


def test_where_no_checkpoint_can_be_read_the_first_update_is_the_measure(checkpoint: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(checkpoint / "model.safetensors", tmp_path))
    source = TensorSource(tensors(1))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(StockSglang(tmp_path))
        file.unlink()
        made = stack.enter_context(publisher(source, server))
        assert made.publish(version=1).ok
        source.replace(wrong("missing"))
        error = failures(made)[server.url]
        assert isinstance(error, IncompatibleWeightsError)
        assert "missing tensor 'layers.5.scale'" in str(error)
        assert_serves(server, 1, 1)


def test_the_session_of_a_dead_trainer_is_closed(start: Start) -> None:
    server = start()
    server.http.post("/begin_weight_update", json={}).raise_for_status()
    with publisher(Trained().step(4), server) as made:
        assert made.publish(version=4).ok
    assert_serves(server, 4, 4)


def test_a_rank_that_holds_other_weights_is_found_and_healed(start: Start) -> None:
    server, source = start(num_ranks=2), Trained()
    with publisher(source.step(1), server) as made:
        server.fault("one rank does not load", bucket=1)
        error = failures(made, version=1)[server.url]
        assert isinstance(error, InstallError)
        assert "different layers." in str(error)
        state = server.state()
        assert (state["is_paused"], state["label"]) == (True, "incomplete, was default")
        source.step(2)
        assert made.publish(version=2).ok
        assert_serves(server, 2, 2)


class Breaking(Trained):
    """Breaks while it is packed, after `num_good` buckets."""

    def __init__(self, num_good: int) -> None:
        super().__init__()
        self.num_good = num_good

    def watch(self, done_bytes: int, total_bytes: int) -> None:
        self.num_good -= 1
        if self.num_good == 0:
            raise RuntimeError("the trainer's own hook broke")


@pytest.mark.parametrize("num_good", [1, 30])
def test_a_publish_that_breaks_leaves_no_server_that_serves_a_mix(start: Start, num_good: int) -> None:
    server, source = start(), Breaking(num_good)
    with publisher(source.step(1), server) as made:
        with pytest.raises(RuntimeError, match="hook broke"):
            made.publish(version=1, on_progress=source.watch)
        assert_whole_or_paused(server, 1)
        assert not server.state()["has_session"]
        source.step(2)
        assert made.publish(version=2).ok
        assert_serves(server, 2, 2)


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    """One that has imported this module."""
    with contextlib.closing(WarmPython("sglang_dialect.test_stock_fleet", environment=ENVIRONMENT)) as python:
        yield python


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_killed_trainer_leaves_a_server_whole_or_standing_still(start: Start, when: str, python: WarmPython) -> None:
    server = start()
    script = """
    import os, signal, sys, threading
    from sglang_dialect.test_stock_fleet import Trained, publisher
    url, when = sys.argv[1:]
    source = Trained()
    def die(done, total):
        if when == "during" and done > total / 2:
            os.kill(os.getpid(), signal.SIGKILL)
    with publisher(source.step(1), url) as made:
        if when == "before":
            from weightcast.integrations.sglang.stock.server import StockSender
            StockSender.send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if when == "after":
            from weightcast.integrations.sglang.stock.server import SglangStockServer
            SglangStockServer.resume = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        made.publish(version=1, on_progress=die)
    """
    assert python.run(textwrap.dedent(script), server.url, when) == -signal.SIGKILL
    settled = threading.Event()
    end = time.monotonic() + 30
    while server.state()["has_session"] or (when != "during" and server.state()["is_paused"]):
        assert time.monotonic() < end, server.state()
        settled.wait(0.1)
    match when:
        case "before":
            assert_serves_default(server)
        case "during":
            assert server.state()["is_paused"]
            assert server.state()["label"] == "incomplete, was default"
        case "after":
            assert_serves(server, 1, 1)
    with publisher(Trained().step(2), server) as made:
        assert made.publish(version=2).ok
    assert_serves(server, 2, 2)


DIE_IN_JOIN = """
import sys
from sglang_dialect.dying import die_in_join
from sglang_dialect.test_stock_fleet import Trained, publisher
url, moment, transport = sys.argv[1:]
die_in_join(moment)
with publisher(Trained().step(1), *url.split(), transport=transport) as made:
    made.publish(version=1)
"""


@pytest.mark.parametrize(
    ("moment", "num_ranks", "transport"),
    [
        # With two ranks, one may still connect to the other or to the store: docs/sglang.md says what of that freezes.
        *((moment, 1, GLOO) for moment in MOMENTS),
        ("when ranks wait for ours", 1, "gloo://[::1]:0"),
    ],
)
def test_a_trainer_that_is_killed_in_a_join_leaves_servers_as_they_were(
    start: Start, moment: Moment, num_ranks: int, transport: str, python: WarmPython
) -> None:
    server = start(num_ranks=num_ranks)
    assert python.run(DIE_IN_JOIN, server.url, moment, transport) == -signal.SIGKILL
    wait_until_it_serves(server)
    assert "init_weights_update_group" in server.state()["log"]
    assert_serves_default(server)
    with publisher(Trained().step(2), server) as made:
        assert made.publish(version=2).ok
    assert_serves(server, 2, 2)


def wait_until_it_serves(server: StockSglang) -> None:
    """The guard has ended what it waited for, the session as well, and resumed it."""
    settled, end = threading.Event(), time.monotonic() + 60
    while server.http.post("/end_weight_update", json={}).status_code != 400 or server.state()["is_paused"]:
        assert time.monotonic() < end, server.state()
        settled.wait(0.1)


def assert_serves_default(server: StockSglang) -> None:
    state = server.state()
    assert (set(state["values"]), state["label"], state["is_paused"]) == ({0.0}, "default", False)


def test_a_mixed_fleet_is_updated_by_one_publish(start: Start) -> None:
    stock, source = start(), Trained()
    held = {name: tensor.clone() for name, tensor in tensors(0).items()}
    with EngineServer(_Held(held)) as reference, publisher(source.step(1), stock, reference.url) as made:
        assert made.publish(version=1).ok
        assert_serves(stock, 1, 1)
        assert {float(t.flatten()[0]) for t in held.values() if t.numel()} == {1.0}
        stock.kill()
        source.step(2)
        found = failures(made, version=2)
        assert list(found) == [stock.url]
        made.remove_engine(stock.url)
        assert {float(t.flatten()[0]) for t in held.values() if t.numel()} == {2.0}


def test_several_trainer_ranks_publish_to_stock_servers_and_others(start: Start) -> None:
    server = start(num_ranks=2)
    port = str(free_port())
    program = [sys.executable, str(TESTS / "sglang_dialect" / "trainer_rank.py")]
    ranks = [subprocess.Popen([*program, rank, port, server.url], env=ENVIRONMENT) for rank in ("0", "1")]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert_serves(server, 2, 2)


class _Held:
    """An engine of plain tensors."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held

    def specs(self) -> Sequence[TensorSpec]:
        return Tensors(self.held).specs()

    def load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self.held[name].copy_(tensor)

    def commit(self, version: Any) -> None: ...

    def discard(self) -> None: ...


def test_a_key_is_asked_for_and_given(start: Start) -> None:
    server = start(key="sesame")
    with publisher(Trained().step(1), server, token="sesame") as made:
        assert made.publish(version=1).ok
    with publisher(Trained().step(2), server) as made:
        error = failures(made)[server.url]
    assert isinstance(error, PeerError)
    assert "401" in str(error)
    assert "token" in str(error)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"dp_size": 2}, "dp_size 2"),
        ({"pp_size": 2}, "pp_size 2"),
        ({"quantization": "fp8"}, "quantised by fp8"),
        ({"speculative_algorithm": "EAGLE"}, "has a draft model (EAGLE)"),
    ],
)
def test_what_stock_sglang_cannot_update_is_refused_by_name(
    start: Start, overrides: dict[str, Any], words: str
) -> None:
    server = start(overrides=overrides)
    with publisher(Trained(), server) as made:
        error = failures(made)[server.url]
    assert isinstance(error, UnsupportedError)
    assert words in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"undo": True}, "or install weightcast in its environment"), ({"transport": "memory://"}, "memory://")],
)
def test_what_a_publisher_cannot_have_of_stock_sglang(start: Start, options: dict[str, Any], words: str) -> None:
    server = start()
    with publisher(Trained(), server, **options) as made:
        error = failures(made)[server.url]
    assert isinstance(error, UnsupportedError)
    assert words in str(error)
    assert server.state()["log"] == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"host": "0.0.0.0"}, r"listens on 0\.0\.0\.0.*--host 127\.0\.0\.1.*gloo://"),
        ({"host": ""}, "listens on an unknown address"),
        ({"version": "0.9.1"}, r"is SGLang 0\.9\.1; .* is known only for 0\.5\.23"),
    ],
)
def test_memory_is_shared_only_with_a_known_server_of_this_host(
    start: Start, overrides: dict[str, Any], words: str
) -> None:
    server = start(overrides=overrides)
    with publisher(Trained(), server, transport="ipc://") as made:
        error = failures(made)[server.url]
    assert isinstance(error, UnsupportedError)
    with pytest.raises(UnsupportedError, match=words):
        raise error
    assert server.state()["values"]
    with publisher(Trained().step(2), server) as made:
        assert made.publish(version=2).ok


def test_versions_grow_above_what_a_server_is_labelled_with(start: Start) -> None:
    server, source = start(), Trained()
    with publisher(source.step(1), server) as made:
        made.publish(version=41)
    with publisher(source.step(2), server) as made:
        assert made.publish().version == 42
    assert_serves(server, 2, 42)


def test_a_server_that_was_started_anew_is_updated_like_any_other(start: Start) -> None:
    server, other, source = start(), start(), Trained()
    with publisher(source.step(1), server, other) as made:
        assert made.publish(version=1).ok
        # Of the same name, with none of its state: what a restart leaves.
        server.http.post("/destroy_weights_update_group", json={"group_name": server.state()["groups"][0]})
        server.http.post("/update_weight_version", json={"new_version": "default"})
        source.step(2)
        assert made.publish(version=2).ok
        assert_serves(server, 2, 2)
        assert_serves(other, 2, 2)


def test_a_server_that_is_connected_again_is_in_one_group(start: Start) -> None:
    """After a failure that its group was well in."""
    server, source = start(num_ranks=2), Trained()
    with publisher(source.step(1), server) as made:
        for value in (1, 3, 5):
            assert made.publish(version=value).ok
            assert len(server.state()["groups"]) == 1
            server.fault("one rank does not load", 2)
            source.step(value + 1)
            assert failures(made, version=value + 1).keys() == {server.url}
            source.step(value + 2)
        assert made.publish().ok
    assert not server.state()["groups"]
