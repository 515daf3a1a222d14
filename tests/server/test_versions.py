"""Generation across installs: every token is of the version that its span names, whatever a pause does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from server.tiny_qwen3 import RUN, make_model, teacher_forced, version
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from weightcast.engines.gate import Gate
from weightcast.engines.transformers import Completion, Delta, SamplingParams, TextGenerator, VersionSpan
from weightcast.errors import EngineTornError, PeerTimeoutError

DEADLINE = 60
PROMPT = [5, 9, 17, 33, 2]
TOLERANCE = 1e-2
"""Of a log-probability: a batch adds up in another order than one forward pass. Versions are further apart."""
Install = Callable[[Qwen3ForCausalLM, int], None]


def sampling(max_tokens: int = 100, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=0, **more)  # type: ignore[arg-type]


class Progress:
    """Acts once a request has so many tokens, from a thread of its own, as the generator's must not wait for itself."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self._at = at
        self._act = act
        self._num_tokens = 0
        self.done = threading.Event()

    def __call__(self, delta: Delta) -> None:
        self._num_tokens += len(delta.token_ids)
        if self._num_tokens == self._at and delta.token_ids:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._act()
        self.done.set()


def assert_each_token_is_of_its_version(completion: Completion, models: dict[int | None, Qwen3ForCausalLM]) -> None:
    assert completion.logprobs is not None
    spans = completion.weight_versions
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(completion.token_ids)
    for span in spans:
        forced = teacher_forced(models[span.version], list(completion.prompt_token_ids), list(completion.token_ids))
        for i in range(span.start, span.end):
            expected = forced[i, completion.token_ids[i]].item()
            assert completion.logprobs[i].chosen == pytest.approx(expected, abs=TOLERANCE), (span, i)


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, [7], [3, 4, 5, 6, 7, 8, 9, 10]]], ids=["one", "padded"])
def test_an_install_in_mid_generation_never_reuses_the_cache(
    model: Qwen3ForCausalLM, generator: TextGenerator, install: Install, prompts: list[list[int]]
) -> None:
    old, new = make_model(0), make_model(1)
    progress = Progress(10 * len(prompts), lambda: install(new, 1))
    request = generator.submit(prompts, sampling(n=2, seed=0), on_delta=progress)
    completions = request.future.result(DEADLINE)
    assert progress.done.wait(DEADLINE)
    for completion in completions:
        assert [span.version for span in completion.weight_versions] == [None, 1]
        assert [span.run for span in completion.weight_versions] == ["", RUN]
        assert_each_token_is_of_its_version(completion, {None: old, 1: new})
    assert request.weight_version == version(1)


def test_the_check_above_would_notice_a_reused_cache(
    model: Qwen3ForCausalLM, generator: TextGenerator, gate: Gate
) -> None:
    """Weights changed behind the gate's back: the old cache is read under new weights, and the figures show it."""
    new = make_model(1)

    def change() -> None:
        with gate.exclusive(), torch.no_grad():
            for mine, theirs in zip(model.parameters(), new.parameters(), strict=True):
                mine.copy_(theirs)

    old = make_model(0)
    done = generator.submit([PROMPT], sampling(seed=0), on_delta=Progress(10, change)).future.result(DEADLINE)[0]
    with pytest.raises(AssertionError):
        assert_each_token_is_of_its_version(done, {None: old})
    with pytest.raises(AssertionError):
        assert_each_token_is_of_its_version(done, {None: new})


def test_many_installs_under_load(model: Qwen3ForCausalLM, generator: TextGenerator, install: Install) -> None:
    models: dict[int | None, Qwen3ForCausalLM] = {None: make_model(0), **{n: make_model(n) for n in range(1, 6)}}
    requests = [generator.submit([[3 + i] * (1 + i % 7)], sampling(20 + 5 * (i % 5), n=2, seed=i)) for i in range(12)]
    for number in range(1, 6):
        install(models[number] or model, number)
        requests.append(generator.submit([[90 + number]], sampling(15, seed=number)))
    for request in requests:
        for completion in request.future.result(DEADLINE):
            numbers = [span.version or 0 for span in completion.weight_versions]
            assert numbers == sorted(set(numbers))
            assert_each_token_is_of_its_version(completion, models)


def test_after_an_install_a_new_request_is_of_the_new_version_only(generator: TextGenerator, install: Install) -> None:
    install(make_model(1), 1)
    done = generator.generate([PROMPT], sampling(8, seed=0))[0]
    assert done.weight_versions == (VersionSpan(RUN, 1, 0, 8),)
    with TextGenerator(make_model(1), gate=Gate()) as cold:
        expected = cold.generate([PROMPT], sampling(8, seed=0))[0]
    assert (done.token_ids, done.logprobs) == (expected.token_ids, expected.logprobs)


def test_keep_freezes_requests_and_resume_goes_on(generator: TextGenerator, gate: Gate) -> None:
    expected = generator.generate([PROMPT], sampling(seed=0))[0].token_ids
    progress = Progress(5, lambda: gate.pause("keep"))
    request = generator.submit([PROMPT], sampling(seed=0), on_delta=progress)
    assert progress.done.wait(DEADLINE)
    frozen = len(request.rows[0].output)
    with pytest.raises(TimeoutError):
        request.future.result(0.3)
    assert len(request.rows[0].output) == frozen < 100
    gate.resume()
    assert request.future.result(DEADLINE)[0].token_ids == expected


def test_wait_finishes_what_runs_and_holds_what_waits(generator: TextGenerator, gate: Gate) -> None:
    started = threading.Event()
    running = generator.submit([PROMPT], sampling(seed=0, n=3), on_delta=lambda delta: started.set())
    assert started.wait(DEADLINE)
    gate.pause("wait", deadline_seconds=DEADLINE)
    assert running.future.done()
    assert {c.finish_reason for c in running.future.result(0)} == {"length"}
    queued = generator.submit([PROMPT], sampling(4))
    with pytest.raises(TimeoutError):
        queued.future.result(0.3)
    gate.resume()
    assert len(queued.future.result(DEADLINE)[0].token_ids) == 4


def test_wait_past_its_deadline_leaves_the_gate_open(generator: TextGenerator, gate: Gate) -> None:
    gate.pause("keep", owner="someone")
    request = generator.submit([PROMPT], sampling(4))
    gate.resume()
    request.future.result(DEADLINE)
    progress = Progress(2, lambda: gate.pause("keep", owner="someone"))
    frozen = generator.submit([PROMPT], sampling(), on_delta=progress)
    assert progress.done.wait(DEADLINE)
    with pytest.raises(PeerTimeoutError, match="still ran"):
        gate.pause("wait", owner="another", deadline_seconds=0.2)
    gate.resume(owner="someone")
    assert gate.is_open
    assert len(frozen.future.result(DEADLINE)[0].token_ids) == 100


def test_abort_ends_what_runs_with_what_there_is(generator: TextGenerator, gate: Gate) -> None:
    expected = generator.generate([PROMPT], sampling(seed=0))[0].token_ids
    progress = Progress(5, lambda: gate.pause("abort", deadline_seconds=DEADLINE))
    request = generator.submit([PROMPT], sampling(seed=0), on_delta=progress)
    assert progress.done.wait(DEADLINE)
    assert gate.is_paused
    done = request.future.result(0)[0]
    assert done.finish_reason == "abort"
    assert 5 <= len(done.token_ids) < 100
    assert done.token_ids == expected[: len(done.token_ids)]
    gate.resume()
    assert len(generator.generate([PROMPT], sampling(4))[0].token_ids) == 4


def test_abort_also_ends_what_a_pause_has_frozen(generator: TextGenerator, gate: Gate) -> None:
    progress = Progress(5, lambda: gate.pause("keep", owner="someone"))
    request = generator.submit([PROMPT], sampling(), on_delta=progress)
    assert progress.done.wait(DEADLINE)
    gate.pause("abort", owner="another", deadline_seconds=DEADLINE)
    assert request.future.result(0)[0].finish_reason == "abort"
    gate.resume()


def test_a_torn_engine_answers_nobody_until_it_is_healed(
    generator: TextGenerator, gate: Gate, install: Install
) -> None:
    progress = Progress(5, lambda: gate.tear("half of version 7 was loaded"))
    running = generator.submit([PROMPT], sampling(), on_delta=progress)
    with pytest.raises(EngineTornError, match="half of version 7"):
        running.future.result(DEADLINE)
    assert progress.done.wait(DEADLINE)
    with pytest.raises(EngineTornError, match="half of version 7"):
        generator.submit([PROMPT], sampling())
    install(make_model(1), 8)
    assert generator.generate([PROMPT], sampling(4))[0].weight_versions == (VersionSpan(RUN, 8, 0, 4),)


def test_a_cancelled_request_leaves_the_batch(generator: TextGenerator) -> None:
    started = threading.Event()
    given_up = generator.submit([PROMPT], sampling(200), on_delta=lambda delta: started.set())
    assert started.wait(DEADLINE)
    other = generator.submit([PROMPT], sampling(20))
    given_up.cancel()
    other.future.result(DEADLINE)
    frozen = len(given_up.rows[0].output)
    generator.generate([PROMPT], sampling(5))
    assert len(given_up.rows[0].output) == frozen < 200


def test_pauses_and_requests_from_many_threads(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, leaves_nothing: None
) -> None:
    """No request is lost and no pause hangs when `wait`, `abort` and `keep` meet a stream of requests."""
    gate = Gate()
    with TextGenerator(model, tokenizer, gate=gate) as generator, ThreadPoolExecutor(3) as threads:
        asked: list[Future[list[Completion]]] = [
            threads.submit(generator.generate, [[5 + i]], sampling(10)) for i in range(30)
        ]
        for i in range(12):
            gate.pause(("wait", "abort", "keep")[i % 3], owner="run", deadline_seconds=DEADLINE)
            assert generator.num_running == 0 or i % 3 == 2
            gate.resume(owner="run")
        reasons = {future.result(DEADLINE)[0].finish_reason for future in asked}
    assert reasons <= {"length", "abort"}
