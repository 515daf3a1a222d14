"""weightcast as verl's checkpoint engine, `backend: weightcast`, driven as verl's manager drives its engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from peers.ends import End, Update


@contextlib.contextmanager
def backend(end: End, bucket_mib: int, **options: str) -> Iterator[Update]:
    from verl.checkpoint_engine import CheckpointEngineRegistry

    master = {"is_master": True} if end.is_trainer else {}
    engine = CheckpointEngineRegistry.new(
        "weightcast", bucket_size=bucket_mib << 20, host="127.0.0.1", **options, **master
    )

    async def receive(step: int) -> None:
        async for pair in engine.receive_weights(step):
            end.load([pair])

    def update(step: int) -> None:
        prepared = engine.prepare()
        end.send(prepared)
        metadata = [prepared, end.receive()] if end.is_trainer else [end.receive(), prepared]
        topology = engine.build_topology(1, 1, metadata)[0 if end.is_trainer else 1]
        engine.init_process_group(**{name: values[0] for name, values in topology.items()})
        if end.is_trainer:
            asyncio.run(engine.send_weights(iter(end.tensors.items()), step))
        else:
            asyncio.run(receive(step))
        engine.finalize()

    yield update
