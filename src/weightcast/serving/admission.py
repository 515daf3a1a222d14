"""Whether an engine can take a manifest: every reason why not is found before a byte moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from weightcast.errors import IncompatibleWeightsError, UnsupportedError, listed
from weightcast.format.bucket import Layout
from weightcast.format.manifest import Manifest, TensorSpec
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
    host_memory.require(manifest.num_bytes, "the undo copy", "publish with undo=False, or free memory")


def require_fit(problems: Sequence[str]) -> None:
    """Raises IncompatibleWeightsError with these problems, if there are any."""
    if problems:
        raise IncompatibleWeightsError(f"{len(problems)} tensors do not fit this engine: {listed(problems)}", problems)


def compare_specs(
    offered: Iterable[TensorSpec],
    held: Iterable[TensorSpec],
    *,
    can_cast: Callable[[str, str], bool] | None = None,
) -> list[str]:
    """Every reason why `offered` is not a complete update for an engine that holds `held`; empty if it is one.

    Names may differ by aliases: a record is known if the engine has one of its names, and covers all of them. Dtypes
    may differ only where `can_cast(offered, held)` says so.
    """
    targets = tuple(held)
    by_name = {name: target for target in targets for name in target.names}
    covered: dict[str, str] = {}
    problems: list[str] = []
    for spec in offered:
        known = {by_name[name].name: by_name[name] for name in spec.names if name in by_name}
        if not known:
            problems.append(f"unknown tensor {spec.name!r} {spec.dtype}{list(spec.shape)}")
        for target in known.values():
            problems += _compare(spec, target, can_cast)
            if target.name in covered:
                problems.append(f"{spec.name!r} and {covered[target.name]!r} are both the engine's {target.name!r}")
            covered[target.name] = spec.name
    missing = (target for target in targets if target.name not in covered)
    return problems + [f"missing tensor {spec.name!r} {spec.dtype}{list(spec.shape)}" for spec in missing]


def _compare(spec: TensorSpec, target: TensorSpec, can_cast: Callable[[str, str], bool] | None) -> Iterator[str]:
    if spec.shape != target.shape:
        yield f"{spec.name!r} has the shape {list(spec.shape)}, the engine has {list(target.shape)}"
    if spec.dtype != target.dtype and not (can_cast and can_cast(spec.dtype, target.dtype)):
        yield f"{spec.name!r} is {spec.dtype}, the engine has {target.dtype}"
