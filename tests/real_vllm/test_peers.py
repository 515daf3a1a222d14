"""The benchmark's adapter of vLLM's own reload: what it measures is a server that answers with the new weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines.setups import on

from real_vllm.cold import assert_serves
from real_vllm.models import make_model
from real_vllm.servers import PLAIN, Server

BENCH = Path(__file__).parents[2] / "bench"


@on(PLAIN)
def test_the_benchmark_updates_a_stock_server(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from peers.adapters import vllm
    from peers.ends import End

    for seed in (1, 0):
        with vllm.reload(End(True, make_model(seed=seed), tmp_path, None, server.url)) as update:
            paused_seconds = update(0)
        assert paused_seconds is not None
        assert not server.is_paused()
        assert_serves(server, seed)
