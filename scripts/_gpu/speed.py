"""k. The time of a publish of 1, 8 and 60 GB, streaming and staged, compared with one copy of as many bytes."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch

from _gpu import peers, section
from _gpu.peers import Peer, TrainerCommands
from _gpu.section import GIB, MIB, Here

ROUNDS = 5
BUSY_SECONDS = 0.15
"""Limit, in seconds, for the GPU's work of 60 GB at both ends together."""
BESIDE_GIB = 4.5
"""GiB of device memory beside two models: two contexts, four slots of 512 MiB, and the comparison."""
LAYER_GIB, EMBEDDINGS_GIB = 1.18, 1.2
"""Of `section.experts`."""


def run(here: Here) -> None:
    """Run the most informative parts first, in case the section is cut short."""
    if not here.needs("publishing 1 GB", device_gib=BESIDE_GIB + 2.5, host_gib=8):
        return
    rate = _copy_rate(here)
    with here.part("1 GB"):
        _model(here, rate, "1 GB", section.even(64, here.size(16 * MIB, 64 << 10)))
    fits_gib = (here.free_gib() - BESIDE_GIB) / 2
    with here.part("60 GB"):
        if fits_gib >= 56:
            shapes = section.even(here.size(112, 8), here.size(512 * MIB, 64 << 10))
            _model(here, rate, "60 GB", shapes, profiles=True)
        else:
            here.skip(f"60 GB: {2 * 56 + BESIDE_GIB:g} GiB of device memory ({here.free_gib():.3g} free)")
            if num_tensors := int(fits_gib * 2):
                name = f"{num_tensors / 2:g} GiB in place of 60 GB"
                _model(here, rate, name, section.even(num_tensors, 512 * MIB), profiles=True)
    with here.part("60 GB in 18867 tensors"):
        num_layers = min(48, int((fits_gib - EMBEDDINGS_GIB) / LAYER_GIB)) if not here.dry else 2
        if num_layers < (48 if not here.dry else 2):
            here.skip(
                f"60 GB in 18867 tensors: {2 * 57 + BESIDE_GIB:g} GiB of device memory ({here.free_gib():.3g} free)"
            )
        if num_layers > 0:
            shapes = section.experts(*((num_layers, 128, 2048) if not here.dry else (2, 4, 64)))
            name = "60 GB" if num_layers == 48 or here.dry else f"{num_layers} of 48 layers of 60 GB"
            _model(here, rate, f"{name} in {len(shapes)} tensors", shapes)
    with here.part("16 GB, staged"):
        if here.needs("16 GB staged", device_gib=2 * 16 + BESIDE_GIB, host_gib=36):
            shapes = section.even(here.size(256, 8), here.size(64 * MIB, 64 << 10))
            _model(here, rate, "16 GB", shapes, install="staged", rounds=2)


def _copy_rate(here: Here) -> float:
    """Return the bytes per second of one copy on the device, with read and written bytes counted once."""
    size = here.size(GIB, MIB)
    source, target = (torch.ones(size, dtype=torch.uint8, device=here.device) for _ in range(2))
    rate = size / section.timed(lambda: target.copy_(source), here.device)
    here.fact("one copy on the device, GB/s", round(rate / 1e9, 1))
    return rate


def _model(
    here: Here,
    rate: float,
    name: str,
    shapes: Any,
    install: str = "streaming",
    rounds: int = ROUNDS,
    profiles: bool = False,
) -> None:
    # Two models of 60 GB fit, three do not.
    gc.collect()
    if here.device.type == "cuda":
        torch.cuda.empty_cache()
    with Peer(here, "engine", shapes) as engine:
        trainer = TrainerCommands({"shapes": shapes, "device": str(here.device)})
        engine.ready()
        trainer.open([engine.url], install=install)
        try:
            _fill(trainer, 1)
            first = _publish(trainer)
            here.fact(f"{name}, {install}: first publish, s", round(first["total"], 3))
            _rounds(here, rate, f"{name}, {install}", trainer, rounds if not here.dry else 2)
            here.check(f"{name}, {install}: right", not (found := engine.wrong(trainer_version(trainer))), found)
            if profiles:
                _profiled(here, name, trainer, engine)
        finally:
            trainer.close_publisher()


def trainer_version(trainer: TrainerCommands) -> int:
    """Return the version filled in for the last publish: one above the publisher's own number."""
    return int(trainer.publisher.version) + 1


def _fill(trainer: TrainerCommands, version: int) -> None:
    """Write the weights of the next publish, and wait until the GPU is idle."""
    section.fill(trainer.weights, version)
    section.synchronize(trainer.device)


def _publish(trainer: TrainerCommands) -> dict[str, Any]:
    """Publish the weights that were filled in; return the report, with its seconds."""
    report = trainer.publish_filled()["report"]
    pause = max(result["install_seconds"] for result in report["engines"].values())
    return report["seconds"] | {"num_buckets": report["num_buckets"], "bytes": report["num_bytes"], "install": pause}


def _rounds(here: Here, rate: float, name: str, trainer: TrainerCommands, rounds: int) -> float:
    """Report the median of some publishes as facts; return its wall clock time in seconds."""
    found = []
    for _ in range(rounds):
        _fill(trainer, trainer_version(trainer) + 1)
        found.append(_publish(trainer))
    median = {key: statistics.median(each[key] for each in found) for key in found[0]}
    wall, copy = median["total"], median["bytes"] / rate
    here.fact(
        name,
        f"{wall * 1e3:.1f} ms ({median['bytes'] / wall / 1e9:.1f} GB/s, {wall / copy:.1f} x one copy); pack "
        f"{median['pack'] * 1e3:.1f}, send {median['send'] * 1e3:.1f}, pause {median['pause'] * 1e3:.1f}, install "
        f"{median['install'] * 1e3:.1f} ms; {int(median['num_buckets'])} buckets",
    )
    return float(wall)


def _profiled(here: Here, name: str, trainer: TrainerCommands, engine: Peer) -> None:
    """Report the GPU's work in one publish at each end; each end has its own publish, since profiling costs time.

    The weights are filled before the profile begins: of a trainer's GPU it shows packing alone.
    """
    seen = {}
    if not here.dry:  # a profiler takes seconds to begin
        _fill(trainer, trainer_version(trainer) + 1)
        profile = peers.start_profile(here.device)
        seen["trainer"] = (_publish(trainer), peers.stop_profile(profile, here.device))
    _fill(trainer, trainer_version(trainer) + 1)
    engine.ask("profile_start")
    report = _publish(trainer)
    seen["engine"] = (report, engine.ask("profile_stop"))
    for end, (report, counted) in seen.items():
        buckets, gaps = report["num_buckets"], counted["gap_seconds"]
        here.fact(
            f"{name}, {end}: GPU busy",
            f"{counted['busy_seconds'] * 1e3:.1f} ms of {report['total'] * 1e3:.1f} ms; for each of {buckets} buckets "
            f"{counted['launches'] / buckets:.1f} launches, {counted['waits'] / buckets:.1f} waits; between them "
            f"{len(gaps)} gaps of {sum(gaps) * 1e3:.1f} ms together, the longest {max(gaps, default=0.0) * 1e3:.2f} ms",
        )
        here.check(f"{name}, {end}: the trace has events", counted["events"] > 0, counted)
    both = sum(counted["busy_seconds"] for _, counted in seen.values())
    here.fact(f"{name}: GPU busy at both ends, ms", round(both * 1e3, 1))
    if name == "60 GB" and not here.dry:
        here.check(f"{name}: the GPU is busy for at most {BUSY_SECONDS:g} s", both <= BUSY_SECONDS, f"{both:.3f} s")
