"""One sender for each device of a host: how URLs name them, and which one a receiver reads. No processes."""

from __future__ import annotations

import multiprocessing.connection

import pytest
import torch
from transports.conftest import Ends
from transports.ipc_children import Child

from weightcast.testing.transport_kit import PATIENCE_SECONDS, RUN, Background, numbered, read_all, send_all, version
from weightcast.transports.ipc import IpcReceiver, IpcSender
from weightcast.transports.ipc import devices as ipc_devices

CPU = torch.device("cpu")
DEFAULT = "ipc://@weightcast-0"
ADDRESSES = {"a": "ipc://@weightcast-1", "b & c?": "ipc://@weightcast-2"}


def test_without_other_devices_the_address_is_the_senders_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ipc_devices.LABEL_VARIABLE, "a")
    assert ipc_devices.join(DEFAULT, {}) == DEFAULT
    assert ipc_devices.choose(DEFAULT, CPU) == DEFAULT


@pytest.mark.parametrize(("own", "expected"), [*ADDRESSES.items(), ("d", DEFAULT), ("", DEFAULT)])
def test_a_receiver_reads_from_its_own_device(monkeypatch: pytest.MonkeyPatch, own: str, expected: str) -> None:
    monkeypatch.setenv(ipc_devices.LABEL_VARIABLE, own)
    assert ipc_devices.label(torch.device("cpu")) == own
    assert ipc_devices.choose(ipc_devices.join(DEFAULT, ADDRESSES), CPU) == expected


def test_a_process_without_the_variable_has_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ipc_devices.LABEL_VARIABLE, raising=False)
    assert ipc_devices.label(torch.device("cpu")) == ""
    assert ipc_devices.choose(ipc_devices.join(DEFAULT, ADDRESSES), CPU) == DEFAULT


@pytest.mark.parametrize(
    "url",
    [
        f"{DEFAULT}?a",
        f"{DEFAULT}?a=/run/other.sock",
        f"{DEFAULT}?" + "&".join(f"{number}=@x" for number in range(1000)),
        "ipc://?a=@weightcast-1",
    ],
)
def test_what_is_no_such_url_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(ipc_devices.LABEL_VARIABLE, "a" if "other" in url else "d")
    with pytest.raises(ValueError, match="is not the address of"):
        IpcReceiver(url, peer="engine", run=RUN, deadline_seconds=1.0)


def test_receivers_of_two_devices_connect_to_two_senders(ipc_ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = numbered()
    senders = {label: ipc_ends.sender() for label in ("", "a", "b")}
    url = ipc_devices.join(senders[""].address, {label: senders[label].address for label in "ab"})
    for label, sender in senders.items():
        assert isinstance(sender, IpcSender)
        monkeypatch.setenv(ipc_devices.LABEL_VARIABLE, label)
        receiver = IpcReceiver(url, peer=f"engine {label}", run=RUN, deadline_seconds=PATIENCE_SECONDS)
        ipc_ends.stack.callback(receiver.close)
        receiver.open(manifest, version(1), staged=False)
        peers = ["engine ", "engine a", "engine b"]
        assert {other: each.connected(peers) for other, each in senders.items()} == {  # type: ignore[attr-defined]
            other: [f"engine {other}"] * (other <= label) for other in senders
        }
        reading = Background(read_all, receiver, manifest, 1)
        sender.open(manifest, version(1), peers=[f"engine {label}"], staged=False)
        send_all(sender, manifest, 1)
        assert len(reading.result()) == len(manifest.buckets)


# --- on a GPU: run by scripts/test-gpu ---


def choose_on_gpu(pipe: multiprocessing.connection.Connection, url: str) -> None:
    """The address that a process takes for host memory, its last GPU and its first, whatever is on these."""
    first = torch.ones(1 << 22, device="cuda:0")
    gpus = torch.device("cuda", torch.cuda.device_count() - 1), torch.device("cuda", 0)
    pipe.send([ipc_devices.choose(url, device) for device in (CPU, *gpus)])
    del first


@pytest.mark.gpu
def test_a_gpu_is_known_by_its_uuid() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    labels = [ipc_devices.label(device) for device in devices]
    assert labels == [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    addresses = {label: f"ipc://@weightcast-{number}" for number, label in enumerate(labels)}
    with Child(choose_on_gpu, ipc_devices.join("ipc://@default", addresses)) as child:
        assert child.hear() == ["ipc://@default", addresses[labels[-1]], addresses[labels[0]]]
