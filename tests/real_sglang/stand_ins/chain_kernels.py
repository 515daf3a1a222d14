"""What SGLang's kernels for CPUs do for a draft model that proposes a chain of tokens, written with torch.

They stand in for those of `sgl_kernel`, which has no build for CPUs to install, under its names and with its arguments.
"""

from __future__ import annotations

from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, _: int
) -> None:
    """Write the next `places` into each row of the table."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[taken : taken + end - start]
        taken += end - start


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, _: int
) -> None:
    """Read `places` from each row of the table."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[taken : taken + end - start] = table[row, start:end]
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    places: torch.Tensor,
    width: int,
    topk: int,
    num_steps: int,
) -> None:
    assign_extend_cache_locs_cpu(rows, table, starts, starts + topk * num_steps, places, width)


def fill_bonus_tokens_cpu(tokens: torch.Tensor, lengths: torch.Tensor, last: torch.Tensor, stride: int) -> None:
    """Take the last accepted token of each request."""
    last.copy_(tokens.flatten()[torch.arange(len(lengths)) * stride + lengths - 1])


def build_tree_kernel_efficient_cpu(
    _parents: torch.Tensor,
    _scores: torch.Tensor,
    lengths: torch.Tensor,
    _mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    _next_sibling: torch.Tensor,
    topk: int,
    _num_steps: int,
    num_tokens: int,
    _mode: int,
) -> None:
    """Of a chain: each token follows the one before it, and the attention that stands in needs no mask."""
    assert topk == 1
    places = torch.arange(num_tokens)
    positions.copy_((lengths[:, None] + places).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(places + 1 < num_tokens, places + 1, -1).expand_as(next_token))


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    target_predict: torch.Tensor,
    **_: Any,
) -> None:
    """Accept the proposed tokens that the model would have chosen, up to the first other one."""
    for row, (proposed, chosen) in enumerate(zip(candidates.tolist(), target_predict.tolist(), strict=True)):
        num = 0
        while num + 1 < len(proposed) and proposed[num + 1] == chosen[num]:
            num += 1
        accept_token_num[row] = num
        accept_index[row, : num + 1] = retrive_index[row, : num + 1]
        predicts[retrive_index[row, : num + 1]] = target_predict[row, : num + 1].to(predicts.dtype)


def copy_all_layer_kv_cache_cpu(_data: torch.Tensor, _sizes: torch.Tensor, to: torch.Tensor, of: torch.Tensor) -> None:
    """Move accepted tokens to the front: those of a chain are there."""
    assert torch.equal(to, of)
