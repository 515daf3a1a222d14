"""`weightcast bench`: time of a publish over a transport on this machine, beside one memcpy of the same bytes."""

from __future__ import annotations

import argparse
import contextlib
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.table import Column, Table

from weightcast.cli import exits, output, values
from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.format.amounts import count, size
from weightcast.format.manifest import TensorSpec
from weightcast.host.deadline import LOAD_SECONDS

if TYPE_CHECKING:
    from weightcast.engines.module import ModuleEngine

EPILOG = """
examples:
  weightcast bench
  weightcast bench gloo://127.0.0.1:0 --install streaming
  weightcast bench ipc:// --num-tensors 50000 --json
  weightcast bench gloo://127.0.0.1:0 --changed 1

Equal bfloat16 tensors are sent from this process to an engine in another process (with memory:// in this one), which
does not compute. Every value changes before each publish; with --changed so many percent of them, each by one unit in
the last place, and publishes send deltas. Memory: three times the tensors' bytes, with --changed five times, and the
transport's.
"""

_MIB = 1 << 20


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON output. A publish's seconds are from its call until the engine serves the version; those of later
    publishes are medians. A memcpy by one thread is measured before each. `stall_seconds`: time until the weights may
    change again; staged publishes run in the background. `delta_bytes`: sent in place of `num_bytes`, with --changed.
    """

    transport: str
    install: str
    num_tensors: int
    num_bytes: int
    num_buckets: int
    first_publish_seconds: float
    publish_seconds: float
    stall_seconds: float
    pack_seconds: float
    pause_seconds: float
    memcpy_seconds: float
    memcpy_ratio: float
    delta_bytes: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, positive, default = parser.add_argument, values.integer(1), "(default: %(default)s)"
    add("transport", nargs="?", default="ipc://", metavar="URL", help=f"the transport, for host memory {default}")
    add("--install", choices=("staged", "streaming"), default="staged", help=default)
    add("--num-tensors", type=positive, default=500, metavar="N", help=default)
    add("--total-mib", type=positive, default=512, metavar="M", help=default)
    add("--runs", type=positive, default=5, metavar="R", help=f"publishes after the first one {default}")
    changed_help = "change only this share of the elements, and send deltas"
    add("--changed", type=values.percent, metavar="PERCENT", help=changed_help)
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with output.stage(output.IMPORTING):
        import torch

        from weightcast.control.local import LocalEngine
        from weightcast.host.memory import require
        from weightcast.sources.tensors import TensorSource
        from weightcast.trainer.options import PublishOptions
        from weightcast.trainer.publisher import Publisher

    if args.transport.startswith("nccl:"):
        raise ValueError(
            "nccl sends GPU memory, but this command measures host memory: use ipc://, gloo://, file:// or memory://"
        )
    specs = _specs(args.num_tensors, args.total_mib)
    num_bytes = sum(spec.num_bytes for spec in specs)
    is_delta = args.changed is not None
    require(
        (5 if is_delta else 3) * num_bytes,
        f"{size(num_bytes)} at both ends and for the memcpy",
        "use a smaller --total-mib",
    )
    tensors = [torch.randn(spec.shape).bfloat16() for spec in specs]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    # numpy copies a contiguous array by one call of memcpy, in one thread.
    pairs = [tuple(each.view(torch.int16).numpy() for each in pair) for pair in zip(targets, tensors, strict=True)]
    memcpys, publishes, reports = [], [], []
    with output.stage("starting an engine") as say, contextlib.ExitStack() as stack:
        engine: str | LocalEngine
        if args.transport.startswith("memory:"):
            engine = stack.enter_context(contextlib.closing(LocalEngine(_engine(specs))))
        else:
            engine = stack.enter_context(_started(args))
        source = TensorSource({spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)})
        options = PublishOptions(install=args.install, delta="always" if is_delta else None)
        publisher = stack.enter_context(Publisher(source, transport=args.transport, engines=[engine], options=options))
        for number in range(1 + args.runs):
            say(f"publish {number + 1} of {1 + args.runs}")
            if is_delta:
                for tensor in tensors:
                    tensor.view(torch.int16).add_(torch.rand(tensor.shape) < args.changed / 100)
            else:
                torch._foreach_neg_(tensors)
            started = time.perf_counter()
            for target, values in pairs:
                target[:] = values
            copied = time.perf_counter()
            handle = publisher.start() if args.install == "staged" else None
            reports.append(publisher.publish() if handle is None else handle.result())
            publishes.append(time.perf_counter() - copied)
            memcpys.append(copied - started)
    pauses = [max(each.pause_seconds for each in report.engines.values()) for report in reports]
    stalls, packs = ([getattr(report.seconds, stage) for report in reports] for stage in ("stall", "pack"))
    figures = publishes, stalls, packs, memcpys, pauses
    publish, stall, pack, memcpy, pause = (statistics.median(each[1:]) for each in figures)
    found = BenchResult(
        transport=args.transport,
        install=args.install,
        num_tensors=len(specs),
        num_bytes=num_bytes,
        num_buckets=reports[-1].num_buckets,
        first_publish_seconds=publishes[0],
        publish_seconds=publish,
        stall_seconds=stall,
        pack_seconds=pack,
        pause_seconds=pause,
        memcpy_seconds=memcpy,
        memcpy_ratio=publish / memcpy,
        delta_bytes=reports[-1].delta.num_bytes if reports[-1].delta is not None else None,
    )
    output.show(found, args.json, _view(found))
    return exits.OK


def _specs(num_tensors: int, total_mib: int) -> Sequence[TensorSpec]:
    numel = max(total_mib * _MIB // 2 // num_tensors, 1)
    return [TensorSpec(f"tensor_{number}", "bfloat16", (numel,)) for number in range(num_tensors)]


def _engine(specs: Sequence[TensorSpec]) -> ModuleEngine:
    """Return an engine of a module that has one parameter for each spec."""
    import torch

    from weightcast.engines.module import ModuleEngine

    module = torch.nn.Module()
    for spec in specs:
        tensor = torch.zeros(spec.shape, dtype=torch.bfloat16)
        module.register_parameter(spec.name, torch.nn.Parameter(tensor, requires_grad=False))
    return ModuleEngine(module)


@contextlib.contextmanager
def _started(args: argparse.Namespace) -> Iterator[str]:
    """Start an engine in another process, which ends when its stdin is closed; yield its URL."""
    command = [sys.executable, "-m", __name__, str(args.num_tensors), str(args.total_mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            if not select.select([process.stdout], [], [], LOAD_SECONDS)[0]:
                raise PeerTimeoutError(
                    f"the engine's process did not start within {LOAD_SECONDS:g} s: run it on a less busy machine",
                    peer="the engine",
                )
            if not (url := process.stdout.readline().decode().strip()):
                raise PeerDiedError("the engine's process ended before it served: see its output", peer="the engine")
            yield url
        finally:
            process.kill()


def _view(it: BenchResult) -> Iterator[str | Table]:
    tensors = f"{size(it.num_bytes)} in {count(it.num_tensors, 'tensor')}, {count(it.num_buckets, 'bucket')}"
    yield f"{tensors}, over {it.transport}, {it.install}"
    table = Table(
        "", Column("ms", justify="right"), Column("GB/s", justify="right"), Column("x memcpy", justify="right")
    )
    rows = {
        "one memcpy": it.memcpy_seconds,
        "first publish": it.first_publish_seconds,
        "later publishes": it.publish_seconds,
        "trainer waits": it.stall_seconds,
        "packing": it.pack_seconds,
        "pause": it.pause_seconds,
    }
    for name, seconds in rows.items():
        ratio = f"{seconds / it.memcpy_seconds:.2f}"
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{it.num_bytes / seconds / 1e9:.2f}", ratio)
    yield table
    if it.delta_bytes is not None:
        yield f"the last delta had {size(it.delta_bytes)}, {it.num_bytes / max(1, it.delta_bytes):,.1f} times less"


def _serve() -> None:
    from weightcast.control.server.app import EngineServer

    with EngineServer(_engine(_specs(*map(int, sys.argv[1:])))) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
