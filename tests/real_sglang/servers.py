"""A real SGLang server on a free loopback port: started with a deadline, asked over HTTP, ended with its processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import torch
from real_engines.process import REQUEST_SECONDS, ServerProcess, python_of
from real_vllm.oracle import Answer

from real_sglang.faults import COLLECTIONS, VARIABLE, Break

TESTS = Path(__file__).parents[1]
STAND_INS = Path(__file__).parent / "stand_ins"
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""What an SGLang on a CPU needs."""
ALGORITHMS = {"draft_model": "STANDALONE", "eagle": "EAGLE", "mtp": "NEXTN"}
"""SGLang's names of methods of draft models."""
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a server is started. `plugin`: with weightcast's plugin, which SGLang finds by itself; without, it is stock.

    `api_key`, `admin_key`: what its routes ask for, as SGLang takes them. `options`: further ones of its command line.
    `max_lora_rank`: above 0 it serves LoRA adapters. `speculation`: the method of a draft model, as of `drafts.Pair`;
    `keeps_draft`: which is not updated. `max_behind`: what its health depends on.
    """

    family: str = "qwen3"
    dtype: torch.dtype = torch.float32
    tp: int = 1
    plugin: bool = True
    token: str = ""
    admin_key: str = ""
    max_lora_rank: int = 0
    speculation: str = ""
    keeps_draft: bool = False
    max_behind: str = ""
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [self.family, str(self.dtype).removeprefix("torch."), f"tp{self.tp}"]
        words += ["plugin" if self.plugin else "stock"]
        words += [f"lora{self.max_lora_rank}"] if self.max_lora_rank else []
        words += [self.speculation] * bool(self.speculation) + ["kept"] * self.keeps_draft
        words += [f"behind{self.max_behind}"] if self.max_behind else []
        words += [option.lstrip("-") for option in self.options]
        return "-".join(words)


ONE = Setup()
TWO = Setup(tp=2)
STOCK = Setup(plugin=False)
STOCK_TWO = Setup(plugin=False, tp=2)
"""Setups that many tests share."""


STARTED_BY_COMMAND = frozenset({ONE, STOCK})
"""Those that most tests run on are started as a user starts one; the others are forked, in a fraction of the time."""


class Span(NamedTuple):
    """Tokens `start` to `end` of an answer came from this version."""

    version: str
    start: int
    end: int


class Part(NamedTuple):
    """A message of a stream: its new tokens, the spans of all so far, and how many tokens before were cached.

    `num_proposed`, `num_taken`: tokens of a draft model, of all so far.
    """

    answer: Answer
    spans: list[Span]
    num_cached: int
    num_proposed: int
    num_taken: int


def child_environment(setup: Setup) -> dict[str, str]:
    """This process's environment with what the server needs; its processes can import the tests."""
    path = os.pathsep.join(filter(None, (str(STAND_INS), str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
    environment.pop("WEIGHTCAST_TOKEN", None)
    environment.pop("WEIGHTCAST_HEALTH_MAX_BEHIND", None)
    # SGLang loads those of its plugins that are named here, or all.
    plugins = ["weightcast", "weightcast-test-faults"] if setup.plugin else []
    if setup.max_lora_rank:
        plugins.append("weightcast-test-unpinned")
    if setup.speculation:
        plugins.append("weightcast-test-chains")
    environment["SGLANG_PLUGINS"] = ",".join(plugins) or "none"
    if setup.tp > 1:
        # It would want a NUMA node for each rank.
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(setup.tp))
    if setup.keeps_draft:
        environment["WEIGHTCAST_DRAFT"] = "keep"
    if setup.max_behind:
        environment["WEIGHTCAST_HEALTH_MAX_BEHIND"] = setup.max_behind
    if setup.token:
        environment["WEIGHTCAST_TOKEN"] = setup.token
    return environment


class Server(ServerProcess):
    """A server of `setup` that started from the checkpoint in `folder`. Start it by entering it.

    `cold(seed)` is one like it that started from the weights of a seed: the oracle of what is published to this one.
    `adapters`: by name, the directories of adapters that it starts with. `draft`: the checkpoint of its draft model, if
    that has one of its own.
    """

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        *,
        port: int = 0,
        cold: Callable[[Setup, int], Server] | None = None,
        is_forked: bool = True,
        adapters: Mapping[str, Path] = MappingProxyType({}),
        draft: Path | None = None,
    ):
        headers = {"authorization": f"Bearer {setup.admin_key}"} if setup.admin_key else {}
        super().__init__("sglang", port=port, headers=headers, is_forked=is_forked)
        self.setup = setup
        self.folder = folder
        self._cold = cold
        self._adapters = adapters
        self._draft = draft
        self._faults = tempfile.TemporaryDirectory(prefix="weightcast-faults-")

    def _command(self) -> list[str]:
        setup = self.setup
        command = [python_of("sglang"), "-m", "sglang.launch_server", "--model-path", str(self.folder)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--dtype", str(setup.dtype).removeprefix("torch.")]
        command += ["--max-total-tokens", "4096", "--max-running-requests", "8", "--mem-fraction-static", "0.1"]
        command += ["--disable-overlap-schedule", "--skip-server-warmup", "--tp-size", str(setup.tp)]
        command += ["--enable-metrics", *setup.options]
        if self._is_forked:
            # Else each of its ranks would keep a core busy while another server is asked.
            command += ["--sleep-on-idle"]
        if setup.max_lora_rank:
            command += ["--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "4"]
            command += ["--max-lora-rank", str(setup.max_lora_rank), "--lora-target-modules", *LORA_MODULES]
            if self._adapters:
                command += ["--lora-paths", *(f"{name}={path}" for name, path in self._adapters.items())]
        if setup.speculation:
            command += ["--speculative-algorithm", ALGORITHMS[setup.speculation], "--speculative-num-steps", "1"]
            command += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
            if self._draft is not None:
                command += ["--speculative-draft-model-path", str(self._draft)]
        if setup.admin_key:
            command += ["--admin-api-key", setup.admin_key]
        return command

    def _environment(self) -> dict[str, str]:
        return child_environment(self.setup) | {VARIABLE: str(self._fault)}

    def is_healthy(self) -> bool:
        """Whether it answers about itself. Its /health would generate a token, which a pause holds up."""
        return self._answers("/model_info")

    def close(self) -> None:
        super().close()
        self._faults.cleanup()

    @property
    def _fault(self) -> Path:
        return Path(self._faults.name, "fault")

    @contextlib.contextmanager
    def failing(self, fault: Break) -> Iterator[None]:
        """Every install meanwhile fails so; only with the plugin."""
        self._fault.write_text(json.dumps(dataclasses.asdict(fault)))
        try:
            yield
        finally:
            self._fault.unlink()

    def num_collections(self) -> int:
        """How many garbage collections its schedulers were asked for; only with the plugin."""
        counted = self._fault.with_name(COLLECTIONS)
        return counted.stat().st_size if counted.exists() else 0

    def cold(self, seed: int) -> Server:
        assert self._cold is not None, f"{self} was made without an oracle"
        return self._cold(self.setup, seed)

    # --- what a user does with it ---

    def post(self, path: str, body: Any = None, *, seconds: float = REQUEST_SECONDS) -> httpx.Response:
        """SGLang asks for a body always."""
        return super().post(path, {} if body is None else body, seconds=seconds)

    def version(self) -> str:
        return str(self.get("/model_info")["weight_version"])

    def checksums(self) -> Any:
        """What /weights_checker says of the weights of every rank."""
        reply = self.post("/weights_checker", {"action": "checksum"})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def is_paused(self) -> bool:
        return bool(self.get("/is_paused")["is_paused"])

    def checksum(self) -> str:
        """One for all weights of all ranks."""
        return str(self.checksums()["per_engine_checksum"])

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """A greedy answer, of which nothing was cached before."""
        return self.answer(prompt, num_tokens).answer

    def answer(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> Part:
        """The same, with the versions it came from. `options`: as in `generation`."""
        reply = self.generate(prompt, num_tokens, **options)
        assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
        return _part(reply.json())

    def generate(
        self, prompt: Sequence[int], num_tokens: int, *, seconds: float = REQUEST_SECONDS, **options: Any
    ) -> httpx.Response:
        """The reply as it is."""
        return self._http.post("/generate", json=generation(prompt, num_tokens, **options), timeout=seconds)

    def stream(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> Iterator[Part]:
        """The answer as it comes. Raises AssertionError for a request that fails. `options`: as in `generation`."""
        num_seen = 0
        body = generation(prompt, num_tokens, **options) | {"stream": True}
        with self._http.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200, f"{reply.status_code}: {reply.read().decode()}"
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                message = json.loads(line.removeprefix("data: "))
                assert "error" not in message, message
                whole = _part(message)
                # Each message has the whole of what was generated so far.
                new = Answer(whole.answer.tokens[num_seen:], whole.answer.logprobs[num_seen:])
                num_seen = len(whole.answer.tokens)
                yield whole._replace(answer=new)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Of every token but the first, after those before it."""
        reply = self.generate(tokens, 1, logprob_start_len=0)
        assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
        return [entry[0] for entry in reply.json()["meta_info"]["input_token_logprobs"][1:]]

    def __str__(self) -> str:
        return f"sglang ({self.setup}) on port {self.port}"


def generation(prompt: Sequence[int], num_tokens: int, **options: Any) -> dict[str, Any]:
    """The body of a greedy request that answers with token ids and log-probabilities.

    `options`: more of SGLang's. Requests of one `extra_key` share what is cached; without, this one shares nothing.
    """
    wishes = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": wishes, "return_logprob": True}
    return body | {"extra_key": uuid.uuid4().hex} | options


def _part(reply: dict[str, Any]) -> Part:
    meta = reply["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    spans = [Span(**span) for span in meta.get("weight_versions") or []]
    drafts = (meta.get(f"spec_num_{which}_drafts", 0) for which in ("proposed", "correct"))
    return Part(Answer(list(reply["output_ids"]), logprobs), spans, meta["cached_tokens"], *drafts)
