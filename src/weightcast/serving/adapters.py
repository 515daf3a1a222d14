"""The adapters of an engine: which versions are loaded, which of them requests can name, and updates of them.

Invariants: an update is checked whole before it is loaded, and loaded before a request can name it; a version's label
is never used for another one; a version that requests can name, or that running requests have begun with, stays loaded;
a new version of the model takes the names of all adapters, which were trained on the former one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from weightcast.checkpoint.live import CASTABLE
from weightcast.errors import (
    IncompatibleWeightsError,
    IncompleteUpdateError,
    InstallError,
    StaleVersionError,
    UnsupportedError,
    listed,
)
from weightcast.format.adapters import AdapterTarget, AdapterVersion, adapter_label, tensor_name
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import memory as host_memory
from weightcast.seams.adapters import AdapterLayers, AdapterLimits
from weightcast.serving.admission import misfit_error

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class AdapterTable:
    """The adapters of an engine whose model has these `layers`. The worker calls it, never from two threads at once."""

    def __init__(self, layers: AdapterLayers) -> None:
        self.layers = layers
        self._loaded: dict[str, WeightVersion] = {}
        """By label, every version that is loaded."""
        self._named: dict[str, tuple[WeightVersion, ...]] = {}
        """By adapter, the versions that requests can name, the current one last."""

    def versions(self) -> tuple[AdapterVersion, ...]:
        """Return the versions that requests can name."""
        return tuple(
            AdapterVersion(name, version.number, version.run, is_current=version == versions[-1])
            for name, versions in self._named.items()
            for version in versions
        )

    def newest(self, run: str) -> int:
        """Return the highest number of a version of this run that requests can name; -1 without one."""
        numbers = (v.number for versions in self._named.values() for v in versions if v.run == run)
        return max(numbers, default=-1)

    def serves(self, version: WeightVersion) -> bool:
        """Return whether this is the current version of an adapter."""
        return any(versions[-1] == version for versions in self._named.values())

    def retire(self) -> None:
        """Take the names of all adapters, after the model has changed. Requests that run go on with theirs."""
        self._name({})

    def unload(self, idle: Collection[str] | None = None) -> None:
        """Unload versions that no request can name: those in `idle`, by default those that no request uses."""
        in_use = self.layers.in_use() if idle is None else self._loaded.keys() - set(idle)
        for label in self._loaded.keys() - self._labels().values() - set(in_use):
            self.layers.remove(label)
            del self._loaded[label]

    def add(self, target: AdapterTarget, version: WeightVersion, tensors: dict[str, torch.Tensor]) -> None:
        """Load a version, and answer requests that name its adapter with it."""
        label = adapter_label(target.name, version.number)
        self.layers.add(label, tensors, target.config, origin=version.run)
        self._loaded[label] = version
        versions = (*self._named.get(target.name, ()), version)[-1 - target.keep :]
        self._name(self._named | {target.name: versions})

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present names, and unloads what was added since."""
        named, loaded = self._named, set(self._loaded)

        def restore() -> None:
            self._name(named)
            self.unload(self._loaded.keys() - loaded)

        return restore

    def require_room(self, target: AdapterTarget, version: WeightVersion) -> None:
        """Raise StaleVersionError for a label that is in use, UnsupportedError if no further version can be loaded."""
        self.unload()
        label = adapter_label(target.name, version.number)
        if (found := self._loaded.get(label)) is not None:
            raise StaleVersionError(
                f"{label} of run {found.run} is loaded in this engine, and its name stands for it alone: publish a "
                "version with a higher number"
            )
        capacity = self.layers.capacity
        if capacity is not None and len(self._loaded) >= capacity:
            raise UnsupportedError(
                f"this engine has {len(self._loaded)} adapters loaded ({listed(sorted(self._loaded), separator=', ')}) "
                f"and takes at most {capacity}: publish with a smaller keep, or wait for the requests of older "
                f"versions, or start the engine with {self.layers.limits}"
            )

    def _name(self, named: dict[str, tuple[WeightVersion, ...]]) -> None:
        self._named = named
        self.layers.name(self._labels())

    def _labels(self) -> dict[str, str]:
        """Return the label of the version that answers a request, by the name in it."""
        labels = {}
        for name, versions in self._named.items():
            labels[name] = adapter_label(name, versions[-1].number)
            labels |= {label: label for v in versions if (label := adapter_label(name, v.number))}
        return labels


class AdapterUpdate:
    """An `Engine` for one version of an adapter, which it loads beside the served ones. Always `Undoable`.

    `base`: returns the present version of the model.
    """

    def __init__(self, table: AdapterTable, target: AdapterTarget, base: Callable[[], WeightVersion | None]) -> None:
        self._table = table
        self._target = target
        self._base = base
        self._base_at_offer = base()
        self._tensors: dict[str, torch.Tensor] = {}

    def specs(self) -> None:
        """Return None: `validate` decides about an offer."""

    def validate(self, manifest: Manifest) -> None:
        """Check the adapter's base, settings and tensors. Raises IncompatibleWeightsError with every problem."""
        target, found = self._target, self._base_at_offer
        if target.base and target.base != found:
            served = (
                "the weights that it was started with" if found is None else f"version {found.number} of {found.run}"
            )
            wanted = f"version {target.base.number} of run {target.base.run}"
            problem = f"the adapter {target.name!r} is for {wanted} of the model, and this engine serves {served}"
            raise IncompatibleWeightsError(f"{problem}: publish that model to it first", [problem])
        if problems := list(adapter_problems(manifest, target, self._table.layers)):
            raise misfit_error(problems)
        host_memory.require(
            manifest.num_bytes, "a version of an adapter", "publish with a smaller keep, or free memory"
        )

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        # Cloned, since they are valid only during the call, and engines scale B in place.
        self._tensors.update((name, tensor.clone()) for name, tensor in tensors)

    def commit(self, version: WeightVersion) -> None:
        config, tensors = self._target.config, self._tensors
        missing = [
            n for m in config.target_modules for n in (tensor_name(m, "A"), tensor_name(m, "B")) if n not in tensors
        ]
        if missing:
            raise IncompleteUpdateError(f"not loaded: {listed(missing, most=20)}; publish the whole adapter")
        if self._base() != self._base_at_offer:
            raise InstallError("the model's weights have changed since the adapter was offered: publish it again")
        self._tensors = {}
        self._table.add(self._target, version, tensors)

    def discard(self) -> None:
        self._tensors = {}

    def snapshot(self) -> Callable[[], None]:
        return self._table.snapshot()


def adapter_problems(manifest: Manifest, target: AdapterTarget, layers: AdapterLimits) -> Iterator[str]:
    """Yield the reasons why this engine can't load the adapter."""
    config, shapes = target.config, layers.shapes()
    offered = {name: record for record in manifest.tensors for name in record.names}
    modules, first = dict.fromkeys(config.target_modules), config.target_modules[0]
    for name, record in offered.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in modules:
            yield f"unknown tensor {name!r} {record.dtype}{list(record.shape)}: not of a module in target_modules"
        elif record.dtype not in CASTABLE:
            yield f"{name!r} is {record.dtype}; adapters must be {', '.join(sorted(CASTABLE))}"
    for module in (*config.rank_pattern, *config.alpha_pattern):
        if module not in modules:
            yield f"the rank or alpha of {module!r} is given, which is not in target_modules"
    for module in modules:
        rank = config.rank(module)
        if module not in shapes:
            yield f"unknown module {module!r}: this engine has no such layer that takes an adapter"
            continue
        if layers.max_rank is not None and rank > layers.max_rank:
            yield f"{module!r} has rank {rank}, above {layers.max_rank}: start the engine with {layers.limits}"
        if layers.is_uniform and (rank, config.scaling(module)) != (config.rank(first), config.scaling(first)):
            yield f"{module!r} has another rank or alpha than {first!r}: this engine takes adapters with one of each"
        outputs, inputs = shapes[module]
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            name = tensor_name(module, half)
            if name not in offered:
                yield f"missing tensor {name!r} {list(shape)}"
            elif offered[name].shape != shape:
                found = list(offered[name].shape)
                yield f"{name!r} has the shape {found}; with rank {rank} it is {list(shape)} in this engine"
        first_half, second_half = (offered.get(tensor_name(module, half)) for half in "AB")
        if first_half and second_half and first_half.dtype != second_half.dtype:
            yield (
                f"{tensor_name(module, 'A')!r} is {first_half.dtype} and its lora_B {second_half.dtype}: the two must "
                "have one dtype"
            )
