"""f. Processes that are killed or stopped, memory that runs out: no hang, the right error, the next publish heals."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from _gpu import section
from _gpu.peers import Peer, TrainerCommands
from _gpu.section import MIB, Here
from weightcast import Publisher, PublishOptions, TensorSource
from weightcast.errors import InsufficientMemoryError, WeightcastError

AT_BUCKET = 3
"""Number of buckets that are sent before a fault."""
DEADLINE_SECONDS = 3.0
HEALED_SECONDS = 10.0
"""Limit, in seconds, for an engine to be usable again after its trainer's death."""


def run(here: Here) -> None:
    shapes = section.even(32, here.size(16 * MIB, 64 << 10))
    options = {"install": "streaming", "bucket_size_bytes": shapes[0][1][0] * 2048, "on_failure": "report"}
    # All at once: imports take longest.
    lively, stopped, killed, orphan = engines = [Peer(here, "engine", shapes) for _ in range(4)]
    sink = Peer(here, "sink", [])
    doomed = [Peer(here, "trainer", shapes) for _ in range(2)]
    trainer = TrainerCommands({"shapes": shapes, "device": str(here.device)})
    try:
        for peer in (*engines, sink, *doomed):
            peer.ready()
        with here.part("an engine is killed in the middle, beside another one"):
            _engine_is_killed(here, trainer, lively, killed, options)
        with here.part("an engine is stopped in the middle, and goes on later"):
            _engine_is_stopped(here, trainer, lively, stopped, options)
        for install, peer in zip(("streaming", "staged"), doomed, strict=True):
            with here.part(f"the trainer is killed while its packing is held back, {install}"):
                _trainer_is_killed(here, trainer, orphan, peer, options | {"install": install})
        with here.part("an arena that does not fit"):
            _no_room_for_the_arena(here, trainer, lively, options)
        with here.part("an engine without free memory"):
            _engine_is_full(here, trainer, lively, options)
        with here.part("close from another thread"):
            _close_from_another_thread(here, trainer, lively, options)
        with here.part("an update that is given up while a bucket is loaded"):
            _given_up_in_mid_bucket(here, trainer, lively, options)
        with here.part("a manifest that grows"):
            _manifest_grows(here, sink)
    finally:
        for peer in (*engines, sink, *doomed):
            peer.kill()


def _publish(
    trainer: TrainerCommands, number: int, at_bucket: Callable[[], object] = lambda: None
) -> dict[str, tuple[bool, str]]:
    """Fill and publish, and call `at_bucket` midway. Return, by engine, if it took the version, and its error."""
    num_reports = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal num_reports
        num_reports += 1
        if num_reports == AT_BUCKET:
            at_bucket()

    section.fill(trainer.weights, number)
    report = trainer.publisher.publish(on_progress=on_progress)
    return {
        name: (result.ok, "" if result.error is None else f"{result.error.kind}: {result.error.message}")
        for name, result in report.engines.items()
    }


def _heals(here: Here, trainer: TrainerCommands, number: int, *engines: Peer) -> None:
    fared = _publish(trainer, number)
    bad = {engine.url: found for engine in engines if (found := engine.wrong(number))}
    here.check("the next publish heals", all(ok for ok, _ in fared.values()) and not bad, (fared, bad))


def _engine_is_killed(here: Here, trainer: TrainerCommands, lively: Peer, killed: Peer, options: Any) -> None:
    trainer.open([lively.url, killed.url], **options)
    _heals(here, trainer, 1, lively, killed)
    fared = _publish(trainer, 2, killed.kill)
    here.check("the other engine has the version", fared[lively.url][0] and not lively.wrong(2), fared[lively.url])
    ok, error = fared[killed.url]
    here.check("the killed one has failed, by name", not ok and error.startswith(("PeerDied", "Control")), error)
    trainer.publisher.remove_engine(killed.url)
    _heals(here, trainer, 3, lively)
    trainer.close_publisher()


def _engine_is_stopped(here: Here, trainer: TrainerCommands, lively: Peer, stopped: Peer, options: Any) -> None:
    trainer.open([lively.url, stopped.url], deadline_seconds=DEADLINE_SECONDS, **options)
    _heals(here, trainer, 11, lively, stopped)
    began = time.monotonic()
    try:
        fared = _publish(trainer, 12, stopped.stop)
    finally:
        stopped.wake()
    here.fact("seconds of a publish with a stopped engine", round(time.monotonic() - began, 1))
    here.check("the other engine has the version", fared[lively.url][0] and not lively.wrong(12), fared[lively.url])
    ok, error = fared[stopped.url]
    here.check("the stopped one has failed, by name", not ok and "Peer" in error, error)
    kernel = stopped.ask("kernel")
    here.check("its default stream is free", kernel["ok"], kernel)
    _heals(here, trainer, 13, lively, stopped)
    trainer.close_publisher()


def _trainer_is_killed(here: Here, trainer: TrainerCommands, orphan: Peer, doomed: Peer, options: Any) -> None:
    """A kernel delays the packing of a bucket that engines wait for when the trainer is killed (A4)."""
    doomed.ask("open", engines=[orphan.url], **options)
    first = doomed.ask("publish", version=20)
    here.check("it has published before", first["ok"] and not orphan.wrong(20), first)
    doomed.tell("publish", version=21, hold_after=AT_BUCKET, hold_ms=5000)
    doomed.hear()
    doomed.kill()
    began = time.monotonic()
    kernel = orphan.ask("kernel", seconds=2 * HEALED_SECONDS)
    here.check("a kernel on the engine's default stream ends", kernel["ok"], kernel)
    here.check("the engine answers /weight_info", bool(orphan.info(HEALED_SECONDS)))
    trainer.open([orphan.url], **options)
    fared, number = {}, 22

    def is_taken() -> bool:
        fared.update(_publish(trainer, number))
        return fared[orphan.url][0]

    taken = section.within(HEALED_SECONDS, is_taken)
    here.check("it takes another publisher", taken and not orphan.wrong(number), fared)
    here.fact("seconds from the kill to the next version", round(time.monotonic() - began, 2))
    trainer.close_publisher()


def _no_room_for_the_arena(here: Here, trainer: TrainerCommands, lively: Peer, options: Any) -> None:
    if here.dry:
        here.fact("an arena that does not fit", "left out in a dry run: tests have a pretended GPU run full")
        return
    trainer.eat(leave_mib=16)
    trainer.open([lively.url], **options)
    here.raises("InsufficientMemoryError", InsufficientMemoryError, lambda: _publish(trainer, 40))
    trainer.give_back()
    _heals(here, trainer, 41, lively)
    trainer.close_publisher()


def _engine_is_full(here: Here, trainer: TrainerCommands, lively: Peer, options: Any) -> None:
    """The publish ends, with success or not, and the engine is usable afterwards."""
    trainer.open([lively.url], **options)
    _heals(here, trainer, 50, lively)
    lively.ask("eat", leave_mib=8)
    fared = _publish(trainer, 51)
    here.fact("a publish to an engine with 8 MiB of device memory left", fared[lively.url])
    ok, error = fared[lively.url]
    is_named = any(word in error for word in ("InsufficientMemory", "OutOfMemory", "out of memory"))
    lively.ask("give_back")
    here.check("it was taken, or refused for want of memory", (ok and not lively.wrong(51)) or is_named, error)
    _heals(here, trainer, 52, lively)
    trainer.close_publisher()


def _close_from_another_thread(here: Here, trainer: TrainerCommands, lively: Peer, options: Any) -> None:
    trainer.open([lively.url], **options)
    section.fill(trainer.weights, 60)
    closed = threading.Event()

    def close() -> None:
        trainer.publisher.close()
        closed.set()

    thread = threading.Thread(target=close, daemon=True)
    outcome = "published"
    try:
        trainer.publisher.publish(on_progress=lambda done, total: None if thread.ident else thread.start())
    except WeightcastError as exc:
        outcome = f"{type(exc).__name__}: {exc}"
    here.fact("a publish that is closed from another thread", outcome)
    here.check("close returns", closed.wait(HEALED_SECONDS), "it still waits")
    trainer.open([lively.url], **options)
    _heals(here, trainer, 61, lively)
    trainer.close_publisher()


def _given_up_in_mid_bucket(here: Here, trainer: TrainerCommands, lively: Peer, options: Any) -> None:
    """The trainer aborts when a bucket is in the model and a kernel delays the end of its load."""
    trainer.open([lively.url], **options | {"bucket_size_bytes": 4 * options["bucket_size_bytes"]})
    _heals(here, trainer, 62, lively)
    lively.ask("hold_next_load", milliseconds=here.size(2000, 500))
    seen = list[Any]()

    def give_up(done: int, total: int) -> None:
        seen.append(lively.hear())
        raise RuntimeError("this trainer gives up")

    section.fill(trainer.weights, 63)
    began = time.monotonic()
    call = functools.partial(trainer.publisher.publish, on_progress=give_up)
    here.raises("the trainer's own error", RuntimeError, call, "this trainer gives up")
    here.fact("an update that is given up while a bucket is loaded, s", round(time.monotonic() - began, 2))
    here.check("a bucket was being loaded", [each.get("held") for each in seen] == [True], seen)
    kernel = lively.ask("kernel", seconds=2 * HEALED_SECONDS)
    here.check("the engine's default stream is free", kernel["ok"], kernel)
    _heals(here, trainer, 64, lively)
    trainer.close_publisher()


def _manifest_grows(here: Here, sink: Peer) -> None:
    """Tensors grow from version to version, so that the arena of a connected engine is replaced."""
    source = TensorSource()
    sizes = [here.size(each * MIB, each << 10) for each in (1, 8, 64, 4)]
    for install in ("staged", "streaming"):
        options = PublishOptions(install=install)
        with Publisher(source, engines=[sink.url], trainer_group=None, options=options) as publisher:
            for number, size in enumerate(sizes, 1):
                tensors = {
                    f"t{n}": torch.full((size,), n + number, dtype=torch.uint8, device=here.device) for n in range(3)
                }
                source.replace(tensors)
                publisher.publish()
                held = sink.ask("held")["held"]
                expected = {f"t{n}": [size, n + number, n + number] for n in range(3)}
                here.check(f"3 tensors of {size} bytes, {install}", held == expected, held)
