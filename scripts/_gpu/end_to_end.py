"""d. Publisher to engine, in two processes and in one: every install holds what was published, bit for bit.

The weights are written on the default stream right before `publish`, and again right after. A second pass delays every
stream and event of weightcast, so that a missing synchronization shows.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
from pretended import LazyGpu
from torch import nn

from _gpu import peers, section
from _gpu.peers import Peer, TrainerCommands
from _gpu.section import MIB, Here
from weightcast import LocalEngine, ModuleEngine, ModuleSource, Publisher, PublishOptions

SLOW_MS = 50.0
LATE = (
    ("ipc", "streaming", False),
    ("ipc", "streaming", True),
    ("ipc", "staged", False),
    ("ipc", "staged", True),
    ("file", "staged", False),
)


def run(here: Here) -> None:
    shapes = section.even(16, here.size(16 * MIB, 64 << 10))
    with Peer(here, "engine", shapes) as engine:
        with here.part("memory://, in this process"):
            _in_one_process(here)
        engine.ready()
        trainer = TrainerCommands({"shapes": shapes, "device": str(here.device)})
        number = 0
        for transport, install in (("ipc", "streaming"), ("ipc", "staged"), ("file", "staged")):
            for undo in (False, True):
                with here.part(f"{transport}, {install}, undo {undo}"):
                    number = _publishes(here, trainer, engine, number, transport, install, undo)
        peers.slow_down(SLOW_MS)
        engine.ask("slow", milliseconds=SLOW_MS)
        for transport, install, undo in LATE:
            with here.part(f"late streams: {transport}, {install}, undo {undo}"):
                number = _publishes(here, trainer, engine, number, transport, install, undo, late=True)
        peers.slow_down(0)


def _publishes(
    here: Here,
    trainer: TrainerCommands,
    engine: Peer,
    number: int,
    transport: str,
    install: str,
    undo: bool,
    late: bool = False,
) -> int:
    """Return the number of the last version."""
    seconds, bad = [], {}
    rounds = here.size(5 if late else 20, 2)
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store" if transport == "file" else f"{transport}://"
        trainer.open([engine.url], url, install=install, undo=undo, bucket_size_bytes=here.size(32 * MIB, 1 << 18))
        try:
            for _ in range(rounds):
                number += 1
                seconds.append(trainer.publish(number)["report"]["seconds"]["total"])
                if found := engine.wrong(number):
                    bad[number] = found
        finally:
            trainer.close_publisher()
    what = f"{transport} {install}{' with undo' * undo}{' late' * late}"
    here.check(f"{rounds} versions over {what} are right", not bad, bad)
    here.fact(f"{what}: median ms", round(sorted(seconds)[len(seconds) // 2] * 1e3, 1))
    return number


def _in_one_process(here: Here) -> None:
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(LazyGpu()) if here.dry else None
        for install in ("streaming", "staged"):
            for late, undo in ((False, False), (False, True), (True, False)):
                _publish_in_one_process(here, gpu, install, late, undo)


def _publish_in_one_process(here: Here, gpu: LazyGpu | None, install: Any, late: bool, undo: bool) -> None:
    names, rounds = [f"t{number}" for number in range(8)], here.size(5 if late else 20, 2)
    numel = here.size(4 * MIB, 2048)

    def made() -> nn.Module:
        net = nn.Module()
        for name in names:
            zeros = torch.zeros(numel) if gpu else torch.zeros(numel, device=here.device)
            net.register_parameter(name, nn.Parameter(gpu.tensor(zeros) if gpu else zeros, requires_grad=False))
        return net

    # The pretended GPU is late by itself, and knows the streams of torch.cuda's replacement only.
    slow = late and gpu is None
    trainer, served, bad = made(), made(), []
    engine = LocalEngine(ModuleEngine(served))
    options = PublishOptions(install=install, undo=undo, bucket_size_bytes=numel * 4)
    if slow:
        peers.slow_down(SLOW_MS)
    try:
        with Publisher(
            ModuleSource(trainer), transport="memory://", engines=[engine], trainer_group=None, options=options
        ) as publisher:
            for version in range(1, rounds + 1):
                for number, parameter in enumerate(trainer.parameters()):
                    parameter.data.fill_(float(version * 10 + number))
                publisher.publish()
                for parameter in trainer.parameters():
                    parameter.data.fill_(-1.0)
                for number, parameter in enumerate(served.parameters()):
                    bad += [version] if not bool((parameter.data == float(version * 10 + number)).all()) else []
    finally:
        if slow:
            peers.slow_down(0)
        engine.close()
    what = f"memory {install}{' with undo' * undo}{' late' * late}"
    here.check(f"{rounds} versions over {what} are right", not bad, bad[:10])
