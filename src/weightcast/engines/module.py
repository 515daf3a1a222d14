"""Installs weights into a live `nn.Module`, in place: for models served in your own process, and as the reference.

Invariants: nothing is written before the whole call has been checked; only memory of the module is written, in a few
calls however many tensors there are; a tensor of another shape, or without `cast` of another dtype, is never taken.
Parameters keep their identity, so compiled and graph-captured models stay valid.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from weightcast.checkpoint import conversion
from weightcast.checkpoint.live import CASTABLE, Buffers, InstallMap, LiveCheckpoint, Names, state_dict_hooks
from weightcast.errors import IncompatibleWeightsError, IncompleteUpdateError, InstallError, listed, thrown
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.host import copy as host_copy
from weightcast.host import device as host_device

logger = logging.getLogger(__name__)


class ModuleEngine:
    """An `Engine` that copies into a module's own parameters and buffers; also undoes and reads.

    It accepts the names and shapes that the module has in checkpoint form (see `checkpoint`): a model with fused
    experts takes one tensor per expert. With `cast`, half, bfloat16, single and double precision may differ: what comes
    is cast to the module's dtype as it is copied. It can't bring back what a source with a dtype of its own has rounded
    before: float32 that is sent as bfloat16 to a float32 parameter is rounded, which `dtype="engine"` avoids.
    Calls come from one thread at a time, and nothing else may use the module meanwhile. Extra memory: none but
    `snapshot_bytes` for an undo. Raises ValueError if the module has no checkpoint form in place, or
    where tensors share memory without being tied as a whole.
    """

    def __init__(
        self, model: nn.Module, *, cast: bool = False, buffers: Buffers = "persistent", names: Names | None = None
    ) -> None:
        self.version: WeightVersion | None = None
        self._mapped: Collection[str] = ()
        self._model = model
        self._cast = cast
        self._live = _LiveModule(LiveCheckpoint(model, buffers=buffers, names=names))
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
        self._live.look()
        return self._live.devices

    @property
    def install_map(self) -> InstallMap:
        return self._live

    def specs(self) -> Sequence[TensorSpec]:
        self._live.expect_update()
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
        self._live.bind()
        numbers = self._live.numbers(names)
        unique = set(numbers)
        if len(unique) != len(numbers):
            numbers, sources = _once(names, numbers, sources)
        self._check(numbers, sources)
        with self._copying():
            host_copy.copy_all([self._live.views[number] for number in numbers], sources)
        self._loaded.update(self._live.specs[number].name for number in unique)

    def load_mapped(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        mapped: Collection[str],
        copy: Callable[[], None],
        *,
        is_last: bool = True,
    ) -> None:
        """As `load`, where `copy` makes the copies of the tensors named in `mapped` (see `Mapped`)."""
        self.load(tensors)
        with self._copying():
            copy()
        if is_last:
            self._mapped = mapped

    def commit(self, version: WeightVersion) -> None:
        """Every tensor has been loaded since the last commit or discard: `version` is served.

        Raises IncompleteUpdateError, naming what was not loaded; InstallError (torn) if the module's tensors were
        exchanged during the update, so that what was written is no longer in use. (`param.data = ...` during an update
        is found by the next one.)
        """
        if self._live.were_exchanged():
            raise InstallError("the module's tensors were replaced during the update: publish again", torn=True)
        specs = self._live.specs
        if len(self._mapped) < len(specs):
            missing = [repr(s.name) for s in specs if s.name not in self._loaded and s.name not in self._mapped]
            if missing:
                names = listed(missing, most=20, separator=", ")
                raise IncompleteUpdateError(
                    f"{len(missing)} of {len(specs)} tensors were not loaded: {names}; publish all of them"
                )
        self._finish_copies()
        self.discard()
        self.version = version

    def discard(self) -> None:
        self._live.end_update()
        self._loaded = set[str]()
        self._mapped = ()

    def snapshot(self) -> Callable[[], None]:
        """Copy the live weights to host memory; the result restores them, and frees nothing until it is dropped.

        Takes `snapshot_bytes` of host memory. The restorer raises InstallError (torn) if the module has other tensors.
        """
        self._live.refresh()
        specs = self._live.specs
        with torch.inference_mode():
            copies = [torch.empty(view.shape, dtype=view.dtype) for view in self._live.views]
            host_copy.copy_all(copies, self._live.views)

        def restore() -> None:
            self._live.refresh()
            if self._live.specs != specs:
                raise InstallError("the module's tensors changed their form, the undo copy no longer fits", torn=True)
            with self._copying():
                host_copy.copy_all(self._live.views, copies)
            self._finish_copies()
            self.discard()

        return restore

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every record's name with the live memory, in the order of `specs`."""
        self._live.refresh()
        yield from self._live.live.items()

    def _check(self, numbers: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        specs, shapes, dtypes = self._live.specs, self._live.shapes, self._live.dtypes
        if not all(map(operator.eq, map(_shape_of, sources), map(shapes.__getitem__, numbers))):
            problems = [
                f"{specs[number].name!r} has the shape {list(source.shape)}, the module has {list(shapes[number])}"
                for number, source in zip(numbers, sources, strict=True)
                if source.shape != shapes[number]
            ]
            raise IncompatibleWeightsError(f"other shapes: {listed(problems)}", problems)
        if not all(map(operator.is_, map(_dtype_of, sources), map(dtypes.__getitem__, numbers))):
            for number, source in zip(numbers, sources, strict=True):
                spec, offered = specs[number], DTYPE_NAMES.get(source.dtype, str(source.dtype))
                if not self.can_cast(offered, spec.dtype):
                    found = f"{spec.name!r} is {offered}, the module has {spec.dtype}"
                    raise IncompatibleWeightsError(f"{found}: give the source a dtype, or the engine cast=True")

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        try:
            # Not no_grad: parameters that were made in inference mode can be written only there.
            with torch.inference_mode():
                yield
        except RuntimeError as exc:
            raise InstallError(f"copying into the module failed: {exc}", torn=True) from thrown(exc)

    def _finish_copies(self) -> None:
        for device in self._live.devices:
            if device.type == "cuda":
                host_device.synchronize_stream(device)


_shape_of = operator.attrgetter("shape")
_dtype_of = operator.attrgetter("dtype")


class _LiveModule(InstallMap):
    """The module's tensors by name and by number.

    A look at every tensor costs about as much as the copies of small ones: in an update there is one before it writes,
    by whichever call comes first, and one at members that were exchanged at its end.
    """

    def __init__(self, checkpoint: LiveCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._is_fresh = self._is_updating = self._is_replaced = False
        self._index()

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self._checkpoint.specs

    @property
    def live(self) -> Mapping[str, torch.Tensor]:
        return self._checkpoint.views

    def bind(self) -> bool:
        """An update begins to write, or goes on with it."""
        self.look()
        self._is_updating = True
        return True

    def expect_update(self) -> None:
        """Look at every tensor; the update that begins next does not look again."""
        if not self._is_updating:
            self.refresh()
            self._is_fresh = True

    def look(self) -> None:
        """Look at every tensor, unless this update has."""
        if not (self._is_updating or self._is_fresh):
            self.refresh()

    def refresh(self) -> None:
        self._note(self._checkpoint.refresh())

    def were_exchanged(self) -> bool:
        """Whether the module got other tensors since the update began."""
        self._note(self._checkpoint.refresh_members())
        return self._is_replaced

    def end_update(self) -> None:
        self._is_fresh = self._is_updating = self._is_replaced = False

    def numbers(self, names: Sequence[str]) -> list[int]:
        """Raises IncompatibleWeightsError, naming every name that the module does not have."""
        try:
            return [self._by_name[name] for name in names]
        except KeyError as exc:
            problems = [f"unknown tensor {name!r}" for name in names if name not in self._by_name]
            raise IncompatibleWeightsError(listed(problems), problems) from exc

    def _note(self, has_changed: bool) -> None:
        if has_changed:
            self._is_replaced = self._is_updating
        # What can't be written to is looked at again each time, not left at the former tensors.
        if self._indexed is not self.live:
            self._index()

    def _index(self) -> None:
        self._checkpoint.require_memory()
        conversion.require_apart(self.live)
        self._indexed = self.live
        self.views = list(self.live.values())
        self.shapes = [view.shape for view in self.views]
        self.dtypes = [view.dtype for view in self.views]
        self.devices = list(dict.fromkeys(view.device for view in self.views))
        self._by_name = {name: number for number, spec in enumerate(self.specs) for name in spec.names}


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
