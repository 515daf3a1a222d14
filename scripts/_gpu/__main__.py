"""Runs the sections one after the other, each in a child with a time limit; one JSON line each, a table at the end.

Exit status: 0 if no section failed (those that were skipped, in whole or in part, are named), 1 if one did or did not
run, 2 for wrong arguments or a machine that can't run it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _gpu import LETTERS, LIMITS, visible_gpu
from _gpu.forked import ADDRESS, Forked

ROOT = Path(__file__).parents[2]
NUM_TAIL_LINES = 40
DRY_PATIENCE = 3
MARGIN_SECONDS = 8.0
"""Seconds of `--seconds` that are reserved for ending a section and for the table."""
SETTLE_SECONDS = 5.0
BASELINE_MIB = 64
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
SERVED = ("weightcast.engines.tensors", "weightcast.control.client", "uvicorn", "uvicorn.protocols.http.h11_impl")
ASK_TORCH = "import torch; print(torch.__version__, torch.cuda.is_available())"
LEAST_TORCH = (2, 8)


def main() -> int:
    args = arguments()
    if args.wheels:
        return collect(args.wheels, args.python, args.with_torch)
    names = list(LIMITS) if args.only is None else args.only
    args.out.mkdir(parents=True, exist_ok=True)
    # Indices in CUDA_VISIBLE_DEVICES mean those of nvidia-smi.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # On SIGTERM, too, a section's children and leftovers are ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="weightcast-gpu-") as folder:
        python = find_python(Path(folder), args.wheels_from, args.dry)
        if python is None:
            return 2
        server = warm(python, Path(folder)) if args.dry else contextlib.nullcontext()
        end, before = time.monotonic() + args.seconds, used_mib()
        print(f"{len(names)} sections in {args.seconds:g} s; results in {args.out / 'gpu.jsonl'}", flush=True)
        with server:
            for name in names:
                left = end - time.monotonic() - MARGIN_SECONDS
                # CPUs of a dry run may have other work.
                limit = min(LIMITS[name] * (DRY_PATIENCE if args.dry else 1), left)
                if left < MARGIN_SECONDS:
                    why = f"{max(left, 0):.0f} s were left: --only {name}"
                    result = {"section": name, "status": "not run", "why": why, "seconds": 0.0}
                else:
                    result = run_section(name, python, Path(folder), limit, args.dry, before)
                    before = result["device_mib"][1]
                with (args.out / "gpu.jsonl").open("a") as lines:
                    lines.write(json.dumps(result | {"dry": args.dry}) + "\n")
    return report(args.out, names, args.dry)


def arguments() -> argparse.Namespace:
    def sections(text: str) -> list[str]:
        names = [LETTERS.get(word, word) for word in text.split(",")]
        if unknown := [name for name in names if name not in LIMITS]:
            known = ", ".join(f"{letter}={name}" for letter, name in LETTERS.items())
            raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; known: {known}")
        return names

    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    add = parser.add_argument
    add("--only", type=sections, metavar="c,e", help="sections to run, by letter or name; the table keeps the others'")
    add("--seconds", type=float, default=560.0, help="time limit of all sections together (default: %(default)g)")
    add("--out", type=Path, default=ROOT / "build" / "gpu", help="directory for gpu.jsonl and gpu.md (%(default)s)")
    add("--dry", action="store_true", help="run the sections' logic on a CPU, which proves nothing about a GPU")
    add("--from", type=Path, dest="wheels_from", metavar="DIR", help="wheels of packages that this Python lacks")
    add("--wheels", type=Path, metavar="DIR", help="download those wheels into DIR, and run no section")
    add("--python", default=".".join(map(str, sys.version_info[:2])), help="with --wheels: for Python %(default)s")
    add("--with-torch", action="store_true", help="with --wheels: torch, too (several GB), for a machine without it")
    return parser.parse_args()


# --- the interpreter ---


def collect(folder: Path, python: str, with_torch: bool) -> int:
    """Download what weightcast, its server and its GPU tests need, for x86-64 and that Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # transformers is for real models only, and brings many others.
    wanted = [*project["dependencies"], *extras["serve"], *extras["testing"], "pytest-timeout>=2.3"]
    left_out = {"transformers"} | (set() if with_torch else {"torch"})
    wanted = [line for line in wanted if name_of(line) not in left_out]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["-d", str(folder), "--implementation", "cp", "--python-version", python]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    status = subprocess.run([*command, *wanted], check=False).returncode
    size = sum(path.stat().st_size for path in folder.glob("*.whl")) >> 20
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size} MiB in {folder}", flush=True)
    return status


def find_python(folder: Path, wheels: Path | None, dry: bool) -> list[str] | None:
    """Return the command of an interpreter that has torch (with a GPU, unless `dry`) and, from the wheels, all else."""
    reasons = []
    for python in dict.fromkeys([sys.executable, str(ROOT / ".venv" / "bin" / "python")]):
        if (reason := why_not(python, dry)) is None:
            break
        reasons.append(f"{python}: {reason}")
    else:
        if wheels is None or not list(wheels.glob("torch-*.whl")):
            print(*reasons, sep="\n")
            print("name an interpreter in WEIGHTCAST_PYTHON, or")
            print("collect wheels with --wheels DIR --with-torch and pass --from DIR here", flush=True)
            return None
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        python = str(folder / "venv" / "bin" / "python")
    paths = [str(ROOT / folder) for folder in ("scripts", "src", "tests")]
    if wheels is not None:
        missing = lacking(python, wheels)
        print(f"from {wheels}: {', '.join(path.name for path in missing) or 'nothing is lacking'}", flush=True)
        if missing:
            # Into a folder of its own, and without pip: the interpreter may be somebody else's, and have none.
            site = folder / "site"
            for path in missing:
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(site)
            for part in site.glob("*.data/*lib"):
                shutil.copytree(part, site, dirs_exist_ok=True)
            paths.append(str(site))
    os.environ["PYTHONPATH"] = ":".join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    if not list((ROOT / "src" / "weightcast" / "native").glob("_core*.so")):
        print("building the native core, which takes a C compiler and setuptools", flush=True)
        build = [python, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=ROOT, env={"WEIGHTCAST_CC": "auto", **os.environ}, check=False)
    done = subprocess.run([python, "-c", "import pretended, uvicorn"], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1])
        print("collect what is missing with --wheels DIR where there is internet, and pass --from DIR here", flush=True)
        return None
    return [python, "-u", "-c"]


def why_not(python: str, dry: bool) -> str | None:
    """Return why an interpreter can't run the sections; None if its torch is sufficient."""
    if not Path(python).exists():
        return "is not there"
    done = subprocess.run([python, "-c", ASK_TORCH], capture_output=True, text=True)
    if done.returncode:
        return f"has no torch that can be imported ({(done.stderr.strip().splitlines() or ['no error'])[-1]})"
    version, has_cuda = done.stdout.split()[-2:]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < LEAST_TORCH:
        return f"has torch {version}, and weightcast needs {'.'.join(map(str, LEAST_TORCH))} or newer"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
    return None if dry or has_cuda == "True" else f"has torch {version}, which finds no CUDA device{where}"


def lacking(python: str, wheels: Path) -> list[Path]:
    """Return the wheels of the packages that the interpreter lacks in any version."""
    names = "import importlib.metadata as m; print(*{d.metadata['Name'] for d in m.distributions()}, sep='\\n')"
    found = subprocess.run([python, "-c", names], capture_output=True, text=True, check=True).stdout.split()
    there = {name_of(name) for name in found}
    return sorted(path for path in wheels.glob("*.whl") if name_of(path.name.split("-")[0]) not in there)


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].replace("_", "-").replace(".", "-").lower()


# --- a section ---


@contextlib.contextmanager
def warm(python: Sequence[str], folder: Path) -> Iterator[None]:
    """Start a process that has imported everything that sections and peers need; a dry run forks them from it."""
    address = str(folder / "forks")
    modules = ["_gpu.peers", "pretended", *(f"_gpu.{name}" for name in LIMITS), *SERVED]
    command = [*python, "import sys, _gpu.forked; _gpu.forked.serve(*sys.argv[1:])", address, *modules]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            while not Path(address).exists() and process.poll() is None:
                time.sleep(0.01)
            os.environ[ADDRESS] = address
            yield
        finally:
            os.environ.pop(ADDRESS, None)
            process.kill()


def run_section(
    name: str, python: Sequence[str], folder: Path, limit: float, dry: bool, before: int | None
) -> dict[str, Any]:
    """Run a section to its end or limit, end the processes it left behind, and return its result.

    `before`: MiB of device memory in use before it.
    """
    print(f"\n=== {name} (at most {limit:.0f} s)", flush=True)
    token, own = secrets.token_hex(8), folder / name
    own.mkdir(exist_ok=True)
    results = own / "results.jsonl"
    environment = os.environ | {"WEIGHTCAST_GPU": token, "WEIGHTCAST_GPU_DRY": str(int(dry)), "TMPDIR": str(own)}
    began = time.monotonic()
    process: Any
    if ADDRESS in environment:
        process = Forked("_gpu.section", [name, str(results)], environment, None)
    else:
        process = subprocess.Popen(
            [*python, "import sys, _gpu.section; _gpu.section.main(*sys.argv[1:])", name, str(results)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    tail: collections.deque[str] = collections.deque(maxlen=NUM_TAIL_LINES)
    reader = threading.Thread(target=echo, args=(process, tail), daemon=True)
    reader.start()
    ended = "in time"
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        ended = "at its limit"
    finally:
        left = end_all(process, token)
    reader.join(SETTLE_SECONDS)
    seconds = time.monotonic() - began
    after = settled_mib(before)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    checks = [line for line in lines if line["kind"] == "check"]
    skipped = [line["name"] for line in lines if line["kind"] == "skip"]
    failed = [f"{check['name']}: {check['found']}" for check in checks if not check["ok"]]
    if ended != "in time":
        failed.append(f"it was ended {ended} of {limit:.0f} s")
    elif process.returncode:
        failed.append(f"it ended with status {process.returncode}")
    if left and ended == "in time":
        failed.append(f"it left processes behind: {left}")
    if before is not None and after is not None and after > before + BASELINE_MIB:
        failed.append(f"{after - before} MiB of device memory were not given back")
    if not checks and not skipped and not failed:
        failed.append("it has checked nothing")
    status = "failed" if failed else "skipped" if skipped else "passed"
    result = {
        "section": name,
        "status": status,
        "seconds": round(seconds, 1),
        "num_checks": len(checks),
        "failed": failed,
        "skipped": skipped,
        "facts": {line["name"]: line["value"] for line in lines if line["kind"] == "fact"},
        "device_mib": [before, after],
        "tail": list(tail) if failed else [],
    }
    print(f"=== {name}: {status} after {seconds:.1f} s", *failed, sep="\n    ", flush=True)
    return result


def echo(process: Any, tail: collections.deque[str]) -> None:
    with io.TextIOWrapper(process.stdout, errors="replace") as lines:
        for line in lines:
            tail.append(line.rstrip()[:2000])
            print(f"  {line.rstrip()}", flush=True)


def end_all(process: Any, token: str) -> list[int]:
    """Kill the section and the processes that it left behind; return the ids of those processes."""
    had_ended = process.poll() is not None
    deadline = time.monotonic() + SETTLE_SECONDS
    # What ends by itself, now that its section has (a publisher's watchdog, an engine), is not left behind.
    while had_ended and started_with(token) and time.monotonic() < deadline:
        time.sleep(0.1)
    left: set[int] = set()
    # Again, for what was being started meanwhile.
    while (found := started_with(token)) and time.monotonic() < deadline + SETTLE_SECONDS:
        left.update(found)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.02)
    process.kill()
    process.wait()
    return sorted(left)


def started_with(token: str) -> list[int]:
    """Return the ids of living processes that have the section's mark in their environment or as their name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_marked = f"WEIGHTCAST_GPU={token}".encode() in path.read_bytes().split(b"\0")
            if is_marked or path.with_name("comm").read_text().strip() == token[:15]:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def used_mib() -> int | None:
    """Return the used memory of the sections' GPU by nvidia-smi, since this program has no CUDA context."""
    try:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={visible_gpu()}"]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=20).stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def settled_mib(before: int | None) -> int | None:
    """Return the used memory once it is back to `before`, or after a while."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (now := used_mib()) is not None and before is not None:
        if now <= before + BASELINE_MIB or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return now


# --- the end ---


def report(out: Path, names: Sequence[str], dry: bool) -> int:
    """Print and write the table of each section's last result; return the exit status of those that ran now."""
    last: dict[str, dict[str, Any]] = {}
    for line in (out / "gpu.jsonl").read_text().splitlines():
        result = json.loads(line)
        if result["dry"] == dry:
            last[result["section"]] = result
    table = "\n".join(rows(last, dry))
    (out / "gpu.md").write_text(table + "\n")
    print(f"\n{table}", flush=True)
    return 0 if all(last[name]["status"] in ("passed", "skipped") for name in names) else 1


def rows(last: Mapping[str, Mapping[str, Any]], dry: bool) -> Iterator[str]:
    if dry:
        yield "A dry run on a CPU: it proves the sections' own logic, and nothing about a GPU."
        yield ""
    else:
        facts = last.get("machine", {}).get("facts", {})
        yield ", ".join(f"{name} {facts.get(name, 'not asked')}" for name in ("GPU", "driver", "torch", "CUDA", "NCCL"))
        yield ""
    yield "| section | result | checks | s | failed or skipped |"
    yield "|---|---|---|---|---|"
    for letter, name in LETTERS.items():
        result = last.get(name, {"status": "not run", "seconds": 0.0})
        status = f"dry: {result['status']}" if dry else result["status"]
        words = [*result.get("failed", ()), *(f"skipped: {each}" for each in result.get("skipped", ()))]
        cell = "; ".join([*words, *filter(None, [result.get("why")])]).replace("|", "/").replace("\n", " ")
        yield f"| {letter}. {name} | {status} | {result.get('num_checks', 0)} | {result['seconds']:g} | {cell[:600]} |"
    for name, result in last.items():
        # What a dry run has measured is of small sizes on a CPU.
        if not dry and (facts := result.get("facts")):
            yield ""
            yield f"{name}:"
            yield ""
            yield from (f"- {fact}: {value}" for fact, value in facts.items())


if __name__ == "__main__":
    sys.exit(main())
