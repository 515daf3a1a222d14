"""g. Settings of torch's allocator and of CUDA, on either side: it works, or says what to do instead."""

from __future__ import annotations

import subprocess
from typing import Any

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
"""A name -> the environment of the trainer and of the engine."""
REMEDIES = ("staged", "memory://")
"""One of these must be in the text of an UnsupportedError."""


def run(here: Here) -> None:
    pairs = dict(PAIRS)
    if here.dry:
        pairs = {name: pairs[name] for name in list(pairs)[:1]}
    else:
        uuid = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
        if "UUID: " in uuid:
            by_uuid = {"CUDA_VISIBLE_DEVICES": uuid.split("UUID: ")[1].split(")")[0]}
            pairs["the engine names its GPU by UUID"] = ({}, by_uuid)
        else:
            here.skip("the GPU's UUID (nvidia-smi -L names none)")
    shapes = section.even(16, here.size(16 * MIB, 64 << 10))
    # All at once: imports take longest.
    peers = {
        name: (Peer(here, "trainer", shapes, trainer), Peer(here, "engine", shapes, engine))
        for name, (trainer, engine) in pairs.items()
    }
    try:
        for name, (trainer, engine) in peers.items():
            with here.part(name):
                _publish(here, name, trainer.ready(), engine.ready())
        with here.part("a large block in torch's cache"):
            _large_block(here, shapes)
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
    """Torch has a large free block when the arena is made; the block must go back to the device all the same (A9)."""
    mib = here.size(20 << 10, 4)
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
