"""Lets SGLang be imported on a CPU: Python runs this at its start where this folder is on PYTHONPATH.

SGLang imports its GPU kernels (`sgl_kernel`) and torchvision without a need for either on this path. There is no build
of the kernels for CPUs to install; torchvision's is for another torch, and fails when it registers its operators. What
stands in here is imported and never called: a call raises. Only those of `chain_kernels` compute.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

ABSENT = frozenset({"sgl_kernel"})
CHAIN_KERNELS = frozenset(
    f"{name}_cpu"
    for name in (
        *("assign_req_to_token_pool", "assign_extend_cache_locs", "assign_draft_cache_locs_contiguous"),
        *("copy_all_layer_kv_cache", "fill_bonus_tokens", "build_tree_kernel_efficient", "verify_tree_greedy"),
    )
)
EMPTY = frozenset({"torchvision._meta_registrations"})


class _Type:
    """What stands in for classes; SGLang derives some of its own from them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()


class _StandIn(types.ModuleType):
    """A module all of whose names exist: capitalised ones are classes, others are such modules again."""

    __path__: ClassVar[list[str]] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in CHAIN_KERNELS:
            return getattr(importlib.import_module("chain_kernels"), name)
        is_class = name[:1].isupper() and not name.isupper()
        # A class says where it comes from: what pickles a class looks it up there.
        made = type(name, (_Type,), {"__module__": self.__name__}) if is_class else _StandIn(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # as a decorator
        raise RuntimeError(f"{self.__name__} is only a stand-in of weightcast's tests")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT and name not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name not in EMPTY)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None if spec.name in EMPTY else _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.insert(0, _Finder())
