"""The benchmark's adapters of SGLang's own routes: what they measure is a server that holds the new weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines.setups import on
from real_vllm.models import make_model

from real_sglang.oracle import assert_serves
from real_sglang.servers import STOCK, Server

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("name", ["disk", "distributed"])
@on(STOCK)
def test_the_benchmark_updates_a_stock_server(
    server: Server, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from peers.adapters import sglang, sglang_groups
    from peers.ends import End

    adapter = {"disk": sglang.disk, "distributed": sglang_groups.distributed}[name]
    with adapter(End(True, make_model(seed=1), tmp_path, None, server.url)) as update:
        update(0)
    assert_serves(server, 1)
