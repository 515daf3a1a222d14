"""Keeps an engine object of this process from generating while its weights are of no whole version.

If the engine were only paused, its callers would wait without an end: vLLM's `LLM.generate` has no deadline.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from weightcast.errors import EngineTornError

logger = logging.getLogger(__name__)

_GENERATES = (
    *("generate", "chat", "beam_search", "encode", "embed", "classify", "score", "reward"),
    *("enqueue", "enqueue_chat", "wait_for_completion", "add_request", "step", "_generate_impl"),
)
"""Methods of vLLM's LLM, LLMEngine and AsyncLLM, and of TorchRL's AsyncVLLM."""

_MARK = "_weightcast_refused"
_ABSENT = object()


class _Refused:
    """Stands in the place of an engine's methods. `reasons`: of each part that is torn."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.former: list[tuple[dict[str, Any], str, Any]] = []

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise EngineTornError(f"this engine does not generate until a complete update heals it: {self}")

    def __str__(self) -> str:
        return "; ".join(self.reasons.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """That of `engine`, by which callers generate. `part`: the replica in question, where it has several.

    While any part is refused, whatever begins generation on the object, or goes on with it, raises EngineTornError
    before a worker is asked; afterwards the object is as it was.
    """

    engine: Any
    part: str = ""

    def begin(self, why: str) -> None:
        attributes = _attributes(self.engine)
        refused = attributes.get(_MARK)
        if refused is None:
            refused = attributes[_MARK] = _Refused()
            for part in (self.engine, getattr(self.engine, "llm_engine", None)):
                own = _attributes(part)
                for name in _GENERATES:
                    if callable(getattr(part, name, None)):
                        refused.former.append((own, name, own.get(name, _ABSENT)))
                        own[name] = refused
        refused.reasons[self.part] = why
        logger.warning("%s does not generate until a complete update heals it: %s", type(self.engine).__name__, why)

    def end(self) -> None:
        """This part's weights are of one whole version again. Idempotent."""
        refused = _attributes(self.engine).get(_MARK)
        if refused is None:
            return
        refused.reasons.pop(self.part, None)
        if not refused.reasons:
            del _attributes(self.engine)[_MARK]
            for own, name, former in refused.former:
                own.pop(name) if former is _ABSENT else own.update({name: former})

    @property
    def why(self) -> str:
        """Why the object does not generate, or empty."""
        return str(_attributes(self.engine).get(_MARK, ""))


def _attributes(part: Any) -> dict[str, Any]:
    return getattr(part, "__dict__", {})
