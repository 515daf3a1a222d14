"""NeMo-RL's checkpoint engine, named in its configuration as `module:ClassName`: `docs/nemo-rl.md`."""

from __future__ import annotations

from weightcast.errors import import_of_extra

with import_of_extra():
    import nemo_rl as _nemo_rl  # noqa: F401  # first: where it is missing, whatever else is missing is no help

    from weightcast.integrations.nemo_rl.checkpoint_engine import NemoCheckpointEngine

__all__ = ["NemoCheckpointEngine"]


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"module {__name__!r} has no {name!r}: the class is {__all__[0]}; set "
        f"policy.generation.refit_transport: '{__name__}:{__all__[0]}', and use the same text as the key in refit_cfg"
    )
