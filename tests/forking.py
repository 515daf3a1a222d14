"""Processes that tests fork: from one server that has imported what each would import, or from the test itself."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_context = multiprocessing.get_context("forkserver")
_modules: dict[str, None] = {}


def preloaded(*modules: str) -> ForkServerContext:
    """The context to make processes with. A server that runs already has imported what was asked for before."""
    _modules.update(dict.fromkeys(modules))
    _context.set_forkserver_preload(list(_modules))
    return _context


def start_server() -> None:
    """Where a module of this run has asked for the server: it stays until the end, and is no leak of the first test."""
    if _modules:
        forkserver.ensure_running()


def in_child(call: Callable[[], str], deadline_seconds: float = 60.0) -> str:
    """What `call` returns, or raises, in a process that is forked from this one. Fails if it hangs."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = call()
        except BaseException as exc:
            said = f"{type(exc).__name__}: {exc}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    try:
        with open(reader, encoding="utf-8") as pipe:
            assert select.select([pipe], [], [], deadline_seconds)[0], "the child hangs"
            return pipe.read()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
