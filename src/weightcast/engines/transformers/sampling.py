"""Logits to tokens for a whole batch at once: greedy or by the inverse of the distribution, with log-probabilities.

Invariants: a row's token depends on its own logits, parameters and random stream only; log-probabilities are those of
the raw logits in fp32. One transfer to the host per step, however many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast.engines.transformers.request import DecodeRow, TokenLogprobs

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity: what can't be chosen is reported as this, as vLLM does."""


class Sampler:
    """The parameters of a fixed set of rows as tensors. Make a new one when the set changes."""

    def __init__(self, rows: Sequence[DecodeRow], device: torch.device) -> None:
        params = [row.request.sampling for row in rows]
        self._rows = rows
        self._device = device
        self._drawn = [i for i, p in enumerate(params) if p.temperature > 0]
        self._temperatures = torch.tensor([[params[i].temperature] for i in self._drawn], device=device)
        self._nuclei = [j for j, i in enumerate(self._drawn) if params[i].top_p < 1]
        self._top_ps = torch.tensor([[params[self._drawn[j]].top_p] for j in self._nuclei], device=device)
        self._num_top = [-1 if p.logprobs is None else p.logprobs for p in params]
        self._reported = [i for i, num_top in enumerate(self._num_top) if num_top >= 0]

    def __call__(self, logits: torch.Tensor) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Choose a token for each row of `logits` (num_rows x vocabulary)."""
        logits = logits.float()
        if len(self._drawn) == len(self._rows):
            tokens = self._draw(logits)
        else:
            tokens = logits.argmax(dim=-1)
            if self._drawn:
                tokens[self._drawn] = self._draw(logits[self._drawn])
        return tokens.tolist(), self._logprobs(logits, tokens)

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        # fp64: in fp32 the running sum over a large vocabulary is off by more than many tokens' probability.
        probs = torch.softmax(logits / self._temperatures, dim=-1, dtype=torch.float64)
        if self._nuclei:
            rest = probs[self._nuclei] if len(self._nuclei) < len(probs) else probs
            probs[self._nuclei] = _keep_nucleus(rest, self._top_ps)
        sums = probs.cumsum(dim=-1)
        uniforms = torch.tensor([[self._rows[i].uniform()] for i in self._drawn], dtype=torch.float64)
        at = uniforms.to(self._device) * sums[:, -1:]
        return torch.searchsorted(sums, at, right=True).clamp_(max=logits.shape[-1] - 1).squeeze(-1)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(self._rows)
        if not self._reported:
            return found
        everyone = len(self._reported) == len(self._rows)
        logprobs = torch.log_softmax(logits if everyone else logits[self._reported], dim=-1)
        picked = (tokens if everyone else tokens[self._reported]).unsqueeze(-1)
        chosen = logprobs.gather(-1, picked).clamp_(min=_LOWEST_LOGPROB).squeeze(-1).tolist()
        values, ids = _top(logprobs, max(self._num_top))
        for j, i in enumerate(self._reported):
            k = self._num_top[i]
            found[i] = TokenLogprobs(chosen[j], tuple(zip(ids[j][:k], values[j][:k], strict=True)))
        return found


def _keep_nucleus(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of likeliest tokens whose probabilities reach top_p."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill_(before >= top_ps, 0))


def _top(logprobs: torch.Tensor, num_top: int) -> tuple[list[list[float]], list[list[int]]]:
    if num_top == 0:
        return [[]] * len(logprobs), [[]] * len(logprobs)
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return values.clamp_(min=_LOWEST_LOGPROB).tolist(), ids.tolist()
