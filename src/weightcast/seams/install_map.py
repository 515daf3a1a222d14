"""The seam of engines whose weights are installed by copies: maps checkpoint tensors to live memory.

One install, called by the worker of a `Mapped` engine:

    InstallMap.bind()                    right before the first copy; False: `load` gets everything
    Mapped.begin(copied)                 these tensors are copied, the others are passed to `load`
    InstallMap.are_copied_as_is(...)     True where a copy needs only a tensor's address; else
    InstallMap.source_blocks(...)        the blocks that a copy reads, of a tensor or a piece of one
    InstallMap.target_blocks(...)        the blocks that it writes
    Engine.load(others)
    Engine.commit(version)               raises if the model's tensors were replaced during the copies
    InstallMap.prove(...)                after an install through the loader: finds out which tensors can be copied
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from weightcast.format.bucket import narrow
from weightcast.format.geometry import Region
from weightcast.format.tensor_digest import tensor_digest


class InstallMap:
    """Map of an engine's tensors to live memory. In this base class each is one live tensor of the same shape.

    It is called from one thread at a time.
    """

    revision = 0
    """Grows whenever copies that were prepared by this map, or the set of copied tensors, are out of date."""

    also_loaded: Collection[str] = frozenset()
    """Names whose tensors `load` gets even if they are copied."""

    is_within_storage = False
    """True if `bind` makes sure that each live tensor ends within its storage. Copies that are prepared right after it
    don't check that again; all others do."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self._live = live

    @property
    def is_stale(self) -> bool:
        """True if the engine's model has changed since the map was made. Asked at each offer of a known manifest, so
        it should read no tensor; changes that it does not see have to be found by `bind`.
        """
        return False

    @property
    def proven(self) -> Collection[str]:
        """The names that an install by this map copies."""
        return self._live.keys()

    def bind(self) -> bool:
        """Find the present memory of every live tensor.

        Returns False if one is missing or has another shape or dtype.
        """
        return True

    def can_copy(self, name: str) -> bool:
        """Return whether copies of this tensor are known, so that it is copied once it is proven."""
        return name in self._live

    def can_copy_pieces(self, name: str) -> bool:
        """Return whether a piece of this tensor can be copied by itself: all its blocks are regions of the tensor."""
        return True

    def target_bytes(self, names: Iterable[str]) -> int:
        """Return the size of this rank's parts of these tensors, in the live parameters' dtypes."""
        return sum([self._live[name].nbytes for name in names])

    def source_blocks(self, name: str, tensor: torch.Tensor, piece: Region | None = None) -> list[torch.Tensor]:
        """Return views of a contiguous tensor's blocks that this rank needs, in the order of `target_blocks`.

        `tensor`: all of it, or this `piece` of one that `can_copy_pieces`.
        """
        return [tensor]

    def are_copied_as_is(self, names: Sequence[str], dtypes: Sequence[torch.dtype]) -> list[bool]:
        """Return, for each tensor of this name and dtype, whether it is only copied, all of it, to one live tensor of
        its shape and dtype in host memory. That takes its address, and no `source_blocks`: override both or none.
        """
        known, loaded = self._live, self.also_loaded
        live = zip(names, map(known.get, names), dtypes, strict=True)
        return [t is not None and t.dtype is dtype and t.is_cpu and name not in loaded for name, t, dtype in live]

    def target_blocks(self, name: str, piece: Region | None = None) -> list[torch.Tensor]:
        """Return the views of live parameters, as found by `bind`, to which the source blocks are copied."""
        return [self._live[name] if piece is None else narrow(self._live[name], piece)]

    def block_digests(self, name: str, sources: Sequence[torch.Tensor]) -> list[str]:
        """Return the digests of source blocks after a cast to the live dtypes, for `prove`."""
        targets = self.target_blocks(name)
        return [tensor_digest(source.to(live.dtype)) for source, live in zip(sources, targets, strict=True)]

    def prove(self, tensors: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Find out, after an install through the loader, which of these tensors can be copied from now on.

        `tensors`: names with the digests of their source blocks. In this base class all can be copied.
        """


@runtime_checkable
class Mapped(Protocol):
    """An engine whose worker copies all or some tensors into live memory."""

    @property
    def install_map(self) -> InstallMap | None:
        """The map of the last validated offer; None if there is none."""

    def begin(self, copied: Collection[str]) -> None:
        """Begin an install in which the worker copies the tensors named in `copied`, in addition to calls of `load`.

        Called right after `bind`, before the first `load` or copy. Of these names `load` gets only those that are
        `also_loaded`. Without this call, `load` gets all tensors.
        """
