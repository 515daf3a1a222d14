"""Refusal of requests by an engine object of this process while its weights are torn.

If the engine were only paused, its callers would wait without end: vLLM's `LLM.generate` has no deadline.

Invariant: requests are refused in functions through which all requests pass, whatever method of the engine is called.
The names of these functions are looked up before a publisher connects, and a missing name is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from weightcast.errors import EngineTornError, UnsupportedError

logger = logging.getLogger(__name__)

_VLLM = {"input_processor": "assign_request_id", "engine_core": "get_output"}
"""By part of vLLM's LLMEngine and AsyncLLM: each new request passes the first method; the second waits for the tokens
of earlier requests (an AsyncLLM has another one, which goes on waiting)."""
_TORCHRL = "_generate_impl"
"""Method of TorchRL's AsyncVLLM, whose engines are in other processes, through which each prompt passes."""
_OTHER = "generate"
"""Method through which all requests of any other kind of engine must pass."""
_ABSENT = object()


class _Refused:
    """Replaces methods of the engine. `reasons`: by torn part of the engine. `former`: the replaced methods."""

    def __init__(self, places: Iterable[tuple[Any, str]]) -> None:
        self.reasons: dict[str, str] = {}
        self.former = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name in places]
        for owner, name, _ in self.former:
            setattr(owner, name, self)

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise EngineTornError(f"this engine does not generate until a complete update heals it: {self}")

    def __str__(self) -> str:
        return "; ".join(self.reasons.values())


class Refusal:
    """Refusal of requests by `engine`, the object with which callers generate. `part`: the replica, if it has several.

    While any part is torn, requests raise EngineTornError before a worker is asked; afterwards the object is as before.
    Raises UnsupportedError if the engine lacks a method through which requests must pass.
    """

    def __init__(self, engine: Any, part: str = "") -> None:
        self._kind, self._part = type(engine).__name__, part
        inner = getattr(engine, "llm_engine", engine)
        if inner is not engine or hasattr(inner, "engine_core"):
            self._places = [(getattr(inner, part, None), name) for part, name in _VLLM.items()]
        else:
            self._places = [(engine, _TORCHRL if hasattr(engine, "actors") else _OTHER)]
        methods = [(f"{type(owner).__name__}.{name}", getattr(owner, name, None)) for owner, name in self._places]
        lacking = [name for name, method in methods if not callable(method)]
        if lacking:
            raise UnsupportedError(
                f"{self._kind} could not be kept from generating while it is torn: it lacks {', '.join(lacking)}, "
                "through which all requests must pass. Use a version that weightcast was tested with, or have your own "
                "engine generate by that method",
                lacking,
            )

    @property
    def _refused(self) -> _Refused | None:
        method = getattr(*self._places[0])
        return method if isinstance(method, _Refused) else None

    def begin(self, why: str) -> None:
        refused = self._refused or _Refused(self._places)
        refused.reasons[self._part] = why
        logger.warning("%s does not generate until a complete update heals it: %s", self._kind, why)

    def end(self) -> None:
        """Accept requests again, once this part has one whole version. Idempotent."""
        refused = self._refused
        if refused is not None:
            refused.reasons.pop(self._part, None)
            if not refused.reasons:
                for owner, name, former in refused.former:
                    delattr(owner, name) if former is _ABSENT else setattr(owner, name, former)

    @property
    def why(self) -> str:
        """Return why the object does not generate, or an empty string."""
        return str(self._refused or "")
