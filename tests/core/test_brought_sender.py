"""An engine without workers of ours, whose client brings the sender: every pause ends, guarded by the watchdog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from weightcast import TensorSource
from weightcast.errors import PeerDiedError, PublishError, UnsupportedError, WeightcastError
from weightcast.format.bucket import BucketBuffer, slot_size_bytes
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.messages import Abort, WeightInfo
from weightcast.links.watchdog import RecoveryRequest, Watchdog
from weightcast.seams.client import EngineClient, SenderContext, ServesTraffic
from weightcast.trainer import publish_run
from weightcast.trainer.fleet import Fleet, FleetMember
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")
TENSORS = {"weight": torch.randn(40, 40)}


class ListedSender:
    """A sender of clients' that notes what is asked of it; `raises` at `send`."""

    address, is_staged = "", False

    def __init__(self) -> None:
        self.failures: Mapping[str, WeightcastError] = {}
        self.raises: BaseException | None = None
        self.reasons: list[str] = []

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        self.failures, self._manifest = {}, manifest
        return 0

    def buffer(self, index: int) -> BucketBuffer:
        return BucketBuffer.of(torch.empty(slot_size_bytes(self._manifest), dtype=torch.uint8))

    def send(self, index: int, num_bytes: int) -> None:
        raises, self.raises = self.raises, None
        if isinstance(raises, WeightcastError):
            self.failures = {"engine": raises}
        elif raises is not None:
            raise raises

    def connected(self, peers: Sequence[str]) -> Sequence[str]:
        return peers

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)

    def close(self) -> None: ...


class Bringing(EngineClient, ServesTraffic):
    """Its engine only counts pauses."""

    name = "engine"

    def __init__(self) -> None:
        self.own = ListedSender()
        self.calls: list[str] = []
        self.fails_to_finish = False

    def info(self) -> WeightInfo:
        return WeightInfo("default", world_size=0)

    def init(self, info: Any) -> None: ...

    def update(self, info: Any) -> None:
        self.calls += ["abort"] * isinstance(info, Abort)

    def sender(self, known: Sequence[Any], context: SenderContext) -> Any:
        return self.own

    def pause(self, run: str) -> None:
        self.calls.append("pause")

    def finish(self, version: int) -> None:
        self.calls.append("finish")
        if self.fails_to_finish:
            raise PeerDiedError("gone", peer="engine")

    def resume(self, run: str) -> None:
        self.calls.append("resume")

    def recovery_requests(self, run: str) -> Sequence[RecoveryRequest]:
        return [RecoveryRequest("http://127.0.0.1:9/resume")]


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The engines that the watchdog would resume."""
    held: set[str] = set()
    monkeypatch.setattr("weightcast.links.watchdog.Watchdog.keep", lambda self, name, requests: held.add(name))
    monkeypatch.setattr("weightcast.links.watchdog.Watchdog.release", lambda self, name: held.discard(name))
    return held


@pytest.mark.parametrize("error", [PeerDiedError("lost", peer="engine"), ValueError("no"), KeyboardInterrupt()])
def test_a_pause_ends_whatever_becomes_of_the_transfer(guarded: set[str], error: BaseException) -> None:
    client = Bringing()
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher:
        client.own.raises = error
        with pytest.raises(PublishError if isinstance(error, WeightcastError) else type(error)):
            publisher.publish()
        aborted = ["abort"] if isinstance(error, ValueError) else []
        assert (client.calls, guarded) == (["pause", "resume", *aborted], set())
        client.calls.clear()
        assert publisher.publish().ok
        assert (client.calls, guarded) == (["pause", "finish", "resume"], set())


def test_an_engine_that_does_not_finish_is_resumed(guarded: set[str]) -> None:
    client = Bringing()
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher:
        client.fails_to_finish = True
        with pytest.raises(PublishError, match="gone"):
            publisher.publish()
        assert (client.calls, guarded) == (["pause", "finish", "resume"], set())


def test_an_abort_that_fails_at_one_sender_keeps_no_engine_from_its_own(
    monkeypatch: pytest.MonkeyPatch, guarded: set[str]
) -> None:
    def abort(reason: str) -> None:
        raise ZeroDivisionError

    client = Bringing()
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher:
        client.own.raises = ValueError("no")
        monkeypatch.setattr(client.own, "abort", abort)
        with pytest.raises(ZeroDivisionError):
            publisher.publish()
        assert (client.calls, guarded) == (["pause", "resume", "abort"], set())


def test_every_client_is_closed_whatever_another_one_raises() -> None:
    closed = []

    class Closing(Bringing):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise ZeroDivisionError

    fleet = Fleet()
    for name in "abc":
        fleet.add(FleetMember(Closing(name), "run", Watchdog(), 60.0, owned=True))
    with pytest.raises(ZeroDivisionError):
        fleet.close()
    assert sorted(closed) == ["a", "b", "c"]


def test_nothing_waits_for_digests_that_no_worker_compares(monkeypatch: pytest.MonkeyPatch, guarded: set[str]) -> None:
    """On a GPU that would be a wait for the device during the engine's pause."""

    def refused(*args: object) -> str:
        raise AssertionError("the root was computed")

    monkeypatch.setattr(publish_run, "root_digest", refused)
    with Publisher(TensorSource(TENSORS), engines=[Bringing()]) as publisher:
        assert publisher.publish().ok


def test_an_engine_that_is_written_to_bucket_by_bucket_is_not_brought_to_a_version_again(guarded: set[str]) -> None:
    """Its weights can't be compared before they are changed."""
    client = Bringing()
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher:
        publisher.publish()
        client.calls.clear()
        with pytest.raises(PublishError, match="publish a new version") as caught:
            publisher.sync(client)
        assert isinstance(caught.value.failures["engine"], UnsupportedError)
        assert client.calls in ([], ["abort"])
        assert publisher.publish().version == 1
    assert not guarded
