"""The seam of engines that are installed into by copies: where a checkpoint's tensors lie in live memory.

One install, called by the worker of a `Mapped` engine:

    InstallMap.bind()                    right before the first copy; False: `load` gets everything
    Mapped.begin(copied)                 these tensors are copied, the others come by `load`
    InstallMap.source_blocks(...)        what a copy reads, of a tensor or a piece of one
    InstallMap.target_blocks(...)        what it writes
    Engine.load(others)
    Engine.commit(version)               raises if what was copied to is not the model's memory any more
    InstallMap.prove(...)                after an install through the loader: what can be copied from now on
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from weightcast.format.bucket import narrow
from weightcast.format.geometry import Region
from weightcast.format.tensor_digest import tensor_digest


class InstallMap:
    """The places of an engine's tensors in live memory. In this base class each is one live tensor of the same shape.

    Calls come from one thread at a time.
    """

    revision = 0
    """Grows whenever a copy that was prepared by this map, or the choice of what is copied, is out of date."""

    also_loaded: Collection[str] = frozenset()
    """Names whose tensors `load` gets in any case, also where they are copied."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self._live = live

    @property
    def is_stale(self) -> bool:
        """True if the engine's model is another one than the one that this map was made for."""
        return False

    @property
    def proven(self) -> Collection[str]:
        """The names that an install by this map copies."""
        return self._live.keys()

    def bind(self) -> bool:
        """Find every live tensor where it is now. Returns False if one is gone or of another form."""
        return True

    def can_copy(self, name: str) -> bool:
        """Return whether copies of this tensor are known, so that it is copied once it is proven."""
        return name in self._live

    def can_copy_pieces(self, name: str) -> bool:
        """Return whether a piece of this tensor can be copied by itself: all its blocks are regions of the tensor."""
        return True

    def target_bytes(self, name: str) -> int:
        """Return how much of this tensor this rank takes, in the live parameters' dtypes."""
        return self._live[name].nbytes

    def source_blocks(self, name: str, tensor: torch.Tensor, piece: Region | None = None) -> list[torch.Tensor]:
        """The blocks of a contiguous tensor that this rank takes, as views, in the order of `target_blocks`.

        `tensor` is all of it, or that `piece` of one that `can_copy_pieces`.
        """
        return [tensor]

    def target_blocks(self, name: str, piece: Region | None = None) -> list[torch.Tensor]:
        """Views of the live parameters, where `bind` has found them, that the source blocks belong in."""
        return [self._live[name] if piece is None else narrow(self._live[name], piece)]

    def block_digests(self, name: str, sources: Sequence[torch.Tensor]) -> list[str]:
        """Digests of source blocks after a cast to the live dtypes, for `prove` once the tensor is gone."""
        targets = self.target_blocks(name)
        return [tensor_digest(source.to(live.dtype)) for source, live in zip(sources, targets, strict=True)]

    def prove(self, tensors: Iterable[tuple[str, Sequence[torch.Tensor | str]]]) -> None:
        """Find out which of these may be copied from now on, after an install through the loader. Here all may.

        With each name come its source blocks, or their digests.
        """


@runtime_checkable
class Mapped(Protocol):
    """An engine whose tensors, or some of them, are copied into live memory by its worker."""

    @property
    def install_map(self) -> InstallMap | None:
        """The map of the offer that was validated last; None if there is none."""

    def begin(self, copied: Collection[str]) -> None:
        """Begin an install in which the worker copies the tensors named in `copied`, beside the calls of `load`.

        Called right after `bind`, before the first `load` or copy. Of these names `load` gets only those that are
        `also_loaded`, to look at. Without this call everything comes by `load`.
        """
