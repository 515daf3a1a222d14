"""Notices that a module has other tensors than it had, at a fraction of a microsecond per tensor."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weightcast.checkpoint import sharding

_BATCH_TENSORS = 1024
_LOOKS = (torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.is_contiguous)


class TensorChangeDetector:
    """Notices that a module has other tensors than when the watch was made.

    The views that were made then keep their memory alive, so an equal address is the same memory.
    """

    def __init__(self, module: nn.Module, *, with_buffers: bool) -> None:
        registers: list[dict[str, Any]] = []
        for part in module.modules():
            registers += [part._parameters, part._modules]
            if with_buffers:
                registers.append(part._buffers)
        self._empty = [register for register in registers if not register]
        self._filled = [register for register in registers if register]
        self._values = self._all_values()
        self._names = list(itertools.chain.from_iterable(self._filled))
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._plain = [tensor for tensor in tensors if sharding.as_dtensor(tensor) is None]
        self._distributed = [tensor for tensor in map(sharding.as_dtensor, tensors) if tensor is not None]
        self._places = list(self._all_places())

    def has_changed(self) -> bool:
        return self.has_other_members() or not all(map(operator.eq, self._all_places(), self._places))

    def has_other_members(self) -> bool:
        values = self._all_values()
        return (
            any(self._empty)
            or len(values) != len(self._values)
            or not all(map(operator.is_, values, self._values))
            or list(itertools.chain.from_iterable(self._filled)) != self._names
        )

    def _all_values(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._filled)))

    def _all_places(self) -> Iterator[tuple[list[Any], ...]]:
        """Where the tensors' memory is, and what tells another view of it (a transpose, a slice) apart, in batches.

        A batch at a time: the later looks at a tensor find it in cache, and a look at a shape costs ten times as much.
        """
        for start in range(0, len(self._plain), _BATCH_TENSORS):
            batch = self._plain[start : start + _BATCH_TENSORS]
            yield tuple(list(map(look, batch)) for look in _LOOKS)
        shards = [tensor._local_tensor for tensor in self._distributed]
        yield tuple(list(map(look, shards)) for look in _LOOKS)
