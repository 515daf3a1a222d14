"""A receiver gets the device of the engine that it works for, whatever its background thread has as its own."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

import weightcast
from core.direct import DirectEngine, RecordingEngine
from weightcast import registry
from weightcast.errors import UnsupportedError
from weightcast.format.messages import InitInfo
from weightcast.links.link import WorkerLink
from weightcast.seams.transport import Receiver, Transport
from weightcast.transports import collective

pytestmark = pytest.mark.usefixtures("leaves_nothing")
TRANSPORT: Transport


class OnSecondGpu(RecordingEngine):
    devices = (torch.device("cpu"), torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("engine", "device"),
    [
        (OnSecondGpu(), torch.device("cuda", 1)),
        (RecordingEngine(), torch.device("cpu")),
        (weightcast.ModuleEngine(torch.nn.Linear(2, 2)), torch.device("cpu")),
    ],
    ids=["says a GPU", "says nothing", "module"],
)
def test_the_worker_hands_on_what_its_engine_says(
    engine: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    is_made = threading.Event()

    def receiver(url: str, *, link: WorkerLink | None, **options: Any) -> Receiver:
        assert link is not None
        made.append({"url": url, "link": link.address, **options})
        is_made.set()
        raise UnsupportedError("enough was seen")

    recording = Transport(registry.transport("memory://").sender, receiver, same_host=True)
    monkeypatch.setitem(globals(), "TRANSPORT", recording)
    monkeypatch.setitem(registry.TRANSPORTS, "recording", f"{__name__}:TRANSPORT")
    client = DirectEngine("a", engine)
    client.init(InitInfo("0" * 32, "a", "recording://x", "unix:@nobody", "0" * 64, 5.0, deadline_seconds=70.0))
    assert is_made.wait(30)
    client.close()
    expected = {"url": "recording://x", "link": "unix:@nobody", "run": "0" * 32, "peer": "a", "device": device}
    assert made == [{**expected, "deadline_seconds": 75.0}]


def test_over_nccl_an_engine_that_says_no_gpu_is_told_what_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcast.process_group.require", lambda backend: None)
    link = WorkerLink("tcp:127.0.0.1:1", lease_seconds=1.0, deadline_seconds=1.0)
    with contextlib.closing(link), pytest.raises(UnsupportedError, match="property `devices`"):
        collective.NCCL.receiver(
            "nccl://", run="0" * 32, peer="a", link=link, device=torch.device("cpu"), deadline_seconds=1.0
        )
