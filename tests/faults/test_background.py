"""Trainers that publish in the background, cancel, skip and are killed: an engine serves one whole version, always."""

from __future__ import annotations

import random

import pytest

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

NUM_STARTS = 50


@pytest.mark.parametrize(("wire", "num_trainers"), [on(IPC, 3), on(IPC, 60, full=True)])
def test_killed_at_any_start(stage: Stage, wire: Wire, num_trainers: int) -> None:
    """Each trainer makes up to 50 starts, and is killed after one of them, wherever its publish is then."""
    engines, chance, first = stage.engines(2), random.Random(5), 1
    footprints = None
    for _ in range(num_trainers):
        trainer = stage.publisher(*engines, deadline_seconds=10.0)
        trainer.tell("start often", first, NUM_STARTS, chance.randrange(1 << 30))
        for version in range(first, first + chance.randrange(1, NUM_STARTS)):
            assert trainer.hear("started") == version
        trainer.kill()
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
