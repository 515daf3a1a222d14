"""NeMo-RL's contract, as `nemo_rl/utils/checkpoint_engines/base.py` has it: its calls, in its order, with real workers.

NeMo-RL is on no package index. Its base class is written down here; what its workers do around it is `Refit`.
"""

from __future__ import annotations

import abc
import asyncio
import importlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from weightcast import registry
from weightcast.errors import (
    IncompatibleWeightsError,
    InstallError,
    PeerTimeoutError,
    UpdateAbortedError,
    WeightcastError,
)

pytest.importorskip("ray")

DEADLINE_SECONDS = 20.0
BUCKET_BYTES = 64 << 10
SHAPES = {f"layers.{i}.{name}": shape for i in range(6) for name, shape in (("w", (120, 301)), ("b", (7,)))}
"""Each `w` is larger than a bucket."""


class BaseEngine(abc.ABC):
    """The contract."""

    cleanup_after_load: bool = True
    shard_expert_weights: bool = False

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        return None

    @abc.abstractmethod
    def prepare(self) -> Any: ...

    @abc.abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abc.abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None:
        return None

    @abc.abstractmethod
    async def send_weights(self, weights: Any) -> None: ...

    @abc.abstractmethod
    def receive_weight_batches(self) -> Any: ...


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., Any]]:
    """NeMo-RL's `create_checkpoint_engine` with the name from its configuration."""
    names = ["nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines", "nemo_rl.utils.checkpoint_engines.base"]
    patch = pytest.MonkeyPatch()
    for name in names:
        patch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].CheckpointEngine = BaseEngine  # type: ignore[attr-defined]

    def create(*, bucket_size: int = BUCKET_BYTES, **engine_kwargs: Any) -> Any:
        module_name, class_name = ["weightcast.integrations.nemo_rl", "NemoCheckpointEngine"]
        engine_class = getattr(importlib.import_module(module_name), class_name)
        options = {"host": "127.0.0.1", "deadline_seconds": DEADLINE_SECONDS} | engine_kwargs
        return engine_class(bucket_size=bucket_size, **options)

    yield create
    for name in [name for name in sys.modules if name.startswith("weightcast.integrations.nemo_rl")]:
        del sys.modules[name]
    patch.undo()


def value(step: int, name: str) -> float:
    return float(step * 100 + sum(map(ord, name)) % 97)


def weights(step: int, *, fails_at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in SHAPES.items():
        if name == fails_at:
            raise OSError(f"the exporter failed at {name}")
        yield name, torch.full(shape, value(step, name), dtype=torch.float32 if name.endswith("w") else torch.bfloat16)


class Refit:
    """Policy workers and rollout workers, each with a thread of its own as they have a process."""

    def __init__(self, make_engine: Callable[..., Any], num_policy: int, num_rollout: int, **options: Any) -> None:
        self._make = lambda: make_engine(**options)
        self.policy = [self._make() for _ in range(num_policy)]
        self.rollout = [self._make() for _ in range(num_rollout)]
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in self.rollout]
        self.batches: list[list[int]] = [[] for _ in self.rollout]
        self.fails_at: dict[int, str] = {}
        self._pool = ThreadPoolExecutor(num_policy + num_rollout)

    def __enter__(self) -> Refit:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(wait=True)
        for engine in self.policy + self.rollout:
            engine.close()

    def restart_rollout(self, rank: int) -> None:
        self.rollout[rank].close()
        self.rollout[rank] = self._make()

    def run(self, step: int, **exporter: str) -> list[BaseException | None]:
        """One refit; the error of each worker, policy workers first."""
        metadata = pickle.loads(pickle.dumps([engine.prepare() for engine in self.policy + self.rollout]))
        sizes = {"train_world_size": len(self.policy), "rollout_world_size": len(self.rollout), "metadata": metadata}
        for rank, engine in enumerate(self.policy):
            engine.init_policy_process_group(worker_rank=rank, **sizes)
        for rank, engine in enumerate(self.rollout):
            engine.init_rollout_process_group(rollout_rank=rank, **sizes)
        iterators = [weights(step, **exporter) for _ in self.policy]
        calls: list[Any] = [
            lambda engine=engine, each=each: asyncio.run(engine.send_weights(each))
            for engine, each in zip(self.policy, iterators, strict=True)
        ]
        calls += [lambda rank=rank: asyncio.run(self._receive(rank)) for rank in range(len(self.rollout))]
        futures = [self._pool.submit(call) for call in calls]
        errors = [future.exception(5 * DEADLINE_SECONDS) for future in futures]
        assert all(next(each, None) is None for each in iterators), "all ranks have taken their weights to the end"
        for engine in self.policy + self.rollout:
            engine.finalize()
        return errors

    async def _receive(self, rank: int) -> None:
        """As NeMo-RL's worker does: each batch is loaded before the next is asked for."""
        self.batches[rank] = []
        async for batch in self.rollout[rank].receive_weight_batches():
            self.batches[rank].append(len(batch))
            for name, tensor in batch:
                if name == self.fails_at.get(rank):
                    raise OSError(f"the model takes no {name}")
                self.held[rank][name] = tensor.clone()

    def require_step(self, step: int) -> None:
        for held in self.held:
            assert held.keys() == SHAPES.keys()
            for name, tensor in held.items():
                expected = torch.full(SHAPES[name], value(step, name), dtype=tensor.dtype)
                assert torch.equal(tensor, expected), (step, name)


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize(("num_policy", "num_rollout"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("transport", [None, "gloo://127.0.0.1:0"])
def test_every_rollout_worker_has_each_version(
    make_engine: Callable[..., Any], num_policy: int, num_rollout: int, install: str, transport: str | None
) -> None:
    with Refit(make_engine, num_policy, num_rollout, install=install, transport=transport) as refit:
        for step in (1, 2, 3):
            assert refit.run(step) == [None] * (num_policy + num_rollout)
            refit.require_step(step)
            assert all(sum(batches) == len(SHAPES) and len(batches) > 1 for batches in refit.batches)


@pytest.mark.parametrize("is_near", [True, False])
def test_the_transport_is_that_of_the_hosts(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_near: bool
) -> None:
    made, transport = [], registry.transport
    monkeypatch.setattr(registry, "transport", lambda url: made.append(url.partition(":")[0]) or transport(url))
    with Refit(make_engine, 1, 2) as refit:
        if not is_near:
            far = refit.rollout[1]
            url, token, _ = far.prepare()["endpoint"]
            monkeypatch.setattr(far, "prepare", lambda: {"endpoint": (url, token, "another host")})
        assert refit.run(1) == [None] * 3
        refit.require_step(1)
        assert set(made) == ({"ipc"} if is_near else {"ipc", "gloo"})  # each worker imports the default one, ipc


def test_small_tensors_come_in_one_batch(make_engine: Callable[..., Any]) -> None:
    with Refit(make_engine, 1, 1, bucket_size=16 << 20) as refit:
        assert refit.run(1) == [None, None]
        assert refit.batches == [[len(SHAPES)]]


def test_connections_that_are_not_kept(make_engine: Callable[..., Any]) -> None:
    with Refit(make_engine, 1, 2, keep_connected=False) as refit:
        for step in (1, 2):
            assert refit.run(step) == [None] * 3
            refit.require_step(step)


@pytest.mark.parametrize("is_first", [True, False])
def test_an_exporter_that_fails_leaves_every_rollout_as_it_was(make_engine: Callable[..., Any], is_first: bool) -> None:
    with Refit(make_engine, 1, 2) as refit:
        if not is_first:
            refit.run(1)
        sender, *receivers = refit.run(2, fails_at="layers.3.w")
        assert isinstance(sender, (OSError, WeightcastError))
        assert all(isinstance(error, WeightcastError) and not isinstance(error, InstallError) for error in receivers)
        if not is_first:
            refit.require_step(1)
        assert refit.run(3) == [None] * 3
        refit.require_step(3)


def test_a_rollout_that_fails_in_its_load_is_an_install_error_and_the_next_refit_heals_it(
    make_engine: Callable[..., Any],
) -> None:
    with Refit(make_engine, 1, 2) as refit:
        refit.run(1)
        refit.fails_at = {1: "layers.4.w"}
        sender, _, failed = refit.run(2)
        assert isinstance(sender, InstallError)
        assert isinstance(failed, OSError)
        assert isinstance(pickle.loads(pickle.dumps(sender)), InstallError)
        refit.fails_at = {}
        assert refit.run(3) == [None] * 3
        refit.require_step(3)


def test_a_rollout_worker_that_was_started_again(make_engine: Callable[..., Any]) -> None:
    with Refit(make_engine, 2, 2) as refit:
        refit.run(1)
        refit.restart_rollout(1)
        assert refit.run(2) == [None] * 4
        refit.require_step(2)


@pytest.mark.parametrize("fault", ["never asks for its weights", "is lost before its weights come"])
def test_a_rollout_worker_that_is_silent_is_an_error_within_the_deadline(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with Refit(make_engine, 1, 2, deadline_seconds=2.0) as refit:
        assert refit.run(1) == [None] * 3

        async def silent(rank: int) -> None:
            if rank == 0:
                await Refit._receive(refit, rank)
            elif fault == "is lost before its weights come":
                refit.rollout[1].close()

        with monkeypatch.context() as patched:
            patched.setattr(refit, "_receive", silent)
            sender, _, _ = refit.run(2)
        assert isinstance(sender, WeightcastError)
        refit.restart_rollout(1)
        assert refit.run(3) == [None] * 3
        refit.require_step(3)


def test_a_trainer_that_sends_nothing_ends_the_wait(make_engine: Callable[..., Any]) -> None:
    with Refit(make_engine, 1, 1, deadline_seconds=1.0) as refit:
        engine = refit.rollout[0]
        engine.prepare()
        engine.init_rollout_process_group(rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=[])
        with pytest.raises(
            PeerTimeoutError,
            match=r"set a larger policy\.generation\.refit_cfg\[.*NemoCheckpointEngine\"\]\.deadline_seconds",
        ):
            asyncio.run(refit._receive(0))


def test_the_event_loop_goes_on_while_weights_are_sent(make_engine: Callable[..., Any]) -> None:
    async def answer() -> int:
        return 7

    def asking(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, torch.Tensor]]:
        for named in weights(1):
            assert asyncio.run_coroutine_threadsafe(answer(), loop).result(DEADLINE_SECONDS) == 7
            yield named

    async def send(engine: Any) -> None:
        await engine.send_weights(asking(asyncio.get_running_loop()))

    with Refit(make_engine, 1, 1) as refit:
        (policy,), (rollout,) = refit.policy, refit.rollout
        sizes = {"train_world_size": 1, "rollout_world_size": 1, "metadata": [None, rollout.prepare()]}
        policy.init_policy_process_group(worker_rank=0, **sizes)
        rollout.init_rollout_process_group(rollout_rank=0, **sizes)
        received = refit._pool.submit(lambda: asyncio.run(refit._receive(0)))
        asyncio.run(send(policy))
        received.result(DEADLINE_SECONDS)
        refit.require_step(1)


def test_a_rollout_whose_task_is_cancelled_waits_no_more_and_takes_the_next_refit(
    make_engine: Callable[..., Any],
) -> None:
    async def cancelled(refit: Refit) -> None:
        task = asyncio.create_task(refit._receive(0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Refit(make_engine, 1, 1) as refit:
        engine = refit.rollout[0]
        engine.prepare()
        engine.init_rollout_process_group(rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=[])
        asyncio.run(cancelled(refit))
        assert refit.run(2) == [None] * 2
        refit.require_step(2)


def test_other_weights_than_before_are_refused_by_name(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Refit(make_engine, 1, 1) as refit:
        refit.run(1)
        with monkeypatch.context() as patched:
            patched.setitem(SHAPES, "layers.0.b", (9,))
            sender, receiver = refit.run(2)
        assert isinstance(sender, IncompatibleWeightsError)
        assert "layers.0.b" in str(sender)
        assert isinstance(receiver, UpdateAbortedError)
        refit.require_step(1)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ([{}], "1 workers have prepared; after the 1 trainer ranks 0 have an endpoint, expected 1 rollout workers"),
        ([{}, {}], "2 workers have prepared; after the 1 trainer ranks 0 have an endpoint"),
        ([{}, None], "2 workers have prepared; after the 1 trainer ranks 0 have an endpoint"),
    ],
)
def test_rollout_workers_that_have_not_prepared(make_engine: Callable[..., Any], metadata: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_engine().init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
        )


def test_wrong_options_are_refused_where_the_engine_is_made(make_engine: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"NeMo-RL's updates do not support: leave it out, or set it to"):
        make_engine(transport="memory://")
    with pytest.raises(
        TypeError, match=r"has no 'dedline_seconds'; known: transport, install, deadline_seconds, host, "
    ):
        make_engine(dedline_seconds=3)


def test_outside_of_nemo_rls_environment_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that some other package is missing, which would be no help."""
    monkeypatch.delitem(sys.modules, "weightcast.integrations.nemo_rl", raising=False)
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"nemo_rl.*run this in NeMo-RL's own environment"):
        importlib.import_module("weightcast.integrations.nemo_rl")


def test_a_misspelt_class_is_answered_with_the_right_one(make_engine: Callable[..., Any]) -> None:
    module = importlib.import_module("weightcast.integrations.nemo_rl")
    with pytest.raises(AttributeError, match=r"refit_transport: 'weightcast\.integrations\.nemo_rl:NemoCheckpointEng"):
        _ = module.NemoCheckpointEngin
