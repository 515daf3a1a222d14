"""`scripts/bench`: what it says of a wrong call."""

from __future__ import annotations

import pytest
import torch
from publishing.__main__ import main

from weightcast.cli import exits


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("--num-engines 0", exits.USAGE, "num_engines is 0"),
        ("--shapes uniform --total-mib 99999999", exits.NEGATIVE, "left: measure a smaller model"),
        ("--transport nccl", exits.USAGE, "nccl moves memory of a GPU only: add --device cuda, or use gloo"),
        ("--device cuda", exits.USAGE, "this torch finds no CUDA device here: leave out --device"),
    ],
)
def test_a_wrong_call_is_one_line(
    command: str,
    status: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(command.split()) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("scripts/bench: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("option", "says"),
    [("--shapes gpt-9", "invalid choice"), ("--runs many", "invalid int"), ("--bucket-size-mib 0", "at least 1")],
)
def test_a_value_out_of_range_is_a_usage_error(option: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(option.split())
    assert ended.value.code == exits.USAGE
    assert says in capsys.readouterr().err


def test_help_has_examples_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "examples:\n  scripts/bench" in text
    assert exits.TABLE in text
