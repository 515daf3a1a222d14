"""What is published in a bench run: tensor specs of real architectures in checkpoint form, or synthetic ones.

Real architectures are built by transformers on the meta device, so that names and shapes are those of a checkpoint and
no memory is spent. The specs depend on nothing but the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightcast.bench.architectures import ARCHITECTURES, WIDTHS, Field
from weightcast.checkpoint.live import checkpoint_tensors
from weightcast.format.manifest import TensorSpec

SYNTHETIC = ("many-small", "uniform")
NAMES = (*ARCHITECTURES, *SYNTHETIC)
MANY_SMALL_TENSORS = 5000
MANY_SMALL_SHAPE = (64, 64)


def named(
    shapes: str,
    *,
    layers: int | None = None,
    scale: int = 1,
    num_tensors: int = 500,
    num_bytes: int = 1 << 30,
) -> Sequence[TensorSpec]:
    """The specs that `shapes` names.

    `layers` keeps the first layers of an architecture, `scale` divides its widths. `num_tensors` equal tensors that
    fill `num_bytes` (rounded down to whole bf16 elements) are what `uniform` is. Raises ValueError for an unknown name
    or a size that is not positive.
    """
    if shapes == "many-small":
        return _equal(MANY_SMALL_TENSORS, MANY_SMALL_SHAPE)
    if shapes == "uniform":
        return uniform(num_tensors, num_bytes)
    if shapes not in ARCHITECTURES:
        raise ValueError(f"no shapes {shapes!r}; known: {', '.join(NAMES)}")
    model_type, fields = ARCHITECTURES[shapes]
    return _checkpoint_specs(model_type, _shrunk(fields, layers, scale))


def uniform(num_tensors: int, num_bytes: int) -> Sequence[TensorSpec]:
    """`num_tensors` equal flat bf16 tensors of `num_bytes` together."""
    numel = num_bytes // 2 // num_tensors if num_tensors > 0 else 0
    if numel <= 0:
        raise ValueError(f"{num_tensors} tensors cannot share {num_bytes} bytes; each needs an element of 2")
    return _equal(num_tensors, (numel,))


def _equal(num_tensors: int, shape: tuple[int, ...]) -> Sequence[TensorSpec]:
    return tuple(TensorSpec(f"blocks.{i}.weight", "bfloat16", shape) for i in range(num_tensors))


def _shrunk(fields: Mapping[str, Field], layers: int | None, scale: int) -> dict[str, Field]:
    if scale < 1:
        raise ValueError(f"scale is {scale}; it divides widths, so it must be at least 1")
    if layers is not None and layers < 1:
        raise ValueError(f"layers is {layers}; keep at least one")
    shrunk = dict(fields)
    for name in WIDTHS:
        value = fields.get(name)
        if isinstance(value, int):
            shrunk[name] = max(value // scale, 2)  # rotary embeddings need an even width
    if layers is not None:
        shrunk["num_hidden_layers"] = min(layers, fields["num_hidden_layers"] or layers)
    return shrunk


def _checkpoint_specs(model_type: str, fields: Mapping[str, Field]) -> Sequence[TensorSpec]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    return checkpoint_tensors(model)[0]
