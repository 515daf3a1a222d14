"""A trainer rank that makes its default group anew, with a process that is new, meets it as if it were new itself."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import forking
import torch.distributed as dist

from weightcast.trainer.group.rendezvous import Rendezvous

SECONDS = 30
_context = forking.preloaded("torch.distributed", "weightcast.trainer.group.rendezvous")


def meet(rank: int, ports: Sequence[int]) -> None:
    for port in ports:
        timeout = datetime.timedelta(seconds=SECONDS)
        store = dist.TCPStore("127.0.0.1", port, 2, False, timeout)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        group = Rendezvous(None, SECONDS).join()
        # Gloo fails to connect to a member that has connected and gone before this one is through.
        dist.barrier()
        group.close()
        dist.destroy_process_group()


def test_a_rank_outlives_the_others() -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False) for _ in range(2)]  # type: ignore[attr-defined]
    ports = [store.port for store in stores]
    ranks = [_context.Process(target=meet, args=(0, ports), daemon=True)]
    ranks += [_context.Process(target=meet, args=(1, [port]), daemon=True) for port in ports]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(3 * SECONDS)
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
