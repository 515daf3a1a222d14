"""A stock SGLang server, with no code of ours in it, updated over each of its own routes."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines.setups import on
from real_vllm.trainer import FILE, GLOO, IPC, trainer

from real_sglang.oracle import assert_serves
from real_sglang.servers import STOCK, STOCK_TWO, Server


@pytest.mark.parametrize("transport", [GLOO, IPC, FILE])
@on(STOCK, full=[STOCK_TWO])
def test_serves_each_version_after_its_publish(server: Server, transport: str, tmp_path: Path) -> None:
    with trainer(server.setup, server.url, transport=transport.format(tmp_path)) as run:
        for seed in (1, 2):
            report = run.publish(seed)
            assert_serves(server, seed)
            assert server.version() == str(report.version)
