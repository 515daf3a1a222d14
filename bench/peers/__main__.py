"""Measure peers beside weightcast and put the results into a JSON file; scripts/bench-peers calls it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from publishing import shapes

from peers.measure import compare
from peers.results import RESULTS, Comparison, put
from peers.ways import PEERS, WAYS, Way
from weightcast.format.manifest import TensorSpec
from weightcast.host.memory import require

SERVER_BYTES = 3 << 29
"""What a server takes, and a trainer that imports its engine, beside the models."""


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2] for line in lines if "model name" in line), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpus = len(os.sched_getaffinity(0))
    return f"{cpus} CPUs ({model.strip() or platform.machine()}), {memory:.0f} GiB, Linux {platform.release()}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench-peers", description=__doc__)
    parser.add_argument("--peer", action="append", choices=[way.name for way in PEERS])
    parser.add_argument("--environment", default="stock", help="measure the peers that this environment has")
    parser.add_argument("--separate", action="store_true", help="a run for each peer: less memory than all in turns")
    parser.add_argument("--shapes", default="qwen3-0.6b", choices=shapes.NAMES, help="of what a process is sent")
    parser.add_argument("--layers", type=int, help="fewer of the model's; of a server's model (default 14)")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--num-tensors", type=int, default=500)
    parser.add_argument("--num-bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5, help="fewer for slow ways")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers, processes and folders are cleaned up
    peers = [WAYS[name] for name in asked.peer or ()] or [way for way in PEERS if way.environment == asked.environment]
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir="/dev/shm") as folder:
        checkpoints, name = list[Path](), asked.shapes
        if peers[0].boundary == "process":
            sizes = {"layers": asked.layers, "scale": asked.scale}
            specs = shapes.named(asked.shapes, num_tensors=asked.num_tensors, num_bytes=asked.num_bytes, **sizes)
        else:
            from peers.servers import SHAPES, make_checkpoints

            checkpoints, name = [Path(folder, "first"), Path(folder, "negated")], SHAPES
            specs = make_checkpoints(checkpoints, asked.layers or 14)
        runs = [[peer] for peer in peers] if asked.separate else [peers]
        problems = [measure(run, specs, name, checkpoints, asked) for run in runs]
    if any(problems):
        sys.exit("\n".join(filter(None, problems)))


def measure(
    peers: Sequence[Way],
    specs: Sequence[TensorSpec],
    name: str,
    checkpoints: Sequence[Path],
    asked: argparse.Namespace,
) -> str:
    """Measure peers in one run and keep the result; return why it was not kept, or nothing."""
    num_bytes = sum(spec.num_bytes for spec in specs)
    ways = {name for peer in peers for name in (peer.name, *peer.against)}
    # At each end a model, between them one or two that are sent, stored or staged; and the buffers of the memcpy.
    needed = (7 * len(ways) // 2 + 2) * num_bytes + (SERVER_BYTES * len(ways) if checkpoints else 0)
    require(needed, f"a run of {len(ways)} ways", "try --separate, fewer --layers or --peer")
    print(f"{', '.join(peer.name for peer in peers)}: {name}", file=sys.stderr)
    rows, other_cores = compare(peers, specs, asked.rounds, checkpoints)
    packages = sorted({package for peer in peers for package in peer.packages})
    comparison = Comparison(
        boundary=peers[0].boundary,
        shapes=name,
        num_tensors=len(specs),
        num_bytes=num_bytes,
        rows=rows,
        command=f"scripts/bench-peers {shlex.join(sys.argv[1:]).removeprefix('--environment ')}",
        versions={name: importlib.metadata.version(name) for name in ("weightcast", *packages)},
        machine=machine(),
        other_cores=other_cores,
    )
    for row in rows:
        cpu = row.median("trainer_cpu_seconds"), row.median("engine_cpu_seconds")
        print(
            f"  {row.name:42} {row.median('seconds'):8.3f} s  pause {row.median('pause_seconds'):8.3f} s  "
            f"CPU {cpu[0]:.2f} + {cpu[1]:.2f} s  "
            f"extra {row.extra_bytes[0] >> 20} / {row.extra_bytes[1] >> 20} MiB  verified {row.verified}"
        )
    print(f"  other work took {other_cores:.2f} cores")
    if wrong := [row.name for row in rows if not row.verified]:
        return f"an engine did not hold what was sent: {', '.join(wrong)}"
    try:
        put(asked.json, comparison)
    except ValueError as exc:
        return str(exc)
    return ""


if __name__ == "__main__":
    main()
