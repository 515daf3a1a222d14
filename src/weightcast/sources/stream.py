"""A source of the (name, tensor) pairs that an exporter yields one after another."""

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
"""How much is copied between two looks at the memory that is left."""


class IteratorSource:
    """A `StreamSource` of what an exporter yields: (name, tensor) pairs, each tensor valid until the next is asked for.

    Give it an iterator before each publish, by `use`; a publish takes each tensor once, and copies it into buckets
    before it asks for the next. All iterators yield the same names, dtypes and shapes in the same order. If these are
    not given they are learned from the first iterator: its tensors are copied to host memory, all of them before the
    first byte is sent, each freed when it was packed. Later ones need no memory but the tensor that is there.
    """

    def __init__(self, specs: Sequence[TensorSpec] = ()) -> None:
        """`specs`: of what each iterator yields; by default they are learned from the first."""
        self.device = torch.device("cpu")
        """Device of the tensors that the specs were learned from; with `specs`, of the last iterator's first tensor."""
        self._specs = specs
        self._is_learning = not specs
        self._given: Iterator[tuple[str, torch.Tensor]] | None = None

    def use(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish these next. To learn what they are it takes all of them, and blocks until the iterator ends; with
        `specs` it takes the first one.

        Raises what the iterator raises; where it learns, InsufficientMemoryError, and ValueError for a tensor that
        can't travel: nothing was learned then.
        """
        given = iter(tensors)
        if not self._is_learning:
            first = list(itertools.islice(given, 1))
            self.device = first[0][1].device if first else self.device
            # A chain keeps what it is made of, but an iterator at its end keeps no tensor.
            given = itertools.chain(iter(first), given)
        elif not self._specs:
            given = self._copied(given)
        self._given = given

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def stream(self) -> TensorStream:
        """The tensors of the last `use`, once. Raises ValueError if they were taken."""
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
                raise ValueError(f"{name!r} is {tensor.dtype}; known: {', '.join(DTYPE_NAMES.values())}")
            if tensor.is_meta or not is_memory(tensor):
                raise ValueError(f"{name!r} on {tensor.device} is without memory, or computed when it is read")
            unchecked_bytes += tensor.nbytes
            if unchecked_bytes >= _CHECKED_BYTES:
                what = f"a copy of the first version, which is {name!r} and all tensors before it,"
                memory.require(unchecked_bytes, what, "free host memory on the rank that publishes")
                unchecked_bytes = 0
            specs.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
            copies.append((name, tensor.to("cpu", copy=True)))
            if tensor.device.type != "cpu":
                self.device = tensor.device
        self._specs = tuple(specs)
        copies.reverse()
        return (copies.pop() for _ in range(len(copies)))
