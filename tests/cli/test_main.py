"""The command line as a whole: help, exit statuses, and errors as one line."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast import EngineServer, TensorSpec, cli
from weightcast.cli import exits
from weightcast.errors import IncompatibleWeightsError, PeerDiedError, PublishError, PublishReport, StageSeconds

NOBODY = "http://127.0.0.1:9"  # the discard port: refused at once


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightcast.cli", *argv], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_examples_and_exit_statuses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == exits.OK
    assert f"examples:\n  weightcast {command}" in text
    assert exits.TABLE in text


def test_the_top_level_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\s", text, re.MULTILINE) for name in cli.COMMANDS)
    assert "exit status" in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["publish"],
        ["publish", "directory"],
        ["bench", "nonsense", "ipc://"],
        ["bench", "--runs", "many"],
        ["--json"],
    ],
)
def test_a_wrong_call_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == exits.USAGE
    assert "usage: weightcast" in capsys.readouterr().err


def test_a_wrong_option_is_answered_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", "--engine", NOBODY])
    assert ended.value.code == exits.USAGE
    said = capsys.readouterr().err
    assert said.startswith("usage: weightcast status ")
    assert "unrecognized arguments: --engine" in said


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
def test_a_reader_of_the_output_that_has_ended_is_no_traceback(tmp_path: Path, as_json: bool) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "weightcast.cli", "inspect", str(tmp_path), *["--json"] * as_json]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    ended = subprocess.run(
        argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=buffered
    )
    os.close(writer)
    assert ended.returncode == exits.NEGATIVE
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "model", "--port", "65536"], "from 0 to 65535"),
        (["serve", "model", "--port", "-1"], "from 0 to 65535"),
        (["serve", "model", "--threads", "0"], "at least 1"),
        (["serve", "model", "--health-max-behind", "-1"], "at least 0"),
        (["publish", "x", "--engine", NOBODY, "--bucket-size-mib", "0"], "at least 1"),
        (["publish", "x", "--engine", NOBODY, "--deadline", "nan"], "finite"),
        (["publish", "x", "--engine", NOBODY, "--deadline", "inf"], "finite"),
        (["publish", "x", "--engine", NOBODY, "--deadline", "0"], "above 0"),
        (["publish", "x", "--engine", NOBODY, "--version", "-1"], f"from 0 to {2**63 - 1}"),
        (["publish", "x", "--engine", NOBODY, "--version", str(2**63)], f"from 0 to {2**63 - 1}"),
        (["publish", "x", "--engine", NOBODY, "--transport", "memory://"], "only within one process"),
        (["publish", "x", "--engine", NOBODY, "--dtype", "int8"], "invalid choice"),
        (["bench", "--total-mib", "0"], "at least 1"),
    ],
)
def test_a_value_out_of_range_is_a_usage_error(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == exits.USAGE
    assert says in capsys.readouterr().err


def test_an_address_without_a_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "127.0.0.1:8000"]) == exits.USAGE
    assert "write http://127.0.0.1:8000" in capsys.readouterr().err


def test_a_token_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", NOBODY, "--token-file", "no/such/file"]) == exits.USAGE
    assert "--token-file no/such/file can't be read: No such file" in capsys.readouterr().err


def test_a_damaged_safetensors_file_is_status_2() -> None:
    safetensors = pytest.importorskip("safetensors")
    assert exits.status_of(safetensors.SafetensorError("x")) == exits.USAGE


def test_the_help_of_a_command_loads_no_torch() -> None:
    code = "import sys; from weightcast import cli\ntry: cli.main(['publish', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print(sorted({{'torch', 'httpx', 'transformers'}} & set(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "no/such/directory"],
        ["verify", "no/such/directory", "--engine", NOBODY],
        ["publish", "no/such/directory", "--engine", NOBODY],
        ["serve", "no/such/directory"],
        ["inspect", NOBODY, "--token-file", "no/such/file"],
        ["bench", "nccl://"],
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == exits.USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith("weightcast: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_an_engine_that_is_not_there_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", NOBODY]) == exits.NEGATIVE
    assert f"PeerDiedError: {NOBODY}/weight_info can't be reached" in capsys.readouterr().err


def test_with_json_an_error_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", NOBODY, "--json"]) == exits.NEGATIVE
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "PeerDiedError"
    assert error["peer"] == NOBODY


def test_a_stdout_that_can_not_be_written_is_no_second_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert cli.main(["inspect", "no/such/directory", "--json"]) == exits.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", NOBODY, "--debug"]) == exits.NEGATIVE
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: object) -> int:
        raise AssertionError("a bug")

    monkeypatch.setattr(cli, "_run", broken)
    with pytest.raises(AssertionError, match="a bug"):
        cli.main(["inspect", NOBODY])


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["inspect", NOBODY, "--json"]) == exits.INTERRUPTED
    assert capsys.readouterr() == ("", "weightcast: interrupted\n")


def test_on_a_terminal_it_says_that_it_imports(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "weightcast.cli", "publish", str(tmp_path / "none"), "--engine", NOBODY]
    environment = {**os.environ, "TERM": "xterm"}
    with open(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(command, stderr=theirs, env=environment, timeout=100, check=False)
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # what Linux raises at the end of a terminal
            while part := terminal.read(4096):
                shown += part
    assert done.returncode == exits.USAGE
    assert b"importing torch" in shown
    assert shown.index(b"importing torch") < shown.index(b"weightcast: FileNotFoundError")


def test_running_the_package() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("weightcast 0")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), exits.USAGE),
        (FileNotFoundError("x"), exits.USAGE),
        (ModuleNotFoundError("x"), exits.USAGE),
        (PeerDiedError("x"), exits.NEGATIVE),
        (PublishError("x", {}, PublishReport("r", 1, 0, 0, 0, "staged", StageSeconds(), {})), exits.NEGATIVE),
        (BrokenPipeError("x"), exits.NEGATIVE),
        (KeyboardInterrupt(), exits.INTERRUPTED),
        (TypeError("x"), None),
    ],
)
def test_status_of(error: BaseException, status: int | None) -> None:
    assert exits.status_of(error) == status


def test_an_error_is_one_line_and_its_problems_are_in_the_object() -> None:
    error = IncompatibleWeightsError("2 tensors\n do not fit", ["a is missing", "b is unknown"])
    assert exits.describe(error) == "IncompatibleWeightsError: 2 tensors do not fit"
    assert json.loads(exits.describe(error, as_json=True))["error"]["problems"] == ["a is missing", "b is unknown"]


def test_a_missing_extra_names_the_pip_line() -> None:
    error = ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
    assert exits.describe(error).endswith(
        "No module named 'uvicorn'; it comes with weightcast's extra `serve`: pip install 'PATH_TO_WEIGHTCAST[serve]'"
    )


@pytest.mark.parametrize("content", ["", "\n", "two words", "two\nlines", "t\u00f6ken"])
def test_a_token_file_without_one_token(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    assert cli.main(["inspect", NOBODY, "--token-file", str(file)]) == exits.USAGE
    assert "must contain one token" in capsys.readouterr().err


def test_an_engine_that_does_not_list_its_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Engine:
        """The four methods of an engine, and no way to look into it."""

        def specs(self) -> list[TensorSpec]:
            return [TensorSpec("a", "float32", (2,))]

        def load(self, tensors: object) -> None: ...

        def commit(self, version: object) -> None: ...

        def discard(self) -> None: ...

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with EngineServer(Engine()) as server:
        assert cli.main(["publish", str(tmp_path), "--engine", server.url, "--version", "7"]) == exits.OK
        capsys.readouterr()
        assert cli.main(["inspect", server.url]) == exits.OK
        assert capsys.readouterr().out.startswith("version 7 of run ")
        assert cli.main(["inspect", server.url, "--json"]) == exits.OK
        shown = json.loads(capsys.readouterr().out)
        assert (shown["engine"]["weight_version"], shown["tensors"]) == ("7", [])
        assert cli.main(["verify", str(tmp_path), "--engine", server.url]) == exits.NEGATIVE
        assert f"{server.url} reports no digests of its weights" in capsys.readouterr().err


def test_what_a_terminal_would_act_on_is_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(
        {"\x1b[31mred": torch.zeros(3), "two\nlines": torch.zeros(3), "größe": torch.zeros(3)},
        tmp_path / "a.safetensors",
    )
    assert cli.main(["inspect", str(tmp_path)]) == exits.OK
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert all(name in out for name in (r"\x1b[31mred", r"two\nlines", "größe"))
    assert exits.describe(PeerDiedError("a peer's \x1b[31mword")) == r"PeerDiedError: a peer's \x1b[31mword"
