"""A directory of engines in named Ray actors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from weightcast.errors import import_of_extra

with import_of_extra():
    import ray

logger = logging.getLogger(__name__)


class ActorEngines:
    """Implements `EngineDirectory`: the engine servers in Ray actors whose names begin with `prefix`.

    An actor's method `url` returns the URL of its server. It is called until it has returned once, so an actor that Ray
    restarts has to keep its URL. An actor that does not answer yet, as while it starts, or whose `url` raises, is left
    out until a later call. Ray must be initialised.
    """

    def __init__(self, prefix: str, *, namespace: str | None = None, timeout_seconds: float = 10.0) -> None:
        """`namespace`: of the actors, by default this job's. `timeout_seconds`: how long new actors are waited for."""
        self._prefix = prefix
        self._namespace = namespace
        self._timeout_seconds = timeout_seconds
        self._asked: dict[Any, Any] = {}
        """The pending or complete call of each actor, by the actor's id; None after one that has failed."""

    def engines(self) -> Sequence[str]:
        namespace = self._namespace or ray.get_runtime_context().namespace
        named = ray.util.list_named_actors(all_namespaces=True)
        former, self._asked = self._asked, {}
        for each in named:
            if each["namespace"] == namespace and each["name"].startswith(self._prefix):
                try:
                    actor = ray.get_actor(each["name"], namespace=namespace)
                except ValueError:
                    continue  # It has ended since.
                known = former.get(actor._actor_id)
                self._asked[actor._actor_id] = actor.url.remote() if known is None else known
        asked = {call: actor for actor, call in self._asked.items()}
        is_any_new = not self._asked.keys() <= former.keys()
        seconds = self._timeout_seconds if is_any_new else 0.0
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
        urls = []
        for call in ready:
            try:
                urls.append(ray.get(call))
            except ray.exceptions.RayError as exc:
                self._asked[asked[call]] = None
                logger.warning("an actor did not say its engine's URL, and is asked again: %s", exc)
        return sorted(urls)
