"""Measure a peer beside weightcast and put the result into a JSON file; scripts/bench-peers calls it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import msgspec

from peers.measure import Row, compare
from peers.ways import PEERS, WAYS
from weightcast.bench import shapes


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one peer beside weightcast's ways, on one machine."""

    peer: str
    boundary: str
    shapes: str
    num_tensors: int
    num_bytes: int
    rows: list[Row]
    command: str
    versions: dict[str, str]
    machine: str

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.peer, self.shapes, self.num_tensors, self.num_bytes


def machine() -> str:
    model = next((line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpus = len(os.sched_getaffinity(0))
    return f"{cpus} CPUs ({model.strip() or platform.machine()}), {memory:.0f} GiB, Linux {platform.release()}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench-peers", description=__doc__)
    parser.add_argument("--peer", action="append", choices=[way.name for way in PEERS], help="all of this environment's")
    parser.add_argument("--environment", default="stock", help="measure the peers that this environment has")
    parser.add_argument("--shapes", default="qwen3-0.6b", choices=shapes.NAMES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--num-tensors", type=int, default=500)
    parser.add_argument("--num-bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/peers/results.json"))
    asked = parser.parse_args()
    sizes = {"layers": asked.layers, "scale": asked.scale}
    specs = shapes.named(asked.shapes, num_tensors=asked.num_tensors, num_bytes=asked.num_bytes, **sizes)
    peers = [WAYS[name] for name in asked.peer or ()] or [way for way in PEERS if way.environment == asked.environment]
    for peer in peers:
        print(f"{peer.name}: {asked.shapes}", file=sys.stderr)
        comparison = Comparison(
            peer=peer.name,
            boundary=peer.boundary,
            shapes=asked.shapes,
            num_tensors=len(specs),
            num_bytes=sum(spec.num_bytes for spec in specs),
            rows=compare(peer, specs, asked.rounds),
            command=" ".join(["scripts/bench-peers", *sys.argv[1:]]),
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
        if not all(row.verified for row in comparison.rows):
            sys.exit("an engine did not hold what was sent")


def read(path: Path) -> list[Comparison]:
    return msgspec.json.decode(path.read_bytes(), type=list[Comparison]) if path.exists() else []


def put(path: Path, comparison: Comparison) -> None:
    """Add it to the file, in the place of an earlier one of the same peer and shapes."""
    kept = [found for found in read(path) if found.key != comparison.key]
    path.write_bytes(msgspec.json.format(msgspec.json.encode([*kept, comparison]), indent=1) + b"\n")


if __name__ == "__main__":
    main()
