"""The one server that processes of tests are forked from: it has imported, once, what they would each import."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_context = multiprocessing.get_context("forkserver")
_modules: dict[str, None] = {}


def preloaded(*modules: str) -> ForkServerContext:
    """The context to make processes with. A server that runs already has imported what was asked for before."""
    _modules.update(dict.fromkeys(modules))
    _context.set_forkserver_preload(list(_modules))
    return _context
