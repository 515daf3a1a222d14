"""Whether an engine can take a manifest: every reason why not is found before a byte moves."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.errors import IncompatibleWeightsError, InsufficientMemoryError, UnsupportedError
from weightcast.format.bucket import Layout
from weightcast.format.manifest import Manifest, TensorSpec
from weightcast.format.plan import compare_specs
from weightcast.host import memory as host_memory
from weightcast.seams.engine import Casting, Engine, Undoable, Validating
from weightcast.serving.load_plan import LoadPlan


def admit(manifest: Manifest, engine: Engine, specs: Sequence[TensorSpec] | None) -> LoadPlan:
    """How a checked manifest goes into an engine; `specs` is what `engine.specs()` gave.

    Raises IncompatibleWeightsError, whose problems name every tensor that does not fit, or UnsupportedError.
    """
    if specs is not None:
        can_cast = engine.can_cast if isinstance(engine, Casting) else None
        require_fit(compare_specs(manifest.tensors, specs, can_cast=can_cast))
    if isinstance(engine, Validating):
        engine.validate(manifest)
    try:
        return LoadPlan(Layout(manifest), engine, specs)
    except ValueError as exc:
        raise UnsupportedError(str(exc)) from exc


def check_undo(manifest: Manifest, engine: Engine) -> None:
    """Raises UnsupportedError if the engine can't go back, InsufficientMemoryError if the copy would not fit."""
    if not isinstance(engine, Undoable):
        raise UnsupportedError(f"{type(engine).__name__} can't be undone: publish with undo=False")
    needed, available = manifest.num_bytes, host_memory.available_bytes()
    if needed > available:
        raise InsufficientMemoryError(f"the undo copy needs {needed} bytes, this host has {available} left")


def require_fit(problems: Sequence[str]) -> None:
    """Raises IncompatibleWeightsError with these problems, if there are any."""
    if problems:
        shown = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise IncompatibleWeightsError(f"{len(problems)} tensors do not fit this engine: {shown}{more}", problems)
