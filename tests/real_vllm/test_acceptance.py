"""What a user relies on: a published version is what is served, whole, labelled, and with nothing of the old one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from real_engines.process import REQUEST_SECONDS
from real_engines.setups import on

from real_vllm.cold import assert_answered, assert_serves
from real_vllm.models import make_model
from real_vllm.oracle import LONG_PROMPT, NUM_STREAMED, PROMPT, Answer, joined
from real_vllm.servers import EXPERT_REPLICAS, EXPERTS, MOE_REPLICAS, ONE, PIPELINE, REPLICAS, TWO, Server, Setup, Span
from real_vllm.trainer import FILE, GLOO, IPC, trainer
from weightcast import HttpEngine, ModuleSource, Publisher

BF16 = Setup(dtype=torch.bfloat16)
SPECULATING = [Setup(speculation="ngram")]
if importlib.util.find_spec("arctic_inference") is not None:  # it is built for minutes, and nothing else needs it
    SPECULATING.append(Setup(speculation="suffix"))
REPETITIVE = PROMPT * 3
"""A prompt in which an n-gram is found for what comes next."""
NUM_SPECULATED = 40
NUM_BEFORE_PAUSE = 20
QUIET_SECONDS = 5.0
"""A part that the server has sent comes within this time."""
NUM_TRIES = 10
"""Of pausing a request while it runs: on a machine with other work it may end before."""
T = TypeVar("T")


@on(ONE, TWO, PIPELINE, EXPERTS, REPLICAS, full=[MOE_REPLICAS, EXPERT_REPLICAS])
@pytest.mark.parametrize("transport", [IPC, GLOO, FILE], ids=["ipc", "gloo", "file"])
def test_alternating_publishes_serve_what_was_published(server: Server, transport: str, tmp_path: Path) -> None:
    with trainer(server.setup, server.url, transport=transport.format(tmp_path)) as it:
        for seed in (1, 0, 1):
            report = it.publish(seed)
            assert report.ok
            assert server.version() == str(report.version)
            assert_serves(server, seed)


@on(ONE, TWO, PIPELINE, EXPERTS)
@pytest.mark.parametrize("transport", [GLOO, IPC], ids=["gloo", "ipc"])
def test_deltas_give_what_a_full_update_gives(server: Server, transport: str) -> None:
    with trainer(server.setup, server.url, transport=transport, delta="always", verify="installed") as it:
        it.publish(1)
        for seed in (1, 0):
            it.publish(seed)
            near = it.publish_near(seed)
            report = it.publish(seed)
            for each in (near, report):
                assert each.delta is not None
                assert each.delta.num_engines == 1
                assert each.delta.num_bytes < each.num_bytes / 4
            assert server.version() == str(report.version)
            assert_serves(server, seed)


@on(*SPECULATING)
def test_an_engine_that_speculates_without_a_draft_model_is_updated_like_any_other(server: Server) -> None:
    with trainer(server.setup, server.url, verify="installed") as it:
        for seed in (1, 0, 1):
            version = it.publish(seed).version
            assert server.version() == str(version)
            num_drafts = server.metric("vllm:spec_decode_num_drafts_total")
            assert_answered(server, seed, REPETITIVE, server.ask(REPETITIVE, NUM_SPECULATED))
            assert server.metric("vllm:spec_decode_num_drafts_total") > num_drafts
            assert_serves(server, seed)


@on(BF16)
def test_each_tensor_is_cast_to_what_the_engine_has(server: Server) -> None:
    """A trainer in float32, asked for no dtype of its own."""
    source = ModuleSource(make_model(server.setup.family, 1, server.setup.dtype).float(), dtype="engine")
    engine = HttpEngine(server.url)
    with contextlib.closing(engine), Publisher(source, engines=[engine]) as publisher:
        assert set((engine.dtypes(source.specs()) or {}).values()) == {"bfloat16"}
        report = publisher.publish()
        assert report.num_bytes * 2 == sum(spec.num_bytes for spec in source.specs())
        assert_serves(server, 1)


@on(ONE, TWO, REPLICAS, full=[MOE_REPLICAS, PIPELINE, EXPERTS])
def test_an_answer_says_which_version_it_is_of(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        first, second = it.publish(0).version, it.publish(1).version
        assert second > first
        assert list(server.generate(PROMPT, 12))[-1].spans == [(str(second), 0, 12)]


@on(ONE, TWO)
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_no_cache_of_the_old_version_is_used(server: Server, mode: Any) -> None:
    engine = HttpEngine(server.url, pause=mode)
    with contextlib.closing(engine), trainer(server.setup, engine) as it:
        it.publish(0)
        before = server.metric("vllm:prefix_cache_hits_total")
        for is_cached in (False, True):
            assert_serves(server, 0, LONG_PROMPT, is_cached=is_cached)
        assert server.metric("vllm:prefix_cache_hits_total") > before, "the prompt is not cached at all"
        it.publish(1)
        assert_serves(server, 1, LONG_PROMPT)


class Stream(Generic[T]):
    """A request in a thread of its own, begun when all of an update has been sent, so that the pause finds it running.

    Use it as the update's `on_progress`; `parts` is what came, once the request was `awaited`.
    """

    def __init__(self, parts: Iterator[T]) -> None:
        self.parts: list[T] = []
        self._coming = parts
        self._is_running = threading.Event()
        self._has_come = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._reading: concurrent.futures.Future[None] | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            self._reading = self._pool.submit(self._read)
            assert self._is_running.wait(REQUEST_SECONDS)

    def _read(self) -> None:
        for part in self._coming:
            self.parts.append(part)
            self._has_come.set()
            if len(self.parts) == NUM_BEFORE_PAUSE:
                self._is_running.set()

    def num_parts(self) -> int:
        """How many parts came, once what was on its way when this was called has come too."""
        while self._has_come.wait(QUIET_SECONDS):
            self._has_come.clear()
        return len(self.parts)

    def awaited(self) -> list[T]:
        assert self._reading is not None
        self._reading.result(REQUEST_SECONDS)
        self._pool.shutdown()
        return self.parts


@on(ONE, TWO)
def test_a_kept_request_goes_on_under_the_new_version_and_says_where(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        for _ in range(NUM_TRIES):
            first = it.publish(0).version
            stream = Stream(server.generate(PROMPT, NUM_STREAMED))
            second = it.publish(1, on_progress=stream).version
            parts = stream.awaited()
            if len(parts[-1].spans) > 1:
                break
        answer = joined(part.answer for part in parts)
        assert len(answer.tokens) == NUM_STREAMED
        cut = _cut(parts[-1].spans, first, second)
        assert NUM_BEFORE_PAUSE <= cut < NUM_STREAMED
        assert_answered(server, 0, PROMPT, Answer(answer.tokens[:cut], answer.logprobs[:cut]))
        rest = Answer(answer.tokens[cut:], answer.logprobs[cut:])
        assert_answered(server, 1, [*PROMPT, *answer.tokens[:cut]], rest)


def _cut(spans: Sequence[Span], first: int, second: int) -> int:
    """Where the second version begins; the spans must be of the two, in order and without a gap."""
    (old, start, cut), (new, next_start, _end) = spans
    assert (old, start, new, next_start) == (str(first), 0, str(second), cut)
    return cut


@on(ONE)
@pytest.mark.parametrize(("mode", "is_whole"), [("wait", True), ("abort", False)])
def test_pause_wait_lets_requests_end_and_abort_ends_them(server: Server, mode: Any, is_whole: bool) -> None:
    engine = HttpEngine(server.url, pause=mode)
    with contextlib.closing(engine), trainer(server.setup, engine) as it:
        for _ in range(NUM_TRIES):
            it.publish(0)
            stream = Stream(server.stream(PROMPT, NUM_STREAMED))
            it.publish(1, on_progress=stream)
            answer = joined(stream.awaited())
            if is_whole or len(answer.tokens) < NUM_STREAMED:
                break
        assert (len(answer.tokens) == NUM_STREAMED) is is_whole
        assert_answered(server, 0, PROMPT, answer)
        assert_serves(server, 1)


_WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None  # whoever imports it now gets an ImportError
sys.path.insert(0, sys.argv[2])
import torch
from real_vllm.models import make_model
from weightcast import ModuleSource, Publisher
with Publisher(ModuleSource(make_model("qwen3", 1)), engines=[sys.argv[1]]) as publisher:
    print(publisher.publish().version)
"""


@on(ONE)
def test_the_trainer_needs_no_vllm(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
    command = [sys.executable, "-c", _WITHOUT_VLLM, server.url, "tests"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert server.version() == done.stdout.strip()
    assert_serves(server, 1)
