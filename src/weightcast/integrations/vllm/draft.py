"""A model and its draft model as one module, so that both are checked, installed, undone and proven as one model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weightcast.integrations.vllm import internals

PREFIX = "draft."
"""Of published names of a draft model that has a checkpoint of its own."""


class ModelWithDraft(nn.Module):
    """A `model` with its `draft` model, whose modules have the prefix "draft." before their names.

    Modules that vLLM shares between the two, such as embeddings, are the model's. Each published tensor goes to one of
    the two loaders: `names` has those of the draft model, each with the name that its loader knows.
    """

    def __init__(self, model: nn.Module, draft: nn.Module, names: Mapping[str, str]) -> None:
        super().__init__()
        self.model = model
        self.draft = draft
        self._names = names

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
                with internals.require().any_mtp_layers():
                    draft.load_weights((self._names[name], tensor) for name, tensor in group)
            else:
                model.load_weights(group)
