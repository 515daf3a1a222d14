"""Installs weights into a live `nn.Module`, in place: for models served in your own process, and as the reference.

Invariants: nothing is written before the whole call has been checked; only memory of the module is written, in a few
calls however many tensors there are; a tensor of another shape, or without `cast` of another dtype, is never taken.
Parameters keep their identity, so compiled and graph-captured models stay valid.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import nn

from weightcast.checkpoint import conversion
from weightcast.checkpoint.live import CASTABLE, Buffers, LiveCheckpoint, Names, state_dict_hooks
from weightcast.errors import IncompatibleWeightsError, IncompleteUpdateError, InstallError, ManifestError, listed
from weightcast.format.bucket import DTYPE_NAMES, narrow
from weightcast.format.geometry import Region, check_tiling, is_inside
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.host import copy as host_copy
from weightcast.host import device as host_device

logger = logging.getLogger(__name__)


class ModuleEngine:
    """An `Engine` that copies into a module's own parameters and buffers; also takes regions, undoes and reads.

    It accepts the names and shapes that the module has in checkpoint form (see `checkpoint`): a model with fused
    experts takes one tensor per expert. With `cast`, half, bfloat16, single and double precision may differ.
    Calls come from one thread at a time, and nothing else may use the module meanwhile. Extra memory: none but
    `snapshot_bytes` for an undo. Raises ValueError if the module has no checkpoint form in place, or
    where tensors share memory without being tied as a whole.
    """

    def __init__(
        self, model: nn.Module, *, cast: bool = False, buffers: Buffers = "persistent", names: Names | None = None
    ) -> None:
        self.version: WeightVersion | None = None
        self._model = model
        self._cast = cast
        self._live = LiveCheckpoint(model, buffers=buffers, names=names)
        self._live.require_memory()
        self._targets = _ParameterTargets(self._live)
        if hooks := state_dict_hooks(model, loading=True):
            logger.warning(
                "weights are copied into what the module holds: these are not called, which may do more when a state "
                "dict is loaded: %s",
                listed(hooks, separator=", "),
            )
        self.discard()

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that `snapshot` takes."""
        return sum(spec.num_bytes for spec in self._live.specs)

    @property
    def devices(self) -> Collection[torch.device]:
        """All devices that weights of the module lie on."""
        if not (self._updating or self._is_fresh):
            self._refresh()
        return self._targets.devices

    def specs(self) -> Sequence[TensorSpec]:
        if not self._updating:
            self._refresh()
            self._is_fresh = True
        return self._live.specs

    def can_cast(self, offered: str, held: str) -> bool:
        """Whether `load` takes dtype `offered` for a tensor of dtype `held`."""
        return offered == held or (self._cast and offered in CASTABLE and held in CASTABLE)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy into the module; on a GPU the copies are only queued on this thread's stream, and over at `commit`.

        Raises IncompatibleWeightsError, before anything is written, for unknown names, other shapes or dtypes, or
        different tensors for names that are tied; InstallError (torn) if a copy fails.
        """
        names: list[str] = []
        sources: list[torch.Tensor] = []
        # One object at a time: tens of thousands of tuples alive at once would set off collections of the whole heap.
        for name, tensor in tensors:
            names.append(name)
            sources.append(tensor)
        if not names:
            return
        self._begin()
        numbers = self._targets.numbers(names)
        unique = set(numbers)
        if len(unique) != len(numbers):
            numbers, sources = _once(names, numbers, sources)
        self._check(numbers, sources)
        self._copy([self._targets.views[number] for number in numbers], sources)
        self._loaded |= unique

    def load_regions(self, parts: Iterable[tuple[str, Region, torch.Tensor]]) -> None:
        """Copy parts of tensors into their places. Raises as `load`, before anything is written."""
        names: list[str] = []
        regions: list[Region] = []
        sources: list[torch.Tensor] = []
        for name, region, part in parts:
            names.append(name)
            regions.append(region)
            sources.append(part)
        if not names:
            return
        self._begin()
        into = self._targets.parts(names, regions)
        if not all(map(operator.eq, map(_shape_of, sources), into.sizes)):
            for number, region, source in zip(into.numbers, regions, sources, strict=True):
                if source.shape != region.sizes:
                    raise self._targets.no_region(number, region, source.shape)
        if not all(map(operator.is_, map(_dtype_of, sources), into.dtypes)):
            for number, source in zip(into.numbers, sources, strict=True):
                self._check_dtype(number, source)
        self._copy(into.targets, sources)
        self._parts.append(into)

    def commit(self, version: WeightVersion) -> None:
        """Every tensor has been loaded since the last commit or discard: `version` is served.

        Raises IncompleteUpdateError, naming what was not loaded; InstallError (torn) if the module's tensors were
        exchanged during the update, so that what was written is no longer in use. (`param.data = ...` during an update
        is found by the next one.)
        """
        self._note(self._live.refresh_members())
        if self._replaced:
            raise InstallError("the module's tensors were replaced during the update: publish again", torn=True)
        specs = self._live.specs
        if len(self._loaded) < len(specs) and not self._targets.was_whole(self._loaded, self._parts):
            regions: dict[int, list[Region]] = {}
            for parts in self._parts:
                for number, region in zip(parts.numbers, parts.regions, strict=True):
                    regions.setdefault(number, []).append(region)
            unloaded = [(spec, regions.get(n)) for n, spec in enumerate(specs) if n not in self._loaded]
            missing = [repr(spec.name) for spec, found in unloaded if not _is_whole(spec, found)]
            if missing:
                names = listed(missing, most=20, separator=", ")
                raise IncompleteUpdateError(
                    f"{len(missing)} of {len(specs)} tensors were not loaded: {names}; publish all of them"
                )
        self._finish_copies()
        self._targets.keep(self._loaded, self._parts)
        self.discard()
        self.version = version

    def discard(self) -> None:
        self._updating = False
        self._is_fresh = False
        self._replaced = False
        self._loaded = set[int]()
        self._parts = list[_Parts]()

    def snapshot(self) -> Callable[[], None]:
        """Copy the live weights to host memory; the result restores them, and frees nothing until it is dropped.

        Takes `snapshot_bytes` of host memory. The restorer raises InstallError (torn) if the module has other tensors.
        """
        self._refresh()
        specs = self._live.specs
        with torch.inference_mode():
            copies = [torch.empty(view.shape, dtype=view.dtype) for view in self._targets.views]
            host_copy.copy_all(copies, self._targets.views)

        def restore() -> None:
            self._refresh()
            if self._live.specs != specs:
                raise InstallError("the module's tensors changed their form, the undo copy no longer fits", torn=True)
            self._copy(self._targets.views, copies)
            self._finish_copies()
            self.discard()

        return restore

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every record's name with the live memory, in the order of `specs`."""
        self._refresh()
        yield from self._live.views.items()

    def _begin(self) -> None:
        # A look at every tensor of the module costs about as much as the copies: the offer's look (`specs`) is enough.
        if not self._updating:
            if not self._is_fresh:
                self._refresh()
            self._updating = True

    def _refresh(self) -> None:
        self._note(self._live.refresh())

    def _note(self, has_changed: bool) -> None:
        if has_changed:
            self._replaced = self._updating
        # What can't be written to is looked at again each time, not left at the former tensors.
        if self._targets.of is not self._live.views:
            self._live.require_memory()
            self._targets = _ParameterTargets(self._live)

    def _check(self, numbers: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        shapes, dtypes = self._targets.shapes, self._targets.dtypes
        if not all(map(operator.eq, map(_shape_of, sources), map(shapes.__getitem__, numbers))):
            specs = self._live.specs
            problems = [
                f"{specs[number].name!r} has the shape {list(source.shape)}, the module has {list(shapes[number])}"
                for number, source in zip(numbers, sources, strict=True)
                if source.shape != shapes[number]
            ]
            raise IncompatibleWeightsError(f"other shapes: {listed(problems)}", problems)
        if not all(map(operator.is_, map(_dtype_of, sources), map(dtypes.__getitem__, numbers))):
            for number, source in zip(numbers, sources, strict=True):
                self._check_dtype(number, source)

    def _check_dtype(self, number: int, source: torch.Tensor) -> None:
        spec, offered = self._live.specs[number], DTYPE_NAMES.get(source.dtype, str(source.dtype))
        if not self.can_cast(offered, spec.dtype):
            found = f"{spec.name!r} is {offered}, the module has {spec.dtype}"
            raise IncompatibleWeightsError(f"{found}: give the source a dtype, or the engine cast=True")

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if not targets:
            return
        try:
            # Not no_grad: parameters that were made in inference mode can be written only there.
            with torch.inference_mode():
                host_copy.copy_all(targets, sources)
        except RuntimeError as exc:
            raise InstallError(f"copying {len(targets)} tensors into the module failed: {exc}", torn=True) from exc

    def _finish_copies(self) -> None:
        for device in self._targets.devices:
            if device.type == "cuda":
                host_device.synchronize_stream(device)


def _is_whole(spec: TensorSpec, regions: Sequence[Region] | None) -> bool:
    """Whether these regions, which were loaded, are all of a tensor. Raises IncompleteUpdateError for some of it."""
    if 0 in spec.shape:
        return True
    if regions is None:
        return False
    try:
        # Names that are tied may come each with the same parts.
        check_tiling(list(dict.fromkeys(regions)), spec.shape, spec.name)
    except ManifestError as exc:
        raise IncompleteUpdateError(f"{spec.name!r} was loaded in part: {exc}") from exc
    return True


_shape_of = operator.attrgetter("shape")
_dtype_of = operator.attrgetter("dtype")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What one call of `load_regions` writes: the same in every update, as long as the layout is."""

    names: list[str]
    regions: list[Region]
    numbers: list[int]
    sizes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    targets: list[torch.Tensor]


class _ParameterTargets:
    """The module's tensors by number, prepared for many checks at once.

    Memory: views for the regions of the last update that was whole, and of those since.
    """

    def __init__(self, live: LiveCheckpoint) -> None:
        self._specs = live.specs
        conversion.require_apart(live.views)
        self._parts: dict[tuple[str, Region], _Parts] = {}
        self._whole: tuple[set[int], list[_Parts]] | None = None
        self.of = live.views
        self.views = list(live.views.values())
        self.shapes = [view.shape for view in self.views]
        self.dtypes = [view.dtype for view in self.views]
        self.devices = list(dict.fromkeys(view.device for view in self.views))
        self._by_name = {name: number for number, spec in enumerate(live.specs) for name in spec.names}

    def parts(self, names: list[str], regions: list[Region]) -> _Parts:
        """Regions of the tensors of these names. Raises IncompatibleWeightsError for a region that is none.

        Those of a call like one before are the same object: a view costs more than to copy what is small.
        """
        known = self._parts.get((names[0], regions[0]))
        if known is not None and known.names == names and known.regions == regions:
            return known
        numbers, targets = self.numbers(names), list[torch.Tensor]()
        for number, region in zip(numbers, regions, strict=True):
            if not is_inside(region, self.shapes[number]):
                raise self.no_region(number, region, region.sizes)
            targets.append(narrow(self.views[number], region))
        sizes, dtypes = [region.sizes for region in regions], [self.dtypes[number] for number in numbers]
        found = self._parts[names[0], regions[0]] = _Parts(names, regions, numbers, sizes, dtypes, targets)
        return found

    def was_whole(self, loaded: set[int], parts: list[_Parts]) -> bool:
        """Whether the last update that was whole had just these tensors and parts."""
        return self._whole == (loaded, parts)

    def keep(self, loaded: set[int], parts: list[_Parts]) -> None:
        """An update of these was whole: the next one will be like it, and not like those before."""
        self._whole = loaded, parts
        self._parts = {(each.names[0], each.regions[0]): each for each in parts}

    def no_region(self, number: int, region: Region, sizes: Sequence[int]) -> IncompatibleWeightsError:
        spec, found = self._specs[number], f"{list(sizes)} elements at {list(region.offsets)}"
        return IncompatibleWeightsError(f"{found} are not a region of {spec.name!r} {list(spec.shape)}")

    def numbers(self, names: Sequence[str]) -> list[int]:
        """Raises IncompatibleWeightsError, naming every name that the module does not have."""
        try:
            return [self._by_name[name] for name in names]
        except KeyError as exc:
            problems = [f"unknown tensor {name!r}" for name in names if name not in self._by_name]
            raise IncompatibleWeightsError(listed(problems), problems) from exc


def _once(
    names: Sequence[str], numbers: Sequence[int], sources: Sequence[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """Each target once: tied names may come each with the same tensor, not with different ones."""
    first: dict[int, int] = {}
    for position, number in enumerate(numbers):
        former = first.setdefault(number, position)
        if sources[former] is not sources[position] and _memory(sources[former]) != _memory(sources[position]):
            raise IncompatibleWeightsError(
                f"{names[former]!r} and {names[position]!r} are one tensor in the module, but two different ones came"
            )
    return list(first), [sources[position] for position in first.values()]


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
