"""Docstrings, comments and pages in plain English: no sentence begins with What, Whether, Where or As."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "weightcast"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench" / "README.md"]

BEGINNING = re.compile(r"(?:\A\s*|[.!?:]\s+|\n\s*\n\s*|\n\s*- )(?=((?:What|Whether|Where|As)\b.*))")
BANNED = re.compile(r"\b(anew|whoever|stands still|tells|brings)\b", re.IGNORECASE)


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of modules, classes, functions and attributes: every string that is a statement, with its line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def bad_beginnings(path: Path) -> list[str]:
    return [
        f"{name_of(path)}:{line + text.count(chr(10), 0, found.start(1))}: {found[1].strip()}"
        for line, text in docstrings(path.read_text())
        for found in BEGINNING.finditer(text)
    ]


def test_sentences_of_docstrings_have_a_verb_or_a_noun_first() -> None:
    found = [line for path in files() for line in bad_beginnings(path)]
    assert not found, "begin with a verb in the imperative or with a noun:\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_of_pages_have_a_subject_first(page: Path) -> None:
    """Titles and the cells of tables are not sentences, and code is not read."""
    text = re.sub(r"```.*?```|^#.*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = [match[1].strip() for match in BEGINNING.finditer(text)]
    assert not found, "begin with a subject:\n" + "\n".join(found)


def test_docstrings_and_comments_avoid_the_words_that_style_bans() -> None:
    found = []
    for path in files():
        source = path.read_text()
        for line, text in (*docstrings(source), *comments(source)):
            found += [f"{name_of(path)}:{line}: {word[0]}" for word in BANNED.finditer(text)]
    assert not found, "use another word:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Whether it is open.", 1),
        ("\n    What it holds.", 1),
        ("Return it. As `one`, but later. Where it fails, raise.", 2),
        ("The state:\n\n    - Where it is\n", 1),
        ("The place.\n\n    What is left.\n", 1),
        ("Return whether it is open, as asked, where it is.", 0),
        ("Assets of Whatever. Aspects.", 0),
    ],
)
def test_beginnings_are_found(text: str, number: int) -> None:
    assert len(BEGINNING.findall(text)) == number
