"""LoRA adapters of the tiny models: as sources, as directories of PEFT's form, and trainers that publish them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import torch
from real_engines.process import footprint
from safetensors.torch import save_file
from warm_python import WarmPython

from real_vllm.models import model_of
from real_vllm.oracle import PROMPT, Answer
from real_vllm.servers import Server, Setup, completion
from weightcast import ModuleSource, Publisher, PublishError, PublishOptions, PublishReport, TensorSource
from weightcast.format.adapters import AdapterTarget, LoraConfig, tensor_name
from weightcast.integrations.stock_adapters import FOLDER, StockAdapters
from weightcast.trainer.options import Adapter, PublishEvent

NUM_TOKENS = 8
_load = StockAdapters.load
RANK, ALPHA = 8, 16
Q = tensor_name("model.layers.0.self_attn.q_proj", "A")
DOWN = tensor_name("model.layers.1.mlp.down_proj", "B")
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


def refusal(
    server: Server, adapter: AdapterOf, transport: str = "ipc://", version: int | None = None, **target: Any
) -> str:
    """The message with which a publish of this adapter fails."""
    with publishing(server, adapter, transport, **target) as (publisher, _), pytest.raises(PublishError) as e:
        publisher.publish(version)
    return str(e.value)


def assert_costs_the_adapter_alone(report: PublishReport, source: Source) -> None:
    """At most 1.5 times its bytes are sent."""
    num_bytes = sum(regions[0][1].nbytes for regions in source.regions().values())
    assert num_bytes <= report.num_bytes <= 1.5 * num_bytes


def assert_broken_updates_are_refused(
    server: Any,
    answer: Any,
    transport: str = "ipc://",
    *,
    name: str = "policy",
    more: Mapping[str, tuple[Mapping[str, torch.Tensor], LoraConfig]] = MappingProxyType({}),
) -> None:
    """Each of twelve is refused by name, and the version `name` answers as before. `more`: by what is said, others."""
    adapter, large = (AdapterOf(server.setup.family, 0, rank) for rank in (RANK, 32))
    tensors, config = adapter.tensors, adapter.config
    renamed = {name.replace("layers.0", "layers.7"): tensor for name, tensor in tensors.items()}
    modules = tuple(module.replace("layers.0", "layers.7") for module in config.target_modules)
    cases = {
        f"'{Q}' has the shape [8, 127]": (tensors | {Q: torch.zeros(8, 127)}, config),
        "has rank 32, above 16: start the engine with": (large.tensors, large.config),
        f"missing tensor '{Q}'": ({name: tensor for name, tensor in tensors.items() if name != Q}, config),
        "with rank 4 it is [4, 128]": (tensors, msgspec.structs.replace(config, r=4)),
        "unknown module 'model.layers.7.": (renamed, msgspec.structs.replace(config, target_modules=modules)),
        f"'{Q}' is int8": (tensors | {Q: tensors[Q].to(torch.int8)}, config),
        f"'{Q}' is float16 and its lora_B float32": (tensors | {Q: tensors[Q].half()}, config),
        f"'{Q}' has the shape [128, 8]": (tensors | {Q: tensors[Q].T.contiguous()}, config),
        f"missing tensor '{DOWN}'": ({name: t for name, t in tensors.items() if "layers.1." not in name}, config),
        f"unknown tensor '{Q}'": (tensors, msgspec.structs.replace(config, target_modules=config.target_modules[1:])),
        "unknown tensor 'lm_head.weight'": (tensors | {"lm_head.weight": torch.zeros(2, 2)}, config),
        "the rank or alpha of 'lm_head' is given": (
            tensors,
            msgspec.structs.replace(config, alpha_pattern={"lm_head": 3.0}),
        ),
        **more,
    }
    before = answer(server, name), named(server)
    for said, (adapter.tensors, adapter.config) in cases.items():
        assert said in refusal(server, adapter, transport)
        assert (answer(server, name), named(server)) == before


def with_head(adapter: AdapterOf) -> tuple[Mapping[str, torch.Tensor], LoraConfig]:
    """The adapter with one of the head beside the others."""
    head = {tensor_name("lm_head", half): torch.zeros(shape) for half, shape in (("A", (8, 128)), ("B", (512, 8)))}
    modules = (*adapter.config.target_modules, "lm_head")
    return adapter.tensors | head, msgspec.structs.replace(adapter.config, target_modules=modules)


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


_KILLED = """
import sys
from real_vllm.adapters import killed_at
killed_at(*sys.argv[1:])
"""
_STREAMS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from real_vllm.adapters import publishing_until_killed
url, family, first, file, transport = sys.argv[1:]
publishing_until_killed(url, family, int(first), SimpleNamespace(set=Path(file).touch), transport)
"""
"""A trainer of many versions, which makes a file when the first one is served."""


def assert_a_killed_trainer_leaves_a_whole_version(
    server: Any, phase: str, expected: list[Answer], answer: Any, python: WarmPython
) -> None:
    """And the next trainer takes over."""
    family = server.setup.family
    assert python.run(_KILLED, server.url, phase, family) == -signal.SIGKILL
    assert answer(server, "policy") == expected[1 if phase == "installed" else 0]
    assert not server.is_paused()
    source = Source(AdapterOf(family, 2).tensors, AdapterOf(family, 2).config)
    options = PublishOptions(target=Adapter("policy"), takeover=True)
    with Publisher(source, engines=[server.url], options=options) as publisher:
        publisher.publish()
    assert answer(server, "policy") == expected[2]


def killed_trainers(
    server: Any,
    seed: int,
    expected: list[Answer],
    answer: Any,
    python: WarmPython,
    folder: Path,
    transport: str = "ipc://",
) -> Iterator[int]:
    """Kill four trainers, each at a random moment in its stream of versions; yield the newest version after each.

    All versions answer as cold starts with them. `folder`: an empty one.
    """
    generator, family = random.Random(seed), server.setup.family
    next_number, memory = 1 + max([1000, *versions_of(server).values()]), list[int]()
    for number in range(4):
        file = folder / str(number)
        trainer = python.start(_STREAMS, server.url, family, str(next_number), str(file), transport)
        while not file.exists():
            assert trainer.poll() is None, "the trainer has ended by itself"
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.3))
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait(60)
        newest = assert_answers_are_whole(server, expected, answer, has_alias=transport == "ipc://")
        assert newest >= next_number
        assert not server.is_paused()
        yield newest
        next_number = newest + 10
        memory.append(footprint(server).rss_bytes)
    print(f"version {newest}; the server's memory after each kill: {[size >> 20 for size in memory]} MiB")


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


def load_from_nowhere(self: StockAdapters, target: AdapterTarget, version: int, path: Path) -> None:
    """Load a version that the server can't see, as one on another host."""
    shutil.rmtree(path)
    _load(self, target, version, path)


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
