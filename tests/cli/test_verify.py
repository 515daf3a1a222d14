"""`compare`: every way in which an engine may hold something else than a checkpoint."""

from __future__ import annotations

import pytest

from weightcast.cli.verify import Difference, compare
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldWeights

A = TensorSpec("a", "bfloat16", (2, 3))
B = TensorSpec("b", "bfloat16", (4,))
TIED = TensorSpec("embed", "bfloat16", (2, 3), aliases=("head",))


def held(*tensors: tuple[TensorSpec, str]) -> HeldWeights:
    return HeldWeights("", "", [spec for spec, _ in tensors], {spec.name: digest for spec, digest in tensors})


def kinds(found: list[Difference]) -> list[tuple[str, str]]:
    return [(difference.name, difference.what) for difference in found]


def test_the_same_is_no_difference() -> None:
    assert compare(held((A, "1"), (B, "2")), held((B, "2"), (A, "1"))) == []


@pytest.mark.parametrize(
    "other", [(A, "9"), (TensorSpec("a", "float16", (2, 3)), "1"), (TensorSpec("a", "bfloat16", (3, 2)), "1")]
)
def test_values_dtype_and_shape(other: tuple[TensorSpec, str]) -> None:
    assert kinds(compare(held((A, "1")), held(other))) == [("a", "differs")]


def test_missing_and_unknown() -> None:
    assert kinds(compare(held((A, "1")), held((B, "2")))) == [("a", "missing"), ("b", "unknown")]


def test_a_tied_tensor_goes_by_any_of_its_names() -> None:
    other_way = TensorSpec("head", "bfloat16", (2, 3), aliases=("embed",))
    assert compare(held((TIED, "1")), held((other_way, "1"))) == []
    assert compare(held((TensorSpec("embed", "bfloat16", (2, 3)), "1")), held((TIED, "1"))) == []


def test_tied_in_one_and_apart_in_the_other() -> None:
    embed, head = TensorSpec("embed", "bfloat16", (2, 3)), TensorSpec("head", "bfloat16", (2, 3))
    assert compare(held((embed, "1"), (head, "1")), held((TIED, "1"))) == []
    assert kinds(compare(held((embed, "1"), (head, "2")), held((TIED, "1")))) == [("head", "differs")]
    assert kinds(compare(held((TIED, "1")), held((embed, "1"), (head, "2")))) == [("embed", "differs")]


def test_an_engines_tied_parameter_is_compared_with_what_it_is_tied_to() -> None:
    """A checkpoint has one name for both; vLLM's head is a parameter of its own that lies where the embedding lies."""
    embed, head = TensorSpec("embed", "bfloat16", (2, 3)), TensorSpec("head", "bfloat16", (2, 3), aliases=("embed",))
    assert compare(held((embed, "1")), held((embed, "1"), (head, "1"))) == []
    assert compare(held((TIED, "1")), held((embed, "1"), (head, "1"))) == []
    assert kinds(compare(held((embed, "1")), held((embed, "1"), (head, "2")))) == [("head", "differs")]
    both = kinds(compare(held((embed, "1")), held((embed, "2"), (head, "2"))))
    assert both == [("embed", "differs"), ("head", "differs")]


def test_a_digest_that_is_not_there_is_a_difference() -> None:
    engine = HeldWeights("", "", [A], {})
    assert kinds(compare(held((A, "1")), engine)) == [("a", "differs")]
