"""A stock SGLang over time and at size: many publishes under streams, and against one request for each tensor."""

from __future__ import annotations

import threading
import time

import httpx
import torch
from real_engines.process import REQUEST_SECONDS
from real_engines.setups import on
from real_vllm.trainer import GLOO, checkpoint_tensors, trainer

from real_sglang.oracle import assert_serves
from real_sglang.servers import STOCK, STOCK_TWO, Server, Setup
from real_sglang.test_transactional_soak import publish_under_streams
from weightcast.integrations.sglang.stock.group import StockGroup


@on(STOCK, full=[STOCK_TWO])
def test_fifty_publishes_under_streams_and_no_token_of_another_version_than_it_says(server: Server) -> None:
    publish_under_streams(server, transport=GLOO)


LARGE = Setup("qwen3-large", plugin=False)
NUM_ATTEMPTS = 4
MIN_SPEEDUP = 40


@on(full=[LARGE])
def test_two_thousand_tensors_come_forty_times_as_fast_as_one_by_one(server: Server) -> None:
    with trainer(server.setup, server.url, transport=GLOO, bucket_size_bytes=None) as it:
        tensors = checkpoint_tensors(it.of(1))
        assert len(tensors) >= 2000
        times = []
        for number in range(NUM_ATTEMPTS):
            start = time.perf_counter()
            report = it.publish(number % 2)
            times.append(time.perf_counter() - start)
            (result,) = report.engines.values()
            print(f"{report.num_bytes / 1e6:.0f} MB: {times[-1]:.2f} s, paused for {result.pause_seconds:.2f} s")
        assert_serves(server, 1)
    whole = min(times)
    single = one_by_one(server, tensors)
    print(f"{len(tensors)} tensors: {whole:.2f} s; one by one {single:.1f} s, {single / whole:.0f} times as long")
    assert single >= MIN_SPEEDUP * whole


def one_by_one(server: Server, tensors: dict[str, torch.Tensor]) -> float:
    """Seconds for one request and one broadcast for each tensor, as SGLang's plain route has it."""
    group = StockGroup("one-by-one", "gloo", "127.0.0.1", 2, 60.0)
    body = {"master_address": "127.0.0.1", "master_port": group.port, "rank_offset": 1, "world_size": 2}
    call(server, group.connect, "/init_weights_update_group", body | {"group_name": group.name, "backend": "gloo"})
    try:
        start = time.perf_counter()
        with httpx.Client(base_url=server.url, timeout=REQUEST_SECONDS, trust_env=False) as http:
            http.post("/begin_weight_update", json={}).raise_for_status()
            for name, tensor in tensors.items():
                dtype = str(tensor.dtype).removeprefix("torch.")
                body = {"names": [name], "dtypes": [dtype], "shapes": [list(tensor.shape)], "group_name": group.name}
                body["flush_cache"] = False
                flat = tensor.detach().contiguous()
                sending = threading.Thread(target=group.broadcast, args=(flat,))
                sending.start()
                http.post("/update_weights_from_distributed", json=body).raise_for_status()
                sending.join()
            http.post("/end_weight_update", json={}).raise_for_status()
        return time.perf_counter() - start
    finally:
        server.post("/destroy_weights_update_group", {"group_name": group.name})
        group.close()


def call(server: Server, beside: object, path: str, body: dict[str, object]) -> None:
    """A request that needs something done beside it."""
    assert callable(beside)
    thread = threading.Thread(target=beside)
    thread.start()
    server.post(path, body).raise_for_status()
    thread.join()
