"""A Ctrl-C at any point of a wait for the links: the condition is neither held nor polled afterwards."""

from __future__ import annotations

import itertools
import os
import select
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from weightcast.links import link
from weightcast.links.link import ReadingCondition

_FILES = {Path(link.__file__).name, Path(threading.__file__).name}


class Interrupt:
    """Raises KeyboardInterrupt where Python may: before the first line of a function, and after a call of C."""

    def __init__(self, after: int) -> None:
        self.num_left = after
        self.has_come = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and Path(frame.f_code.co_filename).name in _FILES:
            self.num_left -= 1
            if self.num_left < 0 and not self.has_come:
                self.has_come = True
                raise KeyboardInterrupt


def test_a_ctrl_c_at_any_point_of_a_wait() -> None:
    for number in itertools.count():
        condition, interrupt, is_read = ReadingCondition(), Interrupt(number), threading.Event()
        raised: type[BaseException] | None = None
        sys.setprofile(interrupt)
        try:
            with condition:
                condition.wait(0.001)
        except BaseException as exc:
            raised = type(exc)
        finally:
            sys.setprofile(None)
        _assert_reads(condition, is_read, number)
        condition.close()
        if not interrupt.has_come:
            assert number > 5
            return
        assert raised is KeyboardInterrupt, number


def _assert_reads(condition: ReadingCondition, is_read: threading.Event, number: int) -> None:
    """Another thread waits on the condition, and reads what comes."""
    descriptor = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    condition.on_ready = lambda events: is_read.set()

    def wait() -> None:
        with condition:
            condition.poller.register(descriptor, select.EPOLLIN)
            condition.wait(0.001)
            condition.poller.unregister(descriptor)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive(), f"held after an interrupt at point {number}"
    assert is_read.is_set(), f"polled after an interrupt at point {number}"
    os.close(descriptor)
