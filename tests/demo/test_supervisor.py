"""Events are JSON; signals are noted, not raised; a process that ends says how."""

from __future__ import annotations

import os
import queue
import signal
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from demo import runs
from rl_demo import messages
from rl_demo.supervisor import SIGNALS, Processes, catch_signals


def test_events_come_out_as_they_went_in() -> None:
    for event in runs.events():
        assert messages.decoder.decode(msgspec.json.encode(event)) == event


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decoder.decode(b"Loading weights: 100%\n")


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_former_handlers_come_back(number: signal.Signals) -> None:
    former = {each: signal.getsignal(each) for each in SIGNALS}
    inbox = queue.SimpleQueue()
    with catch_signals(inbox) as received:
        assert not received
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert inbox.get(timeout=60) is number
        assert received[0] is number
    assert {each: signal.getsignal(each) for each in SIGNALS} == former


def test_the_lines_and_the_end_of_a_process_come_into_the_inbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "repeats.py").write_text("import sys\nfor line in sys.stdin:\n    print(2 * line.strip())\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    inbox = queue.SimpleQueue()
    with closing(Processes(str(tmp_path), inbox)) as processes:
        processes.start("good", "repeats")
        processes.send("good", b"12\n")
        assert inbox.get(timeout=60) == ("good", b"1212\n")
        processes.start("bad one", "json.tool", "--no-such-option")
        assert inbox.get(timeout=60) == ("bad one", 2)
        processes.send("bad one", b"too late")
        found = processes.describe_end("bad one", 2)
        assert found.startswith("bad one ended with status 2, the end of its log:\n  | usage:")
    assert inbox.get(timeout=60) == ("good", -signal.SIGTERM)
    assert processes.describe_end("good", -signal.SIGTERM) == "good was ended by SIGTERM"
