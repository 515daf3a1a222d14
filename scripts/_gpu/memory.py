"""e. Memory neither grows nor leaks: 200 publishes, 20 engines that are killed, 20 publishers."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from pretended import LazyGpu

from _gpu import section
from _gpu.peers import Peer, TrainerCommands
from _gpu.section import MIB, Here
from weightcast import Publisher
from weightcast.host.device_memory import DeviceMemory

TOLERANCE = {
    "device_used_mib": 2,
    "reserved_mib": 0,
    "rss_mib": 32,
    "threads": 0,
    "descriptors": 0,
    "mappings": 8,
    "shm_files": 0,
}
"""Growth that is permitted between the middle publishes and the last ones."""
NUM_AT_ONCE = 4
"""Engines, each with a context, 1 GB of weights and the libraries' memory."""
QUIET_SECONDS = 1.0


def run(here: Here) -> None:
    shapes = section.even(64, here.size(16 * MIB, 64 << 10))
    rounds, num_engines = here.size(200, 12), here.size(20, 2)
    if not here.needs("publishing 1 GB", device_gib=6, host_gib=8):
        return
    first = section.used_bytes(here.device)
    if not here.dry and section.within(QUIET_SECONDS, lambda: section.used_bytes(here.device) != first):
        here.skip("comparing the device's memory to 2 MiB: another program uses this GPU")
        return
    with Peer(here, "engine", shapes) as engine:
        engine.ready()
        trainer = TrainerCommands({"shapes": shapes, "device": str(here.device)})
        with here.part(f"{rounds} publishes"):
            _many_publishes(here, trainer, engine, rounds)
        if here.needs(f"{num_engines} engines killed", device_gib=4 + 1.6 * NUM_AT_ONCE, host_gib=4 * NUM_AT_ONCE):
            for start in range(0, num_engines, NUM_AT_ONCE):
                with here.part(
                    f"engines {start + 1} to {min(start + NUM_AT_ONCE, num_engines)} of {num_engines} killed"
                ):
                    _kill_engines(here, trainer, engine, shapes, range(start, min(start + NUM_AT_ONCE, num_engines)))
        with here.part(f"{num_engines} publishers"):
            _many_publishers(here, trainer, engine, num_engines)
        with here.part("memory given back between publishes"):
            _release(here, trainer, engine)
    with here.part("memory of our own"):
        _own_memory(here)


def _many_publishes(here: Here, trainer: TrainerCommands, engine: Peer, rounds: int) -> None:
    # Kernels are loaded, and pools made that stay.
    trainer.open([engine.url], install="streaming")
    trainer.publish(0, spoil=False)
    engine.wrong(0)
    trainer.close_publisher()
    before = _used_when_empty(here, engine)
    trainer.open([engine.url], install="streaming")
    at, seen = {rounds // 20, rounds // 2, rounds}, {}
    for number in range(1, rounds + 1):
        trainer.publish(number, spoil=False)
        if number in at:
            seen[number] = (section.meters(here.device), engine.ask("meters"))
    for number, (own, other) in seen.items():
        here.fact(f"after {number} publishes", {"trainer": own, "engine": other})
    middle, last = seen[rounds // 2], seen[rounds]
    for which, end in enumerate(("trainer", "engine")):
        grown = {
            name: f"{middle[which][name]} -> {value}"
            for name, value in last[which].items()
            if value > middle[which][name] + TOLERANCE[name]
        }
        here.check(f"in the {end} nothing has grown from publish {rounds // 2} to {rounds}", not grown, grown)
    here.check("the engine holds the last version", not (found := engine.wrong(rounds)), found)
    trainer.close_publisher()
    _check_is_back(here, f"all that {rounds} publishes took is back, to 2 MiB", before, engine)


def _kill_engines(here: Here, trainer: TrainerCommands, engine: Peer, shapes: Any, numbers: range) -> None:
    """Each one takes a version beside a publisher that stays, and is killed with the arena mapped."""
    before = _used_when_empty(here, engine)
    with contextlib.ExitStack() as stack:
        # Started at once: imports take longest.
        victims = [stack.enter_context(Peer(here, "engine", shapes)) for _ in numbers]
        for victim in victims:
            victim.ready()
        _kill_each(here, trainer, victims, 300 + numbers.start)
    _check_is_back(here, "all that they had is back, to 2 MiB", before)


def _kill_each(here: Here, trainer: TrainerCommands, victims: list[Peer], first: int) -> None:
    trainer.open([], install="streaming")
    publisher: Publisher = trainer.publisher
    bad: dict[int, Any] = {}
    used = []
    for number, victim in enumerate(victims, first):
        publisher.add_engine(victim.url)
        trainer.publish(number)
        if found := victim.wrong(number):
            bad[number] = found
        victim.kill()
        publisher.remove_engine(victim.url)
        used.append(section.used_bytes(here.device) // MIB)
    here.check(f"{len(victims)} engines took their version before they were killed", not bad, bad)
    here.fact(f"device MiB used after each, from version {first} on", used)
    trainer.close_publisher()


def _many_publishers(here: Here, trainer: TrainerCommands, engine: Peer, rounds: int) -> None:
    bad, used = {}, []
    _empty(here)
    for number in range(400, 400 + rounds):
        before = section.used_bytes(here.device)
        trainer.open([engine.url], install="streaming")
        trainer.publish(number, spoil=False)
        if found := engine.wrong(number):
            bad[number] = found
        trainer.close_publisher()
        _empty(here)
        if number > 400:  # the first one loads kernels, and makes pools that stay
            engine.ask("empty_cache")
            back = section.within(1.0, lambda before=before: section.used_bytes(here.device) <= before + 2 * MIB)
            used.append(0 if back else (section.used_bytes(here.device) - before) // MIB)
    here.check(f"{rounds} publishers published", not bad, bad)
    here.check("each gave its device memory back within a second", not any(used), f"MiB kept by each: {used}")


def _release(here: Here, trainer: TrainerCommands, engine: Peer) -> None:
    trainer.open([engine.url], install="streaming")
    trainer.publish(500, spoil=False)
    engine.ask("empty_cache")
    _empty(here)
    with_arena = section.used_bytes(here.device)
    trainer.publisher.release()
    _empty(here)
    if not here.dry:
        less = section.within(1.0, lambda: section.used_bytes(here.device) < with_arena - 100 * MIB)
        freed = (with_arena - section.used_bytes(here.device)) // MIB
        here.check("release() gives the slots back while the engine is connected", less, f"{freed} MiB were freed")
    trainer.publish(501, spoil=False)
    here.check("a publish after it is right", not (found := engine.wrong(501)), found)
    trainer.close_publisher()


def _own_memory(here: Here) -> None:
    """Check that arenas are the driver's memory, not torch's blocks, which the checks above can't show."""
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(LazyGpu()).device if here.dry else here.device
        before = section.used_bytes(here.device)
        made = DeviceMemory.allocate(512 * MIB if not here.dry else MIB, device, "a trial")
        tensor = made.tensor()
        tensor.fill_(7)
        here.check("the driver's memory can be written and read", bool((tensor == 7).all()))
        here.check("another process could open it", made.descriptor is not None, made.descriptor)
        made.close()
        del made, tensor
        gc.collect()
        if not here.dry:
            back = section.within(1.0, lambda: section.used_bytes(here.device) <= before + 2 * MIB)
            here.check("it is freed with its last tensor", back, section.used_bytes(here.device) - before)


def _used_when_empty(here: Here, engine: Peer) -> int:
    """Return the device's used bytes after both processes have emptied torch's cache."""
    engine.ask("empty_cache")
    _empty(here)
    return section.used_bytes(here.device)


def _check_is_back(here: Here, name: str, before: int, *engines: Peer) -> None:
    """Check that the used memory is back to `before` within a second, after emptying the caches of `engines`."""
    for engine in engines:
        engine.ask("empty_cache")
    _empty(here)
    back = section.within(1.0, lambda: abs(section.used_bytes(here.device) - before) <= 2 * MIB)
    now = section.used_bytes(here.device)
    here.check(name, back, f"{before // MIB} MiB before, {now // MIB} MiB after")


def _empty(here: Here) -> None:
    """Return torch's cached memory to the device, so that only memory that can't be returned counts."""
    if here.device.type == "cuda":
        torch.cuda.synchronize(here.device)
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
