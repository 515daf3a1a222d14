"""Check of the weights for NaN and infinity, by the smallest and the largest value of each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weightcast.errors import NotFiniteError, listed
from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.manifest import TensorSpec
from weightcast.trainer.packer import Shard

_STEP_ELEMENTS = 4 << 20
"""Number of elements of a one-byte dtype that are converted at once."""


@torch.no_grad()
def require_finite(specs: Sequence[TensorSpec], shards: Sequence[Shard]) -> None:
    """Raise NotFiniteError naming each tensor that has NaN or infinity, or would have it in its spec's dtype.

    Reads each element once. On a GPU all work is queued before the one wait.
    """
    found: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for shard in shards:
        for part in _comparable(shard.data):
            ends = torch.stack(torch.aminmax(part))
            dtype = TORCH_DTYPES[specs[shard.tensor].dtype]
            # Casts are monotonic: if any value overflows, one of these two does.
            cast = ends.to(dtype) if dtype != shard.data.dtype and dtype.is_floating_point else ends
            found.setdefault(part.device, []).append((shard.tensor, torch.cat([ends.double(), cast.double()])))
    problems: dict[str, str] = {}
    for of_device in found.values():
        for (number, _), (low, high, *cast) in zip(
            of_device, torch.stack([t for _, t in of_device]).tolist(), strict=True
        ):
            spec = specs[number]
            if low != low:  # aminmax returns NaN twice if there is one
                problems[spec.name] = f"{spec.name!r} holds NaN"
            elif float("inf") in (-low, high):
                problems.setdefault(spec.name, f"{spec.name!r} holds infinity")
            elif any(abs(value) == float("inf") for value in cast):
                problems.setdefault(
                    spec.name, f"{spec.name!r} has values up to {max(-low, high):g}, too large for {spec.dtype}"
                )
    if problems:
        raise NotFiniteError(
            f"the weights are not finite, so nothing was sent: {listed(list(problems.values()))}; mend the weights, or "
            "publish with check_finite=False",
            list(problems.values()),
        )


def _comparable(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor, or its parts, in a dtype that `aminmax` supports."""
    if data.is_complex():
        yield torch.view_as_real(data)
    elif data.is_floating_point() and data.itemsize > 1:
        yield data
    elif data.is_floating_point() and data.dtype != torch.float4_e2m1fn_x2:  # this dtype has neither NaN nor infinity
        for start in range(0, data.numel(), _STEP_ELEMENTS):
            yield data.reshape(-1)[start : start + _STEP_ELEMENTS].float()
