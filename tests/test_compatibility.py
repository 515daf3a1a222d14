"""The page of tested versions is what CI installs, and so is what this environment has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_compatibility", ROOT / "scripts" / "_compatibility.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the script reads, to be changed."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("constraints*.txt"), ROOT / "pyproject.toml"):
        shutil.copy(file, tmp_path / file.name)
    return tmp_path


def test_the_page_has_the_versions_that_are_installed(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert page == script.with_table(page), "run scripts/compatibility"
    assert "| vLLM | | 0.32.0 | | | |" in page


def test_what_weightcast_says_it_was_tested_with_is_run(script: ModuleType) -> None:
    assert script.problems() == []


def test_every_constraints_file_has_a_column(script: ModuleType) -> None:
    assert set(script.ENVIRONMENTS.values()) == {path.name for path in ROOT.glob("constraints*.txt")}
    assert all((ROOT / name).is_file() for name in script.ENVIRONMENTS)


def test_this_environment_is_one_of_them(script: ModuleType) -> None:
    """`scripts/test` installs by constraints.txt, the others by theirs."""
    found = {}
    for shown, names in script.PACKAGES.items():
        for name in names:
            try:
                found[shown] = importlib.metadata.version(name).partition("+")[0]
            except importlib.metadata.PackageNotFoundError:
                continue
    assert any(held.items() <= found.items() for held in script.pinned().values()), found


def test_another_version_shows(script: ModuleType, copy: Path) -> None:
    before = script.table(copy)
    file = copy / "constraints-verl.txt"
    file.write_text(re.sub(r"^verl==.*$", "verl==0.10.0", file.read_text(), flags=re.MULTILINE))
    assert script.table(copy) == before.replace("0.9.1", "0.10.0")
    [problem] = script.problems(copy)
    assert "verl/__init__.py says that it was tested with verl 0.9; CI runs {'0.10.0'}" in problem


def test_a_page_without_a_place_is_named(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="lacks the line"):
        script.with_table("# Compatibility\n")
