"""Engine that installs weights into a live `nn.Module` in place, for models in your own process; the reference engine.

Invariants: nothing is written before all tensors of a call were checked; only memory of the module is written, in a few
calls however many tensors there are; a tensor of another shape, or without `cast` of another dtype, is refused.
Parameters keep their identity, so compiled and graph-captured models stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from weightcast.checkpoint import conversion
from weightcast.checkpoint.live import CASTABLE, Buffers, LiveCheckpoint, Names, state_dict_hooks
from weightcast.errors import IncompatibleWeightsError, IncompleteUpdateError, InstallError, listed
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.host import copy as host_copy
from weightcast.host import device as host_device
from weightcast.native.tables import same_members
from weightcast.seams.adapters import AdapterLayers
from weightcast.seams.install_map import InstallMap

logger = logging.getLogger(__name__)


class ModuleEngine:
    """An `Engine` that copies into a module's own parameters and buffers. Supports undo and reading.

    It accepts the names and shapes that the module has in checkpoint form (see `checkpoint`): a model with fused
    experts takes one tensor per expert. With `cast`, tensors in half, bfloat16, single or double precision are cast to
    the module's dtype while they are copied. Values that the source has rounded before stay rounded: to send float32
    to a float32 parameter, give the source `dtype="engine"` or no dtype.
    Call it from one thread at a time, while nothing else uses the module. Extra memory: the weights in host memory for
    an undo, otherwise none. Raises ValueError if the module has no checkpoint form that can be written in place, or if
    tensors share memory without being tied as a whole.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        cast: bool = False,
        buffers: Buffers = "persistent",
        names: Names | None = None,
        adapters: AdapterLayers | None = None,
    ) -> None:
        """`adapters`: the model's `LoraLayers`, so that LoRA adapters can be published to it."""
        self.adapters = adapters
        self.version: WeightVersion | None = None
        self._copied: Collection[str] = ()
        self._written: object = None
        """The module's tensors to which this update has written so far."""
        self._model = model
        self._cast = cast
        self._checkpoint = LiveCheckpoint(model, buffers=buffers, names=names)
        self.install_map = _ModuleMap(self._checkpoint)
        """The map by which an install copies into the module (see `Mapped`)."""
        if hooks := state_dict_hooks(model, loading=True):
            logger.warning(
                "weights are copied into the module's parameters and buffers; these hooks for loading a state dict, "
                "which may do more than copy, are not called: %s",
                listed(hooks, separator=", "),
            )
        self.discard()

    @property
    def devices(self) -> Collection[torch.device]:
        """All devices that have tensors of the module."""
        if not same_members(*self._checkpoint.changes.members):
            self.install_map.look()
        return self._checkpoint.devices()

    def specs(self) -> Sequence[TensorSpec]:
        """Return the tensors that the module accepts; the same object until its names, shapes or dtypes change.

        This reads no tensor: other data (`param.data = ...`) is found by `InstallMap.bind`.
        """
        if self.install_map.is_stale:
            self.install_map.look()
            if self.install_map.is_stale:
                self.install_map = _ModuleMap(self._checkpoint)
        return self.install_map.specs

    def can_cast(self, offered: str, held: str) -> bool:
        """Return whether `load` takes dtype `offered` for a tensor of dtype `held`."""
        return offered == held or (self._cast and offered in CASTABLE and held in CASTABLE)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy into the module. On a GPU the copies are queued on this thread's stream; `commit` waits for them.

        Raises IncompatibleWeightsError, before anything is written, for unknown names, other shapes or dtypes, or
        different tensors under tied names; InstallError (torn) if a copy fails, or if the module's tensors were
        replaced since an earlier call of this update.
        """
        named = list(tensors)
        if not named:
            return
        self.install_map.look()
        by_name = self.install_map.by_name
        if problems := [f"unknown tensor {name!r}" for name, _ in named if name not in by_name]:
            raise IncompatibleWeightsError(listed(problems), problems)
        # Each target once: tied names may each come with the same tensor, but not with different ones.
        first: dict[TensorSpec, tuple[str, torch.Tensor]] = {}
        for name, tensor in named:
            former, source = first.setdefault(by_name[name], (name, tensor))
            if source is not tensor and _memory(source) != _memory(tensor):
                raise IncompatibleWeightsError(
                    f"{former!r} and {name!r} are one tensor in the module, but two different tensors came: tie them "
                    "in the trainer too, or untie them in the engine"
                )
        problems = [
            f"{spec.name!r} has the shape {list(source.shape)}, the module has {list(spec.shape)}"
            for spec, (_, source) in first.items()
            if source.shape != spec.shape
        ]
        if problems:
            what = f"shapes differ: {listed(problems)}; publish the model that is served"
            raise IncompatibleWeightsError(what, problems)
        for spec, (_, source) in first.items():
            offered = DTYPE_NAMES.get(source.dtype, str(source.dtype))
            if not self.can_cast(offered, spec.dtype):
                found = f"{spec.name!r} is {offered}, the module has {spec.dtype}"
                raise IncompatibleWeightsError(f"{found}: give the source this dtype, or the engine cast=True")
        self._require_in_place()
        live = self.install_map.live
        _copy([live[spec.name] for spec in first], [source for _, source in first.values()])
        self._loaded.update(spec.name for spec in first)

    def begin(self, copied: Collection[str]) -> None:
        """Begin an install in which these tensors are copied by the map (see `Mapped`)."""
        self.discard()
        self._copied, self._written = copied, self.install_map.live

    def commit(self, version: WeightVersion) -> None:
        """Complete the update to `version`: every tensor must have been loaded since the last commit or discard.

        Raises IncompleteUpdateError that names the missing tensors; InstallError (torn) if the module's tensors were
        replaced during the update (`param.data = ...`, other parameters, other modules), so that the written memory is
        no longer used.
        """
        self.install_map.look()
        self._require_in_place()
        specs = self.install_map.specs
        if len(self._copied) < len(specs):
            missing = [repr(s.name) for s in specs if s.name not in self._loaded and s.name not in self._copied]
            if missing:
                names = listed(missing, most=20, separator=", ")
                raise IncompleteUpdateError(
                    f"{len(missing)} of {len(specs)} tensors were not loaded: {names}; publish all of them"
                )
        self._finish_copies()
        self.discard()
        self.version = version

    def discard(self) -> None:
        """Forget the state of an aborted update; the module keeps what was written."""
        self._written = None
        self._loaded = set[str]()
        self._copied = ()

    def snapshot(self) -> Callable[[], None]:
        """Copy the live weights to host memory; return a function that restores them.

        The copy is kept as long as the function is. It raises InstallError (torn) if the module's tensors have changed.
        """
        self.install_map.look()
        specs = self.install_map.specs
        with torch.inference_mode():
            copies = [torch.empty(view.shape, dtype=view.dtype) for view in self.install_map.views]
            host_copy.copy_all(copies, self.install_map.views)

        def restore() -> None:
            self.install_map.look()
            if self.install_map.specs != specs:
                raise InstallError(
                    "the undo copy no longer fits: the module's tensors have other names, shapes or dtypes by now; "
                    "publish again",
                    torn=True,
                )
            _copy(self.install_map.views, copies)
            self._finish_copies()
            self.discard()

        return restore

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor's name and live memory, in the order of `specs`."""
        self.install_map.look()
        yield from self.install_map.live.items()

    def _require_in_place(self) -> None:
        """Raise InstallError if the module's tensors are not those that this update has written to so far."""
        if self._written is None:
            self._written = self.install_map.live
        elif self._written is not self.install_map.live:
            raise InstallError("the module's tensors were replaced during the update: publish again", torn=True)

    def _finish_copies(self) -> None:
        # As torch's own copies do, so that a backward pass over the former weights raises. In parts, since the GIL is
        # held meanwhile.
        with torch.inference_mode():  # for parameters made there, which `module.to` has moved outside of it
            for start in range(0, len(self.install_map.views), _VERSIONS_AT_ONCE):
                increment_version(self.install_map.views[start : start + _VERSIONS_AT_ONCE])
        for device in self.install_map.devices:
            if device.type == "cuda":
                host_device.synchronize_stream(device)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    try:
        with torch.inference_mode():  # not no_grad: parameters made in inference mode can be written only there
            host_copy.copy_all(targets, sources)
    except (RuntimeError, ValueError) as exc:
        raise InstallError(f"copying into the module failed: {exc}", torn=True) from exc


_VERSIONS_AT_ONCE = 2048


class _ModuleMap(InstallMap):
    """Install map of a module: each tensor is copied to the live tensor of its name.

    It has the module's tensors and their specs by name, as of the last `look`. `live` (by name) is a new object after a
    look that found moved tensors, `specs` after one that found other tensors, for which another map is needed.
    """

    is_within_storage = True  # of all views, which the checkpoint makes again whenever a tensor has moved

    def __init__(self, checkpoint: LiveCheckpoint) -> None:
        super().__init__(checkpoint.views)
        self._checkpoint = checkpoint
        self._index()
        self._own_specs = self.specs

    @property
    def is_stale(self) -> bool:
        checkpoint = self._checkpoint
        is_looked_up = checkpoint.specs is self._own_specs and checkpoint.views is self.live
        return not is_looked_up or not same_members(*checkpoint.changes.members)

    def bind(self) -> bool:
        self.look()
        return self.specs == self._own_specs

    def target_bytes(self, names: Iterable[str]) -> int:
        return sum(map(self._num_bytes.__getitem__, names))

    def are_copied_as_is(self, names: Sequence[str], dtypes: Sequence[torch.dtype]) -> list[bool]:
        return [self._host_dtypes.get(name) is dtype for name, dtype in zip(names, dtypes, strict=True)]

    def look(self) -> None:
        """Look up every tensor of the module. Raises ValueError for tensors that can't be written to."""
        self._checkpoint.refresh()
        # Indexed only after success, so that a tensor that can't be written to is found again at the next look.
        if self.live is not self._checkpoint.views:
            self._index()
            self.revision += 1

    def _index(self) -> None:
        self._checkpoint.require_memory()
        conversion.require_apart(self._checkpoint.views)
        self._live = self.live = self._checkpoint.views
        self.specs = self._checkpoint.specs
        self.views = list(self.live.values())
        self._num_bytes = {name: view.nbytes for name, view in self.live.items()}
        self._host_dtypes = {name: view.dtype for name, view in self.live.items() if view.is_cpu}
        self.devices = list(dict.fromkeys(view.device for view in self.views))
        self.by_name = {name: spec for spec in self.specs for name in spec.names}


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
