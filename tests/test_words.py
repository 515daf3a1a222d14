"""Docstrings, comments, messages and pages in plain English; one spelling of each option."""

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
BANNED_IN_MESSAGES = re.compile(
    BANNED.pattern + r"|\b(update one end|have it say|not to be had|travels?|said so|nobody|somebody|everybody|lets? go"
    # "aborted", "dropped" or "closed" say who stops what.
    r"|(?:has|have) gone|giv(?:e|es|en) up|gave up|(?:could not|can't) be had|(?:is|are|was|were) to be)\b"
    # "list is no mapping" for "list is not a mapping"; "there is no engine" is plain.
    r"|(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b)\w+"
    # The dash of telegram style.
    r"|\s[-\u2013\u2014]{1,2}\s(?!-)",
    re.IGNORECASE,
)
FORMER_OPTIONS = re.compile(r'\bon_error=["\']|\bOnError\b|\bon_failure="(?!raise"|report")')
"""Former spellings of `on_failure="raise" | "report"`."""


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


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The strings of three words or more that are not docstrings, with their lines: errors, logs, help, reasons."""
    tree = ast.parse(source)
    documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text.count(" ") >= 2 and node not in documentation:
                yield node.lineno, text


def c_messages(source: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(r'"((?:[^"\\\n]|\\.)* (?:[^"\\\n]|\\.)*)"', source):
        yield source.count("\n", 0, found.start()) + 1, found[1]


def c_comments(source: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(r"/\*.*?\*/", source, re.DOTALL):
        yield source.count("\n", 0, found.start()) + 1, found[0]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_avoid_the_words_that_style_bans(page: Path) -> None:
    assert not BANNED.findall(page.read_text())


def test_docstrings_and_comments_avoid_the_words_that_style_bans() -> None:
    found = []
    for path in files():
        source = path.read_text()
        for line, text in (*docstrings(source), *comments(source)):
            found += [f"{name_of(path)}:{line}: {word[0]}" for word in BANNED.finditer(text)]
    assert not found, "use another word:\n" + "\n".join(found)


def test_messages_avoid_the_words_that_style_bans() -> None:
    found = [
        f"{name_of(path)}:{line}: {word[0]!r} in {text!r}"
        for path in files()
        for line, text in messages(path.read_text())
        for word in BANNED_IN_MESSAGES.finditer(text)
    ]
    assert not found, "use other words:\n" + "\n".join(found)


def test_words_of_the_native_core() -> None:
    found = []
    for path in sorted([*SRC.rglob("*.c"), *SRC.rglob("*.h")]):
        source = path.read_text()
        for pattern, texts in ((BANNED, c_comments(source)), (BANNED_IN_MESSAGES, c_messages(source))):
            found += [f"{name_of(path)}:{line}: {word[0]}" for line, text in texts for word in pattern.finditer(text)]
    assert not found, "use other words:\n" + "\n".join(found)


def test_the_option_for_failed_updates_has_one_spelling() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in (*files(), *PAGES, *sorted((ROOT / "examples").rglob("*.py")))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in FORMER_OPTIONS.finditer(line)
    ]
    assert not found, 'write on_failure="raise" or "report":\n' + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('raise TypeError(f"{kind} is no mapping of names")', 1),
        ('raise TypeError(f"{kind} is not a mapping") from exc', 0),
        ('raise ValueError("there is no engine to publish to" if empty else "it is no store")', 1),
        ('logger.warning("%s tells nothing", name)', 1),
        ('warnings.warn(f"{name}: refused - publish anew", stacklevel=2)', 2),
        ('parser.add_argument("--wait", help="seconds, or whoever comes", metavar="anew")', 1),
        ('reason = f"{name} was given up"', 1),
        ('def f(): "It is no message."', 0),
    ],
)
def test_banned_words_of_messages_are_found(source: str, number: int) -> None:
    assert sum(len(BANNED_IN_MESSAGES.findall(text)) for _, text in messages(source)) == number


def test_strings_and_comments_of_c_are_found() -> None:
    source = '/* one */ error("row %zu of \\"it\\" is bad",\n  why); x = "one"; /* two\n lines */'
    assert list(c_messages(source)) == [(1, 'row %zu of \\"it\\" is bad')]
    assert list(c_comments(source)) == [(1, "/* one */"), (2, "/* two\n lines */")]


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
