"""verl's checkpoint engine `weightcast`: `docs/verl.md`.

The entry point of `verl.plugins`: verl imports this module in each of its processes. verl hides errors of the import;
they are recorded, and shown in verl's error about the missing backend.
"""

from __future__ import annotations

import logging

from weightcast.errors import import_of_extra, with_extra

with import_of_extra():
    import verl
    from verl.checkpoint_engine import CheckpointEngineRegistry

BACKEND = "weightcast"
TESTED_WITH = "0.9"

logger = logging.getLogger(__name__)


def _register() -> None:
    try:
        if not verl.__version__.startswith(f"{TESTED_WITH}."):
            raise ImportError(
                f"weightcast's backend was tested with verl {TESTED_WITH}, found {verl.__version__}: install "
                f"'verl=={TESTED_WITH}.*', or a weightcast version that was tested with your verl"
            )
        from weightcast.integrations.verl.checkpoint_engine import WeightcastCheckpointEngine
    except ImportError as exc:
        error = with_extra(exc) if isinstance(exc, ModuleNotFoundError) else exc
        logger.warning("verl has no backend %r: %s", BACKEND, error)
        CheckpointEngineRegistry.record_import_error(BACKEND, error)
        return
    CheckpointEngineRegistry.register(BACKEND)(WeightcastCheckpointEngine)


_register()
