"""Rows that decode together, and the KV cache they share.

Invariants: the cache holds every token of every row but the last, left-padded to one length, and was computed in whole
under `version`; a step under any other version drops it and computes it anew. Caches that can't be cut or joined
exactly (recurrent layers) are computed anew instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from weightcast.engines.transformers.model import CausalModel
from weightcast.engines.transformers.request import DecodeRow
from weightcast.engines.transformers.sampling import Sampler
from weightcast.format.manifest import WeightVersion


class DecodeBatch:
    """At least one row. `step` gives every row one token."""

    def __init__(self, model: CausalModel, rows: Sequence[DecodeRow]) -> None:
        self.rows = list(rows)
        self.version: WeightVersion | None = None
        self._model = model
        self._cache: DynamicCache | None = None
        self._mask: torch.Tensor | None = None
        self._length = 0
        self._sampler = Sampler(self.rows, model.device)

    @property
    def num_cells(self) -> int:
        """Cache cells, padding included."""
        return self._length * len(self.rows)

    def step(self, version: WeightVersion | None) -> None:
        """Compute the next token of every row under `version`, which must be the weights' own now."""
        if self._cache is None or version != self.version:
            logits = self._prefill(version)
        else:
            logits = self._decode(self._cache)
        tokens, logprobs = self._sampler(logits)
        for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
            row.append(token, version, logprob)

    def _prefill(self, version: WeightVersion | None) -> torch.Tensor:
        self._cache, cache = None, self._model.new_cache()
        sequences = [row.tokens() for row in self.rows]
        unique = {tuple(tokens): None for tokens in sequences} if _can_select(cache) else None
        computed = sequences if unique is None else [list(tokens) for tokens in unique]
        tokens, self._mask, positions = _left_pad(computed, self._model.device)
        logits = self._model.logits(tokens, self._mask, positions, cache)
        self._cache, self._length, self.version = cache, tokens.shape[1], version
        if unique is not None and len(unique) < len(sequences):
            place = {tokens: i for i, tokens in enumerate(unique)}
            repeats = torch.tensor([place[tuple(tokens)] for tokens in sequences], device=self._model.device)
            logits = logits[repeats]
            self._select(cache, repeats)
        return logits

    def _decode(self, cache: DynamicCache) -> torch.Tensor:
        device = self._model.device
        tokens = torch.tensor([[row.output[-1]] for row in self.rows], device=device)
        positions = None
        if self._mask is not None:
            self._mask = functional.pad(self._mask, (0, 1), value=1)
            positions = torch.tensor([[row.num_tokens - 1] for row in self.rows], device=device)
        self._length += 1
        return self._model.logits(tokens, self._mask, positions, cache)

    def drop_ended(self) -> None:
        """Let the rows go that have ended or were given up."""
        kept = [i for i, row in enumerate(self.rows) if not row.is_over]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in kept]
        self._sampler = Sampler(self.rows, self._model.device)
        if self._cache is not None and self.rows and _can_select(self._cache):
            self._select(self._cache, torch.tensor(kept, device=self._model.device))
            self._trim(self._cache)
        else:
            self._cache = None

    def _select(self, cache: DynamicCache, indices: torch.Tensor) -> None:
        cache.batch_select_indices(indices)
        if self._mask is not None:
            self._mask = self._mask[indices]

    def _trim(self, cache: DynamicCache) -> None:
        # The padding that every row has was of a longer row that is gone.
        if self._mask is None or not _is_plain(cache):
            return
        excess = self._length - max(row.num_tokens for row in self.rows) + 1
        if excess > 0:
            for layer in _plain_layers(cache):
                layer.keys, layer.values = layer.keys[..., excess:, :], layer.values[..., excess:, :]
            self._mask, self._length = self._mask[:, excess:], self._length - excess
        if all(row.num_tokens - 1 == self._length for row in self.rows):
            self._mask = None

    def try_join(self, other: DecodeBatch) -> bool:
        """Take over `other`'s rows, if the caches are of one version, can be joined, and little padding comes of it."""
        if self._cache is None or other._cache is None or self.version != other.version:
            return False
        length = max(self._length, other._length)
        too_sparse = length * (len(self.rows) + len(other.rows)) > 2 * (self.num_cells + other.num_cells)
        if too_sparse or not (_is_plain(self._cache) and _is_plain(other._cache)):
            return False
        self._join(self._cache, other._cache, other, length)
        return True

    def _join(self, cache: DynamicCache, other_cache: DynamicCache, other: DecodeBatch, length: int) -> None:
        mine, theirs = length - self._length, length - other._length
        if mine or theirs or self._mask is not None or other._mask is not None:
            self._mask = torch.cat([self._padded_mask(mine), other._padded_mask(theirs)])
        for layer, added in zip(_plain_layers(cache), _plain_layers(other_cache), strict=True):
            layer.keys = _cat_left_padded(layer.keys, mine, added.keys, theirs)
            layer.values = _cat_left_padded(layer.values, mine, added.values, theirs)
        self._length = length
        self.rows += other.rows
        self._sampler = Sampler(self.rows, self._model.device)

    def _padded_mask(self, num_more: int) -> torch.Tensor:
        mask = self._mask
        if mask is None:
            mask = torch.ones(len(self.rows), self._length, dtype=torch.long, device=self._model.device)
        return functional.pad(mask, (num_more, 0))


def _left_pad(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Tokens, mask and positions, rows x the longest; the latter two are None if all are of one length."""
    length = max(map(len, sequences))
    if all(len(tokens) == length for tokens in sequences):
        return torch.tensor(sequences, device=device), None, None
    padded = torch.tensor([[0] * (length - len(tokens)) + list(tokens) for tokens in sequences], device=device)
    mask = torch.tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in sequences], device=device)
    return padded, mask, (mask.cumsum(dim=-1) - 1).clamp_(min=0)


def _cat_left_padded(a: torch.Tensor, pad_a: int, b: torch.Tensor, pad_b: int) -> torch.Tensor:
    return torch.cat([functional.pad(a, (0, 0, pad_a, 0)), functional.pad(b, (0, 0, pad_b, 0))])


def _is_plain(cache: DynamicCache) -> bool:
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _plain_layers(cache: DynamicCache) -> list[Any]:
    return cast("list[Any]", cache.layers)


def _can_select(cache: DynamicCache) -> bool:
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
