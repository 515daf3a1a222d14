"""The engines of a bench run: processes of their own, or threads of this one where the transport is `memory`.

Leaving the context ends every engine that it started, whatever happened inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import torch

from weightcast.bench.broadcasts import NUM_BUFFERS, Broadcasts
from weightcast.bench.channel import BenchChannel, SharedBytes, pair
from weightcast.bench.engine_process import ANSWER_SECONDS, EngineReady, JoinGroup, PerTensor, Serve, attend, served
from weightcast.bench.model import build_model
from weightcast.bench.processes import END_SECONDS, process, shared_specs
from weightcast.bench.settings import BenchSettings
from weightcast.format.manifest import TensorSpec
from weightcast.process_group import ProcessGroup, serve_store

_MODULE = "weightcast.bench.engine_process"


@dataclasses.dataclass(frozen=True)
class BenchEngine:
    """`pid` is None where the engine shares the publisher's process. `channel` speaks the baselines."""

    url: str
    channel: BenchChannel
    pid: int | None


@contextlib.contextmanager
def started(specs: Sequence[TensorSpec], settings: BenchSettings) -> Iterator[list[BenchEngine]]:
    """The engines that the settings ask for; each serves a zeroed model of these specs."""
    numbers = range(settings.num_engines)
    with contextlib.ExitStack() as stack:
        if settings.one_process:
            yield [stack.enter_context(_in_thread(specs, settings.engine_device(index), index)) for index in numbers]
            return
        starting = [
            stack.enter_context(process(_MODULE, peer=f"engine {index}", deadline_seconds=ANSWER_SECONDS))
            for index in numbers
        ]
        with contextlib.closing(shared_specs(specs)) as shared:
            for index, (_, channel) in enumerate(starting):
                channel.send(Serve(shared.tensor.numel(), settings.engine_device(index)), shared.fd)
            engines = [
                BenchEngine(channel.receive(EngineReady).url, channel, process.pid) for process, channel in starting
            ]
        yield engines


def lend_slot(engines: Sequence[BenchEngine], slot: SharedBytes) -> None:
    """Let every engine map the shared memory of the per-tensor baseline; they wait for its first message."""
    for engine in engines:
        engine.channel.send(PerTensor(slot.tensor.numel()), slot.fd)
    for engine in engines:
        engine.channel.receive(EngineReady)


def make_group(
    engines: Sequence[BenchEngine], settings: BenchSettings, buffer_bytes: int, num_bytes: int
) -> Broadcasts:
    """A process group of this process (rank 0) and all engines, for the baselines of a publish of `num_bytes`."""
    backend, host, device = settings.transport, settings.host, torch.device(settings.device)
    store, port = serve_store(host, ANSWER_SECONDS)
    size = len(engines) + 1
    num_buffers = -(-num_bytes // buffer_bytes) if settings.install == "staged" else NUM_BUFFERS
    for index, engine in enumerate(engines):
        engine.channel.send(JoinGroup(backend, host, port, index + 1, size, buffer_bytes, num_buffers))
    group = ProcessGroup(
        backend,
        store,
        rank=0,
        size=size,
        timeout_seconds=ANSWER_SECONDS,
        host=host,
        device=device if backend == "nccl" else None,
    )
    for engine in engines:
        engine.channel.receive(EngineReady)
    return Broadcasts(group, buffer_bytes, device, NUM_BUFFERS)


@contextlib.contextmanager
def _in_thread(specs: Sequence[TensorSpec], device: str, index: int) -> Iterator[BenchEngine]:
    model = build_model(specs, device)
    channel, theirs = pair(f"engine {index}", deadline_seconds=ANSWER_SECONDS)
    with contextlib.closing(channel), served(model) as server:
        thread = threading.Thread(target=attend, args=(theirs, model, server.url), name=f"bench-engine-{index}")
        thread.start()
        try:
            yield BenchEngine(server.url, channel, None)
        finally:
            channel.close()
            thread.join(END_SECONDS)
