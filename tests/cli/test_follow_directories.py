"""`weightcast follow --marker`: a loop's checkpoint directories, to reference servers; faults of both sides."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from store.store_kit import follow_command

from weightcast import cli
from weightcast.checkpoint.directories import CheckpointDirectories
from weightcast.cli import exits
from weightcast.cli.directory_follower import DirectoryFollower
from weightcast.control.server.app import EngineServer
from weightcast.engines.module import ModuleEngine
from weightcast.errors import IntegrityError, PublishError
from weightcast.seams.source import Source
from weightcast.sources.safetensors import SafetensorsSource
from weightcast.trainer.options import PublishOptions

LONG_SECONDS = 60.0


class Model(torch.nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((300,), value))
        self.bias = torch.nn.Parameter(torch.full((7,), value))


def save(root: Path, number: int, value: float | None = None, *, marker: str = "STABLE") -> Path:
    directory = root / f"step_{number}"
    directory.mkdir(parents=True, exist_ok=True)
    value = float(number) if value is None else value
    tensors = {name: tensor.detach() for name, tensor in Model(value).named_parameters()}
    save_file(tensors, directory / "model.safetensors")
    if marker:
        (directory / marker).touch()
    return directory


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[tuple[EngineServer, Model]]:
    module = Model()
    with EngineServer(ModuleEngine(module), port=port) as server:
        yield server, module


def following(
    root: Path,
    *urls: str,
    dtype: torch.dtype | None = None,
    read: Callable[[Path], Source] | None = None,
) -> DirectoryFollower:
    directories = CheckpointDirectories(root, ["STABLE"])
    return DirectoryFollower(
        directories,
        read or functools.partial(SafetensorsSource, copied=True, dtype=dtype),
        urls,
        transport="ipc://",
        token=None,
        options=PublishOptions(deadline_seconds=LONG_SECONDS),
    )


def value_of(module: Model) -> float:
    """The one value that all elements have: of one version only."""
    values = {float(v) for tensor in module.parameters() for v in tensor.detach().unique()}
    assert len(values) == 1, values
    return values.pop()


def version_of(server: EngineServer) -> tuple[str, int]:
    assert server.gate.version is not None
    return server.gate.version.run, server.gate.version.number


def test_each_complete_directory_is_a_version(tmp_path: Path) -> None:
    with serving() as (server, module), following(tmp_path, server.url) as follower:
        assert follower.poll() is None
        for number in (3, 4, 9):
            directory = save(tmp_path, number, marker="")
            assert follower.poll() is None
            (directory / "STABLE").touch()
            followed = follower.poll()
            assert followed is not None
            assert (followed.version, followed.num_bytes, value_of(module)) == (number, 4 * 307, float(number))
            assert (followed.run, number) == version_of(server)
            assert follower.poll() is None


def test_that_nothing_complete_is_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            if "has no complete version yet (a directory with the file STABLE); waiting" in text:
                (tmp_path / "step_3" / "STABLE").touch()
            return super().write(text)

    save(tmp_path, 3, marker="")
    monkeypatch.setattr("weightcast.cli.follow.GRACE_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", Stderr())
    with serving() as (server, module):
        words = ["follow", str(tmp_path), "--marker", "STABLE", "--engine", server.url, "--once"]
        assert cli.main(words) == exits.OK
    assert value_of(module) == 3


def test_sigterm_ends_it_also_while_it_has_the_lock_of_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes where Event.wait has its lock; an Event can't be set from there."""

    def wait(self: DirectoryFollower, timeout_seconds: float, *, stop: threading.Event) -> None:
        with stop._cond:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(LONG_SECONDS)

    monkeypatch.setattr(DirectoryFollower, "wait", wait)
    words = ["follow", str(tmp_path), "--marker", "STABLE", "--engine", "http://127.0.0.1:9"]
    assert cli.main(words) == exits.OK
    assert cli.main([*words, "--once"]) == exits.NEGATIVE, "no version was sent"


def test_a_cast_on_the_way(tmp_path: Path) -> None:
    module = Model().bfloat16()
    with EngineServer(ModuleEngine(module)) as server:
        save(tmp_path, 2)
        with following(tmp_path, server.url, dtype=torch.bfloat16) as follower:
            assert follower.poll() is not None
        assert value_of(module) == 2


def test_missed_ones_are_not_made_up_for(tmp_path: Path) -> None:
    with serving() as (server, module), following(tmp_path, server.url) as follower:
        for number in (1, 2, 3):
            save(tmp_path, number)
        assert follower.poll() is not None
        assert (value_of(module), version_of(server)[1], follower.poll()) == (3, 3, None)


def test_a_loop_that_starts_again_from_below(tmp_path: Path) -> None:
    with serving() as (server, module), following(tmp_path, server.url) as follower:
        save(tmp_path, 100)
        assert follower.poll() is not None
        shutil.rmtree(tmp_path / "step_100")
        save(tmp_path, 90, 5.0)
        followed = follower.poll()
        assert followed is not None
        assert (followed.version, value_of(module), version_of(server)[1]) == (90, 5.0, 90)


def test_a_directory_that_goes_away_while_it_is_read(tmp_path: Path) -> None:
    """Before it is opened, and after the last byte: nothing of it is sent, the next one is."""

    def read(path: Path) -> Source:
        if doing == ["removed before"]:
            shutil.rmtree(path)
        source = SafetensorsSource(path, copied=True)
        if doing == ["written again after"]:
            save(tmp_path, 2, -1.0)
        return source

    doing: list[str] = []
    with serving() as (server, module), following(tmp_path, server.url, read=read) as follower:
        save(tmp_path, 1)
        assert follower.poll() is not None
        for fault in ("removed before", "written again after"):
            doing[:] = [fault]
            save(tmp_path, 2)
            assert follower.poll() is None
            assert (value_of(module), version_of(server)[1]) == (1, 1)
        doing.clear()
        followed = follower.poll()
        assert followed is not None
        assert value_of(module) == -1


def test_a_marker_without_files_is_said_once(tmp_path: Path) -> None:
    with serving() as (server, module), following(tmp_path, server.url) as follower:
        save(tmp_path, 1)
        assert follower.poll() is not None
        (tmp_path / "step_2").mkdir()
        (tmp_path / "step_2" / "STABLE").touch()
        with pytest.raises(IntegrityError, match=r"step_2 is left out until it changes: it has no weights: neither"):
            follower.poll()
        assert follower.poll() is None
        assert value_of(module) == 1
        save(tmp_path, 2)
        assert follower.poll() is not None
        assert value_of(module) == 2


@pytest.mark.parametrize("damage", ["half a file", "no shard", "an adapter"])
def test_a_damaged_one_leaves_the_one_before(tmp_path: Path, damage: str) -> None:
    with serving() as (server, module), following(tmp_path, server.url) as follower:
        save(tmp_path, 1)
        directory = save(tmp_path, 2)
        file = directory / "model.safetensors"
        if damage == "half a file":
            file.write_bytes(file.read_bytes()[:-100])
        elif damage == "no shard":
            index = {"weight_map": {"weight": "model-00001-of-00001.safetensors"}}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            file.rename(directory / "adapter_model.safetensors")
            (directory / "adapter_config.json").touch()
        (directory / "STABLE").touch()
        with pytest.raises(IntegrityError, match="step_2 is left out until it changes: "):
            follower.poll()
        assert follower.poll() is not None
        assert (value_of(module), follower.poll()) == (1, None)


def test_an_engine_that_is_down_gets_the_newest_when_it_is_back(tmp_path: Path) -> None:
    """And the engine that was there is left alone."""
    with serving() as (server, module), contextlib.ExitStack() as stack:
        other, _ = stack.enter_context(serving())
        port = other.port
        with following(tmp_path, server.url, other.url) as follower:
            save(tmp_path, 1)
            assert follower.poll() is not None
            stack.close()
            save(tmp_path, 2)
            for _ in range(2):
                with pytest.raises(PublishError):
                    follower.poll()
                assert value_of(module) == 2
            served = version_of(server)
            with serving(port) as (again, other_module):
                followed = follower.poll()
                assert followed is not None
                assert (followed.version, value_of(other_module)) == (2, 2.0)
                assert version_of(server) == served == version_of(again)
                assert follower.poll() is None


def test_all_engines_down_and_back(tmp_path: Path) -> None:
    with serving() as (server, _):
        port, url = server.port, server.url
    with following(tmp_path, url) as follower:
        save(tmp_path, 1)
        with pytest.raises(PublishError):
            follower.poll()
        save(tmp_path, 2)
        with pytest.raises(PublishError):
            follower.poll()
        with serving(port) as (_, module):
            followed = follower.poll()
            assert followed is not None
            assert (followed.version, value_of(module)) == (2, 2.0)


def test_a_restart_sends_nothing_that_is_held(tmp_path: Path) -> None:
    with serving() as (server, module):
        save(tmp_path, 5)
        with following(tmp_path, server.url) as follower:
            assert follower.poll() is not None
        served = version_of(server)
        with following(tmp_path, server.url) as follower:
            followed = follower.poll()
            assert followed is not None
            assert (followed.version, followed.run, followed.num_bytes) == (5, "", 0)
            assert (version_of(server), follower.poll()) == (served, None)
            save(tmp_path, 6)
            assert follower.poll() is not None
        # The same number with other weights is sent, and so is what one engine of two lacks.
        save(tmp_path, 6, 60.0)
        with following(tmp_path, server.url) as follower:
            assert follower.poll() is not None
        assert (value_of(module), version_of(server)[1]) == (60.0, 6)
        with serving() as (other, other_module), following(tmp_path, server.url, other.url) as follower:
            assert follower.poll() is not None
            assert value_of(other_module) == 60


def test_wait_ends_when_it_is_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    with serving() as (server, _), following(tmp_path, server.url) as follower:
        stop.set()
        save(tmp_path, 1)
        assert follower.wait(LONG_SECONDS, stop=stop) is None
        stop.clear()
        assert follower.wait(LONG_SECONDS, stop=stop) is not None


def test_the_command_goes_on_until_it_is_ended(tmp_path: Path) -> None:
    """Past a directory that is damaged, which it says once."""
    root = tmp_path / "broadcasts"
    with serving() as (server, module), (tmp_path / "log").open("w") as log:
        words = (str(root), "--marker", "STABLE", "--engine", server.url)
        with follow_command(*words, stderr=log) as line:
            for number in (1, 2):
                save(root, number)
                assert line()["version"] == number
                assert value_of(module) == number
            damaged = save(root, 3, marker="")
            (damaged / "model.safetensors").write_bytes(b"no header")
            (damaged / "STABLE").touch()
            save(root, 4)
            assert line()["version"] == 4
        assert (tmp_path / "log").read_text().count("Traceback") == 0


def test_once_ends_also_where_all_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as (server, _):
        save(tmp_path, 5)
        command = ["follow", str(tmp_path), "--marker", "STABLE", "--engine", server.url, "--once"]
        assert cli.main(command) == cli.main(command) == exits.OK
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("version 5 of run ")
    assert second == "version 5: all engines have it already, nothing was sent"


def test_once_of_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "STABLE").touch()
    command = ["follow", str(tmp_path), "--marker", "STABLE", "--engine", "http://127.0.0.1:9", "--once"]
    assert cli.main(command) == exits.NEGATIVE
    assert "step_1 is left out until it changes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["DIR"], "pass --marker NAME, the file that your loop writes into each when it is complete"),
        (["file:///store", "--dtype", "bfloat16"], "--dtype works only with --marker"),
        (["file:///store", "--marker", "DONE"], "pass its path in place of file:///store"),
        (["DIR", "--marker", "a/b"], "--marker a/b is not the name of a file"),
    ],
)
def test_usage(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path) if word == "DIR" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        cli.main(["follow", *words, "--engine", "http://127.0.0.1:9"])
    assert ended.value.code == exits.USAGE
    assert message in capsys.readouterr().err
