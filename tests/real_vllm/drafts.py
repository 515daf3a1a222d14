"""Models with draft models that now and then propose what the model takes: as checkpoints, as sources, and served.

The blocks of both add little to the embedding of the last token, so that a draft model of the same embedding and head
often proposes what the model would, and one of another seed hardly ever does.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from publishers import publisher_of
from safetensors.torch import load_file, save_file
from warm_python import WarmPython

from real_vllm.models import make_model, save
from real_vllm.oracle import Answer
from real_vllm.trainer import checkpoint_tensors
from weightcast import HttpEngine, ModuleSource, Publisher, PublishError, TensorSource
from weightcast.errors import IncompatibleWeightsError, WeightcastError
from weightcast.format.tensor_digest import tensor_digest
from weightcast.sources.joined import JoinedSource

MTP_LAYER = "model.layers.3."
_EAGLE = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
NUM_TOKENS = 60
Tensors = dict[str, torch.Tensor]


def make_main(family: str, seed: int) -> Any:
    model = make_model(family, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= 0.015
    return model


def draft_tensors(method: str, main: Any) -> Tensors:
    """The tensors of a draft model of that method for a model, as in the checkpoint that has them."""
    tensors, norm = checkpoint_tensors(main), main.model.norm.weight.data
    eye, zeros = torch.eye(len(norm)), torch.zeros(len(norm), len(norm))
    if method == "draft_model":
        return {name: t.clone() for name, t in tensors.items() if ".layers." not in name or ".layers.0." in name}
    if method == "eagle":
        block = {n.removeprefix("model."): t.clone() for n, t in tensors.items() if n.startswith("model.layers.0.")}
        for name in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm"):  # Llama's EAGLE has none
            del block[f"layers.0.{name}.weight"]
        return block | {"fc.weight": torch.cat([torch.diag(norm), zeros], dim=1)}
    block = {n: t.clone() for n, t in tensors.items() if n.startswith("model.layers.2.")}
    return {n.replace("model.layers.2.", MTP_LAYER): t for n, t in block.items()} | {
        f"{MTP_LAYER}enorm.weight": torch.ones_like(norm),
        f"{MTP_LAYER}hnorm.weight": torch.ones_like(norm),
        f"{MTP_LAYER}eh_proj.weight": torch.cat([eye, zeros], dim=1),
        f"{MTP_LAYER}shared_head.norm.weight": norm.clone(),
        # The checkpoints of DeepSeek and GLM have copies of these, which vLLM replaces by the model's.
        f"{MTP_LAYER}embed_tokens.weight": zeros.new_zeros(main.config.vocab_size, len(norm)),
    }


class Pair:
    """A model of `family` and its draft model, both of a seed: their checkpoints, and what a trainer publishes."""

    def __init__(self, family: str, method: str, engine: str = "vllm") -> None:
        self.family = family
        self.method = method
        self.engine = engine
        self.prefix = "" if method == "mtp" else "draft."
        self._main = make_main(family, 0)
        self.draft = TensorSource(self.draft_of(0))
        self.main = ModuleSource(self._main)
        self.source = JoinedSource(self.main, self.draft)

    def draft_of(self, seed: int) -> Tensors:
        """The draft model's tensors under their published names."""
        tensors = self._draft_tensors(make_main(self.family, seed))
        if self.method == "mtp":  # trainers do not have these
            del tensors[f"{MTP_LAYER}embed_tokens.weight"]
        return {f"{self.prefix}{name}": tensor for name, tensor in tensors.items()}

    def _draft_tensors(self, main: Any) -> Tensors:
        tensors = draft_tensors(self.method, main)
        if self.method == "eagle" and self.engine == "sglang":
            tensors["fc.bias"] = 0.01 * main.model.norm.weight.data
        return tensors

    def step_to(self, seed: int) -> None:
        self._main.load_state_dict(make_main(self.family, seed).state_dict())
        self.draft.replace(self.draft_of(seed))

    def save(self, seed: int, folder: Path) -> tuple[Path, Path | None]:
        """Write the checkpoints of the model and of its draft model, if that has its own."""
        main = make_main(self.family, seed)
        own, draft = self._draft_tensors(main), folder / "draft"
        save(main, folder)
        config = json.loads((folder / "config.json").read_text())
        if self.method == "mtp":
            _write(folder, load_file(folder / "model.safetensors") | own, config | {"num_nextn_predict_layers": 1})
            return folder, None
        draft.mkdir()
        config["num_hidden_layers"] = 1
        del config["layer_types"]
        if self.method == "eagle":
            config |= {"model_type": "llama", "architectures": [_EAGLE[self.engine]]}
        _write(draft, own, config)
        return folder, draft


class Speculated(NamedTuple):
    """A greedy answer, and how many tokens were proposed and taken for it."""

    answer: Answer
    num_proposed: float
    num_taken: float


class Served:
    """A server that was started from seed 0, and what servers answer that were started from each seed.

    `speculated(server)` asks one.
    """

    def __init__(
        self, server: Any, pair: Pair, cold: list[Speculated], speculated: Callable[[Any], Speculated]
    ) -> None:
        self.server = server
        self.pair = pair
        self.cold = cold
        self._speculated = speculated

    @contextlib.contextmanager
    def publisher(self, source: object = None, **options: object) -> Iterator[Publisher]:
        made = publisher_of(source or self.pair.source, engines=[self.server.url], bucket_size_bytes=1 << 18, **options)
        with made as publisher:
            yield publisher

    def publish(self, publisher: Publisher, seed: int) -> int:
        self.pair.step_to(seed)
        return publisher.publish().version

    def failure(self, publisher: Publisher, seed: int) -> WeightcastError:
        with pytest.raises(PublishError) as caught:
            self.publish(publisher, seed)
        (cause,) = caught.value.failures.values()
        return cause

    def assert_serves(self, seed: int, version: int) -> None:
        assert self.server.version() == str(version)
        assert not self.server.is_paused()
        assert self._speculated(self.server) == self.cold[seed]

    def assert_is_of_a_cold_start(self) -> None:
        """What is published is served by both models, and proven in them."""
        assert all(cold.num_taken > 5 for cold in self.cold)
        assert self.cold[0] != self.cold[1]
        with self.publisher(verify="installed") as publisher:
            for seed in (1, 0, 1):
                self.assert_serves(seed, self.publish(publisher, seed))
        with contextlib.closing(HttpEngine(self.server.url)) as engine:
            held = engine.held()
        assert held is not None
        norms = {name: tensor for name, tensor in self.pair.draft_of(1).items() if name.endswith("norm.weight")}
        assert {name: held.digests[name] for name in norms} == {name: tensor_digest(t) for name, t in norms.items()}

    def assert_unfit_tensors_are_refused(self) -> None:
        with self.publisher() as publisher:
            version = self.publish(publisher, 0)
        tensors = self.pair.draft_of(1)
        small, gone = list(tensors)[:2]
        tensors[small] = tensors[small][:16]
        del tensors[gone]
        unknown = f"{self.pair.prefix}model.layers.7.nonsense.weight"
        tensors[unknown] = torch.zeros(4)
        main = {name: held[0][1] for name, held in self.pair.main.regions().items()}
        with self.publisher(TensorSource(main | tensors), takeover=True) as publisher:
            error = self.failure(publisher, 0)
        assert isinstance(error, IncompatibleWeightsError), error
        for name in (small, gone, unknown):
            assert any(name in problem for problem in error.problems), (name, error.problems)
        self.assert_serves(0, version)

    def assert_a_trainer_that_dies_halfway_leaves_both(self, python: WarmPython) -> None:
        with self.publisher() as publisher:
            version = self.publish(publisher, 0)
        pair = self.pair
        assert python.run(_DIES_HALFWAY, self.server.url, pair.family, pair.method, pair.engine) == -signal.SIGKILL
        self.assert_serves(0, version)
        with self.publisher(takeover=True) as publisher:
            self.assert_serves(1, self.publish(publisher, 1))

    def assert_keeps_the_draft_model(self) -> None:
        """The main model alone is updated."""
        with self.publisher(self.pair.main, verify="installed") as publisher:
            for seed in (1, 0):
                self.assert_serves(seed, self.publish(publisher, seed))
        assert self.cold[1].num_taken < self.cold[0].num_taken
        with self.publisher(takeover=True) as publisher:
            error = self.failure(publisher, 1)
        assert isinstance(error, IncompatibleWeightsError), error
        assert all("draft." in problem for problem in error.problems)


_DIES_HALFWAY = """
import os, signal, sys
from real_vllm.drafts import Pair
from weightcast import Publisher, PublishOptions
def on_progress(done, total):
    if 2 * done >= total:
        os.kill(os.getpid(), signal.SIGKILL)
url, *which = sys.argv[1:]
pair, options = Pair(*which), PublishOptions(bucket_size_bytes=1 << 18)
pair.step_to(1)
Publisher(pair.source, engines=[url], options=options).publish(on_progress=on_progress)
"""


def _write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
