"""Prints how many lines of code Python folders have, by folder: no blank lines, comments or docstrings; with imports.

`python scripts/_code_lines.py src/weightcast`. A text that stands as a statement of its own counts as a docstring.
"""

from __future__ import annotations

import ast
import collections
import io
import sys
import tokenize
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """How many lines of a file's text have code on them."""
    docstrings, lines = set[int](), set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def by_folder(root: Path) -> dict[str, int]:
    """Each folder's lines, those of its own folders included, by its path below `root`; "." is all."""
    found: collections.Counter[str] = collections.Counter()
    for path in root.rglob("*.py"):
        lines = code_lines(path.read_text())
        for folder in path.relative_to(root).parents:
            found[str(folder)] += lines
    return dict(sorted(found.items()))


def main() -> None:
    for root in map(Path, sys.argv[1:]):
        lines = by_folder(root)
        folders = ", ".join(f"{folder} {count:,}" for folder, count in lines.items() if folder != ".")
        print(f"{root}: {lines['.']:,} lines of code{f' ({folders})' * bool(folders)}")


if __name__ == "__main__":
    main()
