"""What a peer of protocol 1 says, from the golden files of its time, is refused by name at both ends and in a store."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core.direct import DirectEngine, RecordingEngine, fleet
from golden.objects import VERSION, payload

from weightcast import TensorSource
from weightcast.errors import IntegrityError, ManifestError, PublishError, UnsupportedError
from weightcast.format.bucket import BucketBuffer, check_bucket
from weightcast.format.manifest import decode
from weightcast.format.messages import InitInfo, LinkMessage, Offer, WeightInfo
from weightcast.links.link import LinkListener, frame
from weightcast.sources.store import StoreSource
from weightcast.transports.store import StoreReceiver, StoreSender

HERE = Path(__file__).parent / "protocol_1"
TENSORS = {"w": torch.ones(16, 16)}

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def old(name: str, kind: Any) -> Any:
    return decode((HERE / f"{name}.json").read_bytes(), kind)


def test_an_engine_refuses_a_publisher() -> None:
    with fleet(TensorSource(TENSORS), RecordingEngine()) as (publisher, (client,)):
        with pytest.raises(
            UnsupportedError, match="publisher speaks protocol 1, this engine speaks 4: install the same version"
        ):
            client.worker.init(old("init", InitInfo))
        publisher.publish(5)
        manifest = json.dumps(json.loads((HERE / "offer.json").read_bytes())["manifest"])
        ours = Offer(publisher.run, 8, "d" * 64, manifest, secret=publisher._connections.listener.secret)
        with pytest.raises(
            ManifestError, match="protocol 1 was offered, this engine speaks 4: install the same version"
        ):
            client.worker.update(ours)
        assert publisher.publish().ok


def test_a_publisher_refuses_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordingEngine()
    with fleet(TensorSource(TENSORS), engine) as (publisher, _):
        with monkeypatch.context() as patch:
            patch.setattr(DirectEngine, "info", lambda self: old("info", WeightInfo))
            with pytest.raises(PublishError) as caught:
                publisher.publish()
        [error] = caught.value.failures.values()
        assert isinstance(error, UnsupportedError)
        assert "engine-0 speaks protocol 1, this publisher speaks 4: install the same version" in str(error)
        assert engine.calls == []
        assert publisher.publish().ok


def test_a_publisher_hangs_up_on_a_worker() -> None:
    hello = old("hello", LinkMessage)
    assert hello.protocol == 1
    listener = LinkListener(hello.run)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30.0)
            sock.connect("\0" + listener.address.removeprefix("unix:@"))
            sock.sendall(frame(hello))
            assert sock.recv(1) == b""
    finally:
        listener.close()


def test_a_bucket_whose_trailer_follows_its_payload() -> None:
    trailer = torch.tensor(list((HERE / "trailer.bin").read_bytes()), dtype=torch.uint8)
    with pytest.raises(
        IntegrityError, match=r"bucket 5: its header says magic .*, expected magic b'wcbucket': install"
    ):
        check_bucket(BucketBuffer.of(torch.cat([payload(), trailer])), 1024, VERSION, 5)
    renamed = torch.cat([trailer, torch.zeros(192, dtype=torch.uint8), payload()])
    with pytest.raises(
        IntegrityError,
        match="magic b'wcbuckt1', expected magic b'wcbucket': install the same version of weightcast at both ends",
    ):
        check_bucket(BucketBuffer.of(renamed), 1024, VERSION, 5)


@pytest.mark.parametrize("end", ["reader", "source", "writer"])
def test_a_store(tmp_path: Path, end: str) -> None:
    (tmp_path / "current.json").write_bytes((HERE / "current.json").read_bytes())
    (tmp_path / "writer.lock").touch()
    before = sorted(tmp_path.iterdir())
    url = f"file://{tmp_path}"
    words = (
        "current.json has the format 'weightcast-store-1', expected 'weightcast-store-4': another program or protocol "
        "version wrote this store; read it with that one, or publish into an empty directory"
    )
    with contextlib.ExitStack() as stack:
        receiver = StoreReceiver(url, peer="late")
        stack.callback(receiver.close)
        calls: dict[str, Callable[[], object]] = {
            "reader": lambda: receiver.newest(None),
            "source": lambda: StoreSource(url),
            "writer": lambda: StoreSender(url, run=VERSION.run),
        }
        with pytest.raises(IntegrityError, match=words):
            calls[end]()
    assert sorted(tmp_path.iterdir()) == before
