"""A real `vllm serve` on a free loopback port: started with a deadline, asked over HTTP, ended with its processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import torch
from real_engines.process import REQUEST_SECONDS, ServerProcess, python_of

from real_vllm import balanced_on_cpus
from real_vllm.oracle import Answer, Ask

if TYPE_CHECKING:
    from real_vllm.cold import Cold

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread for each rank, anywhere: `auto` wants a NUMA node for each.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # A connection may wait while another one's request does.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Importing TRL sets it to ERROR in its own process, which may be that of the tests.
    "VLLM_LOGGING_LEVEL": "INFO",
    "DO_NOT_TRACK": "1",
}
"""What a vLLM on a CPU needs, whether it serves or runs offline."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a server is started. `endpoints`: with weightcast's own routes, which vLLM loads only when they are named.

    `backend`: the weight transfer backend; None: a server that was started without one. `speculation`: vLLM's method of
    proposing tokens, "": it proposes none; `keeps_draft`: only its main model is updated. `max_adapters`: how many LoRA
    adapters it keeps, of which four fit in one batch; 0: it was started without LoRA. `ep`: its ranks share out the
    experts, of which `redundant` have two places, and vLLM balances their load. `quantization`: vLLM's name of how it
    quantises while it loads. `max_behind`: what its health depends on.
    """

    family: str = "qwen3"
    dtype: torch.dtype = torch.float32
    tp: int = 1
    dp: int = 1
    endpoints: bool = True
    backend: str | None = "weightcast"
    token: str = ""
    speculation: str = ""
    max_adapters: int = 0
    pp: int = 1
    ep: bool = False
    quantization: str = ""
    keeps_draft: bool = False
    max_behind: str = ""
    redundant: int = 0

    def __str__(self) -> str:
        words = [self.family, str(self.dtype).removeprefix("torch."), f"tp{self.tp}", f"dp{self.dp}"]
        words += ["endpoints" if self.endpoints else "stock-routes"] if self.backend else ["no-backend"]
        words += [self.speculation + "-kept" * self.keeps_draft] if self.speculation else []
        words += [f"lora{self.max_adapters}"] if self.max_adapters else []
        words += [f"pp{self.pp}"] if self.pp > 1 else []
        words += ["ep"] if self.ep else []
        words += [f"redundant{self.redundant}"] if self.redundant else []
        words += [self.quantization] if self.quantization else []
        words += [f"behind{self.max_behind}"] if self.max_behind else []
        return "-".join(words)


def child_environment(setup: Setup) -> dict[str, str]:
    """This process's environment with what the server needs; its workers can import the tests."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    environment.pop("VLLM_PLUGINS", None)
    environment.pop("WEIGHTCAST_TOKEN", None)
    environment.pop("WEIGHTCAST_HEALTH_MAX_BEHIND", None)
    if setup.endpoints:
        environment["VLLM_PLUGINS"] = "weightcast"
    if setup.max_adapters and setup.backend is None:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if setup.max_behind:
        environment["WEIGHTCAST_HEALTH_MAX_BEHIND"] = setup.max_behind
    if setup.token:
        environment["WEIGHTCAST_TOKEN"] = setup.token
    return environment


ONE = Setup()
STOCK = Setup(endpoints=False)
TWO = Setup("llama-tied", tp=2)
REPLICAS = Setup(dp=2)
MOE_REPLICAS = Setup("qwen3-moe", dp=2)
PIPELINE = Setup("llama-tied", pp=2)
EXPERTS = Setup("qwen3-moe", tp=2, ep=True)
BALANCED = Setup("qwen3-moe", tp=2, ep=True, redundant=2)
BALANCED_REPLICAS = Setup("qwen3-moe", dp=2, ep=True, redundant=2)
EXPERT_REPLICAS = Setup("qwen3-moe", dp=2, ep=True)
PLAIN = Setup(backend=None, endpoints=False)
"""Setups that many tests share; `PLAIN` knows nothing of weightcast. Data-parallel engines of a dense model don't know
of each other, those of a mixture of experts run in step."""


STARTED_BY_COMMAND = frozenset({ONE})
"""Those that most tests run on are started as a user starts one; the others are forked, in a seventh of the time."""


class Span(NamedTuple):
    """Tokens `start` to `end` of an answer came from this version."""

    version: str
    start: int
    end: int


class Part(NamedTuple):
    """A message of a stream. `spans`: of the whole answer, in its last message."""

    answer: Answer
    spans: list[Span]


class Server(ServerProcess):
    """A server of `setup` that started from the checkpoint in `folder`. Start it by entering it.

    `extension`: a class mixed into vLLM's workers, for what only a test does to them. `cold`: what its answers are
    held against. `is_forked`: see `ServerProcess`. `adapters`: that it starts with, by name, each from a directory.
    `draft`: the checkpoint of its draft model, if that is not the model's own.
    """

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        *,
        port: int = 0,
        extension: str = "real_vllm.extension.Extension",
        cold: Cold | None = None,
        is_forked: bool = True,
        adapters: Mapping[str, Path] | None = None,
        draft: Path | None = None,
    ):
        super().__init__("vllm", port=port, is_forked=is_forked)
        self._draft = draft
        self._adapters = adapters or {}
        self.setup = setup
        self.cold = cold
        self.folder = folder
        self._extension = extension

    def _command(self) -> list[str]:
        setup = self.setup
        command = [python_of("vllm"), "-m", "vllm.entrypoints.cli.main", "serve", str(self.folder)]
        command += ["--served-model-name", "tiny", str(self.folder), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", str(setup.dtype).removeprefix("torch."), "--enforce-eager"]
        command += ["--enable-scale-out"]  # the one HTTP route that says which tokens came from which version
        command += ["--max-model-len", "512", "--max-num-seqs", "16", "--worker-extension-cls", self._extension]
        # Enough for so many of that length; else each rank would fill a gigabyte.
        command += ["--num-gpu-blocks-override", "64"]
        command += ["--tensor-parallel-size", str(setup.tp), "--data-parallel-size", str(setup.dp)]
        if setup.pp > 1:
            # On a CPU vLLM makes room for what a rank gets from the one before it only while it warms up for a graph.
            command += ["--pipeline-parallel-size", str(setup.pp), "--no-enforce-eager"]
            command += ["--compilation-config", json.dumps({"mode": 2, "backend": "eager"})]
        if setup.ep:
            command += ["--enable-expert-parallel"]
        if setup.quantization:
            command += ["--quantization", setup.quantization]
        if setup.speculation:
            # Of the request alone, so that a server that has answered others proposes the same.
            alone = {"ngram": {"prompt_lookup_min": 1}, "suffix": {"suffix_decoding_max_cached_requests": 0}}
            num_tokens = 1 if setup.speculation == "mtp" else 3
            speculation = {"method": setup.speculation, "num_speculative_tokens": num_tokens}
            speculation |= alone.get(setup.speculation, {})
            speculation |= {} if self._draft is None else {"model": str(self._draft)}
            command += ["--speculative-config", json.dumps(speculation)]
        if setup.redundant:
            command += ["--additional-config", json.dumps({balanced_on_cpus.OPTION: setup.redundant})]
        if setup.keeps_draft:
            command += ["--additional-config", json.dumps({"weightcast": {"draft": "keep"}})]
        if setup.max_adapters:
            command += ["--enable-lora", "--max-loras", "4", "--max-cpu-loras", str(setup.max_adapters)]
            command += ["--max-lora-rank", "16"]
        if self._adapters:
            command += ["--lora-modules", *(f"{name}={folder}" for name, folder in self._adapters.items())]
        if setup.backend is not None:
            command += ["--weight-transfer-config", json.dumps({"backend": setup.backend})]
        return command

    def _environment(self) -> dict[str, str]:
        return child_environment(self.setup)

    def is_healthy(self) -> bool:
        return self._answers("/version" if self.setup.max_behind else "/health")

    # --- what a user does with it ---

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """A worker method, on every rank of the first engine; its results."""
        reply = self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        assert reply.status_code == 200, reply.text
        return list(reply.json()["results"])

    def version(self) -> str:
        return str(self.get("/weight_info")["weight_version"])

    def checksums(self) -> Any:
        """What vLLM's own checker says of the weights, by name. It sees nothing of those that it packs for a CPU."""
        reply = self.post("/weight_checker", {"action": "checksum"})
        assert reply.status_code == 200, reply.text
        return reply.json()["checksums"]

    def is_paused(self) -> bool:
        return bool(self.get("/is_paused")["is_paused"])

    def asks(self) -> list[Ask]:
        """One `ask` for each data-parallel engine, so that each is sure to answer."""
        if self.setup.dp == 1:
            return [self.ask]
        return [functools.partial(self.ask, dp_rank=rank) for rank in range(self.setup.dp)]

    def ask(self, prompt: Sequence[int], num_tokens: int, *, dp_rank: int = 0) -> Answer:
        """A greedy completion. `dp_rank`: by which data-parallel engine."""
        reply = self.complete(prompt, num_tokens, dp_rank=dp_rank)
        assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
        choice = reply.json()["choices"][0]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def complete(
        self, prompt: Sequence[int], num_tokens: int, *, dp_rank: int = 0, seconds: float = REQUEST_SECONDS
    ) -> httpx.Response:
        """The reply as it is."""
        headers = {"X-data-parallel-rank": str(dp_rank)}
        body = completion(prompt, num_tokens)
        return self._http.post("/v1/completions", json=body, headers=headers, timeout=seconds)

    def stream(self, prompt: Sequence[int], num_tokens: int) -> Iterator[Answer]:
        """The same, as it comes: the tokens of each message. Raises AssertionError for a request that fails."""
        for choice in self._choices("/v1/completions", completion(prompt, num_tokens)):
            if choice.get("token_ids"):
                yield Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def generate(self, prompt: Sequence[int], num_tokens: int) -> Iterator[Part]:
        """A greedy answer as it comes, by the route that says which version each token is of."""
        wishes = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0}
        for choice in self._choices("/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": wishes}):
            content = (choice.get("logprobs") or {}).get("content") or []
            logprobs = [token["top_logprobs"][0]["logprob"] for token in content]
            spans = [Span(**span) for span in choice.get("weight_versions") or []]
            yield Part(Answer(choice["token_ids"] or [], logprobs), spans)

    def _choices(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._http.stream("POST", path, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200, f"{reply.status_code}: {reply.read().decode()}"
            for line in reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    message = json.loads(line.removeprefix("data: "))
                    assert "error" not in message, message
                    yield from message["choices"]

    def __str__(self) -> str:
        return f"vllm serve ({self.setup}) on port {self.port}"


def completion(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """The body of a greedy request that answers with token ids and log-probabilities."""
    wishes = {"temperature": 0, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "prompt": list(prompt), "max_tokens": num_tokens} | wishes
