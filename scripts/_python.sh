# Sourced by _venv.sh and its like: goes to the repository's root; how they speak, and which Python they start from.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Processes by the hundred import weightcast: it is compiled once, whatever a user's shell says.
unset PYTHONDONTWRITEBYTECODE

# Without a C compiler the native core is built with that of the package index's wheel `ziglang` (setup.py).
export WEIGHTCAST_CC=${WEIGHTCAST_CC:-auto}

_say() { printf '[weightcast] %s\n' "$*" >&2; }

_find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    _say "no Python 3.11 or newer was found on PATH: install one, or set $1"
    return 1
}

# _install_once VENV STAMP: calls _install unless VENV holds what STAMP stands for; one script at a time.
_install_once() {
    exec {_lock}>"$1.lock"
    flock -n "$_lock" || { _say "waiting for another script that is installing"; flock "$_lock"; }
    if [[ "$(cat "$1/weightcast-stamp" 2>/dev/null)" != "$2" ]]; then
        _install
        echo "$2" >"$1/weightcast-stamp"
        _say "installed"
    fi
    exec {_lock}>&-
}

# Installs are made with --no-compile: of an engine's 24,000 modules some 5,000 are ever imported, and compiled then.
_pip() { "$PYTHON" -m pip --disable-pip-version-check "$@"; }

# _stamp FILE...: stands for an environment that is made as pyproject.toml, the native core's sources and these files
# say, in this folder.
_stamp() { { pwd; cat pyproject.toml setup.py src/weightcast/native/*.[ch] "$@"; } | sha256sum | cut -d' ' -f1; }

# For an interpreter that is used as it is: the native core beside its sources, which needs setuptools there.
_build_core() { "$PYTHON" setup.py --quiet build_ext --inplace; }

# pip copies entry points when it installs: an interpreter of somebody else's needs them once more after each change.
_knows_our_plugins() {
    "$PYTHON" - 2>/dev/null <<'END'
import importlib.metadata, sys, tomllib
ours = tomllib.load(open("pyproject.toml", "rb"))["project"].get("entry-points", {})
found = {(e.group, e.name, e.value) for e in importlib.metadata.distribution("weightcast").entry_points}
sys.exit(not {(group, *item) for group, items in ours.items() for item in items.items()} <= found)
END
}
