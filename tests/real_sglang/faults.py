"""A plugin of the tests, in the scheduler processes: has the model's loader, or the copies in its place, fail where and
when a test says so, exchanges layers, and counts the garbage collections that are asked for.

SGLang finds it as it finds any plugin, by the metadata beside the stand-ins. The environment variable names the file in
which a test says what is to fail; as long as there is none, nothing does. Beside it is the one that collections are
counted in, a byte for each.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from weightcast.format.manifest import Manifest

VARIABLE = "WEIGHTCAST_TEST_FAULT"
COLLECTIONS = "collections"


@dataclasses.dataclass(frozen=True)
class Break:
    """An install raises before this tensor, on one rank or on all (-1); or flips a bit of the parameter `corrupt`; or
    a copy of the layer `exchange` has taken that layer's place while an offer is looked at; or the rank can't add an
    `adapter`.
    """

    after: int = 0
    rank: int = -1
    corrupt: str = ""
    exchange: str = ""
    adapter: bool = False

    @property
    def raises(self) -> bool:
        return not (self.corrupt or self.exchange or self.adapter)

    def __str__(self) -> str:
        return f"at-{self.after}" + ("" if self.rank < 0 else f"-on-rank-{self.rank}")


def register() -> None:
    """The entry point."""
    path = Path(os.environ.get(VARIABLE, ""))
    if not path.name or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from weightcast.integrations.sglang.adapters import SglangAdapters
    from weightcast.integrations.sglang.internals import parallel
    from weightcast.integrations.sglang.model import SglangModel
    from weightcast.serving.install import BlockCopies

    load, finish, run = SglangModel._load_some, SglangModel._finish_load, BlockCopies.run
    validate, add = SglangModel.validate, SglangAdapters.add

    def fault() -> Break | None:
        found = Break(**json.loads(path.read_text())) if path.exists() else None
        return found if found is not None and found.rank in (-1, parallel().tp_rank) else None

    def faulty(model: SglangModel, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = fault()
        load(model, _until(found.after, tensors) if found is not None and found.raises else tensors)

    def finished(model: SglangModel) -> list[str]:
        found, result = fault(), finish(model)
        if found is not None and found.corrupt:
            model._model.get_parameter(found.corrupt).data.view(torch.uint8).flatten()[5] ^= 1
        return result

    def faulty_copy(copies: BlockCopies, **options: bool) -> None:
        found = fault()
        if found is None or not found.raises or found.after >= len(copies.blocks):
            return run(copies, **options)
        install_map, some = copies._install_map, copies.blocks[: found.after]
        assert install_map.bind()
        num_blocks = sum(len(install_map.target_blocks(*piece)) for piece in some)
        run(BlockCopies(install_map, some, copies.sources[:num_blocks]))
        raise RuntimeError("the test's fault")

    def validated(model: SglangModel, manifest: Manifest) -> None:
        found = fault()
        if found is None or not found.exchange:
            return validate(model, manifest)
        parent, _, leaf = found.exchange.rpartition(".")
        holder, layer = model._model.get_submodule(parent), model._model.get_submodule(found.exchange)
        setattr(holder, leaf, exchanged(layer))
        try:
            validate(model, manifest)
        finally:
            setattr(holder, leaf, layer)

    def added(adapters: SglangAdapters, *args: Any, **options: Any) -> None:
        found = fault()
        if found is not None and found.adapter:
            raise RuntimeError("the test's fault")
        add(adapters, *args, **options)

    SglangAdapters.add = added  # type: ignore[method-assign]
    SglangModel.validate = validated  # type: ignore[method-assign]
    SglangModel._load_some = faulty  # type: ignore[method-assign]
    SglangModel._finish_load = finished  # type: ignore[method-assign]
    BlockCopies.run = faulty_copy  # type: ignore[method-assign]

    collect = gc.collect

    def counted(*generation: int) -> int:
        with path.with_name(COLLECTIONS).open("a") as count:
            count.write(".")
        return collect(*generation)

    gc.collect = counted


def exchanged(layer: torch.nn.Module) -> torch.nn.Module:
    """A copy with tensors of its own, which compute the same."""
    copied = copy.copy(layer)
    copied._parameters = dict(layer._parameters)
    for name, parameter in layer.named_parameters(recurse=False):
        made = torch.nn.Parameter(parameter.data.clone(), requires_grad=False)
        made.__class__ = parameter.__class__
        vars(made).update(vars(parameter))
        copied._parameters[name] = made
    return copied


def _until(num: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, pair in enumerate(tensors):
        if index == num:
            raise RuntimeError("the test's fault")
        yield pair
