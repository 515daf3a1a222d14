"""A real vLLM over time and under load: many publishes, streams during transfers, a server that is killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from real_engines.process import Footprint, footprint
from real_engines.setups import on

from real_vllm.baseline.per_tensor import PerTensorTrainer
from real_vllm.cold import assert_serves
from real_vllm.models import model_of
from real_vllm.servers import ONE, TWO, Server, Setup
from real_vllm.trainer import GLOO, checkpoint_tensors, trainer
from weightcast.errors import PeerError

# --- 50 publishes in a row ---

NUM_WARM, NUM_PUBLISHES = 10, 50
MAX_GROWTH_BYTES = 16 << 20
"""Of all the server's processes together, in 40 publishes of a model of 2.9 MB, staged once in each of its ranks."""


@on(ONE, TWO)
def test_fifty_publishes_leave_nothing_behind(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
    before_any = footprint(server)
    with trainer(server.setup, server.url) as it:
        for number in range(NUM_WARM):
            it.publish(number % 2)
        warm = footprint(server)
        for number in range(NUM_WARM, NUM_PUBLISHES):
            it.publish(number % 2)
        after = settled(server, warm)
        assert_serves(server, 1)
        growth = after.rss_bytes - warm.rss_bytes
        print(f"grew by {growth / 1e6:.1f} MB from publish {NUM_WARM} to {NUM_PUBLISHES}; {warm} {after}")
        assert growth < MAX_GROWTH_BYTES
        assert after.num_fds <= warm.num_fds, (warm, after)
        assert after.num_threads <= warm.num_threads, (warm, after)
    left = settled(server, before_any)
    assert not left.segments - before_any.segments
    assert left.num_fds <= before_any.num_fds
    assert left.num_threads <= before_any.num_threads


def settled(server: Server, before: Footprint, seconds: float = 60.0) -> Footprint:
    """The footprint once it is no larger than `before`, or after `seconds`.

    The server closes the sockets of answered requests and the links of closed publishers in the background.
    """
    end = time.monotonic() + seconds
    while True:
        now = footprint(server)
        is_as_before = (
            now.segments <= before.segments and now.num_fds <= before.num_fds and now.num_threads <= before.num_threads
        )
        if is_as_before or time.monotonic() > end:
            return now
        threading.Event().wait(0.1)


# --- streams during transfers ---

WIDE = Setup(family="qwen3-wide")
NUM_CLIENTS, NUM_STREAMED = 8, 200
QUIET_SECONDS = 6.0
NUM_LOADED_PUBLISHES = 10
MAX_GAP_RATIO = 3.0
NUM_ATTEMPTS = 3
"""Whatever else the machine does makes gaps longer and never shorter: the best of several measurements counts."""

Window = tuple[float, float]


class Clients:
    """The streaming clients' process; `requests` and `errors` once it was left."""

    def __init__(self, server: Server) -> None:
        program = str(Path(__file__).with_name("stream_clients.py"))
        self._process = subprocess.Popen(
            [sys.executable, program, server.url, str(NUM_CLIENTS), str(NUM_STREAMED)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.requests: list[list[float]] = []
        self.errors: list[str] = []

    def __enter__(self) -> Clients:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "streaming\n"
        return self

    def __exit__(self, *exc_info: object) -> None:
        output, _ = self._process.communicate(timeout=120)
        found = json.loads(output)
        self.requests, self.errors = found["requests"], found["errors"]

    def gaps(self, within: Window) -> list[Window]:
        """From token to token, of every stream, as far as they lie in `within`."""
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self.requests))
        return [gap for gap in pairs if within[0] <= gap[0] and gap[1] <= within[1]]


def seconds(gap: Window) -> float:
    return gap[1] - gap[0]


def standstills(gaps: Sequence[Window], installs: Sequence[Window]) -> set[Window]:
    """The gaps in which an install fell: of each stream the longest in the time of each install's request."""
    found = set()
    for begin, end in installs:
        inside = sorted((gap for gap in gaps if gap[0] < end and gap[1] > begin), key=seconds)
        found.update(inside[-NUM_CLIENTS:])
    return found


@on(full=[WIDE])
def test_streams_go_on_during_transfers_at_full_speed(server: Server) -> None:
    ratios = []
    with trainer(server.setup, server.url, bucket_size_bytes=None) as it:
        it.publish(1)
        for _ in range(NUM_ATTEMPTS):
            with Clients(server) as clients:
                quiet = (time.monotonic(), time.monotonic() + QUIET_SECONDS)
                threading.Event().wait(QUIET_SECONDS)
                begin, reports, finishes = time.monotonic(), [], []
                for number in range(NUM_LOADED_PUBLISHES):
                    reports.append(it.publish(number % 2))
                    now = time.monotonic()
                    finishes.append((now - reports[-1].seconds.pause, now))
                busy = (begin, time.monotonic())
            assert not clients.errors
            gaps = clients.gaps(busy)
            paused = standstills(gaps, finishes)
            usual = statistics.quantiles(map(seconds, clients.gaps(quiet)), n=100)[98]
            longest = max(seconds(gap) for gap in gaps if gap not in paused)
            pause = max(map(seconds, paused))
            install = max(result.install_seconds for report in reports for result in report.engines.values())
            ratios.append(longest / usual)
            print(
                f"{NUM_LOADED_PUBLISHES} publishes of {reports[0].num_bytes / 1e6:.0f} MB in {seconds(busy):.2f} s"
                f" under {NUM_CLIENTS} streams; p99 of gaps without {usual * 1e3:.1f} ms; longest outside the pauses"
                f" {longest * 1e3:.1f} ms ({ratios[-1]:.2f} x); longest pause {pause * 1e3:.0f} ms: the install,"
                f" at most {install * 1e3:.0f} ms, and vLLM's computing the dropped caches of running requests again"
            )
            if ratios[-1] <= MAX_GAP_RATIO:
                break
        assert_serves(server, 1)
    assert min(ratios) <= MAX_GAP_RATIO, ratios


# --- a server killed in mid-transfer ---


@on(ONE, full=[TWO])
@pytest.mark.parametrize(
    "options", [pytest.param({}, id="full"), pytest.param({"transport": GLOO, "delta": "always"}, id="delta")]
)
def test_a_server_killed_in_mid_transfer_is_served_again_on_the_same_port(
    server: Server, options: dict[str, Any]
) -> None:
    with trainer(server.setup, server.url, **options) as it:
        it.publish(1)
        it.publish_near(0)
        error = it.failure(0, on_progress=lambda done, total: server.kill())
        assert isinstance(error, PeerError), error
        assert server.url in str(error)
        server.restart()
        assert_serves(server, 0)
        report = it.publish(1)
        assert server.version() == str(report.version)
        assert_serves(server, 1)


# --- against vLLM's way of today ---

DEEP = Setup(family="qwen3-deep", tp=2)
NUM_ROUNDS = 3
MIN_SPEEDUP = 5.0


@on(full=[DEEP])
def test_two_thousand_tensors_come_five_times_as_fast_as_one_by_one(server: Server) -> None:
    tensors = checkpoint_tensors(model_of(DEEP.family, 0))
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert len(tensors) >= 2000
    assert num_bytes >= 100e6
    ours, theirs, installs = [], [], []
    with trainer(server.setup, server.url, bucket_size_bytes=None) as it:
        it.publish(1)
        baseline = PerTensorTrainer(server, free_port(), num_workers=server.setup.tp)
        with contextlib.closing(baseline):
            for _ in range(NUM_ROUNDS):
                start = time.perf_counter()
                server.post("/pause?mode=keep")
                baseline.send(tensors)
                server.post("/resume")
                theirs.append(time.perf_counter() - start)
                report = it.publish(1)
                ours.append(report.seconds.total)
                installs.append(max(result.install_seconds for result in report.engines.values()))
                print(
                    f"{len(tensors)} tensors, {num_bytes / 1e6:.0f} MB: {theirs[-1]:.2f} s one by one, {ours[-1]:.2f} s"
                    f" here, of which {installs[-1]:.2f} s are the install"
                )
    assert min(theirs) >= MIN_SPEEDUP * min(ours), (theirs, ours)
