"""Keeps an engine object of this process from generating while its weights are of no whole version.

If the engine were only paused, its callers would wait without an end: vLLM's `LLM.generate` has no deadline.

Invariant: requests are refused in functions that all requests pass, by every method of the engine. The names of these
functions are looked up before a publisher connects, and a missing name is an error.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from weightcast.errors import EngineTornError, UnsupportedError

logger = logging.getLogger(__name__)

_VLLM = {"input_processor": "assign_request_id", "engine_core": "get_output"}
"""By part of vLLM's LLMEngine and AsyncLLM: each request passes the first before anything has noted it, and the second
waits for tokens of requests that were there before (an AsyncLLM has another one, which goes on waiting)."""
_TORCHRL = "_generate_impl"
"""Each prompt passes this method of TorchRL's AsyncVLLM, whose engines are in other processes."""
_OTHER = "generate"
"""All requests of an engine of any other kind have to pass it."""
_ABSENT = object()


class _Refused:
    """Stands in the place of methods. `reasons`: by part of the engine that is torn. `former`: what stood there."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.former: list[tuple[Any, str, Any]] = []

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise EngineTornError(f"this engine does not generate until a complete update heals it: {self}")

    def __str__(self) -> str:
        return "; ".join(self.reasons.values())


@dataclasses.dataclass(slots=True)
class Refusal:
    """That of `engine`, by which callers generate. `part`: the replica in question, where it has several.

    While any part is refused, requests raise EngineTornError before a worker is asked; afterwards the object is as it
    was. Raises UnsupportedError if the engine lacks a method by which requests should pass.
    """

    engine: Any
    part: str = ""

    def __post_init__(self) -> None:
        places = self._places()
        lacking = [
            f"{type(owner).__name__}.{name}" for owner, name in places if not callable(getattr(owner, name, None))
        ]
        if lacking:
            raise UnsupportedError(
                f"{type(self.engine).__name__} could not be kept from generating while it is torn: it lacks "
                f"{', '.join(lacking)}, by which all of its requests should pass. Use a version that weightcast was "
                "tested with, or have an engine of your own generate by that method",
                lacking,
            )

    def _places(self) -> list[tuple[Any, str]]:
        inner = getattr(self.engine, "llm_engine", self.engine)
        if inner is not self.engine or hasattr(inner, "engine_core"):
            return [(getattr(inner, part, None), name) for part, name in _VLLM.items()]
        return [(self.engine, _TORCHRL if hasattr(self.engine, "actors") else _OTHER)]

    @property
    def _refused(self) -> _Refused | None:
        owner, name = self._places()[0]
        method = getattr(owner, name)
        return method if isinstance(method, _Refused) else None

    def begin(self, why: str) -> None:
        refused = self._refused
        if refused is None:
            refused = _Refused()
            for owner, name in self._places():
                refused.former.append((owner, name, vars(owner).get(name, _ABSENT)))
                setattr(owner, name, refused)
        refused.reasons[self.part] = why
        logger.warning("%s does not generate until a complete update heals it: %s", type(self.engine).__name__, why)

    def end(self) -> None:
        """This part's weights are of one whole version again. Idempotent."""
        refused = self._refused
        if refused is not None:
            refused.reasons.pop(self.part, None)
            if not refused.reasons:
                for owner, name, former in refused.former:
                    delattr(owner, name) if former is _ABSENT else setattr(owner, name, former)

    @property
    def why(self) -> str:
        """Why the object does not generate, or empty."""
        return str(self._refused or "")
