"""`weightcast plan`: bytes on each link, memory of each host, and the time that the links need for a publish."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Column, Table

from weightcast.cli import exits, output, values
from weightcast.format.amounts import count, size

if TYPE_CHECKING:
    from weightcast.cli.planned_bytes import Deployment, Estimate, Relays

EPILOG = """
examples:
  weightcast plan --config MODEL_DIR
  weightcast plan --config MODEL_DIR --transport gloo --apart --engines 4 --engine-hosts 2 --link-gbit 100
  weightcast plan --params 1e12 --tensors 70000 --trainer-hosts 32 --ranks-per-host 8 --sharding pp \\
      --transport gloo --apart --engines 1000 --workers 8 --engine-hosts 1000 --link-gbit 400 --json
  weightcast plan --params 1e12 --transport gloo --apart --engines 1000 --workers 8 --engine-hosts 1000 \\
      --link-gbit 400 --relays auto

Bytes and memory follow from the bucket plan that a publisher with weights in host memory would make. Seconds are those
that the links alone need; `weightcast bench` measures packing, checks and installs.

With --relays the trainer publishes into a store, file:///STORE on its host or one elsewhere (--store-gbit), and
`weightcast follow` on hosts of the engines (relays) passes its versions on. auto chooses their number: the fewest hosts
that need at most a tenth more time than the fastest choice. Replace the names of hosts and engines in the
printed commands by yours.
"""

_MIB = 1 << 20


def _relays(text: str) -> int | None:
    """Parse a number of relays, or "auto", which is None."""
    return None if text == "auto" else values.integer(1)(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Except for the model's, their names are those of Deployment's fields."""
    positive, default = values.integer(1), "(default: %(default)s)"
    model = parser.add_argument_group("model, one of these").add_mutually_exclusive_group(required=True)
    model.add_argument("--config", type=Path, metavar="DIR", help="a model directory with a config.json")
    model.add_argument("--params", type=values.positive, metavar="N", help="number of parameters, such as 1e12")
    add = parser.add_argument_group("model, besides").add_argument
    add("--tensors", type=positive, default=1000, metavar="N", help=f"number of equal tensors, with --params {default}")
    add("--dtype", choices=values.DTYPES, default="bfloat16", help=default)
    add = parser.add_argument_group("trainer").add_argument
    add("--trainer-hosts", type=positive, default=1, metavar="N", help=default)
    add("--ranks-per-host", type=positive, default=1, metavar="N", help=default)
    sharding = "each host has whole tensors (whole), rows of each (fsdp), or a part of the tensors (pp)"
    add("--sharding", choices=("whole", "fsdp", "pp"), default="whole", help=f"{sharding} {default}")
    add = parser.add_argument_group("engines").add_argument
    add("--engines", dest="num_engines", type=positive, default=1, metavar="N", help=default)
    workers = f"workers of each engine, such as tensor-parallel ranks {default}"
    add("--workers", dest="workers_per_engine", type=positive, default=1, metavar="N", help=workers)
    add("--engine-hosts", type=positive, default=1, metavar="N", help=default)
    apart = "engines run on other hosts than the trainer; default: on the trainer's hosts"
    add("--apart", dest="colocated", action="store_false", help=apart)
    add = parser.add_argument_group("publish").add_argument
    add("--transport", choices=("ipc", "gloo", "nccl", "file"), default="ipc", help=default)
    add("--install", choices=("staged", "streaming"), default="staged", help=default)
    add("--undo", action="store_true", help="engines keep an undo copy of their weights")
    add("--bucket-size-mib", type=positive, metavar="M", help="bucket size in MiB (default: the transport's)")
    link = "Gbit/s of each host's link, each way; needed for seconds"
    add("--link-gbit", type=values.positive, metavar="G", help=link)
    trainer = "Gbit/s of the trainer's links, if it is not --link-gbit"
    add("--trainer-gbit", type=values.positive, metavar="G", help=trainer)
    relays = "plan N relays (auto: choose) between the trainer's store and engines that are --apart"
    add("--relays", type=_relays, default=0, metavar="N", help=relays)
    store = "Gbit/s of the store that relays read, if it is not on the trainer's host"
    add("--store-gbit", type=values.positive, metavar="G", help=store)
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with output.stage(output.IMPORTING):
        from weightcast.cli.planned_bytes import Deployment, equal, estimate, of_config
        from weightcast.cli.planned_relays import plan_relays

    args.bucket_size_bytes = args.bucket_size_mib and args.bucket_size_mib * _MIB
    deployment = Deployment(**{name: getattr(args, name) for name in Deployment.__struct_fields__})
    with output.stage("planning"):
        if args.params:
            specs = equal(int(args.params), args.tensors, args.dtype)
        else:
            specs = of_config(args.config, args.dtype)
        found = estimate(specs, deployment)
        if args.relays != 0:
            relays = plan_relays(specs, deployment, found, num_relays=args.relays)
            found = msgspec.structs.replace(found, relays=relays)
    output.show(found, args.json, _view(found, deployment))
    return exits.OK


def _view(it: Estimate, to: Deployment) -> Iterator[str | Table]:
    hosts = "the trainer's hosts" if to.colocated else count(to.engine_hosts, "host")
    engines = f"{count(to.num_engines, 'engine')} of {count(to.workers_per_engine, 'worker')} on {hosts}"
    trainer = f"{count(to.trainer_hosts, 'host')} of {count(to.ranks_per_host, 'rank')}, {to.sharding}"
    yield f"{size(it.num_bytes)} in {count(it.num_tensors, 'tensor')}, {to.transport}, {to.install}"
    yield f"from {trainer}, to {engines}"
    found = {"counted": _rows(it, to)}
    if it.relays is not None:
        found["relays"] = _relay_rows(it.relays)
    for heading, rows in found.items():
        table = Table(heading, Column("value", justify="right"), "")
        for row in rows:
            table.add_row(*row)
        yield ""
        yield table
    if it.relays is None:
        return
    yield ""
    yield "the first host's commands for each job; --json has those of all:"
    firsts: dict[str, str] = {}
    for each in it.relays.commands:
        job, *urls = each.command.split(" --engine ")
        if len(urls) > 2:
            urls = [f"{urls[0]} ...", urls[-1]]
        firsts.setdefault(job.split()[1], f"  {each.host}: {' --engine '.join([job, *urls])}")
    yield from firsts.values()


def _relay_rows(it: Relays) -> Iterator[tuple[str, str, str]]:
    *copies, num_relays = it.levels
    least, most = f"{it.engines[-1]:,}", count(it.engines[0], "engine")
    each = most if it.engines[-1] == it.engines[0] else f"{least} or {most}"
    yield "relays", f"{num_relays:,}", f"each on a host of its {each}, over {it.transport}"
    yield "trainer's store sends", size(it.levels[0] * it.read_bytes), f"to {count(it.levels[0], 'host')}"
    yield "relay's host sends", size(it.sent_bytes), "to engines; of all relays the most"
    yield "relay's memory", size(it.memory_bytes), "besides that of the engines on its host"
    if it.write_seconds:
        yield "written", f"{it.write_seconds:,.3f} s", "into the trainer's store"
    for number, seconds in zip(copies, it.read_seconds, strict=False):
        yield f"read by {count(number, 'host')}", f"{seconds:,.3f} s", "to copy the store, and serve the copy"
    yield f"read by {count(num_relays, 'relay')}", f"{it.read_seconds[-1]:,.3f} s", ""
    yield "sent to engines", f"{it.send_seconds:,.3f} s", "once a relay has all of the version"
    yield "in all", f"{it.seconds:,.3f} s", f"without relays {it.seconds_without:,.3f} s"


def _rows(it: Estimate, to: Deployment) -> Iterator[tuple[str, str, str]]:
    yield "buckets", f"{it.num_buckets:,}", f"of at most {size(it.bucket_size_bytes)}"
    smallest, largest = size(min(it.origins, default=0)), size(max(it.origins, default=0))
    sizes = f"{largest} {'each' if len(it.origins) > 1 else 'in all'}"
    yield "origins", f"{len(it.origins):,}", sizes if smallest == largest else f"{smallest} to {largest} each"
    if it.members:
        tree = "gloo's tree passes bytes on from engine to engine" if to.transport == "gloo" else "a ring"
        yield "members of a group", f"{it.members:,}", tree
    for whose, host in (("trainer", it.trainer_host), ("engine", it.engine_host)):
        if host.sent or host.received:
            yield (
                f"{whose} host sends",
                size(host.sent),
                f"receives {size(host.received)}; of all {whose} hosts the most",
            )
        if host.link_seconds:
            yield f"{whose} host's link", f"{host.link_seconds:,.3f} s", "alone, in the direction that has more"
    slots = "all buckets" if to.is_staged and to.transport == "ipc" else "slots for buckets"
    yield "trainer host's memory", size(it.trainer_host.buckets), slots
    what = "all buckets, until they are installed" if to.is_staged else "slots for buckets"
    if to.transport == "ipc":
        what = "the trainer's is read in place"
    if it.straddling_bytes:
        what += f"; in it {size(it.straddling_bytes)} a worker for tensors of several origins"
    yield "engine host's memory", size(it.engine_host.buckets), what
    if to.undo:
        yield "  for the undo", size(it.engine_host.undo), "what engines serve, once more"
    if to.transport == "file":
        yield "store", size(sum(it.origins)), "for each version that is kept; two by default"
