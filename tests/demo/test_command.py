"""`scripts/demo`: its help, and what it says of a wrong call."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_demo.__main__ import main

from weightcast.cli import exits


def test_a_report_that_would_replace_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--quick", "--output", str(tmp_path / "file")]) == exits.USAGE
    captured = capsys.readouterr()
    assert captured.err == (
        f"scripts/demo: NotADirectoryError: --output {tmp_path}/file is no directory: "
        "name one for the report, or a new one\n"
    )
    assert captured.out == ""


def test_help_has_examples_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "examples:\n  scripts/demo" in text
    assert exits.TABLE in text
