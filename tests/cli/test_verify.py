"""`compare`: every way in which an engine may hold something else than a checkpoint."""

from __future__ import annotations

import pytest

from weightcast.cli.verify import Difference, Holding, compare
from weightcast.format.manifest import TensorSpec

A = TensorSpec("a", "bfloat16", (2, 3))
B = TensorSpec("b", "bfloat16", (4,))
TIED = TensorSpec("embed", "bfloat16", (2, 3), aliases=("head",))


def holding(*tensors: tuple[TensorSpec, str]) -> Holding:
    return Holding([spec for spec, _ in tensors], {spec.name: digest for spec, digest in tensors})


def kinds(found: list[Difference]) -> list[tuple[str, str]]:
    return [(difference.name, difference.what) for difference in found]


def test_the_same_is_no_difference() -> None:
    assert compare(holding((A, "1"), (B, "2")), holding((B, "2"), (A, "1"))) == []


@pytest.mark.parametrize(
    "other", [(A, "9"), (TensorSpec("a", "float16", (2, 3)), "1"), (TensorSpec("a", "bfloat16", (3, 2)), "1")]
)
def test_values_dtype_and_shape(other: tuple[TensorSpec, str]) -> None:
    assert kinds(compare(holding((A, "1")), holding(other))) == [("a", "differs")]


def test_missing_and_unknown() -> None:
    assert kinds(compare(holding((A, "1")), holding((B, "2")))) == [("a", "missing"), ("b", "unknown")]


def test_a_tied_tensor_goes_by_any_of_its_names() -> None:
    other_way = TensorSpec("head", "bfloat16", (2, 3), aliases=("embed",))
    assert compare(holding((TIED, "1")), holding((other_way, "1"))) == []
    assert compare(holding((TensorSpec("embed", "bfloat16", (2, 3)), "1")), holding((TIED, "1"))) == []


def test_tied_in_one_and_apart_in_the_other() -> None:
    embed, head = TensorSpec("embed", "bfloat16", (2, 3)), TensorSpec("head", "bfloat16", (2, 3))
    assert compare(holding((embed, "1"), (head, "1")), holding((TIED, "1"))) == []
    assert kinds(compare(holding((embed, "1"), (head, "2")), holding((TIED, "1")))) == [("head", "differs")]
    assert kinds(compare(holding((TIED, "1")), holding((embed, "1"), (head, "2")))) == [("embed", "differs")]


def test_an_engines_tied_parameter_is_compared_with_what_it_is_tied_to() -> None:
    """A checkpoint has one name for both; vLLM's head is a parameter of its own that lies where the embedding lies."""
    embed, head = TensorSpec("embed", "bfloat16", (2, 3)), TensorSpec("head", "bfloat16", (2, 3), aliases=("embed",))
    assert compare(holding((embed, "1")), holding((embed, "1"), (head, "1"))) == []
    assert compare(holding((TIED, "1")), holding((embed, "1"), (head, "1"))) == []
    assert kinds(compare(holding((embed, "1")), holding((embed, "1"), (head, "2")))) == [("head", "differs")]
    both = kinds(compare(holding((embed, "1")), holding((embed, "2"), (head, "2"))))
    assert both == [("embed", "differs"), ("head", "differs")]


def test_a_digest_that_is_not_there_is_a_difference() -> None:
    engine = Holding([A], {})
    assert kinds(compare(holding((A, "1")), engine)) == [("a", "differs")]
