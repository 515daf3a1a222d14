"""Decoding of one request's rows: the model's forward pass, the KV cache and sampling.

Invariants: the cache has every token of every row except the last one, left-padded to one length, and was computed
under one version; a step under any other version computes it again. A row's token depends only on its own logits and
random numbers. Rows that have ended stay in the batch until its cache is computed again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from weightcast.engines.transformers.request import DecodeRow, Request, SamplingParams, Tokenizer, TokenLogprobs
from weightcast.format.manifest import WeightVersion

_LOWEST_LOGPROB = -9999.0
"""Log-probability that is reported for tokens of probability 0, as vLLM does, since JSON has no infinity."""


class CausalModel:
    """A transformers causal language model in eval mode, called as its own `generate` calls it."""

    def __init__(self, model: Any, tokenizer: Tokenizer | None) -> None:
        if not hasattr(model, "generate"):
            raise TypeError(
                f"{type(model).__name__} is not a causal language model of transformers, which generation needs: pass "
                "what AutoModelForCausalLM.from_pretrained returns"
            )
        self._model = model.eval()
        self.config = model.config
        self.device: torch.device = model.device
        text_config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(text_config.vocab_size)
        self.max_model_len = int(getattr(text_config, "max_position_embeddings", None) or 1 << 31)
        eos: set[int] = set()
        for owner in (getattr(model, "generation_config", None), tokenizer):
            ids = getattr(owner, "eos_token_id", None)
            eos.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
        self.eos_token_ids = frozenset(eos)
        parameters = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        # transformers 5.24 renamed this argument, and warns about the former name.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Append `tokens` to the cache; return the logits of the last ones.

        Shapes: `tokens` (num_rows, num_new), `mask` (num_rows, cached + num_new), result (num_rows, vocabulary).
        """
        answer = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp_(min=0)[:, -tokens.shape[1] :],
            use_cache=True,
            **{self._cache_name: cache},
            **self._options,
        )
        return cast(torch.Tensor, answer.logits[:, -1])

    def check(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        """Raise TypeError or ValueError for prompts or stop tokens that this model does not support."""
        if not all(hasattr(prompt, "__len__") for prompt in prompts):
            raise TypeError("each prompt must be a list of token ids: [[1, 2, 3]], not [1, 2, 3]")
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt is empty; it needs at least one token")
        longest = max(map(len, prompts))
        if longest + sampling.max_tokens > self.max_model_len:
            raise ValueError(
                f"a prompt of {longest} tokens and max_tokens={sampling.max_tokens} exceed the model's limit of "
                f"{self.max_model_len} tokens: shorten the prompt, or lower max_tokens"
            )
        for tokens in (*prompts, sampling.stop_token_ids or (0,)):
            if min(tokens) < 0 or max(tokens) >= self.vocab_size:
                raise ValueError(
                    f"token ids go from {min(tokens)} to {max(tokens)}; they must be from 0 to {self.vocab_size - 1}"
                )


class DecodeBatch:
    """The rows of one request with their KV cache. `step` adds one token to every row that has not ended."""

    def __init__(self, model: CausalModel, request: Request) -> None:
        self.request = request
        self._model = model
        self._version: WeightVersion | None = None
        self._cache: DynamicCache | None = None
        self._rows: Sequence[DecodeRow] = ()
        self._mask = torch.empty(0)  # num_rows x cached tokens: 0 for padding, 1 for a token

    def step(self, version: WeightVersion | None) -> None:
        """Compute the next tokens. `version`: that of the present weights."""
        if self._cache is None or version != self._version:
            # Unset until the pass has succeeded, so that a model that raises leaves no partial cache.
            self._cache, cache = None, DynamicCache(config=self._model.config)
            self._rows = [row for row in self.request.rows if row.finish_reason is None]
            sequences = [[*row.prompt, *row.output] for row in self._rows]
            length = max(map(len, sequences))
            padding = [[0] * (length - len(ids)) for ids in sequences]
            tokens = [[*zeros, *ids] for zeros, ids in zip(padding, sequences, strict=True)]
            mask = [[*zeros, *[1] * len(ids)] for zeros, ids in zip(padding, sequences, strict=True)]
            self._mask = torch.tensor(mask, device=self._model.device)
            logits = self._model.logits(torch.tensor(tokens, device=self._model.device), self._mask, cache)
            self._cache, self._version = cache, version
        else:
            self._mask = functional.pad(self._mask, (0, 1), value=1)
            newest = torch.tensor([[row.output[-1]] for row in self._rows], device=self._model.device)
            logits = self._model.logits(newest, self._mask, self._cache)
        for row, token, logprobs in zip(self._rows, *_sample(logits.float(), self._rows), strict=True):
            if row.finish_reason is None:
                row.append(token, version, logprobs)
        self.request.answer_if_over()


def _sample(logits: torch.Tensor, rows: Sequence[DecodeRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Choose a token for each row of `logits` (num_rows, vocabulary): the likeliest, or one sampled from top_p."""
    sampling = rows[0].request.sampling
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        # In fp32 the error of a cumulative sum over a large vocabulary exceeds the probability of many tokens.
        probs = torch.softmax(logits / sampling.temperature, dim=-1, dtype=torch.float64)
        if sampling.top_p < 1:  # keep the smallest set of likeliest tokens whose probabilities add up to top_p
            ordered, order = probs.sort(dim=-1, descending=True)
            before = ordered.cumsum(dim=-1) - ordered
            probs = torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill_(before >= sampling.top_p, 0))
        sums = probs.cumsum(dim=-1)
        at = sums[:, -1:] * sums.new_tensor([[row.random.random()] for row in rows])
        tokens = torch.searchsorted(sums, at, right=True).clamp_(max=logits.shape[-1] - 1).squeeze(-1)
    return tokens.tolist(), _logprobs(logits, tokens, sampling.logprobs)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int | None) -> list[TokenLogprobs | None]:
    """Return log-probabilities, in fp32 from the raw `logits`, of the tokens and of the `num_top` likeliest ones."""
    if num_top is None:
        return [None] * len(tokens)
    logprobs = torch.log_softmax(logits, dim=-1).clamp_(min=_LOWEST_LOGPROB)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist()
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    tops = [tuple(zip(*each, strict=True)) for each in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprobs(one, top) for one, top in zip(chosen, tops, strict=True)]
