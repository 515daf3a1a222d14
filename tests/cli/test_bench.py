"""`weightcast bench`: it times real publishes, to an engine in a process of its own, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from weightcast import cli
from weightcast.cli import bench, exits
from weightcast.errors import PeerDiedError

FEW = ["--num-tensors", "7", "--total-mib", "1", "--runs", "2"]


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("transport", ["ipc://", "memory://", "gloo://127.0.0.1:0", "file://{}/store"])
def test_its_json_has_a_publish_and_a_memcpy(
    transport: str, install: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = transport.format(tmp_path)
    assert cli.main(["bench", url, "--install", install, *FEW, "--json"]) == exits.OK
    found = msgspec.json.decode(capsys.readouterr().out, type=bench.BenchResult)
    assert (found.transport, found.install, found.num_tensors) == (url, install, 7)
    assert found.num_bytes == 7 * 2 * ((1 << 20) // 2 // 7)
    assert found.num_buckets >= 1
    assert min(found.first_publish_seconds, found.publish_seconds, found.pause_seconds, found.memcpy_seconds) > 0
    assert found.publish_seconds >= found.stall_seconds >= found.pack_seconds > 0
    assert found.memcpy_ratio == found.publish_seconds / found.memcpy_seconds


@pytest.mark.usefixtures("leaves_nothing")
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *FEW]) == exits.OK
    text = capsys.readouterr().out
    assert text.startswith("1.05 MB in 7 tensors, ")
    for row in ("one memcpy", "first publish", "later publishes", "trainer waits", "packing", "pause"):
        assert row in text


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("code", "error"), [("pass", PeerDiedError), ("import time; time.sleep(60)", TimeoutError)])
def test_an_engine_that_does_not_come_is_an_error(
    code: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends before it serves, or does nothing until the deadline."""
    monkeypatch.setattr(bench, "LOAD_SECONDS", 60.0 if error is PeerDiedError else 0.1)
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen([command[0], "-c", code], **more))
    assert cli.main(["bench", *FEW, "--json"]) == exits.NEGATIVE
    said = json.loads(capsys.readouterr().out)["error"]
    assert said["kind"] == ("PeerDiedError" if error is PeerDiedError else "PeerTimeoutError")
