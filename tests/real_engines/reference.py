"""The reference server as a process, asked as the real ones are."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from real_vllm.oracle import Answer

from real_engines.process import ServerProcess


class ReferenceServer(ServerProcess):
    """It starts from the checkpoint in `folder`, in float32. Start it by entering it."""

    def __init__(self, folder: Path, *, port: int = 0, environment: Mapping[str, str] = os.environ):
        super().__init__("reference", port=port)
        self._folder = folder
        self._own_environment = dict(environment)

    def _command(self) -> list[str]:
        serve = [sys.executable, "-m", "weightcast.cli", "serve", str(self._folder)]
        return [*serve, "--dtype", "float32", "--port", str(self.port)]

    def _environment(self) -> dict[str, str]:
        return self._own_environment

    def is_healthy(self) -> bool:
        return self._answers("/weight_info")

    def version(self) -> str:
        return str(self.get("/weight_info")["weight_version"])

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """A greedy completion."""
        wishes = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0}
        reply = self.post("/v1/completions", {"prompt": list(prompt)} | wishes)
        assert reply.status_code == 200, f"{reply.status_code}: {reply.text}"
        choice = reply.json()["choices"][0]
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def __str__(self) -> str:
        return f"the reference server on port {self.port}"
