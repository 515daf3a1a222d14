"""Fixtures around the tiny model: a gate, a generator, an engine, a server that is closed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
import torch
from server.tiny_qwen3 import make_model, make_tokenizer, version
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from weightcast.control.server.app import EngineServer
from weightcast.engines.gate import Gate
from weightcast.engines.module import ModuleEngine
from weightcast.engines.transformers import TextGenerator


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """A model this small gains nothing from more, and on a busy machine their barriers cost far more than its work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def generator(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, gate: Gate) -> Iterator[TextGenerator]:
    with TextGenerator(model, tokenizer, gate=gate) as made:
        yield made


@pytest.fixture
def install(model: Qwen3ForCausalLM, gate: Gate) -> Callable[[Qwen3ForCausalLM, int], None]:
    """Put another model's weights in place, as a worker does."""

    def put(other: Qwen3ForCausalLM, number: int) -> None:
        with gate.exclusive(), torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
            gate.set_version(version(number))

    return put


@pytest.fixture
def server(
    leaves_nothing: None, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, gate: Gate
) -> Iterator[EngineServer]:
    generator = TextGenerator(model, tokenizer, gate=gate, max_queue=64)
    with EngineServer(ModuleEngine(model), generator=generator, model_name="tiny") as served:
        yield served


@pytest.fixture
def http(server: EngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client
