"""The engine's log: an install is one line at INFO, published or followed."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

import weightcast
from weightcast.serving.follower import Follower

LINE = r"installed version 0 of run \w{8} in \d\.\d{3} s: 2 tensors, 288 bytes, \d+\.\d{3} s after its offer"


def installs(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level and r.getMessage().startswith("installed")]


@pytest.mark.parametrize("engine_rank", [0, 1])
def test_an_install_is_one_line_of_an_engine(engine_rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Of the first rank: the others have it at DEBUG."""
    caplog.set_level(logging.DEBUG, "weightcast")
    engine = weightcast.LocalEngine(weightcast.ModuleEngine(torch.nn.Linear(8, 8)), engine_rank=engine_rank)
    with weightcast.Publisher(weightcast.ModuleSource(torch.nn.Linear(8, 8)), engines=[engine]) as publisher:
        publisher.publish()
    [line] = installs(caplog, logging.DEBUG if engine_rank else logging.INFO)
    assert not installs(caplog, logging.INFO if engine_rank else logging.DEBUG)
    assert re.fullmatch(LINE, line), line


def test_a_follower_logs_its_installs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightcast")
    store = tmp_path.as_uri()
    with weightcast.Publisher(weightcast.ModuleSource(torch.nn.Linear(8, 8)), transport=store) as publisher:
        publisher.publish()
    with Follower(store, weightcast.ModuleEngine(torch.nn.Linear(8, 8))) as follower:
        assert follower.poll() is not None
    assert len(installs(caplog)) == 1
