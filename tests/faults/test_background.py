"""Trainers that publish in the background, cancel, skip and are killed: an engine serves one whole version, always."""

from __future__ import annotations

import random

import pytest

from faults.actors import DEADLINE_SECONDS
from faults.conftest import (
    IPC,
    Footprints,
    Stage,
    Wire,
    assert_one_whole_version,
    assert_serves,
    eventually,
    is_free,
    on,
    served,
)
from faults.publisher_actor import PublisherProcess

NUM_STARTS = 50


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("wire", "num_trainers", "num_ranks"),
    [
        on(IPC, 3, 1),
        pytest.param(IPC, 3, 2, marks=pytest.mark.cluster),
        *(on(IPC, number, ranks, full=True) for number, ranks in ((60, 1), (40, 2), (40, 4))),
    ],
)
def test_killed_at_any_start(stage: Stage, wire: Wire, num_trainers: int, num_ranks: int) -> None:
    """Each trainer makes up to 50 starts, and one of its ranks is killed after one of them, wherever the publish is.

    With several ranks the model is sharded by FSDP2, and the calls of those that live on end in an error, in time.
    """
    engines, chance, first = stage.engines(2), random.Random(5), 1
    footprints = None
    for _ in range(num_trainers):
        if num_ranks > 1:
            ranks = stage.trainer_ranks(num_ranks, *engines, fsdp=True, deadline_seconds=10.0)
        else:
            ranks = [stage.publisher(*engines, deadline_seconds=10.0)]
        seed, victim = chance.randrange(1 << 30), chance.choice(ranks)
        for rank in ranks:
            rank.tell("start often", first, NUM_STARTS, seed)
        for version in range(first, first + chance.randrange(1, NUM_STARTS)):
            assert victim.hear("started") == version
        victim.kill()
        for rank in ranks:
            if rank is not victim:
                assert_fails(rank)
                rank.kill()
        first += NUM_STARTS
        for engine in engines:
            eventually(lambda engine=engine: is_free(engine), "the dead publisher's hold and pause end")
            contents = {str(version): version for version in range(1, first)} | {"default": 0}
            assert_one_whole_version(engine, contents)
        footprints = footprints or Footprints(*engines)
    last = stage.publisher(*engines)
    assert last.publish(7, first)["failures"] == {}
    for engine in engines:
        assert_serves(engine, str(first), 7)
    last.close()
    assert footprints is not None
    footprints.assert_settled()
    assert served(engines[0]) == served(engines[1])


def assert_fails(rank: PublisherProcess) -> None:
    """It says that a call of its failed, whatever starts it still had to tell of."""
    word = "started"
    while word == "started":
        assert rank.pipe.poll(DEADLINE_SECONDS), "a rank whose peer is dead waits for it"
        word = rank.pipe.recv()[0]
    assert word == "failed"
