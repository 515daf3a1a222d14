"""Where a test finds the environment of an engine, and what becomes of it when there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from real_engines.process import python_of


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_environment_skips_a_test_but_fails_it_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CI", ci)
    either = (pytest.fail.Exception, pytest.skip.Exception)
    monkeypatch.setenv("WEIGHTCAST_NOENGINE_PYTHON", str(tmp_path / "python"))
    with pytest.raises(either, match="scripts/test-noengine") as named:
        python_of("noengine")
    monkeypatch.delenv("WEIGHTCAST_NOENGINE_PYTHON")
    with pytest.raises(either, match=r"\.venv-noengine") as made:
        python_of("noengine")
    assert (named.type, made.type) == (outcome, outcome)


def test_an_engine_s_interpreter_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("WEIGHTCAST_NOENGINE_PYTHON", sys.executable)
    assert python_of("noengine") == sys.executable


def test_the_engine_of_this_interpreter_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_PYTEST_PYTHON", "/elsewhere")
    assert python_of("pytest") == sys.executable
