"""The public surface: `__all__` is what can be imported, and each name is where its type checker finds it."""

from __future__ import annotations

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

import weightcast

INIT = Path(weightcast.__file__)


@pytest.mark.parametrize("name", weightcast.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(weightcast, name) is not None
    assert name in dir(weightcast)


def test_a_name_is_the_same_object_as_in_its_home() -> None:
    for name, home in weightcast._HOMES.items():
        assert getattr(weightcast, name) is getattr(importlib.import_module(home), name)


def test_all_is_what_a_type_checker_sees() -> None:
    (block,) = (n for n in ast.parse(INIT.read_text()).body if isinstance(n, ast.If))
    typed = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert typed == weightcast._HOMES
    assert set(weightcast.__all__) == {*weightcast._HOMES, "errors", "__version__"}
    assert len(weightcast.__all__) == len(set(weightcast.__all__))


def test_what_most_programs_need_is_at_the_top_and_no_more() -> None:
    assert len(set(weightcast.__all__) - {"__version__"}) <= 30


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'weightcast' has no attribute 'Publicher'"):
        _ = weightcast.Publicher  # type: ignore[attr-defined]


def test_every_public_name_has_a_docstring() -> None:
    for name in set(weightcast.__all__) - {"__version__"}:
        assert getattr(weightcast, name).__doc__, name


def test_the_version_is_that_of_the_package_and_of_the_changelog() -> None:
    root = INIT.parents[2]
    assert tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "weightcast.__version__"
    }
    assert weightcast.__version__ in (root / "CHANGELOG.md").read_text()
