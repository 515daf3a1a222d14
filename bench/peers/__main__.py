"""Measure a peer beside weightcast and put the result into a JSON file; scripts/bench-peers calls it."""

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

from peers.measure import compare
from peers.results import RESULTS, Comparison, put
from peers.ways import PEERS, WAYS, Way
from weightcast.bench import shapes
from weightcast.format.manifest import TensorSpec


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
    parser.add_argument("--shapes", default="qwen3-0.6b", choices=shapes.NAMES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--num-tensors", type=int, default=500)
    parser.add_argument("--num-bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers, processes and folders are cleaned up
    peers = [WAYS[name] for name in asked.peer or ()] or [way for way in PEERS if way.environment == asked.environment]
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir="/dev/shm") as folder:
        checkpoint, name = None, asked.shapes
        if peers[0].boundary == "process":
            sizes = {"layers": asked.layers, "scale": asked.scale}
            specs = shapes.named(asked.shapes, num_tensors=asked.num_tensors, num_bytes=asked.num_bytes, **sizes)
        else:
            from peers.servers import SHAPES, make_checkpoint

            checkpoint, name = Path(folder), SHAPES
            specs = make_checkpoint(checkpoint, asked.layers or 14)
        is_verified = [measure(peer, specs, name, checkpoint, asked) for peer in peers]
    if not all(is_verified):
        sys.exit("an engine did not hold what was sent")


def measure(
    peer: Way, specs: Sequence[TensorSpec], name: str, checkpoint: Path | None, asked: argparse.Namespace
) -> bool:
    """Measure one peer and keep the result; whether every engine held what was sent."""
    print(f"{peer.name}: {name}", file=sys.stderr)
    comparison = Comparison(
        peer=peer.name,
        boundary=peer.boundary,
        shapes=name,
        num_tensors=len(specs),
        num_bytes=sum(spec.num_bytes for spec in specs),
        rows=compare(peer, specs, asked.rounds, checkpoint),
        command=f"scripts/bench-peers {shlex.join(sys.argv[1:]).removeprefix('--environment ')}",
        versions={name: importlib.metadata.version(name) for name in ("weightcast", *peer.packages)},
        machine=machine(),
    )
    for row in comparison.rows:
        cpu = row.median("trainer_cpu_seconds"), row.median("engine_cpu_seconds")
        ratio = row.median("seconds") / comparison.rows[0].median("seconds")
        print(
            f"  {row.name:42} {row.median('seconds'):8.3f} s  pause {row.median('pause_seconds'):8.3f} s  "
            f"CPU {cpu[0]:.2f} + {cpu[1]:.2f} s  {ratio:5.2f} x the first  "
            f"extra {row.extra_bytes[0] >> 20} / {row.extra_bytes[1] >> 20} MiB  verified {row.verified}"
        )
    put(asked.json, comparison)
    return all(row.verified for row in comparison.rows)


if __name__ == "__main__":
    main()
