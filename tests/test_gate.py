"""The gate with real threads: what must wait waits, what must end ends, and each of it before a deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from weightcast.engines.gate import Gate
from weightcast.errors import ClosedError, EngineTornError, PeerTimeoutError
from weightcast.format.manifest import WeightVersion

DEADLINE = 60.0
SOON = 0.05
ONE, TWO = (WeightVersion("a" * 32, n) for n in (1, 2))


class Threads:
    """Runs calls in threads; `blocked` proves that one has not returned, `result` that it does."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8)

    def start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(call, *args, **kwargs)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


@pytest.fixture
def threads(leaves_nothing: None) -> Iterator[Threads]:
    pool = Threads()
    yield pool
    pool.close()


def assert_blocked(future: Future[Any]) -> None:
    with pytest.raises(TimeoutError):
        future.result(SOON)


@contextlib.contextmanager
def step_of_another_thread(gate: Gate, threads: Threads) -> Iterator[Callable[[], None]]:
    """A step that runs until the callable is called, or the block ends."""
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with gate.step(timeout_seconds=DEADLINE):
            inside.set()
            assert leave.wait(DEADLINE)

    future = threads.start(run)
    assert inside.wait(DEADLINE)

    def end() -> None:
        leave.set()
        future.result(DEADLINE)

    try:
        yield end
    finally:
        end()


def run_step(gate: Gate, timeout_seconds: float | None = DEADLINE) -> WeightVersion | None:
    with gate.step(timeout_seconds=timeout_seconds) as version:
        return version


def test_a_new_gate_is_open_and_has_no_version() -> None:
    gate = Gate()
    assert gate.is_open
    assert not gate.is_paused
    assert not gate.torn
    assert run_step(gate) is None
    assert gate.version is None


def test_steps_run_side_by_side(threads: Threads) -> None:
    gate = Gate()
    with step_of_another_thread(gate, threads), step_of_another_thread(gate, threads):
        assert run_step(gate) is None


def test_a_pause_waits_for_the_running_step_and_holds_the_next(threads: Threads) -> None:
    gate = Gate()
    with step_of_another_thread(gate, threads) as end:
        pause = threads.start(gate.pause, owner="run")
        assert_blocked(pause)
        late = threads.start(run_step, gate)
        assert_blocked(late)
        end()
        pause.result(DEADLINE)
        assert_blocked(late)
    gate.resume(owner="run")
    late.result(DEADLINE)


def test_a_pause_that_cannot_be_had_leaves_the_gate_open(threads: Threads) -> None:
    gate = Gate()
    with (
        step_of_another_thread(gate, threads),
        pytest.raises(PeerTimeoutError, match="step of generation did not end"),
    ):
        gate.pause(owner="run", deadline_seconds=SOON)
    assert not gate.is_paused
    run_step(gate)


def test_a_failed_second_pause_keeps_the_first(threads: Threads) -> None:
    gate = Gate()
    gate.pause(owner="first")
    gate.pause(owner="second")
    gate.resume(owner="second")
    assert gate.is_paused
    gate.pause(owner="first", deadline_seconds=0)
    assert gate.is_paused


def test_each_owner_ends_its_own_pause_and_a_person_ends_all() -> None:
    gate = Gate()
    gate.pause(owner="a")
    gate.pause(owner="b")
    gate.pause()
    gate.resume(owner="a")
    gate.resume(owner="unknown")
    assert gate.is_paused
    gate.resume()
    assert not gate.is_paused
    gate.resume()


def test_a_persons_pause_outlives_a_run() -> None:
    gate = Gate()
    gate.pause()
    gate.pause(owner="run")
    gate.resume(owner="run")
    assert gate.is_paused


def test_two_pauses_of_one_owner_where_the_first_times_out(threads: Threads) -> None:
    """The one that says it holds the gate must hold it."""
    gate = Gate()
    with step_of_another_thread(gate, threads) as end:
        short = threads.start(gate.pause, owner="run", deadline_seconds=5 * SOON)
        assert_blocked(short)
        long = threads.start(gate.pause, owner="run", deadline_seconds=DEADLINE)
        with pytest.raises(PeerTimeoutError):
            short.result(DEADLINE)
        assert_blocked(long)
        end()
        long.result(DEADLINE)
        assert gate.is_paused


def test_a_step_that_waits_too_long_says_so() -> None:
    gate = Gate()
    gate.pause()
    with pytest.raises(PeerTimeoutError, match=r"still paused after 0\.05 s"):
        run_step(gate, SOON)
    assert not gate.is_open
    gate.resume()
    assert gate.is_open


def test_exclusive_waits_for_steps_and_holds_new_ones(threads: Threads) -> None:
    gate = Gate()
    held, leave = threading.Event(), threading.Event()

    def install() -> None:
        with gate.exclusive(deadline_seconds=DEADLINE):
            held.set()
            assert leave.wait(DEADLINE)
            gate.set_version(ONE)

    with step_of_another_thread(gate, threads) as end:
        installing = threads.start(install)
        assert not held.wait(SOON)
        late = threads.start(run_step, gate)
        assert_blocked(late)
        end()
        assert held.wait(DEADLINE)
        assert_blocked(late)
        assert not gate.is_open
        leave.set()
        installing.result(DEADLINE)
    assert late.result(DEADLINE) == ONE


def test_exclusive_that_cannot_be_had_gives_back_what_it_took(threads: Threads) -> None:
    gate = Gate()
    with (
        step_of_another_thread(gate, threads),
        pytest.raises(PeerTimeoutError, match="the current step of generation did not end"),
        gate.exclusive(deadline_seconds=SOON),
    ):
        pytest.fail("the step still ran")
    run_step(gate)
    with gate.exclusive():
        pass


def test_only_one_holds_the_model(threads: Threads) -> None:
    gate = Gate()
    with gate.exclusive():
        with pytest.raises(PeerTimeoutError, match="another install"), gate.exclusive(deadline_seconds=SOON):
            pytest.fail("two held the model")
        waiting = threads.start(run_exclusive, gate)
        assert_blocked(waiting)
    waiting.result(DEADLINE)


def run_exclusive(gate: Gate) -> None:
    with gate.exclusive(deadline_seconds=DEADLINE):
        pass


def test_exclusive_ends_with_its_block_even_by_an_error() -> None:
    gate = Gate()
    with pytest.raises(KeyError), gate.exclusive():
        raise KeyError
    assert gate.is_open


def test_exclusive_works_while_paused_and_keeps_the_pause() -> None:
    gate = Gate()
    gate.pause(owner="run")
    with gate.exclusive():
        gate.set_version(TWO)
    assert gate.is_paused
    assert gate.version == TWO


def test_a_step_that_fails_is_over() -> None:
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate.step():
        _ = 1 / 0
    gate.pause(deadline_seconds=0)


def test_a_torn_engine_has_steps_wait_until_it_is_whole(threads: Threads) -> None:
    gate = Gate()
    gate.pause()
    waiting = threads.start(run_step, gate, None)
    assert_blocked(waiting)
    gate.tear("an install failed half-way")
    gate.resume()
    assert_blocked(waiting)
    with pytest.raises(EngineTornError, match="half-way"):
        run_step(gate, 0)
    assert not gate.is_open
    gate.set_version(TWO)
    assert waiting.result(DEADLINE) == TWO
    assert run_step(gate) == TWO
    assert gate.torn == ""


@pytest.mark.parametrize("is_torn", [True, False])
def test_a_wait_that_nothing_can_end_any_more_ends_with_the_gate(is_torn: bool, threads: Threads) -> None:
    gate = Gate()
    gate.tear("half of version 7") if is_torn else gate.pause()
    waiting = threads.start(run_step, gate, None)
    assert_blocked(waiting)
    gate.close()
    with pytest.raises(ClosedError, match="half of version 7" if is_torn else "paused"):
        waiting.result(DEADLINE)
    with pytest.raises(ClosedError):
        run_step(gate, None)


def test_an_open_gate_has_steps_after_it_was_closed() -> None:
    gate = Gate()
    gate.set_version(TWO)
    gate.close()
    gate.close()
    assert run_step(gate) == TWO


def test_a_thread_in_a_step_is_refused_what_would_wait_for_its_end(threads: Threads) -> None:
    gate = Gate()
    with gate.step():
        for call in (gate.pause, lambda: gate.begin_writing("update"), lambda: gate.exclusive().__enter__()):
            with pytest.raises(ValueError, match="inside `with step"):
                call()
        assert gate.is_open
        with step_of_another_thread(gate, threads):
            pass
    gate.pause(deadline_seconds=0)


def test_a_step_sees_one_version_however_often_it_asks(threads: Threads) -> None:
    def install(gate: Gate) -> None:
        with gate.exclusive(deadline_seconds=SOON):
            pytest.fail("an install ran inside a step")

    gate = Gate()
    gate.set_version(ONE)
    with gate.step() as version:
        with pytest.raises(PeerTimeoutError):
            threads.start(install, gate).result(DEADLINE)
        assert gate.version == version == ONE


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_draining_comes_before_closing(mode: str, threads: Threads) -> None:
    seen: list[tuple[str, float, bool, bool]] = []
    gate = Gate()
    gate.drain = lambda mode, deadline: seen.append((mode, deadline, gate.is_draining, gate.is_paused))
    gate.pause(mode, owner="run", deadline_seconds=3.0)
    assert seen == [(mode, 3.0, True, False)]
    assert gate.is_paused
    assert not gate.is_draining


def test_keep_does_not_drain() -> None:
    gate = Gate()
    gate.drain = lambda mode, deadline: pytest.fail("drained")
    gate.pause("keep")
    assert gate.is_paused


def test_a_drain_that_fails_leaves_the_gate_open() -> None:
    def drain(mode: str, deadline_seconds: float) -> None:
        raise PeerTimeoutError("requests ran on", peer="engine")

    gate = Gate()
    gate.drain = drain
    with pytest.raises(PeerTimeoutError):
        gate.pause("wait")
    assert gate.is_open
    assert not gate.is_draining


def test_no_step_ever_sees_a_change(threads: Threads) -> None:
    """Generators and installers race: within a step the weights stay, and no version is seen half-made."""
    gate = Gate()
    weights, installs, num_steps, is_over = [0, 0], 0, [0, 0, 0], threading.Event()

    def generate(number: int) -> None:
        while not is_over.is_set():
            with gate.step(timeout_seconds=DEADLINE) as version:
                before = list(weights)
                assert before[0] == before[1]
                assert before[0] == (version.number if version else 0)
                num_steps[number] += 1

    generators = [threads.start(generate, number) for number in range(3)]
    try:
        while (installs < 100 or not all(num_steps)) and not any(each.done() for each in generators):
            gate.pause(owner="run", deadline_seconds=DEADLINE)
            with gate.exclusive(deadline_seconds=DEADLINE):
                installs += 1
                weights[0] = installs
                weights[1] = installs
                gate.set_version(WeightVersion("a" * 32, installs))
            gate.resume(owner="run")
    finally:
        is_over.set()
    for each in generators:
        each.result(DEADLINE)
