"""Fuzzing for as long as CI allows; scripts/fuzz goes on for longer with the same targets."""

from __future__ import annotations

import itertools
import random

import pytest
from hostile.fuzzer import SEEDS, TARGETS, inputs, try_one
from hypothesis import example, given
from hypothesis import strategies as st

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_mutated_is_valid_at_first(name: str) -> None:
    assert all(try_one(name, seed) for seed in SEEDS[name])


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_messages(name: str) -> None:
    rng = random.Random(20240229)
    outcomes = [try_one(name, data) for data in itertools.islice(inputs(name, rng), 3000)]
    assert not all(outcomes)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=400))
@example(data=b"")
@example(data=b"{}")
@example(data=b"\x00\x00\x00\x02{}")
@example(data=b'{"kind":"hello"}')
def test_any_bytes(name: str, data: bytes) -> None:
    try_one(name, data)


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in ("header", "frames")])
@given(value=json_values)
def test_any_json(name: str, value: object) -> None:
    import msgspec

    try_one(name, msgspec.json.encode(value))
