"""`scripts/gpu`: what it makes of sections that hang, crash or leave something behind; all of them in a dry run."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import ROOT

NUM_SECTIONS = 12


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("_gpu.__main__")
    # No GPU is asked, whether there is one here or not.
    monkeypatch.setattr(module, "used_mib", lambda: None)
    monkeypatch.setattr(module, "SETTLE_SECONDS", 1.0)
    return module


def section(
    program: ModuleType, folder: Path, text: str, limit: float = 60.0, before: int | None = None
) -> dict[str, Any]:
    """Run this text as a section; `say(kind, name, **more)` reports."""
    child = f"""
import json, subprocess, sys, time
def say(kind, name, **more):
    with open(sys.argv[3], "a") as results:
        results.write(json.dumps({{"kind": kind, "name": name, **more}}) + chr(10))
{text}
"""
    found: dict[str, Any] = program.run_section(
        "machine", [sys.executable, "-u", "-c", child], folder, limit, True, before
    )
    return found


OK = 'say("check", "it is so", ok=True, found="")\n'


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (OK, "passed", ""),
        (OK + 'say("skip", "a thing that is not there")', "skipped", ""),
        (OK + 'say("check", "it adds up", ok=False, found="2 + 2 = 5")', "failed", "it adds up: 2 + 2 = 5"),
        (OK + 'say("skip", "a thing")\nsays()', "failed", "it ended with status 1"),
        ("pass", "failed", "it has checked nothing"),
        (OK + "import os; os.kill(os.getpid(), 11)", "failed", "it ended with status -11"),
    ],
)
def test_how_a_section_ended(program: ModuleType, tmp_path: Path, text: str, status: str, words: str) -> None:
    result = section(program, tmp_path, text)
    assert result["status"] == status
    assert words in "; ".join(result["failed"])
    assert bool(result["failed"]) == (status == "failed")


def test_a_section_that_hangs_is_killed_with_all_that_it_has_started(program: ModuleType, tmp_path: Path) -> None:
    """Also what has a session of its own. What was found before is kept, and what was printed."""
    text = """
say("fact", "speed", value=7)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("started", child.pid)
time.sleep(1000)
"""
    result = section(program, tmp_path, text, limit=2.0)
    assert result["status"] == "failed"
    assert result["failed"] == ["it was ended at its limit of 2 s"]
    assert result["facts"] == {"speed": 7}
    (line,) = result["tail"]
    pid = int(line.removeprefix("started "))
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_what_a_section_leaves_behind_fails_it(program: ModuleType, tmp_path: Path) -> None:
    text = OK + 'print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)'
    result = section(program, tmp_path, text)
    assert result["failed"] == [f"it left processes behind: [{result['tail'][0]}]"]


def test_device_memory_that_is_not_given_back_fails_a_section(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "used_mib", lambda: 1500)
    result = section(program, tmp_path, OK, before=1000)
    assert result["failed"] == ["500 MiB of device memory were not given back"]


def test_the_table_has_the_last_result_of_each_section(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that sections can be run in several goes, and again. A dry run's are apart."""
    facts = {"GPU": "a GPU", "torch": "2"}
    lines = [
        {"section": "machine", "status": "failed", "seconds": 1, "failed": ["no GPU"], "dry": False},
        {"section": "bytes", "status": "skipped", "seconds": 2, "skipped": ["a kernel"], "dry": False},
        {"section": "machine", "status": "passed", "seconds": 3, "facts": facts, "num_checks": 2, "dry": False},
        {"section": "bytes", "status": "passed", "seconds": 4, "dry": True},
    ]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert program.report(tmp_path, ["machine", "bytes"], False) == 0
    table = (tmp_path / "gpu.md").read_text()
    assert table.startswith("GPU a GPU, driver not asked, torch 2")
    assert "| a. machine | passed | 2 | 3 |  |" in table
    assert "| c. bytes | skipped | 0 | 2 | skipped: a kernel |" in table
    assert table.count("| not run |") == NUM_SECTIONS - 2
    assert table in capsys.readouterr().out + "\n"
    assert program.report(tmp_path, ["bytes"], True) == 0
    assert "| c. bytes | dry: passed |" in (tmp_path / "gpu.md").read_text()
    with (tmp_path / "gpu.jsonl").open("a") as file:
        file.write(json.dumps({"section": "bytes", "status": "failed", "seconds": 1, "dry": False}) + "\n")
    assert program.report(tmp_path, ["machine"], False) == 0
    assert program.report(tmp_path, ["machine", "bytes"], False) == 1


def test_sections_that_have_no_time_left_are_not_run(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "find_python", lambda *args: [sys.executable, "-c"])
    ran: list[str] = []
    monkeypatch.setattr(program, "run_section", lambda name, *args: ran.append(name))
    folder = os.environ.get("TMPDIR", "/tmp")
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry", "--seconds", "5", "--only", "a,nccl", "--out", f"{folder}/none"])
    assert program.main() == 1
    assert not ran


def test_what_an_interpreter_lacks_comes_from_wheels_and_nothing_else_does(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    wheels, folder = tmp_path / "wheels", tmp_path / "folder"
    wheels.mkdir()
    for name in ("weightcast_test_only", "pytest"):
        wheel(wheels, name)
    assert [path.name for path in program.lacking(sys.executable, wheels)] == [
        "weightcast_test_only-1.0-py3-none-any.whl"
    ]
    command = program.find_python(folder, wheels, True)
    done = subprocess.run([*command, "import weightcast_test_only as m; print(m.__file__)"], capture_output=True)
    assert done.stdout.decode().startswith(str(folder / "site"))


def wheel(folder: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_a_profile_has_no_fill_of_the_weights_in_it(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of calls at each end, as on a GPU. 60 GB that are filled are another 15 ms of a GPU."""
    speed, peers, here_section = (importlib.import_module(f"_gpu.{name}") for name in ("speed", "peers", "section"))
    calls = list[str]()
    report = {"engines": {"e": {"install_seconds": 0.1}}, "seconds": {"total": 0.2}, "num_buckets": 3, "num_bytes": 9}
    counted = {"launches": 6, "waits": 3, "busy_seconds": 0.05, "gap_seconds": [0.001, 0.003], "events": 9}

    def noted(name: str, result: Any = None) -> Any:
        return lambda *args, **kwargs: calls.append(name.format(*args)) or result

    class SilentPublisher:
        version = 0
        publish = staticmethod(noted("publish", types.SimpleNamespace(to_json=lambda: json.dumps(report), ok=True)))

    monkeypatch.setattr(here_section, "fill", noted("fill"))
    monkeypatch.setattr(here_section, "synchronize", noted("synchronize"))
    monkeypatch.setattr(peers, "start_profile", noted("profile_start"))
    monkeypatch.setattr(peers, "stop_profile", noted("profile_stop", counted))
    trainer = peers.TrainerCommands({"shapes": [["t", [2, 2]]], "device": "cpu"})
    trainer.publisher = SilentPublisher
    here = here_section.Here(tmp_path / "results", dry=False)
    speed._profiled(here, "60 GB", trainer, types.SimpleNamespace(ask=noted("{0}", counted)))
    one_end = ["fill", "synchronize", "profile_start", "publish", "profile_stop"]
    assert calls == one_end * 2
    lines = {line["name"]: line for line in map(json.loads, (tmp_path / "results").read_text().splitlines())}
    assert "2 gaps of 4.0 ms together, the longest 3.00 ms" in lines["60 GB, trainer: GPU busy"]["value"]
    assert lines["60 GB: the GPU is busy for at most 0.15 s"]["ok"]


def test_busy_time_and_gaps_of_a_trace(program: ModuleType) -> None:
    peers = importlib.import_module("_gpu.peers")
    spans = [(10e6, 2e6), (1e6, 3e6), (2e6, 1e6), (4e6, 1e6), (11.5e6, 1e6)]
    assert peers.union_seconds(spans) == 6.5
    assert peers.gaps_seconds(spans) == [5.0]
    assert peers.gaps_seconds([]) == []


def interpreter(folder: Path, name: str, version: str, then: str = "exit 1") -> Path:
    """A program that says of itself that it is Python of that version, and does `then` with everything else."""
    path = folder / name
    path.write_text(f"""#!/bin/sh
case "$2" in *version_info*) echo {version} ;; *) {then} ;; esac
""")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("version", ["3.10", "", "2.7"])
def test_an_interpreter_that_is_too_old_is_told_what_to_do(tmp_path: Path, version: str) -> None:
    environment = os.environ | {"WEIGHTCAST_PYTHON": str(interpreter(tmp_path, "old", version))}
    done = subprocess.run([ROOT / "scripts" / "gpu", "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert (f"is Python {version};" in done.stderr) is bool(version)
    assert "needs Python 3.11 or newer" in done.stderr
    assert "WEIGHTCAST_PYTHON" in done.stderr


def test_where_python3_is_too_old_a_newer_one_is_taken(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", "3.10")
    interpreter(tmp_path, "python3.11", "3.11", f'exec {sys.executable} "$@"')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("WEIGHTCAST_PYTHON", None)
    done = subprocess.run([ROOT / "scripts" / "gpu", "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "python3 is Python 3.10, weightcast needs 3.11: taking python3.11" in done.stderr
    assert "--only" in done.stdout


@pytest.mark.parametrize(
    ("says", "dry", "why"),
    [
        ("echo 2.13.0 True", False, None),
        ("echo 2.7.1 True", True, "torch 2.7.1, and weightcast needs 2.8"),
        ("echo 2.13.0 False", False, "finds no CUDA device with CUDA_VISIBLE_DEVICES=5"),
        ("echo 2.13.0 False", True, None),
        ("exit 1", True, "no torch that can be imported"),
    ],
)
def test_why_an_interpreter_can_not_run_the_sections(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, dry: bool, why: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    found = program.why_not(str(interpreter(tmp_path, "python", "3.12", says)), dry)
    assert (found is None) is (why is None)
    assert (why or "") in (found or "")


@pytest.mark.parametrize(
    ("visible", "gpu"), [(None, "0"), ("", "0"), ("5,6", "5"), ("GPU-8a2f", "GPU-8a2f"), (" 3 ", "3")]
)
def test_the_driver_is_asked_for_the_gpu_that_is_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    program, asked = importlib.import_module("_gpu.__main__"), list[str]()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def run(command: list[str], **options: Any) -> Any:
        asked.extend(command)
        return types.SimpleNamespace(stdout="1234\n")

    monkeypatch.setattr(program.subprocess, "run", run)
    assert program.used_mib() == 1234
    assert asked[0] == "nvidia-smi"
    assert asked[-1] == f"--id={gpu}"


def test_the_least_known_sections_come_first_and_letters_stay(program: ModuleType) -> None:
    names = list(program.LIMITS)
    assert names.index("nccl") < names.index("memory") < names.index("speed")
    letters = {name: letter for letter, name in program.LETTERS.items()}
    assert (letters["machine"], letters["memory"], letters["nccl"], letters["mps"]) == ("a", "e", "j", "l")


@pytest.fixture
def here(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As on a GPU that `has` so much free memory; `lines()`: what was reported."""
    made: Any = importlib.import_module("_gpu.section").Here(tmp_path / "results", dry=False)
    results = tmp_path / "results"
    made.lines = lambda: [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []

    def has(device_gib: float, host_gib: float = 1000.0) -> None:
        monkeypatch.setattr(made, "free_gib", lambda: device_gib)
        monkeypatch.setattr("weightcast.host.memory.available_bytes", lambda: int(host_gib * 2**30))

    made.has = has
    return made


def test_what_needs_more_memory_than_is_free_is_skipped_by_name(here: Any) -> None:
    here.has(23.5, 10)
    assert here.needs("a small part", device_gib=23, host_gib=9)
    assert not here.lines()
    assert not here.needs("a large part", device_gib=40)
    assert not here.needs("a part on the host", host_gib=16)
    assert [line["name"] for line in here.lines()] == [
        "a large part: 40 GiB of device memory (23.5 free)",
        "a part on the host: 16 GiB of host memory (10 free)",
    ]
    assert {line["kind"] for line in here.lines()} == {"skip"}


@pytest.mark.parametrize("name", ["memory", "speed"])
def test_sections_on_a_small_gpu_are_skipped_and_do_not_fail(here: Any, name: str) -> None:
    here.has(3)
    importlib.import_module(f"_gpu.{name}").run(here)
    assert [line["kind"] for line in here.lines()] == ["skip"]


@pytest.mark.parametrize("free_gib", [7.5, 23.5, 47.0, 79.0, 139.0])
def test_models_of_the_speed_section_fit_the_gpu(here: Any, monkeypatch: pytest.MonkeyPatch, free_gib: float) -> None:
    """Two of each, for trainer and engine; what was left out or made smaller is named."""
    speed, made = importlib.import_module("_gpu.speed"), dict[str, float]()

    def model(here: Any, rate: float, name: str, shapes: Any, **options: Any) -> None:
        made[name] = sum(2 * math.prod(shape) for _, shape in shapes) / 2**30

    monkeypatch.setattr(speed, "_copy_rate", lambda here: 1.0)
    monkeypatch.setattr(speed, "_model", model)
    here.has(free_gib)
    speed.run(here)
    assert made["1 GB"] == 1
    assert all(2 * gib + 4 < free_gib for gib in made.values()), made
    skipped = [line["name"].split(":")[0] for line in here.lines() if line["kind"] == "skip"]
    assert ("60 GB" in made) is ("60 GB" not in skipped) is (free_gib > 120)
    if free_gib > 20:
        assert max(made.values()) > min(free_gib / 2 - 4, 55), "as large as can be"
    assert all(line["kind"] == "skip" for line in here.lines()), here.lines()


@pytest.mark.parametrize("is_there", [False, True])
def test_python_h_is_looked_for(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """A C compiler alone compiles no launcher of Triton's."""
    here_section = importlib.import_module("_gpu.section")
    monkeypatch.setenv("CC", "a compiler")
    monkeypatch.setattr(here_section.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if is_there:
        (tmp_path / "Python.h").touch()
    assert (here_section.why_no_compiling() is None) is is_there
    assert is_there or "Python.h (install python3-dev" in here_section.why_no_compiling()


FACTS = {
    "primitives": "the same while another process is busy, us",
    "end_to_end": "ipc staged with undo late: median ms",
    "memory": "after 12 publishes",
    "faults": "an update that is given up while a bucket is loaded, s",
    "consumers": "shapes compiled, versions meanwhile",
    "nccl": "close after an error, s",
    "speed": "16 GB, staged",
}
"""Of each of these sections, something that only its last parts report."""


@pytest.mark.cluster
@pytest.mark.timeout(1600)
def test_every_section_runs_dry(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu", "--dry", "--out", tmp_path, "--seconds", "1500"],
        env={**os.environ, "WEIGHTCAST_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=1550,
        check=False,
    )
    results = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert done.returncode == 0, [(result["section"], result.get("failed"), result.get("tail")) for result in results]
    assert len({result["section"] for result in results}) == len(results) == NUM_SECTIONS
    assert all(result["num_checks"] for result in results)
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    facts = {result["section"]: result["facts"] for result in results}
    assert all(fact in facts[section] for section, fact in FACTS.items()), facts
    assert "proves the sections' own logic, and nothing about a GPU" in done.stdout
