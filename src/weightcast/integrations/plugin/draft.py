"""A model and its draft model as one module, so that both are checked, installed, undone and proven as one model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from weightcast.errors import UnsupportedError, listed
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.dry_run import DryRunOutcome

PREFIX = "draft."
"""Of published names of a draft model that has a checkpoint of its own."""


def draft_remedies(offered: Iterable[str], held: Iterable[str]) -> list[str]:
    """Return what to do if, by the names of their tensors, only the source or only the engine has a draft model."""
    is_offered, is_held = (any(name.startswith(PREFIX) for name in names) for names in (offered, held))
    if is_offered and not is_held:
        what = "this engine updates no draft model with a checkpoint of its own"
        return [f"{what}: leave out the tensors named {PREFIX}*, or start the engine with that draft model"]
    if is_held and not is_offered:
        what = f"publish the draft model too, with {PREFIX!r} before each name"
        return [f"{what}, or start the engine so that its draft model keeps its weights"]
    return []


class ModelWithDraft(nn.Module):
    """A `model` with its `draft` model, whose modules have the prefix "draft." before their names.

    Modules that the engine shares between the two, such as embeddings, are the model's. Each published tensor goes to
    one of the two loaders. `own`: the tensors that the model's checkpoint lacks. `replaced`: the loader's names of
    tensors in whose place the engine uses the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: nn.Module,
        specs: Sequence[TensorSpec] | None,
        dry_run: Callable[[nn.Module, Sequence[TensorSpec]], DryRunOutcome],
        *,
        is_in_model: bool,
        remedy: str,
        loading: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Find the draft model's tensors by a dry run of its loader on `specs`, its checkpoint's.

        `is_in_model`: its layers are in the model's checkpoint (MTP layers). A draft model with its own checkpoint has
        `PREFIX` before each name. `loading`: the context in which the draft model's loader runs. Raises
        UnsupportedError with the `remedy` if the names can't be known.
        """
        super().__init__()
        if specs is None:
            raise UnsupportedError(
                "an engine with a draft model is updated only if the headers of the checkpoints of "
                f"{type(model).__name__} and {type(draft).__name__} can be read: save both as safetensors, or {remedy}"
            )
        outcome = dry_run(draft, specs)
        if outcome.faults:
            faults = listed([f"{name!r}: {fault}" for name, fault in outcome.faults.items()])
            raise UnsupportedError(f"the loader of {type(draft).__name__} fails in a dry run ({faults}): {remedy}")
        self.model = model
        self.draft = draft
        self._loading = loading
        self.own: list[TensorSpec] = []
        of_model = set(model.parameters())
        shared = {name for name, each in draft.named_parameters(remove_duplicate=False) if each in of_model}
        self.replaced = replaced = sorted({copy.name for copy in outcome.copies if copy.target in shared})
        # By the published name of a tensor of the draft model, the name that its loader knows.
        if is_in_model:
            self._names = {n: n for n, (num_used, _) in outcome.used.items() if num_used and n not in replaced}
            used = dry_run(model, specs).used
            if both := [name for name, (num_used, _) in used.items() if num_used and name in self._names]:
                raise UnsupportedError(
                    f"both the main model and its MTP layers load {listed(both)}, which was not tried: {remedy}"
                )
        else:
            self.own = [TensorSpec(f"{PREFIX}{s.name}", s.dtype, s.shape) for s in specs if s.name not in replaced]
            self._names = {spec.name: spec.name.removeprefix(PREFIX) for spec in self.own}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        of_model = set(self.model.modules())
        for name, module in self.draft.named_modules(None, f"{prefix}draft", remove_duplicate):
            if module not in of_model:
                yield name, module

    def get_submodule(self, target: str) -> nn.Module:
        name = f"{target}."
        if name.startswith(PREFIX):
            return self.draft.get_submodule(name.removeprefix(PREFIX).removesuffix("."))
        return self.model.get_submodule(target)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have each loader load its tensors. Raises what they raise."""
        model: Any = self.model
        draft: Any = self.draft
        for is_of_draft, group in itertools.groupby(weights, lambda named: named[0] in self._names):
            if is_of_draft:
                with self._loading():
                    draft.load_weights((self._names[name], tensor) for name, tensor in group)
            else:
                model.load_weights(group)
