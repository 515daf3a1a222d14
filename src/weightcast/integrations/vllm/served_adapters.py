"""The names of published adapters in vLLM's API server: which version answers a request, and which have no request.

Invariant: a version is unloaded only after it has lost its name and every request that was being answered then has
ended, since such a request may have found the version by its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightcast.errors import RefusedError, UnsupportedError
from weightcast.format.adapters import AdapterVersion
from weightcast.format.messages import Offer


class ServedAdapters:
    """The published adapters among the models of one API server. `state`: the server's; it has the list of models."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._ours: dict[str, Any] = {}
        self._num_loaded = 0
        self._running: set[object] = set()
        self._draining: dict[str, frozenset[object]] = {}
        """By label of a loaded version without a name, the requests that ran when it lost its name."""

    @property
    def _models(self) -> Any:
        models = getattr(self._state, "openai_serving_models", None)
        if not isinstance(getattr(models, "lora_requests", None), dict):
            raise UnsupportedError(
                "this vLLM has no list of models with adapters (openai_serving_models.lora_requests): use a version "
                "that weightcast was tested with"
            )
        return models

    def require_room(self, offer: Offer) -> None:
        """Raise RefusedError if the name is of a model, or of an adapter that was loaded by other means.

        Raises UnsupportedError if another version leaves no room for adapters that were loaded by other means.
        """
        assert offer.target
        models, name = self._models, offer.target.name
        if models.is_base_model(name) or (name in models.lora_requests and name not in self._ours):
            raise RefusedError(f"this server has a model or adapter {name!r} already: publish under another name")
        # Published versions are never evicted. Without a free slot vLLM could not load the others again, and would end.
        others, config = models.lora_requests.keys() - self._ours.keys(), self._state.vllm_config.lora_config
        if others and config is not None:
            num_published = self._num_loaded - len(self.idle()) + 1
            if num_published + min(len(others), config.max_loras) > config.max_cpu_loras:
                raise UnsupportedError(
                    f"with another version this engine has {num_published} published adapters, beside {len(others)} "
                    f"that were loaded from paths, and keeps {config.max_cpu_loras} in all: start it with a larger "
                    "--max-cpu-loras, or publish with a smaller keep"
                )

    async def update(self, versions: Sequence[AdapterVersion], ids: Mapping[str, int | str]) -> None:
        """Answer requests with these versions. `ids`: by label, those of all loaded versions."""
        self._num_loaded = len(ids)
        if not (versions or ids or self._ours):
            return
        # Imported here: without LoRA nothing of vLLM is needed.
        from vllm.lora.request import LoRARequest

        models, named = self._models, dict[str, Any]()
        for version in versions:
            label = version.label
            # The path is never read. It is part of the prefix cache's key, which must differ between runs.
            request = LoRARequest(label, ids[label], f"weightcast://{version.run}/{label}")
            named[label] = request
            if version.is_current:
                named[version.name] = request
        for name in self._ours.keys() - named.keys():
            models.lora_requests.pop(name, None)
        models.lora_requests.update(named)
        self._ours = named
        unnamed, running = ids.keys() - named.keys(), frozenset(self._running)
        self._draining = {label: self._draining.get(label, running) for label in unnamed}

    def idle(self) -> tuple[str, ...]:
        """Return the labels of loaded versions that no request uses or can name."""
        return tuple(sorted(label for label, requests in self._draining.items() if not requests & self._running))

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Context of one request."""
        mark = object()
        self._running.add(mark)
        try:
            yield
        finally:
            self._running.discard(mark)

    async def listed(self) -> Any:
        """Return vLLM's list of models, each adapter under the name by which requests find it."""
        models = self._models
        found = await models.show_available_models()
        first = len(found.data) - len(models.lora_requests)
        cards = zip(found.data[first:], models.lora_requests, strict=True)
        renamed = [card.model_copy(update={"id": name}) for card, name in cards]
        return found.model_copy(update={"data": [*found.data[:first], *renamed]})
