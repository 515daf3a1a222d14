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
from real_vllm.trainer import checkpoint_tensors, faulty_ipc
from weightcast import HttpEngine, ModuleSource, Publisher, PublishError, TensorSource
from weightcast.errors import IncompatibleWeightsError, IntegrityError, NotFiniteError, RefusedError, WeightcastError
from weightcast.format.bucket import HEADER_BYTES
from weightcast.format.tensor_digest import tensor_digest
from weightcast.sources.joined import JoinedSource
from weightcast.testing.faults import Corrupt

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
        self.source = self.joined()

    def joined(self, is_draft_first: bool = False) -> JoinedSource:
        return JoinedSource(*((self.draft, self.main) if is_draft_first else (self.main, self.draft)))

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

    def unfit_updates(self) -> dict[str, Tensors]:
        """By what is said of it, an update of seed 1 that the engine must refuse. The main model is of that seed."""
        main = {name: held[0][1] for name, held in self.main.regions().items()}
        draft, other = self.draft_of(1), "eagle" if self.method == "draft_model" else "draft_model"
        q, down, norm = (
            next(name for name in draft if name.endswith(f"{leaf}.weight"))
            for leaf in ("q_proj", "down_proj", "post_attention_layernorm")
        )
        foreign = {f"draft.{name}": t for name, t in draft_tensors(other, make_main(self.family, 1)).items()}
        layer = "layers.3." if self.method == "mtp" else "layers.0."
        # Of its own memory, else it would be the other one by a second name.
        deeper = {name.replace(layer, "layers.9."): t.clone() for name, t in draft.items() if layer in name}
        prefix = "draft." if self.method == "mtp" else "drafts."
        renamed = {prefix + name.removeprefix(self.prefix): tensor for name, tensor in draft.items()}
        drafts = {
            f"'{q}' has the shape [16, 128], the engine has [256, 128]": draft | {q: draft[q][:16]},
            f"'{q}' has the shape [512, 128], the engine has [256, 128]": draft | {q: torch.cat([draft[q]] * 2)},
            f"'{q}' has the shape [128, 256], the engine has [256, 128]": draft | {q: draft[q].T.contiguous()},
            f"'{norm}' has the shape [1, 128], the engine has [128]": draft | {norm: draft[norm][None]},
            f"'{q}' is int8, the engine has float32": draft | {q: draft[q].to(torch.int8)},
            f"'{q}' is bfloat16, the engine has float32": draft | {q: draft[q].bfloat16()},
            f"missing tensor '{q}' float32[256, 128]": {n: t for n, t in draft.items() if n != q},
            f"missing tensor '{down}'": {n: t for n, t in draft.items() if ".mlp." not in n},
            f"missing tensor '{norm}'": {},
            f"unknown tensor '{self.prefix}model.nonsense.weight'": draft
            | {f"{self.prefix}model.nonsense.weight": torch.zeros(4)},
            f"unknown tensor '{q.replace(layer, 'layers.9.')}'": draft | deeper,
            f"unknown tensor '{prefix}": renamed,
            f"unknown tensor 'draft.{'fc' if other == 'eagle' else 'model.norm'}.weight'": foreign,
        }
        updates = {said: main | tensors for said, tensors in drafts.items()}
        return updates | {"missing tensor 'model.norm.weight'": draft}

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


FAILURES = [
    pytest.param(of_draft, is_draft_first, id=name, marks=marks)
    for name, of_draft, is_draft_first, marks in (
        ("draft-after-main", True, False, ()),
        ("main-after-draft", False, True, ()),
        ("draft-before-main", True, True, pytest.mark.full),
        ("main-before-draft", False, False, pytest.mark.full),
    )
]
"""Which model fails in an install, and whether the draft model is installed first."""


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
        self.pair.step_to(seed)
        return self._failure(publisher)

    def _failure(self, publisher: Publisher) -> WeightcastError:
        """The error of a publish of what the publisher's source has."""
        with pytest.raises(PublishError) as caught:
            publisher.publish()
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

    def assert_unfit_updates_are_refused(self) -> None:
        """Each by name. After all of them both models are still those of the cold start, and a good one is taken."""
        with self.publisher() as publisher:
            version = self.publish(publisher, 0)
        self.pair.step_to(1)
        for said, tensors in self.pair.unfit_updates().items():
            print(said)
            with self.publisher(TensorSource(tensors), takeover=True) as publisher:
                error = self._failure(publisher)
            assert isinstance(error, IncompatibleWeightsError), error
            assert any(said in problem for problem in error.problems), (said, error.problems)
            lacks_draft = self.pair.prefix and not any(name.startswith(self.pair.prefix) for name in tensors)
            assert ("publish the draft model too" in str(error)) is bool(lacks_draft), error
            assert self.server.version() == str(version)
        self.assert_serves(0, version)
        with self.publisher() as publisher:
            self.assert_serves(1, self.publish(publisher, 1))

    def assert_a_changed_bit_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the last bucket, which is the draft model's: of a full update, and of a delta."""
        faulty = faulty_ipc(monkeypatch)
        for delta in (None, "always"):
            with self.publisher(delta=delta) as publisher:
                self.publish(publisher, 0)
                report = publisher.publish()
                last = report.num_buckets - 1
                faulty.senders[-1].fault = Corrupt(last, HEADER_BYTES + 100)
                error = self.failure(publisher, 1)
                assert isinstance(error, IntegrityError), error
                assert f"bucket {last}" in str(error)
                self.assert_serves(0, report.version)
                version = self.publish(publisher, 1)
        self.assert_serves(1, version)

    def assert_only_a_newer_version_of_its_own_publisher_is_taken(self) -> None:
        with self.publisher() as publisher, self.publisher() as second:
            version = self.publish(publisher, 0)
            self.pair.step_to(1)
            for stale in (version, version - 1):
                with pytest.raises(ValueError, match=f"version {stale} is not above {version}"):
                    publisher.publish(stale)
            error = self._failure(second)
            assert isinstance(error, RefusedError), error
            assert "has held this engine since" in str(error)
            self.assert_serves(0, version)
            self.assert_serves(1, self.publish(publisher, 1))

    def assert_a_nan_is_refused(self) -> None:
        """If the publisher was told to look for them."""
        with self.publisher(check_finite=True) as publisher:
            version = self.publish(publisher, 0)
            self.pair.step_to(1)
            tensors = self.pair.draft_of(1)
            name = next(name for name in tensors if name.endswith("down_proj.weight"))
            tensors[name][1, 2] = torch.nan
            self.pair.draft.replace(tensors)
            with pytest.raises(NotFiniteError, match=name):
                publisher.publish()
            self.assert_serves(0, version)
            self.assert_serves(1, self.publish(publisher, 1))

    def assert_a_trainer_that_dies_leaves_both(self, moment: str, python: WarmPython) -> None:
        with self.publisher() as publisher:
            version = self.publish(publisher, 0)
        pair = self.pair
        assert python.run(_DIES, self.server.url, moment, pair.family, pair.method, pair.engine) == -signal.SIGKILL
        self.assert_serves(0, version)
        with self.publisher(takeover=True) as publisher:
            self.assert_serves(1, self.publish(publisher, 1))

    def assert_keeps_the_draft_model(self) -> None:
        """The main model alone is updated."""
        with self.publisher(self.pair.main, verify="installed") as publisher:
            for seed in (1, 0):
                version = self.publish(publisher, seed)
                self.assert_serves(seed, version)
        assert self.cold[1].num_taken < self.cold[0].num_taken
        assert_a_draft_model_is_refused(self.server)
        self.assert_serves(0, version)


def assert_a_draft_model_is_refused(server: Any) -> None:
    """The server has none, or keeps the one of its start."""
    pair = Pair(server.setup.family, "draft_model")
    pair.step_to(1)
    with publisher_of(pair.source, engines=[server.url]) as publisher, pytest.raises(PublishError) as caught:
        publisher.publish()
    (error,) = caught.value.failures.values()
    assert isinstance(error, IncompatibleWeightsError), error
    assert len(error.problems) == len(pair.draft.specs())
    assert all(problem.startswith("unknown tensor 'draft.") for problem in error.problems)
    assert "this engine updates no draft model with a checkpoint of its own: leave out the tensors" in str(error)


MOMENTS = ("main", "draft", "received")
"""When a trainer dies: half-way through the main model's tensors or the draft model's, or once all are received."""
_DIES = """
import os, signal, sys
from real_vllm.drafts import Pair
from weightcast import Publisher, PublishOptions
def on_progress(done, total):
    sent = total - num_draft_bytes // 2 if moment == "draft" else total // 2
    if moment != "received" and done >= sent:
        os.kill(os.getpid(), signal.SIGKILL)
def on_event(event):
    if event.phase == moment:
        os.kill(os.getpid(), signal.SIGKILL)
url, moment, *which = sys.argv[1:]
pair, options = Pair(*which), PublishOptions(bucket_size_bytes=1 << 18, on_event=on_event)
num_draft_bytes = sum(tensor.nbytes for tensor in pair.draft_of(1).values())
pair.step_to(1)
Publisher(pair.source, engines=[url], options=options).publish(on_progress=on_progress)
"""


def _write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
