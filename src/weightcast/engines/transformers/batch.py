"""Rows that decode together: the model's forward pass, the KV cache that they share, and the choice of tokens.

Invariants: the cache holds every token of every row but the last, left-padded to one length, and was computed whole
under one version; a step under any other version computes it again. Caches that can't be cut or joined exactly
(recurrent layers) are computed again instead. A row's token depends on its own logits, parameters and random numbers
only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from weightcast.engines.transformers.request import DecodeRow, SamplingParams, Tokenizer, TokenLogprobs
from weightcast.format.manifest import WeightVersion

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity: tokens of probability 0 are reported with this, as vLLM does."""


class CausalModel:
    """A transformers causal language model in eval mode, called as its own `generate` calls it."""

    def __init__(self, model: Any, tokenizer: Tokenizer | None) -> None:
        if not hasattr(model, "generate"):
            raise TypeError(f"{type(model).__name__} is no causal language model of transformers: it can't generate")
        self._model = model.eval()
        self.device: torch.device = model.device
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = int(getattr(config, "max_position_embeddings", None) or 1 << 31)
        eos: set[int] = set()
        for owner in (getattr(model, "generation_config", None), tokenizer):
            ids = getattr(owner, "eos_token_id", None)
            eos.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
        self.eos_token_ids = frozenset(eos)
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Append `tokens` to the cache; return the logits of the last one.

        `tokens` is num_rows x num_new, `mask` num_rows x (cached + num_new), the result num_rows x vocabulary.
        """
        answer = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp_(min=0)[:, -tokens.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            **self._options,
        )
        return cast(torch.Tensor, answer.logits[:, -1])

    def check(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        """Raises TypeError or ValueError for prompts or stop tokens that this model can't take."""
        if not all(hasattr(prompt, "__len__") for prompt in prompts):
            raise TypeError("each prompt must be a list of token ids: [[1, 2, 3]], not [1, 2, 3]")
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt is empty; it needs at least one token")
        longest = max(map(len, prompts))
        if longest + sampling.max_tokens > self.max_model_len:
            raise ValueError(
                f"a prompt of {longest} tokens and max_tokens={sampling.max_tokens}; "
                f"the model takes {self.max_model_len} together"
            )
        for tokens in (*prompts, sampling.stop_token_ids or (0,)):
            if min(tokens) < 0 or max(tokens) >= self.vocab_size:
                raise ValueError(
                    f"token ids go from {min(tokens)} to {max(tokens)}; the vocabulary has {self.vocab_size}"
                )


class DecodeBatch:
    """At least one row. `step` gives every row one token."""

    def __init__(self, model: CausalModel, rows: Sequence[DecodeRow]) -> None:
        self.rows = list(rows)
        self._model = model
        self._version: WeightVersion | None = None
        self._cache: Any = None
        """A DynamicCache, if any. Where `_can_join`: keys and values of num_rows x num_heads x length x head_size."""
        self._mask = torch.empty(0)  # num_rows x cached tokens: 0 for padding, 1 for a token

    def step(self, version: WeightVersion | None) -> None:
        """Compute the next token of every row. `version` is the version of the weights now."""
        if self._cache is None or version != self._version:
            logits = self._prefill(version)
        else:
            self._mask = functional.pad(self._mask, (0, 1), value=1)
            newest = torch.tensor([[row.output[-1]] for row in self.rows], device=self._model.device)
            logits = self._model.logits(newest, self._mask, self._cache)
        for row, token, logprobs in zip(self.rows, *_sample(logits, self.rows), strict=True):
            row.append(token, version, logprobs)

    def _prefill(self, version: WeightVersion | None) -> torch.Tensor:
        """Compute the cache of all rows; return the logits of their last tokens, num_rows x vocabulary."""
        self._cache, cache = None, self._model.new_cache()
        sequences = [(*row.prompt, *row.output) for row in self.rows]
        # Completions of one prompt start as one sequence, which is computed once.
        unique = list(dict.fromkeys(sequences)) if _can_select(cache) else sequences
        length = max(map(len, unique))
        padded = [((0,) * (length - len(ids)) + ids, [0] * (length - len(ids)) + [1] * len(ids)) for ids in unique]
        tokens, self._mask = (torch.tensor(part, device=self._model.device) for part in zip(*padded, strict=True))
        logits = self._model.logits(tokens, self._mask, cache)
        self._cache, self._version = cache, version
        if len(unique) < len(sequences):
            place = {ids: i for i, ids in enumerate(unique)}
            repeats = [place[ids] for ids in sequences]
            self._select(cache, repeats)
            logits = logits[repeats]
        return logits

    def drop_ended(self) -> None:
        """Remove the rows that have ended or were cancelled."""
        kept = [i for i, row in enumerate(self.rows) if not row.is_over]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in kept]
        if self._cache is None or not kept or not _can_select(self._cache):
            self._cache = None
            return
        self._select(self._cache, kept)
        # Padding that all remaining rows have belonged to a longer row that is gone.
        excess = self._mask.shape[1] - max(row.num_tokens - 1 for row in self.rows)
        if excess > 0 and _can_join(self._cache):
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[..., excess:, :], layer.values[..., excess:, :]
            self._mask = self._mask[:, excess:]

    def _select(self, cache: DynamicCache, rows: list[int]) -> None:
        indices = torch.tensor(rows, device=self._model.device)
        cache.batch_select_indices(indices)
        self._mask = self._mask[indices]

    def try_join(self, other: DecodeBatch) -> bool:
        """Take over `other`'s rows, if the caches are of one version, can be joined, and need little padding."""
        if self._cache is None or other._cache is None or self._version != other._version:
            return False
        length = max(self._mask.shape[1], other._mask.shape[1])
        is_sparse = length * (len(self.rows) + len(other.rows)) > 2 * (self._mask.numel() + other._mask.numel())
        if is_sparse or not (_can_join(self._cache) and _can_join(other._cache)):
            return False
        for layer, added in zip(self._cache.layers, other._cache.layers, strict=True):
            layer.keys, layer.values = _join(layer.keys, added.keys), _join(layer.values, added.values)
        self._mask = _join(self._mask[..., None], other._mask[..., None])[..., 0]
        self.rows += other.rows
        return True


def _can_select(cache: DynamicCache) -> bool:
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def _can_join(cache: DynamicCache) -> bool:
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The rows of `a`, then those of `b`; the shorter is padded on the left (axis -2 is the length)."""
    length = max(a.shape[-2], b.shape[-2])
    return torch.cat([functional.pad(part, (0, 0, length - part.shape[-2], 0)) for part in (a, b)])


def _sample(logits: torch.Tensor, rows: Sequence[DecodeRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose a token for each row of `logits` (num_rows x vocabulary): the likeliest, or one drawn from top_p."""
    logits, params = logits.float(), [row.request.sampling for row in rows]
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, param in enumerate(params) if param.temperature > 0]
    if drawn:
        temperatures = logits.new_tensor([[params[i].temperature] for i in drawn])
        # fp64: in fp32 the running sum over a large vocabulary is off by more than many tokens' probability.
        probs = torch.softmax(logits[drawn] / temperatures, dim=-1, dtype=torch.float64)
        nuclei = [j for j, i in enumerate(drawn) if params[i].top_p < 1]
        if nuclei:
            top_ps = logits.new_tensor([[params[drawn[j]].top_p] for j in nuclei])
            probs[nuclei] = _keep_nucleus(probs[nuclei], top_ps)
        sums = probs.cumsum(dim=-1)
        at = sums[:, -1:] * sums.new_tensor([[rows[i].random.random()] for i in drawn])
        tokens[drawn] = torch.searchsorted(sums, at, right=True).clamp_(max=logits.shape[-1] - 1).squeeze(-1)
    return tokens.tolist(), _logprobs(logits, tokens, params)


def _keep_nucleus(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of likeliest tokens whose probabilities reach top_p (num_rows x 1)."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill_(before >= top_ps, 0))


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, params: Sequence[SamplingParams]
) -> list[TokenLogprobs | None]:
    """Log-probabilities in fp32 of the raw `logits` (num_rows x vocabulary), for the rows that asked for them."""
    found: list[TokenLogprobs | None] = [None] * len(params)
    asked = [(i, param.logprobs) for i, param in enumerate(params) if param.logprobs is not None]
    if asked:
        reported = [i for i, _ in asked]
        logprobs = torch.log_softmax(logits[reported], dim=-1).clamp_(min=_LOWEST_LOGPROB)
        chosen = logprobs.gather(-1, tokens[reported].unsqueeze(-1)).squeeze(-1).tolist()
        values, ids = logprobs.topk(min(max(k for _, k in asked), logprobs.shape[-1]), dim=-1)
        for (i, k), one, top, top_logprobs in zip(asked, chosen, ids.tolist(), values.tolist(), strict=True):
            found[i] = TokenLogprobs(one, tuple(zip(top[:k], top_logprobs[:k], strict=True)))
    return found
