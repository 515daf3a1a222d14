"""Words that have had several meanings have one: read from the identifiers of the source.

A name that has one of these words is in the table, with what the word means there, or is called otherwise.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[1] / "src" / "weightcast"


class Word(NamedTuple):
    """`forms`: in which it is looked for. `names`: the identifiers that may have it."""

    meaning: str
    forms: tuple[str, ...]
    names: frozenset[str] = frozenset()


WORDS = {
    "hold": Word(
        "what a rank, an engine or a checkpoint has of the weights; on the wire, the run that has an engine",
        ("hold", "holds", "held", "holder", "holding"),
        frozenset(
            {
                *("Held", "HeldBlock", "HeldParts", "HeldRegion", "HeldTensor", "HeldWeights", "_Held"),
                *("held", "_held", "_held_tied", "held_shards", "held_weights", "assert_holds"),
                "holder",
            }
        ),
    ),
    "share": Word(
        "memory that several processes of a host map; in Megatron's and its families' own names, experts of all tokens",
        ("share", "shares", "shared", "sharing"),
        frozenset(
            {
                *("SharedMemory", "SharedArena", "OwnedSharedArena", "MappedSharedArena"),
                *("shared", "_shared"),
                *("_shared_experts", "_SHARED_GATE"),
            }
        ),
    ),
    "place": Word(
        "where a tensor lies in memory",
        ("place", "places", "placed", "placing"),
        frozenset({"place", "places", "_places", "same_places", "are_in_place", "_require_in_place", "reads_in_place"}),
    ),
    "whole": Word(
        "a tensor in one piece, where a rank or a bucket could have a part of it",
        ("whole", "wholes"),
        frozenset(
            {
                *("Whole", "_Whole", "_WholeLayer", "whole", "_whole", "_wholes"),
                *("add_whole", "gather_whole", "whole_digest", "whole_tensors"),
            }
        ),
    ),
    "settle": Word(
        "after an install, keep the version or go back to the one before",
        ("settle", "settles", "settled", "settling"),
        frozenset({"Settle", "settle", "_settle", "_settles"}),
    ),
    "take": Word("nothing", ("take", "takes", "taken", "taking")),
    "spread": Word("nothing", ("spread", "spreads")),
    "known": Word("nothing", ("known",)),
}


def words_of(identifier: str) -> set[str]:
    """Return the words of a name in snake case or camel case, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield names of classes, functions, their attributes and the module's variables, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for statement in node.body:
                for target in _targets(statement):
                    if isinstance(target, ast.Name):
                        yield target.id, statement.lineno
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr, target.lineno


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the names and attributes that a statement assigns to."""
    assigned = node.targets if isinstance(node, ast.Assign) else []
    assigned = [node.target] if isinstance(node, ast.AnnAssign) else assigned
    for target in assigned:
        yield from (each for each in ast.walk(target) if isinstance(each, ast.expr))


FOUND = [
    (name, f"{path.relative_to(SRC)}:{line}")
    for path in sorted(SRC.rglob("*.py"))
    for name, line in identifiers(ast.parse(path.read_text()))
]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_has_one_meaning(word: str) -> None:
    meaning, forms, names = WORDS[word]
    others = [(name, at) for name, at in FOUND if words_of(name) & set(forms) and name not in names]
    assert not others, f"{word!r} means {meaning}; name these otherwise, or add them to the table: {others}"


@pytest.mark.parametrize("word", WORDS)
def test_the_table_has_no_name_that_is_gone(word: str) -> None:
    assert not WORDS[word].names - {name for name, _ in FOUND}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("HeldTensor", {"held", "tensor"}),
        ("_SHARED_GATE", {"shared", "gate"}),
        ("num_taken", {"num", "taken"}),
        ("_require_in_place", {"require", "in", "place"}),
        ("HTTPPlace2", {"http", "place"}),
    ],
)
def test_names_are_cut_into_words(name: str, found: set[str]) -> None:
    assert words_of(name) == found
