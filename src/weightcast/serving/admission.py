"""Admission of offers: every name, shape and dtype is checked against the engine before any byte moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from weightcast.checkpoint.live import CASTABLE
from weightcast.errors import (
    IncompatibleWeightsError,
    UnsupportedError,
    listed,
)
from weightcast.format.bucket import Layout
from weightcast.format.manifest import Manifest, TensorSpec
from weightcast.host import memory as host_memory
from weightcast.seams.engine import Casting, Engine, Undoable, Validating
from weightcast.seams.install_map import Mapped
from weightcast.serving.install import Install


def present_specs(engine: Engine) -> Sequence[TensorSpec] | None:
    """Return `engine.specs()`, after a look at the memory of all tensors that it lists."""
    specs = engine.specs()
    if specs is not None and isinstance(engine, Mapped) and engine.install_map is not None:
        engine.install_map.bind()
        specs = engine.specs()
    return specs


def admit(manifest: Manifest, digest: str, engine: Engine) -> Install:
    """Check a valid manifest with this digest against the engine; return the install.

    Raises IncompatibleWeightsError, whose `problems` name every tensor that does not fit, or UnsupportedError.
    """
    specs = engine.specs()
    if specs is not None and not _are_equal(manifest, specs):
        specs = present_specs(engine) or ()
        can_cast = engine.can_cast if isinstance(engine, Casting) else None
        require_fit(manifest.tensors, specs, can_cast=can_cast)
    if isinstance(engine, Validating):
        engine.validate(manifest)
    try:
        return Install(Layout(manifest), digest, engine, specs)
    except ValueError as exc:
        raise UnsupportedError(str(exc)) from exc


def replacement_of(install: Install) -> Install:
    """Return an install of the same offer, for one that is not bound any more since its engine has other tensors.

    Raises what `admit` raises. Nothing has been written by then.
    """
    layout, digest, engine = install.layout, install.manifest_digest, install.engine
    if engine.specs() is not install.specs:
        return admit(layout.manifest, digest, engine)
    is_bound = install.install_map is not None and install.install_map.bind()
    return Install(layout, digest, engine, install.specs, uses_map=is_bound)


def check_undo(manifest: Manifest, engine: Engine) -> None:
    """Raise UnsupportedError if the engine can't undo an install, InsufficientMemoryError if the copy won't fit."""
    if not isinstance(engine, Undoable):
        raise UnsupportedError(f"{type(engine).__name__} can't undo an install: publish with undo=False")
    host_memory.require(manifest.num_bytes, "the undo copy", "publish with undo=False, or free memory")


def require_engine(engine: object) -> None:
    """Raise TypeError unless `engine` is an `Engine`."""
    if not all(hasattr(engine, name) for name in ("specs", "load", "commit", "discard")):
        remedy = "pass ModuleEngine(model), or an object with specs(), load(), commit() and discard()"
        raise TypeError(f"{type(engine).__name__} is not an engine: {remedy}")


def _are_equal(manifest: Manifest, specs: Sequence[TensorSpec]) -> bool:
    """Return whether these are the manifest's tensors, in its order, as nearly always."""
    if [spec.name for spec in specs] != [*manifest.names]:
        return False
    if {spec.name: spec.aliases for spec in specs if spec.aliases} != manifest.aliases:
        return False
    forms = [manifest.forms[number] for number in manifest.form_numbers]
    return [s.dtype for s in specs] == [f.dtype for f in forms] and [s.shape for s in specs] == [f.shape for f in forms]


def require_fit(
    offered: Iterable[TensorSpec],
    held: Sequence[TensorSpec],
    *,
    can_cast: Callable[[str, str], bool] | None = None,
) -> None:
    """Raise IncompatibleWeightsError unless `offered` is a complete update for an engine with the tensors `held`.

    A record with aliases matches if the engine has one of its names, and covers all of these. Dtypes may differ only if
    `can_cast(offered, held)` returns True.
    """
    by_name = {name: target for target in held for name in target.names}
    covered: dict[str, TensorSpec] = {}
    problems: list[str] = []
    unknown: set[str] = set()
    misfits: set[tuple[str, str]] = set()
    for spec in offered:
        known = [by_name[name] for name in spec.names if name in by_name]
        if not known:
            unknown.add(spec.name)
            problems.append(f"unknown tensor {spec.name!r} {spec.dtype}{list(spec.shape)}")
        for target in known:
            former = covered.get(target.name)
            if former is spec:
                continue  # matched by another of its names
            if spec.shape != target.shape:
                found = f"has the shape {list(spec.shape)}, the engine has {list(target.shape)}"
                problems.append(f"{spec.name!r} {found}")
            if spec.dtype != target.dtype and not (can_cast and can_cast(spec.dtype, target.dtype)):
                misfits.add((spec.dtype, target.dtype))
                problems.append(f"{spec.name!r} is {spec.dtype}, the engine has {target.dtype}")
            if former is not None:
                both = f"{spec.name!r} and {former.name!r} both match the engine's {target.name!r}"
                problems.append(f"{both}, which ties them: tie them in the trainer too, or untie them in the engine")
            covered[target.name] = spec
    missing = [target for target in held if target.name not in covered]
    problems += [f"missing tensor {spec.name!r} {spec.dtype}{list(spec.shape)}" for spec in missing]
    if problems:
        remedies = dtype_remedies(misfits, {spec.dtype for spec in held})
        raise misfit_error(problems, remedies + _prefix_remedies(unknown, {spec.name for spec in missing}))


def misfit_error(problems: Sequence[str], remedies: Sequence[str] = ()) -> IncompatibleWeightsError:
    """Return the error with which an engine refuses an offer."""
    tensors = "tensor does" if len(problems) == 1 else "tensors do"
    remedy = f". Remedy: {'; '.join(remedies)}" if remedies else ""
    return IncompatibleWeightsError(
        f"{len(problems)} {tensors} not fit this engine: {listed(problems)}{remedy}", problems
    )


def dtype_remedies(misfits: Collection[tuple[str, str]], held: Collection[str]) -> list[str]:
    """Return how the source can send the engine's dtypes.

    `misfits`: (offered, engine's); `held`: all of the engine's.
    """
    wanted = {theirs for _, theirs in misfits}
    if len(wanted) != 1 or not {dtype for pair in misfits for dtype in pair} <= CASTABLE:
        return []
    (dtype,) = wanted
    if not CASTABLE.intersection(held) <= wanted:
        return ["have each tensor cast to the engine's dtype: ModuleSource(model, dtype='engine'), or `--dtype engine`"]
    return [f"cast while packing: ModuleSource(model, dtype=torch.{dtype}), or `weightcast publish --dtype {dtype}`"]


def _prefix_remedies(unknown: Collection[str], missing: Collection[str]) -> list[str]:
    """Return remedies for names that differ by a prefix: with it, one side's unmatched names equal the other's."""
    for longer, shorter, remedy in (
        (unknown, missing, "publish the module that has the names without it, or leave it out with names="),
        (missing, unknown, "publish the module around it, or add it with names="),
    ):
        name = min(shorter, default="")
        for prefix in sorted(other.removesuffix(name) for other in longer if name and other.endswith(f".{name}")):
            if {prefix + each for each in shorter} <= set(longer):
                whose = "trainer" if longer is unknown else "engine"
                return [f"the {whose}'s names begin with {prefix!r}: {remedy} of ModuleSource"]
    return []
