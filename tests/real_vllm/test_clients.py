"""How a publisher finds out what a vLLM server is, and the colocated cycle."""

from __future__ import annotations

import contextlib

from real_engines.setups import on

from real_vllm.cold import Cold
from real_vllm.conftest import Checkpoints
from real_vllm.offline_llm import as_argument
from real_vllm.programs import run
from real_vllm.servers import ONE, TESTS, TWO, Server, child_environment
from weightcast import HttpEngine


@on(ONE, TWO)
def test_what_a_server_is_is_asked_and_what_it_can_do(server: Server) -> None:
    with contextlib.closing(HttpEngine(server.url)) as engine:
        client = engine.connect()
        info = client.info()
        assert client is engine
        assert {"install", "undo", "streaming"} <= set(info.abilities)
        assert info.world_size == server.setup.tp
        assert not info.torn


def test_an_engine_that_sleeps_is_updated_between_two_wakes(checkpoint: Checkpoints, cold: Cold) -> None:
    program, arguments = TESTS / "real_vllm" / "colocated_llm.py", (str(checkpoint()), as_argument(cold.of_seeds(ONE)))
    run(program, *arguments, environment=child_environment(ONE))


def test_an_async_llm_that_is_torn_refuses_requests_until_it_is_healed(checkpoint: Checkpoints, cold: Cold) -> None:
    program, arguments = TESTS / "real_vllm" / "async_llm.py", (str(checkpoint()), as_argument(cold.of_seeds(ONE)))
    run(program, *arguments, environment=child_environment(ONE))
