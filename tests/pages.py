"""The commands of the pages, and a shell that runs them as they stand: with ports, host names and a /mnt of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
CONTINUED = re.compile(r"\s*\\\n\s*")
COMMENT = re.compile(r"(^|\s{2,})#\s.*")
UNSHARE = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]

SHELL = """
set -euo pipefail
ip link set lo up
hostname trainer-0
mount -t tmpfs none /mnt
printf '127.0.0.1 localhost HOST engine-0 trainer-0 trainer-1\\n' >hosts
mount --bind hosts /etc/hosts
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
serve() {
    local url=$1
    shift
    "$@" &
    servers+=($!)
    python - "$url" $! <<'END'
import os, sys, time, urllib.request
deadline = time.monotonic() + 400
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=10).read()
        break
    except OSError as error:
        if not os.path.exists(f"/proc/{sys.argv[2]}") or time.monotonic() > deadline:
            sys.exit(f"{sys.argv[1]} does not answer: {error}")
        time.sleep(0.1)
END
}
follow() {
    : >followed # here, lest the lines of the last one are read before the next one's shell has emptied it
    "$@" >followed &
    until grep -q '^version' followed; do kill -0 $! && sleep 0.1; done
    kill -TERM $!
    wait $!
}
on_two_hosts() {
    "$@" &
    local other=$!
    "$@"
    wait $other
}
servers=()
"""
END = """
for server in "${servers[@]}"; do kill -TERM "$server"; wait "$server" || (($? == 143)); done
echo "$SECONDS s: every command ended well"
"""

PACKAGES = "\n".join(path for path in sys.path if path.endswith("-packages"))
"""Where this environment's packages are: pip finds them in an environment that a page makes, and asks no index."""
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def commands(page: Path) -> list[str]:
    text = CONTINUED.sub(" ", page.read_text())
    lines = (line for _, body in FENCE.findall(text) for line in textwrap.dedent(body).splitlines())
    return [command for line in lines if (command := COMMENT.sub("", line).strip())]


def in_shell(command: str) -> str:
    """The command, after what the shell above does with its kind."""
    if command == "python3 -m venv .venv":
        # Without setuptools of its own, which may be too old to build with.
        return f"""{command}; .venv/bin/pip uninstall -qy setuptools
        echo {shlex.quote(PACKAGES)} >$(echo .venv/lib/python*/site-packages)/packages.pth"""
    if "sglang.launch_server" in command:
        return f"serve http://127.0.0.1:30000/model_info env {command}"
    if "serve-store" in command:
        return f"serve http://127.0.0.1:8200/health {command}"
    if " serve " in command:
        return f"serve http://127.0.0.1:8000/health env {command.removesuffix('&')}"
    if command.startswith("weightcast dashboard"):
        return f"serve http://127.0.0.1:8090/ env {command}"
    if command.startswith("weightcast follow"):
        return f"follow {command}"
    command = command.replace("PATH_TO_WEIGHTCAST", "$PWD")
    return f"on_two_hosts {command}" if "--nnodes 2" in command else command


def put_repository(folder: Path) -> Path:
    """The repository's files under their names. `src`, where pip leaves files, is a copy."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("src", "build", "weightcast-demo"):
            (folder / path.name).symlink_to(path)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    return folder


def run(lines: Iterable[str], folder: Path, environment: Mapping[str, str] = {}) -> None:
    """Run them in one shell, in `folder`. Each must end well; what serves goes on until the end, and must then."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces are not permitted here")
    script = [SHELL, *(f'echo "$SECONDS s:" {shlex.quote(line)}; {in_shell(line)}' for line in lines), END]
    done = subprocess.run(
        [*UNSHARE, "bash", "-c", "\n".join(script)],
        cwd=folder,
        env={
            **os.environ,
            **NO_INDEX,
            "WEIGHTCAST_PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            **environment,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith(" s: every command ended well\n")
    assert "Traceback" not in done.stderr, done.stderr
    print(done.stdout)
