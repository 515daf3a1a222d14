"""SGLang's entry point for weightcast: hooks in its scheduler processes and its HTTP server's process.

Only methods that weightcast needs are hooked, and nothing that needs torch is imported before SGLang itself is.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from weightcast.errors import UnsupportedError
from weightcast.integrations.sglang import internals

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks for this kind of process: the entry point of `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if internals.SCHEDULER in sys.modules:
        from weightcast.integrations.sglang import scheduler

        HookRegistry.register(internals.MADE, scheduler.made, HookType.AFTER)
        HookRegistry.register(internals.CALLED, scheduler.called, HookType.AROUND)
        for loaded in internals.LOADED:
            HookRegistry.register(loaded, scheduler.loads, HookType.BEFORE)
        HookRegistry.register(internals.CHECKED, scheduler.checks, HookType.BEFORE)
        HookRegistry.register(internals.RELEASED, scheduler.releases, HookType.BEFORE)
    # SGLang's child processes never serve HTTP, and would import the server's modules only for this hook.
    if internals.HTTP_SERVER in sys.modules or not any(name in sys.modules for name in internals.CHILDREN):
        HookRegistry.register(internals.SERVED, _served, HookType.AROUND)
        for asked in internals.ASKED:
            HookRegistry.register(asked, _asked, HookType.AROUND)


def _served(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add weightcast's routes to SGLang's HTTP server before it runs."""
    from weightcast.integrations.sglang.engine import attach

    given = inspect.signature(original).bind(*args, **kwargs).arguments
    try:
        attach(sys.modules[internals.HTTP_SERVER].app, given["tokenizer_manager"])
    except UnsupportedError as exc:
        logger.warning("SGLang serves without weightcast's routes: %s", exc)
    return original(*args, **kwargs)


async def _asked(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse rank calls on SGLang's own routes, which lack the authentication of weightcast's routes.

    Weights that are loaded without a label get `UNLABELLED`; SGLang would keep the former version's label.
    """
    from weightcast.integrations.sglang.scheduler import FORMAT

    if getattr(request, "load_format", None) == FORMAT:
        return False, f"load_format {FORMAT!r} is for weightcast's own routes"
    if request.weight_version is None:
        request.weight_version = internals.UNLABELLED
    return await original(manager, request, *args, **kwargs)
