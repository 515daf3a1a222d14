"""`weightcast delta`: what a delta from one checkpoint to another costs, and how much of the model changed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape
from rich.table import Column, Table

from weightcast.cli import exits, output
from weightcast.errors import IncompatibleWeightsError, listed, printable
from weightcast.format.amounts import count, size

if TYPE_CHECKING:
    import torch

    from weightcast.seams.source import Source

EPILOG = """
examples:
  weightcast delta ./step-100 ./step-101
  weightcast delta ./step-100/model.safetensors ./step-101/model.safetensors --json

Both are a directory of safetensors files, or one such file, with the same names, shapes and dtypes. Tensors are
compared by their bits, and coded one by one. `delta` is decoded by itself; `by classes` is smaller, but its decoder
reads all of the first checkpoint. Where a delta would be no smaller than a tensor, the tensor itself is counted.
"""

_PART_BYTES = 256 << 20
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class Cost(msgspec.Struct):
    """Sums over tensors. `delta_bytes` and `classes_bytes`: of their deltas, alone and by classes of the base."""

    num_tensors: int = 0
    num_elements: int = 0
    num_changed: int = 0
    num_bytes: int = 0
    delta_bytes: int = 0
    classes_bytes: int = 0


class DeltaCost(msgspec.Struct, frozen=True):
    """The JSON of `delta`. `groups`: by names of tensors, with * in the place of the number of a layer or an expert."""

    total: Cost
    groups: dict[str, Cost]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", type=Path, metavar="A", help="the checkpoint that a receiver would have")
    parser.add_argument("checkpoint", type=Path, metavar="B", help="the one that it would get")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from weightcast.sources.safetensors import SafetensorsSource

    found = cost(SafetensorsSource(args.base), SafetensorsSource(args.checkpoint))
    output.show(found, args.json, _view(found))
    return exits.OK


def cost(base: Source, checkpoint: Source) -> DeltaCost:
    """Compare all tensors. Raises IncompatibleWeightsError for names, shapes or dtypes that only one of them has."""
    former, specs = ({spec.name: spec for spec in source.specs()} for source in (base, checkpoint))
    problems = [f"{name} is only in the first" for name in former.keys() - specs.keys()]
    problems += [f"{name} is only in the second" for name in specs.keys() - former.keys()]
    for name in former.keys() & specs.keys():
        first, second = (f"{spec.dtype}{list(spec.shape)}" for spec in (former[name], specs[name]))
        if first != second:
            problems.append(f"{name} is {first} in the first, {second} in the second")
    if problems:
        text = f"a delta is between checkpoints of the same tensors, and these differ: {listed(sorted(problems))}"
        raise IncompatibleWeightsError(text, sorted(problems))
    total, groups = Cost(), dict[str, Cost]()
    num_bytes = sum(spec.num_bytes for spec in specs.values())
    with output.measured("comparing") as show:
        for name in specs:
            ((_, a),), ((_, b),) = base.regions()[name], checkpoint.regions()[name]
            for each in (total, groups.setdefault(_LAYER.sub("*", name), Cost())):
                each.num_tensors += 1
                each.num_elements += b.numel()
                each.num_bytes += b.nbytes
            _add(a, b, total, groups[_LAYER.sub("*", name)])
            show(total.num_bytes, num_bytes)
    return DeltaCost(total, groups)


def _add(base: torch.Tensor, tensor: torch.Tensor, *costs: Cost) -> None:
    """Add what changed, and its deltas, in parts as large as a bucket."""
    import torch

    from weightcast.native.deltas import encode
    from weightcast.native.tables import MAX_THREADS

    itemsize = tensor.itemsize
    former, now = (each.reshape(-1).view(torch.uint8) for each in (base, tensor))
    for start in range(0, now.nbytes, _PART_BYTES):
        a, b = (each[start : start + _PART_BYTES] for each in (former, now))
        sizes = []
        for by_classes in (False, True):
            found, num_changed = encode(a, b, min(itemsize, 4), by_classes=by_classes, threads=MAX_THREADS)
            sizes.append(b.nbytes if found is None else found.nbytes)
        if itemsize > 4:  # several words each
            num_changed = int((a != b).view(-1, itemsize).any(dim=1).sum())
        for each in costs:
            each.num_changed += num_changed
            each.delta_bytes += sizes[0]
            each.classes_bytes += sizes[1]


def _view(found: DeltaCost) -> Iterator[str | Table]:
    total = found.total
    yield (
        f"{count(total.num_elements, 'element')} in {count(total.num_tensors, 'tensor')}, {size(total.num_bytes)}; "
        f"{total.num_changed:,} changed"
    )
    yield ""
    right = ("elements", "changed", "%", "dense", "delta", "bytes each", "by classes", "bytes each")
    table = Table("tensors", *(Column(heading, justify="right") for heading in right))
    for name, each in sorted(found.groups.items(), key=lambda item: (-item[1].delta_bytes, item[0])):
        table.add_row(escape(printable(name)), *_cells(each))
    table.add_section()
    table.add_row("all", *_cells(total))
    yield table
    if total.num_bytes:
        yield (
            f"a delta is {total.num_bytes / max(1, total.delta_bytes):,.1f} times smaller than the checkpoint, by "
            f"classes {total.num_bytes / max(1, total.classes_bytes):,.1f} times"
        )


def _cells(it: Cost) -> Iterator[str]:
    yield f"{it.num_elements:,}"
    yield f"{it.num_changed:,}"
    yield f"{100 * it.num_changed / max(1, it.num_elements):.3g}"
    yield size(it.num_bytes)
    for num_bytes in (it.delta_bytes, it.classes_bytes):
        yield size(num_bytes)
        yield f"{num_bytes / it.num_changed:.2f}" if it.num_changed else "-"
