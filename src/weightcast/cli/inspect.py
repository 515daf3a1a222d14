"""`weightcast inspect`: show the tensors and versions of an engine, a checkpoint directory or a store."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from rich.markup import escape
from rich.table import Table

from weightcast.cli import exits, output, values
from weightcast.errors import printable
from weightcast.format.amounts import count, size
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import WeightInfo
from weightcast.store.address import StoreAddress
from weightcast.store.records import StoreInfo

EPILOG = """
examples:
  weightcast inspect http://127.0.0.1:8000
  weightcast inspect ./checkpoint --filter '*.layers.0.*'
  weightcast inspect ./checkpoint --json | jq '.tensors[].name'
  weightcast inspect file:///mnt/weights

vLLM and SGLang report their version and state, but don't list their tensors.
"""

_HOST_AND_PORT = re.compile(r"[^/\s]+:\d+/?")


class Inspection(msgspec.Struct, frozen=True):
    """The JSON output of `inspect`. At most one of `engine` and `store` is set; totals are of the filtered tensors.

    An engine without the ability "inspect" (vLLM, SGLang) reports its version but does not list its tensors.
    """

    target: str
    engine: WeightInfo | None
    store: StoreInfo | None
    num_tensors: int
    num_bytes: int
    tensors: list[TensorSpec]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    targets = "an engine's URL, a checkpoint directory, or a store, file:///dir or s3://bucket/prefix"
    parser.add_argument("target", metavar="TARGET", help=targets)
    parser.add_argument("--filter", default="*", metavar="GLOB", help="show only tensors whose names match")
    output.add_token(parser)
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    info, store, specs = _look(args.target, args.token_file)
    shown = [spec for spec in specs if any(fnmatchcase(name, args.filter) for name in spec.names)]
    found = Inspection(args.target, info, store, len(shown), sum(spec.num_bytes for spec in shown), shown)
    output.show(found, args.json, _view(found, args.filter))
    return exits.OK


def _look(target: str, token_file: Path | None) -> tuple[WeightInfo | None, StoreInfo | None, Sequence[TensorSpec]]:
    if target.startswith(("http://", "https://")):
        from weightcast.control.client import HttpEngine

        with contextlib.closing(HttpEngine(target, token=output.read_token(token_file))) as engine:
            info = engine.connect().info()
            return info, None, engine.specs() if "inspect" in info.abilities else ()
    if values.is_store(target):
        from weightcast.store.reading import pinned, store_status

        address = StoreAddress.parse(target)
        store = store_status(address)
        with pinned(address, label="weightcast inspect") as version:
            return None, store, version.manifest.tensors
    if _HOST_AND_PORT.fullmatch(target) and not Path(target).exists():
        raise ValueError(f"{target} is neither a directory nor a file; if it is an engine, write http://{target}")
    from weightcast.sources.safetensors import SafetensorsSource

    return None, None, SafetensorsSource(Path(target)).specs()


def _view(found: Inspection, pattern: str) -> Iterator[str | Table]:
    if found.engine is not None and "inspect" not in found.engine.abilities:
        yield f"{_state(found.engine)}; this kind of engine does not list its tensors"
        return
    if not found.tensors:
        yield f"no tensor matches {pattern!r}"
        return
    table = Table()
    for heading in ("name", "dtype", "shape", "bytes"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", overflow="fold")
    for spec in found.tensors:
        name = "\n= ".join(map(printable, spec.names))
        table.add_row(escape(name), spec.dtype, " x ".join(map(str, spec.shape)) or "scalar", f"{spec.num_bytes:,}")
    yield table
    state = "" if found.engine is None else f"; {_state(found.engine)}"
    yield f"{count(found.num_tensors, 'tensor')}, {size(found.num_bytes)}{state}"
    if found.store is None:
        return
    store, newest, previous = found.store, found.store.newest, found.store.previous
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest.committed_at))
    yield f"version {newest.number} of run {newest.run[:8]}, committed {when}, in slot {newest.slot}"
    yield (
        "no version before it" if previous is None else f"before it version {previous.number} of run {previous.run[:8]}"
    )
    yield f"{'being written' if store.is_written else 'last written'} by {store.writer}"
    for slot in store.slots:
        readers = f", read by {', '.join(slot.readers)}" if slot.readers else ""
        yield f"slot {slot.number}: {size(slot.num_bytes)}{readers}"


def _state(info: WeightInfo) -> str:
    is_default = info.weight_version == "default"
    version = "the version it was started with" if is_default else f"version {info.weight_version}"
    version += f" of run {info.run[:8]}" if info.run else ""
    parts = [version if not info.torn else f"torn: {info.torn}"]
    if info.holder:
        parts.append(f"held by run {info.holder[:8]}")
    if info.paused:
        parts.append("paused")
    return ", ".join(parts)
