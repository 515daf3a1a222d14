"""LoRA adapters of the tiny models: as sources, as directories of PEFT's form, and trainers that publish them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from real_vllm.models import model_of
from real_vllm.oracle import PROMPT, Answer
from real_vllm.servers import Server, Setup, completion
from weightcast import ModuleSource, Publisher, PublishError, PublishOptions, PublishReport, TensorSource
from weightcast.format.adapters import LoraConfig, tensor_name
from weightcast.integrations.stock_adapters import FOLDER, StockAdapters
from weightcast.trainer.options import Adapter, PublishEvent

NUM_TOKENS = 8
_load = StockAdapters.load
RANK, ALPHA = 8, 16
SUFFIXES = ("q_proj", "v_proj", "o_proj", "down_proj")


class AdapterOf:
    """An adapter of a family's tiny model, drawn from `seed`, as a source and as a directory of PEFT's form."""

    def __init__(self, family: str, seed: int, rank: int = RANK) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name.removesuffix(".weight"): tensor.shape
            for name, tensor in model_of(family).state_dict().items()
            if name.removesuffix(".weight").endswith(SUFFIXES)
        }
        self.config = LoraConfig(rank, ALPHA, tuple(weights))
        self.tensors = {}
        for module, (outputs, inputs) in weights.items():
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                self.tensors[tensor_name(module, half)] = 0.2 * torch.randn(shape, generator=generator)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        save_file(self.tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": self.config.r, "lora_alpha": ALPHA, "target_modules": list(SUFFIXES)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder


class Source(TensorSource):
    def __init__(self, tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
        super().__init__(tensors)
        self._config = config

    @property
    def lora_config(self) -> LoraConfig:
        return self._config

    def use(self, adapter: AdapterOf) -> None:
        self.replace(adapter.tensors)


@contextlib.contextmanager
def publishing(
    server: Server, adapter: AdapterOf, transport: str = "ipc://", **target: Any
) -> Iterator[tuple[Publisher, Source]]:
    source = Source(adapter.tensors, adapter.config)
    options = PublishOptions(target=Adapter(target.pop("name", "policy"), **target))
    with Publisher(source, transport=transport, engines=[server.url], options=options) as publisher:
        yield publisher, source


def refusal(server: Server, adapter: AdapterOf, transport: str = "ipc://", version: int = 0, **target: Any) -> str:
    """The message with which a publish of this adapter fails. `version`: 0 for the next one."""
    with publishing(server, adapter, transport, **target) as (publisher, _), pytest.raises(PublishError) as e:
        publisher.publish(version or None)
    return str(e.value)


def publish_model(server: Server, seed: int, transport: str = "ipc://", **options: Any) -> PublishReport:
    source = ModuleSource(model_of(server.setup.family, seed, server.setup.dtype))
    with Publisher(source, transport=transport, engines=[server.url], options=PublishOptions(**options)) as publisher:
        return publisher.publish()


def answer(server: Server, model: str, *, num_tokens: int = NUM_TOKENS) -> Answer:
    reply = server.post("/v1/completions", completion(PROMPT, num_tokens) | {"model": model})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def named(server: Server) -> set[str]:
    return {model["id"] for model in server.get("/v1/models")["data"]} - {"tiny", str(server.folder)}


def versions_of(server: Server) -> dict[str, int]:
    """By label, the number of each version of the adapter that requests can name."""
    return {label: int(label.partition("@")[2]) for label in named(server) if label.startswith("policy@")}


@pytest.fixture(scope="session")
def cold_answers(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By setup: what a server answers that was started with these adapters from directories on disk, by seed."""
    known: dict[Setup, list[Answer]] = {}

    def of(setup: Setup) -> list[Answer]:
        if setup not in known:
            folder = tmp_path_factory.mktemp("adapters")
            adapters = {f"cold-{seed}": AdapterOf(setup.family, seed).save(folder / str(seed)) for seed in range(3)}
            with Server(setup, checkpoint(setup.family, 0, setup.dtype), adapters=adapters) as server:
                known[setup] = [answer(server, name) for name in adapters]
        return known[setup]

    return of


def killed_at(url: str, phase: str, family: str) -> None:
    """A trainer that publishes one version and then is killed at a phase of the next."""
    first, second = AdapterOf(family, 0), AdapterOf(family, 1)
    source, published = Source(first.tensors, first.config), list[int]()

    def on_event(event: PublishEvent) -> None:
        if published and event.phase == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    options = PublishOptions(target=Adapter("policy"), on_event=on_event, lease_seconds=2.0)
    with Publisher(source, engines=[url], options=options) as publisher:
        published.append(publisher.publish().version)
        source.use(second)
        publisher.publish()


def publishing_until_killed(url: str, family: str, first: int, is_serving: Any, transport: str = "ipc://") -> None:
    """A trainer that publishes version after version, number `first` first; number n is the adapter of seed n % 3."""
    adapters = [AdapterOf(family, seed) for seed in range(3)]
    source = Source(adapters[0].tensors, adapters[0].config)
    options = PublishOptions(target=Adapter("policy"), takeover=True, lease_seconds=2.0)
    with Publisher(source, transport=transport, engines=[url], options=options) as publisher:
        for number in itertools.count(first):
            source.use(adapters[number % 3])
            publisher.publish(number)
            is_serving.set()


def assert_answers_are_whole(server: Any, expected: list[Answer], answer: Any, *, has_alias: bool = True) -> int:
    """Each version that the server names, and the alias, answers as a cold start with it; return the newest number.

    The install that a killed trainer began may end meanwhile, and an older version lose its name.
    """
    versions = versions_of(server)
    for label, number in versions.items():
        try:
            got = answer(server, label)
        except AssertionError:
            assert label not in versions_of(server)
        else:
            assert got == expected[number % 3], label
    got = answer(server, "policy") if has_alias else None
    newest = max(versions_of(server).values())
    assert not has_alias or got in [expected[number % 3] for number in range(max(versions.values()), newest + 1)]
    return newest


# --- stock servers ---


@pytest.fixture(scope="session")
def memory_store() -> Iterator[str]:
    """The URL of a store in memory for stock servers, which read their adapters from it: it outlives them."""
    directory = Path(tempfile.mkdtemp(prefix="weightcast-test-", dir="/dev/shm"))
    yield f"file://{directory}"
    shutil.rmtree(directory)


def directories(store: str, server: Server) -> set[str]:
    """The labels of the versions that are written out for this server in the store."""
    port = server.url.rpartition(":")[2]
    folder = Path(store.removeprefix("file://"), FOLDER)
    return {path.name.rpartition("-")[0] for path in folder.glob(f"*/*{port}/*")}


def load_from_nowhere(self: StockAdapters, version: int) -> None:
    """Load a version that the server can't see, as one on another host."""
    assert self._path is not None
    shutil.rmtree(self._path)
    _load(self, version)


def refusal_of_the_second(server: Any, family: str, stores: Path, answers: Callable[[str], Answer]) -> str:
    """The message to a run whose version `twice@1` another run has loaded first, which goes on answering."""
    sources = [Source(adapter.tensors, adapter.config) for adapter in (AdapterOf(family, 0), AdapterOf(family, 1))]
    before = list[Answer]()

    def overtake(event: PublishEvent) -> None:
        if event.phase == "received" and not before:
            first.publish(1)
            before.append(answers("twice@1"))

    options = PublishOptions(target=Adapter("twice"))
    late = PublishOptions(target=Adapter("twice"), on_event=overtake)
    with (
        Publisher(sources[0], transport=f"file://{stores}/first", engines=[server.url], options=options) as first,
        Publisher(sources[1], transport=f"file://{stores}/second", engines=[server.url], options=late) as second,
        pytest.raises(PublishError) as e,
    ):
        second.publish(1)
    assert [answers("twice@1")] == before
    assert not list((stores / "second" / FOLDER).glob("*/*/*"))
    return str(e.value)
