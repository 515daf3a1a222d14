"""A load that fails on some rank: undone everywhere, or the engine refuses to generate. W13 behind `collective_rpc`."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl_scheme.engine_kit import SHAPES, AsyncVLLM, Collective, Shape
from torchrl_scheme.scheme_kit import TENSORS, LoadingModule, generate_by, sender_of, vllm_shape

from weightcast.errors import EngineTornError, InstallError, PublishError
from weightcast.format.manifest import WeightVersion
from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme as Scheme
from weightcast.testing.leftovers import nothing_left

OLD = {name: tensor + 1 for name, tensor in TENSORS.items()}
NEW = {name: tensor + 2 for name, tensor in TENSORS.items()}
ZEROS = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
"""What ranks have before the first update."""


@pytest.fixture
def shape(request: pytest.FixtureRequest) -> Iterator[Shape]:
    with contextlib.closing(SHAPES[request.param]()) as shape, nothing_left():
        yield shape


@contextlib.contextmanager
def both_sides(tmp_path: Path, shape: Shape, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Its sender and the receiver for this engine."""
    scheme = Scheme(str(tmp_path))
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(contextlib.closing(sender_of(scheme)))
        yield sender, stack.enter_context(contextlib.closing(shape.create(scheme, **options)))


on_all_shapes = pytest.mark.parametrize("shape", SHAPES, indirect=True)


def generates(shape: Shape, *expected: dict[str, torch.Tensor]) -> None:
    """With `expected` on every rank, bit by bit; several: of the first replica, of the second."""
    answers = shape.generate()
    of_ranks = [tensors for tensors in expected for _ in range(len(answers) // len(expected))]
    for answer, tensors in zip(answers, of_ranks, strict=True):
        assert answer.keys() == tensors.keys()
        assert all(torch.equal(answer[name], tensor) for name, tensor in tensors.items())


def old_and(shape: Shape, other: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
    """Each replica of AsyncVLLM is for itself: the first one takes what the second one does not."""
    return (NEW, other) if isinstance(shape, AsyncVLLM) else (other,)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    ("shape", "step"),
    [*((shape, "half-way") for shape in SHAPES), *(("LLM", step) for step in ("snapshot", "load", "commit"))],
    indirect=["shape"],
)
def test_a_failure_on_some_rank_takes_all_ranks_back(
    tmp_path: Path, shape: Shape, step: str, ranks: tuple[int, ...]
) -> None:
    with both_sides(tmp_path, shape) as (sender, receiver):
        sender.update_weights(OLD)
        assert receiver.poll_and_apply(timeout=0)
        for rank in ranks:
            shape.models[rank].fail = step
        sender.update_weights(NEW)
        with pytest.raises(InstallError, match=f"the test's fault in {step}") as caught:
            receiver.poll_and_apply(timeout=0)
        assert not caught.value.torn
        generates(shape, *old_and(shape, OLD))
        assert receiver.poll_and_apply(timeout=0), "the next call takes it"
        generates(shape, NEW)


@on_all_shapes
def test_the_first_version_that_fails_leaves_the_weights_of_the_start(tmp_path: Path, shape: Shape) -> None:
    with both_sides(tmp_path, shape) as (sender, receiver):
        sender.update_weights(TensorDict(NEW, batch_size=[]))
        shape.models[1].fail = "half-way"
        with pytest.raises(InstallError, match="half-way"):
            receiver.poll_and_apply(timeout=0)
        generates(shape, *old_and(shape, ZEROS))


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@on_all_shapes
def test_without_an_undo_it_refuses_to_generate_until_it_is_healed(
    tmp_path: Path, shape: Shape, ranks: tuple[int, ...]
) -> None:
    with both_sides(tmp_path, shape, undo=False) as (sender, receiver):
        sender.update_weights(OLD)
        assert receiver.poll_and_apply(timeout=0)
        sender.update_weights(NEW)
        for _ in range(2):
            for rank in ranks:
                shape.models[rank].fail = "half-way"
            with pytest.raises(InstallError, match="half-way") as caught:
                receiver.poll_and_apply(timeout=0)
            assert caught.value.torn
            with pytest.raises(EngineTornError, match=r"until a complete update heals it.*half-way"):
                shape.generate()
        assert receiver.poll_and_apply(timeout=0)
        generates(shape, NEW)


@on_all_shapes
def test_an_undo_that_fails_leaves_an_engine_that_refuses(tmp_path: Path, shape: Shape) -> None:
    with both_sides(tmp_path, shape) as (sender, receiver):
        sender.update_weights(OLD)
        shape.models[0].fail, shape.models[1].fail = "restore", "half-way"
        with pytest.raises(InstallError, match="half-way") as caught:
            receiver.poll_and_apply(timeout=0)
        assert caught.value.torn
        with pytest.raises(EngineTornError):
            shape.generate()
        assert receiver.poll_and_apply(timeout=0)
        generates(shape, OLD)


@pytest.mark.parametrize("undo", [True, False])
@on_all_shapes
def test_weights_that_are_applied_past_the_store_are_undone_as_well(tmp_path: Path, shape: Shape, undo: bool) -> None:
    with contextlib.closing(shape.create(Scheme(str(tmp_path)), undo=undo)) as receiver:
        receiver.apply_weights(OLD)
        generates(shape, OLD)
        shape.models[1].fail = "half-way"
        with pytest.raises(PublishError, match="half-way"):
            receiver.apply_weights(NEW)
        if undo:
            generates(shape, *old_and(shape, OLD))
        else:
            with pytest.raises(EngineTornError):
                shape.generate()
        receiver.apply_weights(NEW)
        generates(shape, NEW)


@pytest.mark.parametrize("shape", ["AsyncVLLM"], indirect=True)
def test_one_torn_replica_of_several_is_not_generated_with(tmp_path: Path, shape: Shape) -> None:
    """Whichever replica is healed first."""
    with both_sides(tmp_path, shape, undo=False) as (sender, receiver):
        sender.update_weights(OLD)
        for ranks in shape.replicas:
            ranks.models[1].fail = "half-way"
        for _ in range(2):
            with pytest.raises(InstallError):
                receiver.poll_and_apply(timeout=0)
            with pytest.raises(EngineTornError):
                shape.generate()
            shape.replicas[0].models[0].fail = "half-way"
        with pytest.raises(InstallError):
            receiver.poll_and_apply(timeout=0)
        with pytest.raises(EngineTornError):
            shape.generate()
        assert receiver.poll_and_apply(timeout=0)
        generates(shape, OLD)


@pytest.mark.parametrize("shape", ["LLM", "AsyncVLLM"], indirect=True)
def test_ranks_of_two_versions_are_not_generated_with(tmp_path: Path, shape: Shape) -> None:
    with both_sides(tmp_path, shape) as (sender, receiver):
        sender.update_weights(OLD)
        assert receiver.poll_and_apply(timeout=0)
        shape.ranks.engine.ranks[1]._gate.set_version(WeightVersion("another run", 7))
        sender.update_weights(NEW)
        shape.models[0].fail = "half-way"
        with pytest.raises(InstallError, match="half-way") as caught:
            receiver.poll_and_apply(timeout=0)
        assert caught.value.torn
        with pytest.raises(EngineTornError, match="different versions"):
            shape.generate()
        assert receiver.poll_and_apply(timeout=0)
        generates(shape, NEW)


class Late(concurrent.futures.Future[Any]):
    """An answer that comes after whoever waits for it has given up."""

    def result(self, timeout: float | None = None) -> Any:
        raise TimeoutError


@pytest.mark.parametrize("num_late", [1, 100])
@pytest.mark.parametrize("shape", ["Collective"], indirect=True)
def test_a_rank_that_answers_late(tmp_path: Path, shape: Shape, num_late: int) -> None:
    """What it did is asked for; while that is not known, nothing is generated."""
    assert isinstance(shape, Collective)
    with both_sides(tmp_path, shape) as (sender, receiver):
        sender.update_weights(OLD)
        assert receiver.poll_and_apply(timeout=0)
        late: list[str] = []

        def answer(call: str, rank: int, future: Any) -> Any:
            if rank == 0 or (call != "install" and not late) or len(late) == num_late:
                return future
            late.append(call)
            return Late()

        shape.ranks.answer = answer
        sender.update_weights(NEW)
        if num_late == 1:
            assert receiver.poll_and_apply(timeout=0)
            assert late == ["install"]
        else:
            with pytest.raises(InstallError) as caught:
                receiver.poll_and_apply(timeout=0)
            assert caught.value.torn
            with pytest.raises(EngineTornError, match="gave no answer"):
                shape.generate()
            shape.ranks.answer = lambda call, rank, future: future
            assert receiver.poll_and_apply(timeout=0)
        generates(shape, NEW)


class EngineDeadError(Exception):
    """By this name vLLM says that a process of its engine has died."""


@pytest.mark.parametrize("shape", ["Collective", "AsyncVLLM"], indirect=True)
def test_a_worker_that_dies_in_a_load_is_an_error(tmp_path: Path, shape: Shape) -> None:
    with both_sides(tmp_path, shape) as (sender, receiver):
        sender.update_weights(OLD)
        assert receiver.poll_and_apply(timeout=0)
        dead: list[bool] = []

        def answer(call: str, rank: int, future: Any) -> Any:
            dead.append(bool(dead) or call == "install")
            if dead[-1]:
                raise EngineDeadError("a worker has died")
            dead.clear()
            return future

        shape.ranks.answer = answer
        sender.update_weights(NEW)
        with pytest.raises(InstallError) as caught:
            receiver.poll_and_apply(timeout=0)
        assert caught.value.torn
        with pytest.raises(EngineTornError, match="has died"):
            shape.generate()


@pytest.mark.parametrize("undo", [True, False])
@pytest.mark.parametrize("fails", ["load", "reset"])
def test_a_module_of_this_process(tmp_path: Path, leaves_nothing: None, undo: bool, fails: str) -> None:
    scheme, module = Scheme(str(tmp_path)), LoadingModule()
    engine = vllm_shape(module.load_weights, module)
    generate_by(engine, lambda: torch.cat([module.a.detach(), module.b.detach()]).tolist())
    faults: list[Exception] = []
    engine.reset_prefix_cache = lambda: _raise(faults)
    sender, receiver = sender_of(scheme, module), scheme.create_receiver(engine, undo=undo)
    before = dict(vars(engine))

    def break_it() -> None:
        if fails == "load":
            module.fail_at = 1
        else:
            faults.append(RuntimeError("the test's fault"))

    steps = (lambda: receiver.poll_and_apply(timeout=0), lambda: receiver.apply_weights(_of(1.0)))
    sender.update_weights(_of(1.0))
    for take in steps:
        break_it()
        with pytest.raises((InstallError, RuntimeError), match="the test's fault"):
            take()
        module.fail_at = -1
        if undo:
            assert engine.generate() == [0.0] * 16
        else:
            for generate in (engine.generate, engine.llm_engine.step):
                with pytest.raises(EngineTornError, match="the test's fault"):
                    generate()
    assert receiver.poll_and_apply(timeout=0)
    assert engine.generate() == [1.0] * 16
    assert vars(engine) == before
    receiver.close()
    sender.close()


def test_an_undo_of_a_torn_module_leaves_it_torn(tmp_path: Path, leaves_nothing: None) -> None:
    scheme, module = Scheme(str(tmp_path)), LoadingModule()
    engine = vllm_shape(module.load_weights, module)
    generate_by(engine, lambda: "text")
    module.fail_at = 1
    with contextlib.closing(sender_of(scheme, module)) as sender:
        sender.update_weights(_of(1.0))
        for undo in (False, True):
            with contextlib.closing(scheme.create_receiver(engine, undo=undo)) as receiver:
                with pytest.raises(InstallError):
                    receiver.poll_and_apply(timeout=0)
                with pytest.raises(EngineTornError):
                    engine.generate()
        module.fail_at = -1
        with contextlib.closing(scheme.create_receiver(engine)) as receiver:
            assert receiver.poll_and_apply(timeout=0)
        assert engine.generate() == "text"


def test_a_method_that_was_taken_before_refuses_as_well(tmp_path: Path) -> None:
    """What an LLM generates goes through its engine."""
    with contextlib.closing(SHAPES["LLM"]()) as shape:
        generate = shape.given.generate
        with both_sides(tmp_path, shape, undo=False) as (sender, receiver):
            sender.update_weights(NEW)
            shape.models[0].fail = "half-way"
            with pytest.raises(InstallError):
                receiver.poll_and_apply(timeout=0)
            with pytest.raises(EngineTornError):
                generate()
            assert receiver.poll_and_apply(timeout=0)
            assert generate()


def _of(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((8,), value), "b": torch.full((8,), value)}


def _raise(faults: list[Exception]) -> None:
    if faults:
        raise faults.pop()


def test_a_loader_that_can_not_go_back_refuses(tmp_path: Path, leaves_nothing: None) -> None:
    """Nothing is known of its weights but how to load them."""
    scheme, faults = Scheme(str(tmp_path)), [RuntimeError("the test's fault")]
    engine = vllm_shape(lambda pairs: _raise(faults))
    generate_by(engine, lambda: "text")
    sender, receiver = sender_of(scheme), scheme.create_receiver(engine)
    sender.update_weights(_of(1.0))
    with pytest.raises(InstallError) as caught:
        receiver.poll_and_apply(timeout=0)
    assert caught.value.torn
    with pytest.raises(EngineTornError, match="the test's fault"):
        engine.generate()
    assert receiver.poll_and_apply(timeout=0)
    assert engine.generate() == "text"
    receiver.close()
    sender.close()


@pytest.mark.parametrize("shape", ["Collective"], indirect=True)
def test_a_scheme_that_is_initialised_takes_the_choice_of_an_undo(tmp_path: Path, shape: Shape) -> None:
    scheme = Scheme(str(tmp_path))
    scheme.init_on_sender(model_id="policy")
    scheme.init_on_receiver(model_id="policy", engine=shape.given, undo=False)
    scheme.send(OLD)
    shape.models[1].fail = "half-way"
    with pytest.raises(InstallError):
        scheme.receive()
    with pytest.raises(EngineTornError):
        shape.generate()
    assert scheme.receive()
    generates(shape, OLD)
    scheme.shutdown()
