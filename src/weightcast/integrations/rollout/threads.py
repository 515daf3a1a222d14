"""Blocking calls from a framework's `async def` methods, in a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from weightcast.host import device as host_device

T = TypeVar("T")


async def in_thread(call: Callable[[], T], *, on_cancel: Callable[[], None] = lambda: None) -> T:
    """Make a call in another thread, with this thread's GPU and stream, and return its result.

    If the task is cancelled, `on_cancel` is called, and the task ends only when the call has ended, so that it can't
    interfere with the next call.
    """
    here = host_device.present_stream()

    def on_same_stream() -> T:
        with here():
            return call()

    future = asyncio.get_running_loop().run_in_executor(None, on_same_stream)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        on_cancel()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.shield(future)
        raise
