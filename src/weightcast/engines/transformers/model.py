"""A transformers causal language model, called the way its own `generate` calls it, and what it can take."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from weightcast.engines.transformers.request import SamplingParams
from weightcast.engines.transformers.text import Tokenizer


class CausalModel:
    """Wraps a model, which is put into eval mode; the tokenizer is asked for its end-of-sequence token only."""

    def __init__(self, model: Any, tokenizer: Tokenizer | None) -> None:
        self._model = model.eval()
        self.device: torch.device = model.device
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = int(getattr(config, "max_position_embeddings", None) or 1 << 31)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        takes = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def logits(
        self, tokens: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, cache: DynamicCache
    ) -> torch.Tensor:
        """Of the last position: rows x vocabulary. `mask` and `positions` are None if no row is padded."""
        padded = {} if mask is None else {"attention_mask": mask, "position_ids": positions}
        answer = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, **padded, **self._options)
        logits: torch.Tensor = answer.logits[:, -1]
        return logits

    def check(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        """Raises ValueError for prompts or stop tokens that this model can't take."""
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


def _eos_token_ids(model: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        found.update([] if eos is None else [eos] if isinstance(eos, int) else eos)
    return frozenset(found)
