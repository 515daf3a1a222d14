"""The two processes of a way: a trainer whose tensors change, and an engine that must compute with them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from publishing.model import build_model, fill, local_tensors
from safetensors.torch import load_file
from torch import nn

from weightcast.format.bucket import payload_digest
from weightcast.format.manifest import TensorSpec
from weightcast.host.copy import copy_all

DEADLINE_SECONDS = 300.0

Pairs = Iterable[tuple[str, torch.Tensor]]
Update = Callable[[int], float | None]
"""One step. The trainer's may return for how many seconds the engine was paused; else it is measured at the engine."""
Adapter = Callable[..., contextlib.AbstractContextManager[Update]]


@dataclasses.dataclass
class End:
    """What an adapter is given. `folder` is one and the same at both ends, on a filesystem in memory.

    `server`: where a real engine serves, which then is the other end; there is no engine process of ours.
    """

    is_trainer: bool
    model: nn.Module
    folder: Path
    other: Connection | None
    server: str = ""

    def __post_init__(self) -> None:
        self.tensors: Mapping[str, torch.Tensor] = local_tensors(self.model)
        self._loading: list[float] = []

    def send(self, value: Any = None) -> None:
        """Give the other end a value: an address, or the word that it may go on."""
        assert self.other is not None
        self.other.send(value)

    def receive(self) -> Any:
        """What the other end sends. Raises TimeoutError after DEADLINE_SECONDS, EOFError if it has ended."""
        assert self.other is not None
        if not self.other.poll(DEADLINE_SECONDS):
            raise TimeoutError(f"the other end sent nothing within {DEADLINE_SECONDS:g} s")
        return self.other.recv()

    def load(self, pairs: Pairs) -> None:
        """The engine's loader: copies into the live parameters, as weightcast's own engine does."""
        pairs = list(pairs)
        self._loading.append(time.perf_counter())
        copy_all([self.tensors[name] for name, _ in pairs], [tensor for _, tensor in pairs])
        self._loading.append(time.perf_counter())

    def paused_seconds(self) -> float:
        """From the first parameter that was overwritten to the last: meanwhile the engine has two versions' parts."""
        times, self._loading = self._loading, []
        return times[-1] - times[0] if times else 0.0


def adapter(path: str) -> Adapter:
    """What `module:function` names."""
    module, _, name = path.partition(":")
    found: Adapter = getattr(importlib.import_module(module), name)
    return found


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process is: an end, and how it connects. `checkpoint`: the values that the trainer starts with."""

    is_trainer: bool
    specs: Sequence[TensorSpec]
    adapter: str
    options: Mapping[str, Any]
    folder: Path
    other: Connection | None
    server: str = ""
    checkpoint: Path | None = None


def run_end(driver: Connection, job: Job) -> None:
    """The process: do what the driver says until it closes its pipe."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            _serve(driver, job)
        except Exception:
            driver.send(traceback.format_exc())


def _serve(driver: Connection, job: Job) -> None:
    model = build_model(job.specs)
    here = End(job.is_trainer, model, job.folder, job.other, job.server)
    if job.checkpoint is not None:
        for name, tensor in load_file(job.checkpoint / "model.safetensors").items():
            here.tensors[name].copy_(tensor)
    elif job.is_trainer:
        fill(model, seed=0)
    make = adapter(job.adapter)
    driver.send(None)
    assert driver.recv() == "open"
    with make(here, **job.options) as update:
        driver.send(None)
        while True:
            match driver.recv():
                case "change":
                    torch._foreach_neg_(list(here.tensors.values()))
                    gc.collect()
                    driver.send(None)
                case "digest":
                    held = ((name, tensor.view(-1).view(torch.uint8)) for name, tensor in here.tensors.items())
                    driver.send([(name, payload_digest(memory)) for name, memory in held])
                case "close":
                    break
                case step:
                    paused = update(step)
                    driver.send(("done", paused if job.is_trainer else here.paused_seconds()))
    driver.send(None)
