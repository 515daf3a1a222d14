"""`weightcast plan`: what a publish will cost: bytes on each link, memory of each host, seconds of each stage."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.table import Column, Table

from weightcast.bench import shapes
from weightcast.bench.deployment import Deployment, Scheme, Sharding
from weightcast.cli import exits, output, values
from weightcast.format.amounts import count, size

if TYPE_CHECKING:
    from weightcast.bench.cost import Estimate
    from weightcast.bench.parts import Parts

EPILOG = """
examples:
  weightcast plan --measure parts.json
  weightcast plan --shapes qwen3-0.6b --parts parts.json
  weightcast plan --config MODEL_DIR --transport gloo --apart --engines 4 --engine-hosts 2 --link-gbit 100
  weightcast plan --params 1e12 --tensors 70000 --trainer-hosts 32 --ranks-per-host 8 --sharding pp \\
      --transport gloo --apart --engines 1000 --workers 8 --engine-hosts 1000 --link-gbit 400 --json

Bytes and memory are counted from the plan of buckets that a publisher would make, whose weights lie in host memory.
Seconds are calculated from parts that `--measure` has measured, and need `--parts`: measure on a host like those that
you plan for. They are of a later publish; the first one connects and proves more.
"""

_MIB = 1 << 20


def _amount(text: str) -> int:
    """A whole number, also written as 1e12."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= 1e18 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1, such as 1e12 or 70000")
    return int(number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    positive, default = values.integer(1), "(default: %(default)s)"
    model = parser.add_argument_group("model, one of these").add_mutually_exclusive_group()
    model.add_argument("--shapes", choices=shapes.ARCHITECTURES, help="a known architecture")
    model.add_argument("--config", type=Path, metavar="DIR", help="a directory with the config.json of a model")
    model.add_argument("--params", type=_amount, metavar="N", help="so many parameters, such as 1e12, in --tensors")
    add = parser.add_argument_group("model, besides").add_argument
    add("--tensors", type=_amount, default=1000, metavar="N", help=f"equal ones, of --params {default}")
    add("--dtype", choices=values.DTYPES, default="bfloat16", help=f"of --params and --config {default}")
    add = parser.add_argument_group("trainer").add_argument
    add("--trainer-hosts", type=positive, default=1, metavar="N", help=default)
    add("--ranks-per-host", type=positive, default=1, metavar="N", help=default)
    sharding = "what a host holds: rows of each tensor (fsdp), all tensors (hsdp, tp), tensors of its own (pp)"
    add("--sharding", choices=get_args(Sharding), default="whole", help=f"{sharding} {default}")
    add = parser.add_argument_group("engines").add_argument
    add("--engines", type=positive, default=1, metavar="N", help=default)
    add("--workers", type=positive, default=1, metavar="N", help=f"of each engine, as by tensor parallelism {default}")
    add("--engine-hosts", type=positive, default=1, metavar="N", help=default)
    add("--apart", action="store_true", help="engines have hosts of their own, else they are on the trainer's")
    add("--takes-parts", action="store_true", help="engines take parts of tensors, as ModuleEngine does")
    add = parser.add_argument_group("publish").add_argument
    add("--transport", choices=get_args(Scheme), default="ipc", help=default)
    add("--install", choices=("staged", "streaming"), default="staged", help=default)
    add("--undo", action="store_true", help="engines keep a copy to go back to")
    add("--bucket-size-mib", type=positive, metavar="M", help="default: the transport's")
    add = parser.add_argument_group("machines").add_argument
    add("--link-gbit", type=float, metavar="G", help="of each host's link, each way (default: as fast as the hosts)")
    add("--cores", type=positive, metavar="N", help="of each host (default: of the host that was measured)")
    add("--parts", type=Path, metavar="FILE", help="the measured parts of such a host; without, there are no seconds")
    add("--measure", type=Path, metavar="FILE", help="measure this host's parts, in a minute, and write them there")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    has_model = args.shapes or args.config or args.params
    if not has_model and args.measure is None:
        raise ValueError("there is nothing to plan: add --shapes NAME, --config DIR or --params N, or --measure FILE")
    deployment = Deployment(
        transport=args.transport,
        install=args.install,
        trainer_hosts=args.trainer_hosts,
        ranks_per_host=args.ranks_per_host,
        sharding=args.sharding,
        num_engines=args.engines,
        workers_per_engine=args.workers,
        engine_hosts=args.engine_hosts,
        colocated=not args.apart,
        takes_parts=args.takes_parts,
        undo=args.undo,
        link_gbit=args.link_gbit,
        bucket_size_bytes=args.bucket_size_mib and args.bucket_size_mib * _MIB,
        num_cores=args.cores,
    )
    with output.stage(output.IMPORTING):
        from weightcast.bench.cost import estimate
        from weightcast.bench.parts import measure_parts, read_parts

    parts = None if args.parts is None else read_parts(args.parts)
    if args.measure is not None:
        if not args.measure.absolute().parent.is_dir():
            raise FileNotFoundError(f"{args.measure.parent}, where the parts are to be written, is not a directory")
        args.measure.open("ab").close()  # what can't be written to fails before the measuring, which takes minutes
        with output.stage("measuring") as say:
            parts = measure_parts(say)
        args.measure.write_bytes(parts.encode() + b"\n")
        if not has_model:
            output.show(parts, args.json, lambda: _view_parts(parts))
            return exits.OK
    with output.stage("planning"):
        if args.params:
            specs = shapes.equal(args.params, args.tensors, args.dtype)
        else:
            specs = shapes.of_config(args.config, args.dtype) if args.config else shapes.named(args.shapes)
        found = estimate(specs, deployment, parts)
    output.show(found, args.json, lambda: _view(found, deployment, parts))
    return exits.OK


def _view(it: Estimate, to: Deployment, parts: Parts | None) -> Iterator[str | Table]:
    hosts = "the trainer's hosts" if to.colocated else count(to.engine_hosts, "host")
    engines = f"{count(to.num_engines, 'engine')} of {count(to.workers_per_engine, 'worker')} on {hosts}"
    trainer = f"{count(to.trainer_hosts, 'host')} of {count(to.ranks_per_host, 'rank')}, {to.sharding}"
    yield f"{size(it.num_bytes)} in {count(it.num_tensors, 'tensor')}, {to.transport}, {to.install}"
    yield f"from {trainer}, to {engines}"
    yield ""
    counted = Table("counted", Column("value", justify="right"), "")
    for row in _counted(it, to):
        counted.add_row(*row)
    yield counted
    if parts is None:
        yield "no seconds without the parts of such a host: run weightcast plan --measure FILE there, then add --parts"
        return
    timed = Table("calculated", Column("seconds", justify="right"), "")
    for stage, seconds in it.seconds.items():
        if stage != "transfer":
            timed.add_row(stage, _seconds(seconds), "")
            continue
        timed.add_row(stage, _seconds(seconds), "of these at once the longest, and what is left")
        for name, each in it.parallel.items():
            timed.add_row(f"  {name}", _seconds(each), "")
    timed.add_section()
    timed.add_row("publish", _seconds(it.publish_seconds), f"bottleneck: {it.bottleneck}")
    timed.add_row("pause of an engine", _seconds(it.pause_seconds), "")
    yield timed
    yield f"parts measured on {parts.machine}"


def _counted(it: Estimate, to: Deployment) -> Iterator[tuple[str, str, str]]:
    yield "buckets", f"{it.num_buckets:,}", f"of at most {size(it.bucket_size_bytes)}"
    smallest, largest = size(min(it.origins, default=0)), size(max(it.origins, default=0))
    sizes = f"{largest} {'each' if len(it.origins) > 1 else 'in all'}"
    yield "origins", f"{len(it.origins):,}", sizes if smallest == largest else f"{smallest} to {largest} each"
    if it.members:
        tree = "gloo's tree passes bytes on from engine to engine" if to.transport == "gloo" else "a ring"
        yield "members of a group", f"{it.members:,}", tree
    for whose, host in (("trainer", it.trainer_host), ("engine", it.engine_host)):
        if host.sent or host.received:
            links = f"receives {size(host.received)}"
            yield f"{whose} host sends", size(host.sent), f"{links}; of all {whose} hosts the most"
    slots = "all buckets" if to.is_staged and to.transport in ("ipc", "memory") else "slots for buckets"
    yield "trainer host's memory", size(it.trainer_host.trainer), slots
    what = "all buckets, until they are installed" if to.is_staged else "slots for buckets"
    if to.transport in ("ipc", "memory"):
        what = "the trainer's is read in place"
    if it.straddling_bytes:
        what += f"; in it {size(it.straddling_bytes)} a worker for tensors of several origins"
    yield "engine host's memory", size(it.engine_host.staged), what
    if to.undo:
        yield "  for the undo", size(it.engine_host.undo), "what engines serve, once more"
    if it.store_bytes:
        yield "store", size(it.store_bytes), "for each version that is kept; two by default"


def _view_parts(parts: Parts) -> Iterator[str | Table]:
    yield parts.machine
    table = Table("part", Column("alone, GB/s", justify="right"), Column("beside others", justify="right"))
    for name in ("copy", "pack", "check", "install", "write", "read"):
        rate = getattr(parts, name)
        table.add_row(name, f"{1e-9 / rate.alone:.2f}", f"{1e-9 / rate.crowded:.2f}")
    table.add_row("raw broadcast", f"{1e-9 / parts.raw:.2f}", "")
    yield table


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f}" if seconds < 99.95 else f"{seconds:,.0f}"
