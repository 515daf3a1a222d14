"""A checkpoint file: written by the trainer, then read by the engine. What a loop without a transfer library does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from safetensors.torch import load_file, save_file

from peers.ends import End, Update


@contextlib.contextmanager
def safetensors(end: End) -> Iterator[Update]:
    path = end.folder / "model.safetensors"

    def update(step: int) -> None:
        if end.is_trainer:
            save_file(dict(end.tensors), path)
            end.send()
        else:
            end.receive()
            end.load(load_file(path).items())

    yield update


@contextlib.contextmanager
def torch_save(end: End) -> Iterator[Update]:
    path = end.folder / "model.pt"

    def update(step: int) -> None:
        if end.is_trainer:
            torch.save(dict(end.tensors), path)
            end.send()
        else:
            end.receive()
            end.load(torch.load(path, mmap=True).items())

    yield update
    if end.is_trainer:
        os.unlink(path)
