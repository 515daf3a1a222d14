"""The digests of sent tensors: those that follow deltas are those that are computed from the whole bucket."""

from __future__ import annotations

import math
import random

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from weightcast.format.bucket import Layout, queued_digest
from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec
from weightcast.format.plan import plan
from weightcast.trainer.deltas import OriginBase
from weightcast.trainer.sent_digests import SentDigests

DTYPES = ("bfloat16", "float32", "float64", "complex128", "float8_e4m3fn", "int64", "bool")
HOSTILE = (0x7FC0, -1, -0x8000, 0x7F80, -0x80, 0, 1)
"""NaN of both signs, -0.0, infinities, zero, the smallest number: as bits of bfloat16."""


def require_followed(layout: Layout, num_steps: int, seed: int) -> None:
    """Change buckets at random; at each step compare the digests of all."""
    rng, manifest = random.Random(seed), layout.manifest
    bases = [OriginBase(manifest, manifest.digest(), origin) for origin in range(len(manifest.spans))]
    payloads = [torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8) for size in manifest.buckets]
    for step in range(num_steps):
        followed, computed = SentDigests(layout, {}), SentDigests(layout, {})
        proves = step == 0 or rng.random() < 0.7
        for base in bases:
            for index in base.own:
                payload = payloads[index]
                words = payload.view(torch.int16)
                for _ in range(rng.choice([0, 1, 30])):
                    at = rng.randrange(len(words))
                    words[at] = rng.choice([int(words[at]) ^ -0x8000, *HOSTILE])
                layout.clear_gaps(index, payload)
                if step == 0 or rng.random() < 0.05:
                    base.keep(index, payload, queued_digest(payload))
                base.encode(index, payload, queued_digest(payload), followed if proves else None)
                computed.add(index, payload)
        if proves:
            assert followed.by_name() == computed.by_name()
    assert any(base.pieces for base in bases)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=20, deadline=None)
def test_any_tensors(data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    specs = [
        TensorSpec(f"t{number}", dtype, shape)
        for number, (dtype, shape) in enumerate(
            data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=6))
        )
    ]
    hypothesis.assume(any(math.prod(spec.shape) for spec in specs))
    layout = Layout(plan(specs, data.draw(st.sampled_from([1024, 8192, 1 << 20]))))
    require_followed(layout, 4, data.draw(st.integers(0, 1 << 16)))


@pytest.mark.parametrize("columns", [(0, 64), (0, 40)])
def test_several_origins(columns: tuple[int, int]) -> None:
    """A part of the columns is many runs of its tensor."""
    specs = [TensorSpec("a", "bfloat16", (300, 64)), TensorSpec("b", "float32", (77,))]
    whole = {"b": [Region((0,), (77,))]}
    start, stop = columns
    parts = [{"a": [Region((0, start), (300, stop - start))], **whole}, {"a": [Region((0, stop), (300, 64 - stop))]}]
    layout = Layout(plan(specs, 4096, origins=parts if stop < 64 else parts[:1]))
    require_followed(layout, 8, 1)
