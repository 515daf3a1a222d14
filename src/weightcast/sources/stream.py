"""Source of the (name, tensor) pairs that an exporter yields one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from weightcast.checkpoint.live import is_memory
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec
from weightcast.host import memory
from weightcast.seams.source import TensorStream

_CHECKED_BYTES = 256 << 20
"""Bytes that are copied between two checks of the available memory."""


class IteratorSource:
    """A `StreamSource` of an exporter's (name, tensor) pairs, each tensor valid until the next one is requested.

    Call `use` with an iterator before each publish. A publish reads each tensor once, and copies it into buckets before
    it requests the next. All iterators must yield the same names, dtypes and shapes in the same order. Without `specs`
    these are learned from the first iterator: all its tensors are copied to host memory before the first byte is sent,
    and each is freed after it was packed. Later iterators need memory for one tensor at a time.
    """

    def __init__(self, specs: Sequence[TensorSpec] = ()) -> None:
        """`specs`: those of the tensors that each iterator yields; by default learned from the first iterator."""
        self.device = torch.device("cpu")
        """Device of the tensors from which the specs were learned; with `specs`, of the last iterator's first tensor.
        """
        self._specs = specs
        self._is_learning = not specs
        self._given: Iterator[tuple[str, torch.Tensor]] | None = None

    def use(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish these tensors next. Reads the first one; to learn the specs, reads all and blocks until the end.

        Raises the iterator's exceptions; while it learns, InsufficientMemoryError, and ValueError for a tensor of an
        unsupported dtype or without memory. After an error nothing was learned.
        """
        given = iter(tensors)
        if not self._is_learning:
            first = list(itertools.islice(given, 1))
            self.device = first[0][1].device if first else self.device
            # A chain keeps its parts alive, but a list iterator at its end no longer refers to the list.
            given = itertools.chain(iter(first), given)
        elif not self._specs:
            given = self._copied(given)
        self._given = given

    def specs(self) -> Sequence[TensorSpec]:
        """Return the specs of the present iterator's tensors. Empty before the first `use`, unless specs were given."""
        return self._specs

    def stream(self) -> TensorStream:
        """Return the tensors of the last `use`, once. Raises ValueError if they were taken before."""
        if self._given is None:
            raise ValueError("this source has no tensors: call use(iterator) before each version")
        given, self._given = self._given, None
        return TensorStream(self.device, given)

    @torch.no_grad()
    def _copied(self, given: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        copies: list[tuple[str, torch.Tensor]] = []
        specs, unchecked_bytes = [], 0
        for name, tensor in given:
            if tensor.dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"{name!r} has dtype {tensor.dtype}, which is not supported; supported: "
                    f"{', '.join(DTYPE_NAMES.values())}"
                )
            if tensor.is_meta or not is_memory(tensor):
                raise ValueError(
                    f"{name!r} on {tensor.device} has no memory, or computes its values when read: yield a plain tensor"
                )
            unchecked_bytes += tensor.nbytes
            if unchecked_bytes >= _CHECKED_BYTES:
                what = f"a copy of the first version's tensors, up to {name!r},"
                memory.require(unchecked_bytes, what, "free host memory on the rank that publishes")
                unchecked_bytes = 0
            specs.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
            copies.append((name, tensor.to("cpu", copy=True)))
            if tensor.device.type != "cpu":
                self.device = tensor.device
        self._specs = tuple(specs)
        copies.reverse()
        return (copies.pop() for _ in range(len(copies)))
