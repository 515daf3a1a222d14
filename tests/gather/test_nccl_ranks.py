"""Bytes that trainer ranks send each other from GPU to GPU: two ranks in one process, over `pretended.lazy_nccl`."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from pretended.lazy_gpu import LazyGpu
from pretended.lazy_nccl import LazyNccl

from weightcast.errors import PeerError, PeerTimeoutError
from weightcast.process_group import join_store, serve_store
from weightcast.trainer.group.exchange import RankStatus, TrainerRanks

pytestmark = pytest.mark.usefixtures("leaves_nothing")
PATIENCE_SECONDS = 20.0
SHORT_SECONDS = 0.3
T = TypeVar("T")


class Pair:
    def __init__(self, gpu: LazyGpu, nccl: LazyNccl, ranks: list[TrainerRanks], pool: ThreadPoolExecutor) -> None:
        self.gpu, self.nccl, self.ranks, self._pool = gpu, nccl, ranks, pool

    def on_both(self, call: Callable[[TrainerRanks], T]) -> list[T]:
        return list(self._pool.map(call, self.ranks, timeout=PATIENCE_SECONDS))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Connected, as at the first publish, but for their GPUs."""
    store, port = serve_store("127.0.0.1", PATIENCE_SECONDS)
    trainers = [types.SimpleNamespace(rank=rank) for rank in range(2)]
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    with LazyGpu() as gpu, LazyNccl(gpu) as nccl, ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        ranks = []
        for trainer in trainers:
            own = join_store("127.0.0.1", port, PATIENCE_SECONDS) if trainer.rank else store
            monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda own=own: own)
            ranks.append(TrainerRanks(trainer, PATIENCE_SECONDS))
            stack.callback(ranks[-1].close)
        made = Pair(gpu, nccl, ranks, pool)
        made.on_both(lambda each: each.start(RankStatus()))
        yield made
    # Their stores close with the last reference: pytest keeps this fixture for longer, and an error its ranks.
    ranks.clear()
    gc.collect()


def test_ranks_send_each_other_tensors_of_their_gpus(pair: Pair) -> None:
    gpu, (first, second) = pair.gpu, pair.ranks
    pair.on_both(lambda each: each.connect_nccl(gpu.device))
    landings = [gpu.tensor(torch.zeros(8)) for _ in range(2)]

    def take_part(each: TrainerRanks) -> None:
        if each is second:
            for number in (1, 2):
                each.send(gpu.tensor(torch.full((8,), float(number))), 0)
        else:
            arrivals = [each.receive(landing, 1) for landing in landings]
            each.arrived(arrivals)

    pair.on_both(take_part)
    assert [gpu.read(landing).tolist() for landing in landings] == [[1.0] * 8, [2.0] * 8]
    assert first.is_connected


def test_a_rank_whose_gpu_never_connects_is_waited_for_until_the_deadline(pair: Pair) -> None:
    """NCCL itself would wait for it for ever."""
    pair.ranks[0]._rendezvous._deadline_seconds = SHORT_SECONDS
    with pytest.raises(PeerTimeoutError, match=r"no sign of life from trainer rank 1.*not all members have come"):
        pair.ranks[0].connect_nccl(pair.gpu.device)
    assert not pair.ranks[0].is_connected, "the next publish connects anew"


def test_a_rank_that_dies_before_it_sends_is_waited_for_until_the_deadline(pair: Pair) -> None:
    """And what waits on the GPU is aborted."""
    pair.on_both(lambda each: each.connect_nccl(pair.gpu.device))
    first = next(group for group in pair.nccl.groups if group.rank == 0)
    pair.nccl.kill(next(group for group in pair.nccl.groups if group.rank == 1))
    pair.ranks[0]._groups["nccl"]._timeout_seconds = SHORT_SECONDS
    arrivals = [pair.ranks[0].receive(pair.gpu.tensor(torch.zeros(8)), 1)]
    with pytest.raises(PeerError, match="trainer rank 1"):
        pair.ranks[0].arrived(arrivals)
    pair.gpu.synchronize(pair.gpu.device)
    assert first.is_aborted
