"""Ranks of a vLLM engine without vLLM: two in one process, each in a thread, over real gloo, links and ipc."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec import UNSET
from publishers import publisher_of

from weightcast import TensorSource
from weightcast.control.worker_rpc import Ask, Init, InstallCall, Leave, RankCall, RankReply, Settle, UpdateCall
from weightcast.errors import (
    ClosedError,
    EngineTornError,
    ErrorRecord,
    InstallError,
    PeerError,
    PublishError,
    RefusedError,
    StaleVersionError,
    UnsupportedError,
    UpdateAbortedError,
    from_record,
)
from weightcast.format.manifest import WeightVersion
from weightcast.format.messages import InitInfo, Seal, UpdateInfo, WeightInfo
from weightcast.host.deadline import Deadline
from weightcast.integrations.plugin.rank_consensus import Outcome, RankConsensus
from weightcast.integrations.plugin.rank_worker import RankWorker
from weightcast.seams.client import EngineClient, RecoveryRequest, ServesTraffic
from weightcast.testing.leftovers import nothing_left
from weightcast.trainer.publisher import Publisher

NUM_RANKS = 2
TENSORS = {"a": torch.arange(1000.0), "b": torch.arange(3000.0).reshape(3, 1000)}
ZEROS = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


class Model:
    """An engine of one rank. `fail` names the step that raises next."""

    def __init__(self) -> None:
        self.held = {name: tensor.clone() for name, tensor in ZEROS.items()}
        self.fail = ""

    def specs(self) -> None:
        return None

    def validate(self, manifest: Any) -> None:
        self._raise_in("validate")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._raise_in("load")
        for name, tensor in tensors:
            self.held[name] = tensor.clone()
            self._raise_in("half-way")

    def commit(self, version: WeightVersion) -> None:
        self._raise_in("commit")

    def discard(self) -> None:
        pass

    def snapshot(self) -> Callable[[], None]:
        copy = {name: tensor.clone() for name, tensor in self.held.items()}
        self._raise_in("snapshot")

        def restore() -> None:
            self._raise_in("restore")
            self.held.update(copy)

        return restore

    def _raise_in(self, step: str) -> None:
        if self.fail == step:
            self.fail = ""
            raise RuntimeError(f"the test's fault in {step}")


class Engine(EngineClient):
    """Two ranks behind one client, as vLLM's executor would call them: each call on all of them at once."""

    name = "engine"

    def __init__(self, **options: Any) -> None:
        store = dist.HashStore()
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_RANKS)
        self.models: list[Model] = []
        groups = list(self._pool.map(lambda rank: _gloo(store, rank), range(NUM_RANKS)))
        self.ranks = [self._rank(rank, group, options) for rank, group in enumerate(groups)]
        self.replies: list[RankReply] = []
        self._run = ""

    def _rank(self, rank: int, group: Any, options: dict[str, Any]) -> RankWorker:
        ranks = RankConsensus([group], deadline_seconds=20.0)
        self.models.append(Model())
        return RankWorker(self.models[-1], ranks, engine_rank=rank, world_size=NUM_RANKS, **options)

    def call(self, call: RankCall) -> ErrorRecord | None:
        """The error that the ranks agree on."""
        values = msgspec.to_builtins(call)
        answers = self._pool.map(lambda rank: rank.answer(values), self.ranks)
        self.replies = msgspec.convert(list(answers), list[RankReply])
        error = self.replies[0].error
        assert all(reply.error == error for reply in self.replies), self.replies
        return error

    def require(self, call: RankCall) -> None:
        error = self.call(call)
        if error is not None:
            raise from_record(error)

    def info(self) -> WeightInfo:
        self.require(Ask())
        infos = [reply.info for reply in self.replies]
        holders = {info.holder for info in infos}
        # The links of the ranks end one after the other.
        first, second = (msgspec.structs.replace(info, holder="", dropped=UNSET, instance=UNSET) for info in infos)
        assert first == second
        dropped = True if any(info.dropped is True for info in infos) else UNSET
        return msgspec.structs.replace(first, holder=holders.pop() if len(holders) == 1 else "", dropped=dropped)

    def init(self, info: InitInfo) -> None:
        self._run = info.run
        self.require(Init(info))

    def update(self, info: UpdateInfo) -> None:
        self.require(UpdateCall(info))

    def finish(self, version: int) -> None:
        self.require(InstallCall(self._run, version))

    def close(self) -> None:
        self.require(Leave())
        self._pool.shutdown()

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(model.held[name], t) for model in self.models for name, t in tensors.items())


def _gloo(store: Any, rank: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, NUM_RANKS, datetime.timedelta(seconds=20))


@contextlib.contextmanager
def publisher(engine: Engine, tensors: dict[str, torch.Tensor] = TENSORS, **options: Any) -> Iterator[Publisher]:
    options = {"bucket_size_bytes": 4096, "deadline_seconds": 10.0, **options}
    with publisher_of(TensorSource(tensors), engines=[engine], **options) as made:
        yield made


def failure(publishing: Publisher) -> Exception:
    with pytest.raises(PublishError) as caught:
        publishing.publish()
    return caught.value.failures["engine"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def test_all_ranks_install_what_was_published(engine: Engine) -> None:
    with publisher(engine) as it:
        assert it.publish().ok
        assert engine.holds(TENSORS)
        assert engine.info().weight_version == "0"
        assert set(engine.info().abilities) == {"streaming", "undo", "dtypes"}
        assert engine.call(InstallCall(it.run, 0)) is None, "a second call of the same finds it done"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", ["snapshot", "load", "half-way", "commit"])
def test_a_failure_on_one_rank_takes_all_back(engine: Engine, step: str, rank: int) -> None:
    with publisher(engine, undo=True) as it:
        engine.models[rank].fail = step
        error = failure(it)
        assert isinstance(error, InstallError)
        assert not error.torn
        assert f"the test's fault in {step}" in str(error)
        assert f"[engine rank {rank}]" in str(error)
        assert engine.holds(ZEROS)
        assert engine.info().weight_version == "default"
        assert it.publish().ok
        assert engine.holds(TENSORS)


@pytest.mark.parametrize("step", ["load", "half-way", "commit"])
def test_a_failure_on_one_rank_tears_all_without_undo(engine: Engine, step: str) -> None:
    with publisher(engine) as it:
        engine.models[1].fail = step
        error = failure(it)
        assert isinstance(error, InstallError)
        assert error.torn
        assert "publish a complete update" in engine.info().torn
        assert it.publish().ok
        assert not engine.info().torn
        assert engine.holds(TENSORS)


def test_a_rank_that_cannot_go_back_tears_all(engine: Engine) -> None:
    with publisher(engine, undo=True) as it:
        engine.models[0].fail, engine.models[1].fail = "load", "restore"
        error = failure(it)
        assert isinstance(error, InstallError)
        assert error.torn
        assert "restoring the former version failed too" in engine.info().torn
        assert it.publish().ok
        assert not engine.info().torn


@pytest.mark.parametrize("rank", [0, 1])
def test_an_offer_that_one_rank_refuses_is_taken_by_none(engine: Engine, rank: int) -> None:
    with publisher(engine) as it:
        engine.models[rank].fail = "validate"
        assert f"the test's fault in validate [engine rank {rank}]" in str(failure(it))
        for thread in threading.enumerate():
            if thread.name == "weightcast-receive":
                thread.join(60)
                assert not thread.is_alive(), "a rank that took the offer waits for buckets"
        assert it.publish().ok


def test_an_update_that_ended_on_one_rank_is_installed_on_none(engine: Engine) -> None:
    with publisher(engine) as it:
        install = engine.finish

        def lose_a_rank_first(version: int) -> None:
            engine.ranks[1]._worker.shutdown()
            install(version)

        engine.finish = lose_a_rank_first  # type: ignore[method-assign]
        error = failure(it)
        assert isinstance(error, ClosedError)
        assert "[engine rank 1]" in str(error)
        assert engine.holds(ZEROS)
        engine.finish = install  # type: ignore[method-assign]
        assert it.publish().ok


def test_an_update_that_ends_on_one_rank_as_the_install_begins_is_installed_on_none(engine: Engine) -> None:
    with publisher(engine, undo=True) as it:
        worker = engine.ranks[0]._worker
        finish = worker.finish

        def too_late(number: int) -> WeightVersion:
            worker.shutdown()
            return finish(number)

        worker.finish = too_late  # type: ignore[method-assign]
        error = failure(it)
        assert "[engine rank 0]" in str(error)
        assert engine.holds(ZEROS)
        assert not engine.info().torn
        worker.finish = finish  # type: ignore[method-assign]
        assert it.publish().ok


def test_an_install_can_be_taken_back_until_it_is_settled(engine: Engine) -> None:
    with publisher(engine, undo=True) as it:
        it.publish()
        assert engine.call(Settle(it.run, 0, keep=False)) is None
        assert engine.holds(ZEROS)
        assert engine.info().weight_version == "default"
        assert it.publish().version == 1
        assert engine.call(Settle(it.run, 1, keep=True)) is None
        assert engine.call(Settle(it.run, 1, keep=False)) is None, "only the first counts"
        assert engine.holds(TENSORS)
        assert engine.info().weight_version == "1"


def test_what_other_engines_may_lack_is_torn_until_it_is_settled(engine: Engine) -> None:
    with publisher(engine, undo=True) as it:
        engine.finish = lambda version: engine.require(InstallCall(it.run, version, world_size=2 * NUM_RANKS))  # type: ignore[method-assign]
        it.publish()
        assert "not known whether the other data-parallel engines have it" in engine.info().torn
        engine.call(Settle(it.run, 0, keep=True))
        assert not engine.info().torn
        it.publish()
        assert engine.info().torn
        it.publish()
        assert engine.call(Settle(it.run, 2, keep=False)) is None
        assert not engine.info().torn
        assert engine.info().weight_version == "1", "the next offer has kept it"


def test_an_install_on_all_ranks_that_there_are_may_be_kept_at_once(engine: Engine) -> None:
    with publisher(engine) as it:
        engine.finish = lambda version: engine.require(InstallCall(it.run, version, NUM_RANKS, keep=True))  # type: ignore[method-assign]
        it.publish()
        assert engine.call(Settle(it.run, 0, keep=False)) is None, "there is nothing to take back"
        assert engine.holds(TENSORS)
        assert not engine.info().torn
        engine.models[1].fail = "commit"
        assert isinstance(failure(it), InstallError)
        assert engine.info().torn


def test_an_install_without_undo_that_is_taken_back_tears(engine: Engine) -> None:
    with publisher(engine) as it:
        it.publish()
        engine.call(Settle(it.run, 0, keep=False))
        assert "rolled back" in engine.info().torn
        assert it.publish().ok
        assert not engine.info().torn


def test_what_was_taken_back_is_told_on_the_links(engine: Engine) -> None:
    for undo, kind in ((True, UpdateAbortedError), (False, EngineTornError)):
        with publisher(engine, undo=undo) as it:
            it.publish()
            links = it._fleet.members[0].links
            engine.call(Settle(it.run, it.version, keep=False))
            for link in links:
                with pytest.raises(kind):
                    link.wait(Seal, it.version, Deadline(60.0))


def test_a_token_is_required_if_there_is_one() -> None:
    engine = Engine(token="sesame")
    with publisher(engine) as it:
        assert "WEIGHTCAST_TOKEN" in str(failure(it))
        assert isinstance(failure(it), RefusedError)
        engine.init = _with_token(engine, "sesame")  # type: ignore[method-assign]
        assert it.publish().ok
    engine.close()


def _with_token(engine: Engine, token: str) -> Callable[[InitInfo], None]:
    init = Engine.init
    return lambda info: init(engine, msgspec.structs.replace(info, token=token))


def test_what_is_unsupported_is_refused_by_name_at_init() -> None:
    engine = Engine(unsupported=("enable_elastic_ep",))
    with publisher(engine) as it:
        error = failure(it)
    assert isinstance(error, UnsupportedError)
    assert "enable_elastic_ep" in str(error)
    engine.close()


class PausedEngine(Engine, ServesTraffic):
    """Notes when it is paused and resumed, and whether a rank was still loading then."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, bool]] = []

    def pause(self, run: str) -> None:
        self._note("pause")

    def resume(self, run: str) -> None:
        self._note("resume")

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        return []

    def _note(self, call: str) -> None:
        self.require(Ask())
        self.calls.append((call, any(reply.is_loading for reply in self.replies)))


@pytest.mark.parametrize("undo", [False, True])
def test_streaming_into_an_engine_of_which_one_rank_fails_ends_on_all_before_it_is_resumed(undo: bool) -> None:
    """Ranks do not agree on each bucket: the others wait for more of them until the publisher gives the update up."""
    engine, tensors = PausedEngine(), {name: tensor.clone() for name, tensor in TENSORS.items()}
    try:
        with publisher(engine, tensors, install="streaming", undo=undo) as it:
            assert it.publish().ok
            engine.calls.clear()
            for tensor in tensors.values():
                tensor.add_(1)
            engine.models[1].fail = "half-way"
            error = failure(it)
            assert isinstance(error, InstallError)
            assert error.torn is not undo
            assert engine.calls == [("pause", False), ("resume", False)]
            assert engine.holds(TENSORS) is undo
            assert it.publish().ok
            assert engine.holds(tensors)
    finally:
        engine.close()


def test_a_refusal_has_the_problems_of_all_ranks() -> None:
    """Of a pipeline's layers, or of experts, each rank misses its own."""
    ranks = RankConsensus([], first_rank=2)
    records = [ErrorRecord("IncompatibleWeightsError", "no", problems) for problems in (("a", "b"), (), ("b", "c"))]
    outcomes = [Outcome(record if record.problems else None) for record in records]
    message = "no [engine ranks 2, 4, 3 problems in all]"
    assert ranks.first_error(outcomes) == ErrorRecord("IncompatibleWeightsError", message, ("a", "b", "c"))


def test_calls_out_of_order_are_errors_that_all_ranks_share(engine: Engine) -> None:
    run = "a" * 32
    for call in (InstallCall(run, 3), UpdateCall(Seal(run, 3, 1, "0" * 32))):
        error = engine.call(call)
        assert error is not None
        assert error.kind == "ClosedError"
        assert "[engine ranks 0, 1]" in error.message
    assert engine.call(Leave()) is None
    assert engine.call(Leave()) is None
    with publisher(engine) as it:
        assert it.publish().ok


def test_another_version_than_the_sealed_one_is_installed_on_no_rank(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = engine.finish

    def finish_the_wrong_one_first(version: int) -> None:
        with pytest.raises(StaleVersionError, match=r"version 1 is not the update in progress \(version 0\)"):
            finish(version + 1)
        assert engine.holds(ZEROS)
        finish(version)

    monkeypatch.setattr(engine, "finish", finish_the_wrong_one_first)
    with publisher(engine) as it:
        assert it.publish().ok
        assert engine.holds(TENSORS)


def test_what_is_no_call_is_answered_with_an_error(engine: Engine) -> None:
    for values in ({"call": "nonsense"}, None, 7, [], {"call": "install", "run": "x"}):
        reply = msgspec.convert(engine.ranks[0].answer(values), RankReply)
        assert reply.error is not None
        assert reply.error.kind == "ManifestError"


def test_nothing_stays_after_leaving(engine: Engine) -> None:
    with nothing_left(), publisher(engine) as it:
        it.publish()
        engine.require(Leave())
        assert it.publish().ok, "the next publish joins again"
        engine.require(Leave())


def test_a_rank_that_never_answers_is_an_error_by_the_deadline() -> None:
    store = dist.HashStore()
    with concurrent.futures.ThreadPoolExecutor(NUM_RANKS) as pool:
        group, _other = pool.map(lambda rank: _gloo(store, rank), range(NUM_RANKS))
    ranks = RankConsensus([group], deadline_seconds=0.2)
    with pytest.raises(PeerError, match="an exchange among the ranks of this engine failed"):
        ranks.exchange(Outcome())
    with pytest.raises(PeerError, match="the ranks of this engine are out of step"):
        ranks.exchange(Outcome())


def test_outcomes_of_any_length_come_in_the_order_of_ranks() -> None:
    store = dist.HashStore()
    outcomes = [Outcome(ErrorRecord("InstallError", "x" * 5000, torn=True)), Outcome(serves=True)]

    def exchange(rank: int) -> list[Outcome]:
        return RankConsensus([_gloo(store, rank)]).exchange(outcomes[rank])

    with concurrent.futures.ThreadPoolExecutor(NUM_RANKS) as pool:
        assert list(pool.map(exchange, range(NUM_RANKS))) == [outcomes] * NUM_RANKS
