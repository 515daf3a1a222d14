"""g. Settings of torch's allocator and of CUDA, at either end: a publish works, or its error has the remedy."""

from __future__ import annotations

from typing import Any

import torch

from _gpu import section
from _gpu.peers import Peer
from _gpu.section import MIB, Here

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PAIRS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "expandable_segments, trainer": (EXPANDABLE, {}),
    "expandable_segments, engine": ({}, EXPANDABLE),
    "expandable_segments, both": (EXPANDABLE, EXPANDABLE),
    "cudaMallocAsync, trainer": ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, {}),
    "max_split_size_mb:64, trainer": ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
    "one connection, both": ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    "launches block, both": ({"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": "1"}),
}
"""Name -> the environment variables of the trainer and of the engine."""
REMEDIES = ("staged", "memory://")
"""One of these must be in the text of an UnsupportedError."""
PAIRS_AT_ONCE = 3


def run(here: Here) -> None:
    pairs = dict(PAIRS)
    if here.dry:
        pairs = {name: pairs[name] for name in list(pairs)[:1]}
    else:
        uuid = str(torch.cuda.get_device_properties(here.device).uuid)
        pairs["the engine names its GPU by UUID"] = ({}, {"CUDA_VISIBLE_DEVICES": f"GPU-{uuid.removeprefix('GPU-')}"})
    shapes = section.even(16, here.size(16 * MIB, 64 << 10))
    names = list(pairs)
    for start in range(0, len(names), PAIRS_AT_ONCE):
        batch = names[start : start + PAIRS_AT_ONCE]
        # Each process has a context, 256 MiB of weights, and the trainer's as much in slots.
        if here.needs(", ".join(batch), device_gib=1.5 * 2 * len(batch), host_gib=3 * 2 * len(batch)):
            _pairs(here, shapes, {name: pairs[name] for name in batch})
    with here.part("a large block in torch's cache"):
        _large_block(here, shapes)


def _pairs(here: Here, shapes: Any, pairs: dict[str, tuple[dict[str, str], dict[str, str]]]) -> None:
    """Started at once, since imports take longest."""
    peers = {
        name: (Peer(here, "trainer", shapes, trainer), Peer(here, "engine", shapes, engine))
        for name, (trainer, engine) in pairs.items()
    }
    try:
        for name, (trainer, engine) in peers.items():
            with here.part(name):
                _publish(here, name, trainer.ready(), engine.ready())
    finally:
        for both in peers.values():
            for peer in both:
                peer.kill()


def _publish(here: Here, name: str, trainer: Peer, engine: Peer) -> None:
    for install in ("streaming", "staged"):
        number = {"streaming": 1, "staged": 2}[install]
        trainer.ask("open", engines=[engine.url], install=install, on_failure="report")
        error, ok = "", False
        try:
            answer = trainer.ask("publish", version=number)
            ok = answer["ok"]
            errors = [result["error"] for result in answer["report"]["engines"].values() if not result["ok"]]
            error = "; ".join(f"{each['kind']}: {each['message']}" for each in errors if each)
        except RuntimeError as exc:
            error = str(exc)
        is_helpful = "UnsupportedError" in error and any(remedy in error for remedy in REMEDIES)
        right = ok and not engine.wrong(number)
        here.check(f"{name}, {install}: it works, or is refused with a remedy", right or is_helpful, error or "wrong")
        here.fact(f"{name}, {install}", "works" if right else error[:300])
        trainer.ask("close_publisher")


def _large_block(here: Here, shapes: Any) -> None:
    """Torch caches a large free block when the arena is made, and must return it to the device (A9)."""
    # As large as can be, up to 20 GiB, beside two contexts and the weights.
    mib = here.size(min(20 << 10, int((here.free_gib() - 4) * 1024)) if not here.dry else 0, 4)
    if mib <= 0:
        here.skip(f"a large block in torch's cache: 5 GiB of device memory ({here.free_gib():.3g} free)")
        return
    with Peer(here, "trainer", shapes) as trainer, Peer(here, "engine", shapes) as engine:
        trainer.ready()
        engine.ready()
        trainer.ask("use_and_free", mib=mib)
        before = trainer.ask("meters")
        trainer.ask("open", engines=[engine.url], install="streaming")
        trainer.ask("publish", version=1)
        after = trainer.ask("empty_cache")
        if here.dry:
            here.check("it was published", not engine.wrong(1))
            return
        freed = before["reserved_mib"] - after["reserved_mib"]
        here.check(f"{mib} MiB go back while the arena is there", freed >= mib - 64, f"{freed} MiB went back")
        here.check("the engine's weights are right", not (found := engine.wrong(1)), found)
        here.fact("device MiB used before and after", (before["device_used_mib"], after["device_used_mib"]))
