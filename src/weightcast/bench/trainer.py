"""The publishing end of a bench run: this process, and further trainer ranks in processes of their own.

A step is taken by all ranks at the same time; this one, rank 0, tells the others which.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from weightcast.bench.channel import BenchChannel
from weightcast.bench.model import build_model, change, fill, local_tensors
from weightcast.bench.processes import process, shared_specs
from weightcast.bench.ranks import GROUP_SECONDS, default_group, return_free_memory, sharded_model, whole_tensors
from weightcast.bench.settings import BenchSettings
from weightcast.bench.trainer_process import Did, Open, Step, Train, What, make_publisher
from weightcast.errors import PeerDiedError
from weightcast.format.manifest import TensorSpec
from weightcast.process_group import serve_store
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.report import PublishReport

_MODULE = "weightcast.bench.trainer_process"
_HOST = "127.0.0.1"


class Trainer:
    """The model of rank 0, whole or sharded, and what all ranks do with theirs."""

    def __init__(self, model: nn.Module, others: Sequence[BenchChannel] = (), other_pids: Sequence[int] = ()) -> None:
        self.model = model
        self.other_pids = tuple(other_pids)
        self.tensors = local_tensors(model)
        self._others = others

    @contextlib.contextmanager
    def publisher(self, settings: BenchSettings, engines: Sequence[str]) -> Iterator[Publisher]:
        """A publisher to these engines, on every rank."""
        terms = Open(settings.transport_url, settings.install, settings.bucket_size_bytes, tuple(engines))
        for channel in self._others:
            channel.send(terms)
        with make_publisher(self.model, terms) as publisher:
            self._await_others()
            yield publisher

    def change(self) -> None:
        """Every weight becomes another one."""
        with self._together("change"):
            change(list(self.tensors.values()))

    def publish(self, publisher: Publisher) -> PublishReport:
        with self._together("publish"):
            return publisher.publish()

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor whole, one after the other; take all of them."""
        with self._together("gather_each"):
            yield from whole_tensors(self.model)

    def gather_each_seconds(self) -> float:
        """What a `full_tensor()` of every parameter takes, nothing done with it."""
        start = time.perf_counter()
        for _ in self.whole_tensors():
            pass
        return time.perf_counter() - start

    @contextlib.contextmanager
    def _together(self, what: What) -> Iterator[None]:
        for channel in self._others:
            channel.send(Step(what))
        yield
        self._await_others()

    def _await_others(self) -> None:
        for index, channel in enumerate(self._others):
            if error := channel.receive(Did).error:
                raise PeerDiedError(f"trainer rank {index + 1} failed: {error}", peer=f"trainer rank {index + 1}")


@contextlib.contextmanager
def trainer(specs: Sequence[TensorSpec], settings: BenchSettings) -> Iterator[Trainer]:
    """The trainer that the settings ask for, its weights filled; more than one rank: sharded by FSDP2, over gloo."""
    if settings.trainer_ranks == 1:
        model = build_model(specs, settings.device)
        fill(local_tensors(model).values(), seed=0)
        yield Trainer(model)
        return
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(process(_MODULE, peer=f"trainer rank {rank}", deadline_seconds=GROUP_SECONDS))
            for rank in range(1, settings.trainer_ranks)
        ]
        store, port = serve_store(_HOST, GROUP_SECONDS)
        with contextlib.closing(shared_specs(specs)) as shared:
            for index, (_, channel) in enumerate(others):
                train = Train(shared.tensor.numel(), index + 1, settings.trainer_ranks, _HOST, port)
                channel.send(train, shared.fd)
            stack.enter_context(default_group(store, 0, settings.trainer_ranks))
            made = Trainer(
                sharded_model(specs, settings.trainer_ranks),
                [channel for _, channel in others],
                [process.pid for process, _ in others],
            )
            made._await_others()
        return_free_memory()
        yield made
