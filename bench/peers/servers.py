"""A real engine's server as the engine's end: vLLM or SGLang on CPUs, started as the tests start it.

Its model is a Qwen3 of real widths with a small vocabulary and an output layer of its own: on a CPU, vLLM's own reload
leaves one that is tied to the embeddings stale.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from publishing.meters import ProcessMeter
from real_engines.process import ServerProcess
from real_sglang import servers as sglang
from real_vllm import servers as vllm
from real_vllm.models import save

from peers.ways import Way
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec

SHAPES = "qwen3-0.6b's layers"
PROMPT, NUM_TOKENS = tuple(range(10, 210)), 8


def make_checkpoints(folders: Sequence[Path], num_layers: int) -> Sequence[TensorSpec]:
    """Write a model that a server can start from, then the same negated; return what its tensors are."""
    import transformers

    widths = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "vocab_size": 32768}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": num_layers}
    own = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.Qwen3Config(**widths, **heads, **own, max_position_embeddings=512)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for folder in folders:
        save(model, folder)
        torch._foreach_neg_(list(model.state_dict().values()))
    return [TensorSpec(name, DTYPE_NAMES[it.dtype], tuple(it.shape)) for name, it in model.state_dict().items()]


class Served:
    """The engine's end of a way, driven as a `measure.Process` is. The server works by itself: `tell` asks nothing."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self._meters = [ProcessMeter(pid) for pid in server.pids()]
        self._word: str | int = ""

    def begin(self) -> None:
        for meter in self._meters:
            meter.begin()

    def extra_bytes(self) -> int:
        return sum(meter.extra_bytes() for meter in self._meters)

    def cpu_seconds(self) -> float:
        return sum(meter.cpu_seconds() for meter in self._meters)

    def tell(self, word: str | int) -> None:
        self._word = word

    def answer(self) -> Any:
        """To "digest": the server's own checksums of its weights, and what it answers to a prompt. Else: it is done.

        vLLM has no checksums of the weights that it has packed for a CPU; the log-probabilities depend on each of them.
        """
        if self._word != "digest":
            return "done", 0.0
        return self.server.checksums(), self.server.ask(PROMPT, NUM_TOKENS)


@contextlib.contextmanager
def served(way: Way, checkpoint: Path) -> Iterator[Served]:
    """A server of the way's kind that starts from the checkpoint: with weightcast's plugin for ours, stock for a peer.

    The workers of a vLLM for a peer import the stand-ins for CUDA that vLLM's own transfer needs on a CPU.
    """
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    server: ServerProcess
    if way.boundary == "vllm":
        backend = "weightcast" if way.is_ours else "nccl"
        setup = vllm.Setup(dtype=torch.bfloat16, endpoints=way.is_ours, backend=backend)
        extension = "real_vllm.extension.Extension" if way.is_ours else "peers.adapters.vllm_on_cpus.Extension"
        server = vllm.Server(setup, checkpoint, extension=extension)
    else:
        # Else each server that waits for its turn would keep a CPU busy.
        options = ("--sleep-on-idle",)
        server = sglang.Server(sglang.Setup(dtype=torch.bfloat16, plugin=way.is_ours, options=options), checkpoint)
    with server:
        yield Served(server)
