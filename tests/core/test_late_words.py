"""What is said of one version, or by one run, is never taken for another's, however late it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.direct import DirectEngine, RecordingEngine, fleet
from weightcast import TensorSource
from weightcast.errors import ControlError, ErrorRecord, PublishError, StaleVersionError
from weightcast.format.messages import Failed, Offer, Seal, UpdateInfo
from weightcast.links.link import Link
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TENSORS = {f"t{i}": torch.full((40, 40), float(i)) for i in range(8)}
DEADLINE_SECONDS = 20.0


class Lagging(DirectEngine):
    """Says on its link that an earlier version failed while it is asked about a later one."""

    publisher: Publisher
    late: int | None = None
    route = ""

    def _speak_late(self, call: str) -> None:
        if self.late is None or call != self.route:
            return
        hold, (member,) = self.worker._session, self.publisher._fleet.members
        assert hold is not None
        hold.send(Failed(self.late, ErrorRecord("UpdateAbortedError", "a late word of an earlier version")))
        for link in member.links:
            _wait_for(link, self.late)
        raise ControlError("what really went wrong", peer=self.name)

    def update(self, info: UpdateInfo) -> None:
        self._speak_late(type(info).__name__)
        super().update(info)

    def finish(self, version: int) -> None:
        self._speak_late("finish")
        super().finish(version)


def _wait_for(link: Link, version: int) -> None:
    def has_come() -> bool:
        return any(isinstance(message, Failed) and message.version == version for message in link._verdicts)

    with link._condition:
        assert link._condition.wait_for(has_come, DEADLINE_SECONDS)


@pytest.mark.parametrize("route", ["Offer", "Seal", "finish"])
def test_a_late_failure_of_an_earlier_version_is_not_the_cause_of_this_one(route: str) -> None:
    client = Lagging("lagging", RecordingEngine())
    with Publisher(
        TensorSource(TENSORS), engines=[client], options=PublishOptions(deadline_seconds=DEADLINE_SECONDS)
    ) as publisher:
        publisher.publish(1)
        client.publisher, client.late, client.route = publisher, 1, route
        for number in (2, 3):
            with pytest.raises(PublishError, match="what really went wrong"):
                publisher.publish(number)
        client.late = 9  # nor of a later one
        with pytest.raises(PublishError, match="what really went wrong"):
            publisher.publish(4)
        client.late = None
        assert publisher.publish(5).ok
    client.close()


def test_a_failure_of_this_very_version_explains_more_than_a_lost_peer() -> None:
    client = Lagging("lagging", RecordingEngine())
    with Publisher(
        TensorSource(TENSORS), engines=[client], options=PublishOptions(deadline_seconds=DEADLINE_SECONDS)
    ) as publisher:
        publisher.publish(1)
        client.publisher, client.late, client.route = publisher, 2, "Seal"
        with pytest.raises(PublishError, match="a late word"):
            publisher.publish(2)
    client.close()


def test_a_call_of_another_version_or_run_leaves_the_update_alone() -> None:
    told: list[str] = []

    def meddle(done_bytes: int, total_bytes: int) -> None:
        worker, secret = client.worker, _secret(publisher)
        calls: list[Any] = [
            lambda: worker.update(Seal(publisher.run, 1, 1, "0" * 32, secret)),
            lambda: worker.update(Offer(publisher.run, 1, "0" * 64, secret=secret)),
            lambda: worker.update(Seal("f" * 32, 2, 1, "0" * 32, secret)),
            lambda: worker.finish(1, "f" * 32),
            lambda: worker.finish(2, "f" * 32),
            lambda: worker.finish(3),
            lambda: worker.pause("keep", "f" * 32),
        ]
        told.extend(refusal(call) for call in calls)

    with fleet(TensorSource(TENSORS), RecordingEngine()) as (publisher, (client,)):
        publisher.publish(1)
        assert publisher.publish(2, on_progress=meddle).ok
        assert client.gate.version is not None
        assert client.gate.version.number == 2
    assert all(told), told


def test_a_finish_of_a_former_holder_does_not_install_what_its_successor_sealed() -> None:
    engine = RecordingEngine()
    first = DirectEngine("engine", engine)

    class Successor(DirectEngine):
        def finish(self, version: int) -> None:
            with pytest.raises(StaleVersionError, match="holds this engine: publish from that run only"):
                first.worker.finish(version, publisher.run)
            assert [v.run for v in engine.versions] == [publisher.run]
            super().finish(version)

    second = Successor("engine", engine)
    second.close()
    second.worker, second.gate = first.worker, first.gate
    with (
        Publisher(TensorSource(TENSORS), engines=[first]) as publisher,
        Publisher(TensorSource(TENSORS), engines=[second], options=PublishOptions(takeover=True)) as successor,
    ):
        publisher.publish(7)
        assert successor.publish(7).ok
    assert [v.run for v in engine.versions] == [publisher.run, successor.run]
    first.close()


def refusal(call: Callable[[], object]) -> str:
    """The words of the StaleVersionError that it raises: the error itself would keep the publisher's frames."""
    try:
        call()
    except StaleVersionError as exc:
        return str(exc)
    return ""


def _secret(publisher: Publisher) -> str:
    assert publisher._connections is not None
    return publisher._connections.listener.secret
