"""Stands in for the package of this name, which frees memory of GPUs: parameters that are paused lose their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class _Saver:
    enabled = True

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._is_backed_up = False
        self._saved: list[torch.Tensor] = []

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """The parameters of modules that are made in the block have this tag."""
        if tag != "weights":
            yield
            return
        self._is_backed_up = enable_cpu_backup
        hook = register_module_parameter_registration_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self._modules[id(module)] = module

    def pause(self, tag: str) -> None:
        for parameter in self._parameters(tag):
            if self._is_backed_up:
                self._saved.append(parameter.clone())
            parameter.fill_(7)

    def resume(self, tag: str) -> None:
        if self._saved and tag == "weights":
            for parameter, saved in zip(self._parameters(tag), self._saved, strict=True):
                parameter.copy_(saved)
            self._saved.clear()

    def _parameters(self, tag: str) -> list[torch.Tensor]:
        modules = self._modules.values() if tag == "weights" else ()
        found = {id(each): each.data for module in modules for each in module.parameters(recurse=False)}
        return list(found.values())

    def cuda_graph(self, **options: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def disable(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


torch_memory_saver = _Saver()


def configure_subprocess() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
