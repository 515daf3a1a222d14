"""The conversion between a live transformers model and its checkpoint, as views: names, fused experts, tied weights.

transformers loads a checkpoint through conversions (it renames, stacks experts, joins gate and up) and reverts them in
`save_pretrained`. This module runs transformers' own reversal on tensors without data, which allows only views; the
offset and strides of each result show which part of the live tensor it is.

Invariants: every result is a view of one live tensor, and the results of a live tensor have each of its elements once;
otherwise a ValueError is raised. transformers is never imported here: the process of a transformers model has imported
it already.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.errors import ManifestError, listed
from weightcast.format.geometry import Region, check_disjoint, check_tiling, is_inside, relative

Reversal = Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def main_name(model: nn.Module, tied: Sequence[str]) -> str:
    """Return the one of several tied names that `save_pretrained` keeps: the one not declared as tied to another."""
    patterns = [
        re.compile(f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    undeclared = [name for name in tied if not any(pattern.search(name) for pattern in patterns)]
    return undeclared[0] if undeclared else max(tied)


def checkpoint_views(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that `save_pretrained` would write for these live ones (by state dict name), as views of them.

    For a model that is not of transformers these are the tensors themselves. No data is read or copied, so meta tensors
    are accepted. Raises ValueError, with the tensor's name, if a tensor of the checkpoint is not a view of a live one.
    """
    pretrained: type[nn.Module] | None = getattr(
        sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None
    )
    loading = sys.modules.get("transformers.core_model_loading")
    revert: Reversal | None = getattr(loading, "revert_weight_conversion", None)
    if pretrained is None or not isinstance(model, pretrained) or revert is None:
        return tensors
    standins = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    try:
        with _ViewsOnly():  # type: ignore[no-untyped-call]
            outcomes = revert(model, dict(standins))
    except Exception as exc:
        raise _not_a_view(model, f"reverting its weight conversion failed: {exc}") from exc
    owners = {standin.untyped_storage()._cdata: name for name, standin in standins.items()}
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    views: dict[str, torch.Tensor] = {}
    for name, outcome in outcomes.items():
        owner = owners.get(outcome.untyped_storage()._cdata)
        if owner is None or outcome.dtype != standins[owner].dtype:
            raise _not_a_view(model, f"{name!r} is computed from live tensors")
        parts[owner].append(outcome)
        live = tensors[owner]
        offset = live.storage_offset() + outcome.storage_offset()
        views[name] = live.as_strided(outcome.shape, outcome.stride(), offset)
    for name, standin in standins.items():
        if standin.numel() == 0 or (len(parts[name]) == 1 and _geometry(parts[name][0]) == _geometry(standin)):
            continue
        try:
            tile(standin, parts[name], name)
        except ManifestError as exc:
            raise _not_a_view(model, f"its checkpoint would not hold each element of {name!r} once: {exc}") from exc
    return views


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns a view for a clone (which `contiguous` makes), and refuses writes."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if func._schema.is_mutable:
            raise TypeError(f"{func} writes to a tensor")
        return func(*args, **(kwargs or {}))


def _not_a_view(model: nn.Module, what: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} can't be seen in checkpoint form without a copy: {what}. "
        "Write your own Source or Engine for it (docs/writing-an-engine.md)"
    )


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def tile(whole: torch.Tensor, parts: Sequence[torch.Tensor], name: str) -> None:
    """Prove that strided views tile a strided tensor of the same storage. Raises ManifestError if they don't.

    The sorted strides of all views are the place values of a mixed-radix number system: an element's offset in the
    storage becomes a vector of digits and each view a box of such vectors, for which tiling can be decided exactly.
    """
    places = _places((whole, *parts), name)
    box = _box(whole, int(whole.storage_offset()), places, name)
    parts_of_it = [
        relative(_box(part, int(part.storage_offset()), places, name), box) for part in parts if part.numel()
    ]
    check_tiling(parts_of_it, box.sizes, name)
    if not all(is_inside(part, box.sizes) for part in parts_of_it):
        raise ManifestError(f"a part of {name!r} reaches beyond the tensor")


def require_apart(views: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, with the views' names, if views share memory, so that a write to one would change another.

    Elements of one view must not share memory either. Undecidable cases count as shared.
    """
    spans: list[tuple[int, int, str]] = []
    for name, view in views.items():
        if view.is_contiguous():
            spans.append((view.data_ptr(), view.data_ptr() + view.nbytes, name))
            continue
        last = 0
        for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
            if size > 1 and stride <= last:
                raise ValueError(
                    f"{name!r} of shape {list(view.shape)} and strides {list(view.stride())} has several elements at "
                    "one address, so weights can't be copied to it: give the module a contiguous tensor or, for a "
                    "buffer that never changes, pass buffers='none'"
                )
            last += stride * (size - 1)
        spans.append((view.data_ptr(), view.data_ptr() + (last + 1) * view.itemsize, name))
    spans = sorted(span for span in spans if span[0] < span[1])
    first, end = 0, 0
    for number, (start, stop, _) in enumerate(spans):
        if start >= end:
            _require_disjoint(views, spans[first:number])
            first = number
        end = max(end, stop)
    _require_disjoint(views, spans[first:])


def _require_disjoint(views: Mapping[str, torch.Tensor], spans: Sequence[tuple[int, int, str]]) -> None:
    """Check views whose address ranges overlap; see `require_apart`. `spans`: (first, last address, name) of each."""
    if len(spans) < 2:
        return
    names = [name for _, _, name in spans]
    held = [views[name] for name in names]
    try:
        if len({view.dtype for view in held}) > 1:
            raise ManifestError("their dtypes differ")
        places = _places(held, names[0])
        offsets = [(start - spans[0][0]) // held[0].itemsize for start, _, _ in spans]
        boxes = [_box(view, offset, places, names[0]) for view, offset in zip(held, offsets, strict=True)]
        check_disjoint(boxes, names[0])
    except ManifestError as exc:
        raise ValueError(
            f"{listed(list(map(repr, names)), separator=', ')} share memory without being one tensor ({exc}): weights "
            "that are copied to one would change another. Tie whole tensors, or give each tensor separate memory"
        ) from exc


def _places(views: Sequence[torch.Tensor], name: str) -> list[int]:
    """Return all strides of the views, in ascending order. Raises ManifestError if they do not divide each other."""
    strides = {stride for t in views for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1}
    places = sorted(strides | {1})
    if places[0] < 1 or any(upper % lower for lower, upper in itertools.pairwise(places)):
        raise ManifestError(f"the strides {places} of the parts of {name!r} do not divide each other")
    return places


def _box(view: torch.Tensor, offset: int, places: Sequence[int], name: str) -> Region:
    """Return the box of digit vectors of a view's elements, the first one at `offset`.

    Raises ManifestError if they are not a box.
    """
    rest, offsets = offset, [0] * len(places)
    for k in reversed(range(len(places))):
        offsets[k], rest = divmod(rest, places[k])
    sizes = [1] * len(places)
    for stride, size in zip(view.stride(), view.shape, strict=True):
        k = places.index(stride) if size > 1 else 0
        while size > 1:
            base = places[k + 1] // places[k] if k + 1 < len(places) else offsets[k] + size
            count = size if offsets[k] + size <= base else base
            if sizes[k] != 1 or size % count or offsets[k] + count > base:
                raise ManifestError(f"a part of {name!r} of sizes {list(view.shape)} is not a box")
            sizes[k], size, k = count, size // count, k + 1
    return Region(tuple(offsets), tuple(sizes))
