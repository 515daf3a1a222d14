"""A real SGLang over time, under load and at size: many publishes under streams, and how long it stands still."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from real_engines.process import footprint
from real_engines.setups import on
from real_vllm.oracle import Answer, joined
from real_vllm.test_soak import settled
from real_vllm.trainer import checkpoint_tensors, trainer

from real_sglang.conftest import Checkpoints
from real_sglang.oracle import LOOSE, assert_serves
from real_sglang.servers import ONE, TWO, Server, Setup, Span

NUM_CLIENTS, NUM_STREAMED = 4, 60
NUM_WARM, NUM_PUBLISHES = 10, 50


class Streamed(NamedTuple):
    prompt: list[int]
    answer: Answer
    spans: list[Span]


class Client(threading.Thread):
    """Streams one answer after another, each to a prompt of its own, until it is over."""

    def __init__(self, server: Server, index: int, over: threading.Event) -> None:
        super().__init__()
        self.streams: list[Streamed] = []
        self.error: BaseException | None = None
        self._server, self._index, self._over = server, index, over

    def run(self) -> None:
        try:
            while not self._over.is_set():
                prompt = [10 + self._index, 30 + len(self.streams) % 400, 7, 8, 9]
                parts = list(self._server.stream(prompt, NUM_STREAMED))
                self.streams.append(Streamed(prompt, joined(part.answer for part in parts), parts[-1].spans))
        except BaseException as error:
            self.error = error


@on(ONE, full=[TWO])
def test_fifty_publishes_under_streams_and_no_token_of_another_version_than_it_says(server: Server) -> None:
    publish_under_streams(server)


def publish_under_streams(server: Server, **options: Any) -> None:
    """Publish fifty times while clients stream; every token must be of the version that its answer names for it."""
    over = threading.Event()
    clients = [Client(server, index, over) for index in range(NUM_CLIENTS)]
    seeds: dict[str, int] = {}
    with trainer(server.setup, server.url, **options) as it:
        seeds[str(it.publish(0).version)] = 0
        for client in clients:
            client.start()
        try:
            for number in range(NUM_PUBLISHES):
                seeds[str(it.publish(number % 2).version)] = number % 2
                threading.Event().wait(0.05)
        finally:
            over.set()
            for client in clients:
                client.join()
        assert_serves(server, 1)
        assert [client.error for client in clients] == [None] * NUM_CLIENTS
        streams = [stream for client in clients for stream in client.streams]
        num_mixed = sum(len(stream.spans) > 1 for stream in streams)
        print(f"{len(streams)} streams, {num_mixed} of several versions, {len(seeds)} versions")
        assert num_mixed > 0
        for stream in streams:
            assert_of_its_versions(server, stream, seeds)


def assert_of_its_versions(server: Server, stream: Streamed, seeds: Mapping[str, int]) -> None:
    """Requests are computed in batches of ever other sizes, so that no bits can be compared."""
    tokens, logprobs = stream.answer
    assert len(tokens) == NUM_STREAMED
    assert [span.start for span in stream.spans] == [0, *(span.end for span in stream.spans[:-1])]
    assert stream.spans[-1].end == NUM_STREAMED
    for version, start, end in stream.spans:
        own = server.cold(seeds[version]).logprobs([*stream.prompt, *tokens[:end]])[start - end :]
        far = max(abs(a - b) for a, b in zip(own, logprobs[start:end], strict=True))
        assert far < LOOSE, (stream.spans, version, far)


MAX_GROWTH_BYTES = 24 << 20
"""Of all the server's processes together, in 40 publishes of a model of 2.9 MB."""


@on(ONE, full=[TWO])
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
    growth = after.rss_bytes - warm.rss_bytes
    print(f"grew by {growth / 1e6:.1f} MB from publish {NUM_WARM} to {NUM_PUBLISHES}")
    assert growth < MAX_GROWTH_BYTES
    assert after.num_fds <= warm.num_fds, (warm, after)
    assert after.num_threads <= warm.num_threads, (warm, after)
    left = settled(server, before_any)
    assert not left.segments - before_any.segments
    assert left.num_fds <= before_any.num_fds
    assert left.num_threads <= before_any.num_threads


LARGE = Setup("qwen3-large")
NUM_ATTEMPTS = 9
MAX_RATIO = 1.0


@on(full=[LARGE])
def test_three_hundred_megabytes_stand_still_no_longer_than_for_a_reload_from_disk(
    server: Server, checkpoint: Checkpoints
) -> None:
    folders = [checkpoint(LARGE.family, seed) for seed in (0, 1)]
    with trainer(server.setup, server.url, bucket_size_bytes=None) as it:
        tensors = checkpoint_tensors(it.of(0))
        assert len(tensors) >= 2000
        it.publish(0)
        pauses, reloads = [], []
        for _ in range(NUM_ATTEMPTS):
            start = time.perf_counter()
            server.post("/update_weights_from_disk", {"model_path": str(folders[0])}).raise_for_status()
            reloads.append(time.perf_counter() - start)
            report = it.publish(1)
            (result,) = report.engines.values()
            pauses.append(result.pause_seconds)
        assert_serves(server, 1)
    pause, reload = statistics.median(pauses), statistics.median(reloads)
    print(
        f"{len(tensors)} tensors, {report.num_bytes / 1e6:.0f} MB: paused for {pause:.3f} s, "
        f"SGLang's own reload from disk {reload:.3f} s, {pause / reload:.2f} times as long"
    )
    assert pause <= MAX_RATIO * reload
