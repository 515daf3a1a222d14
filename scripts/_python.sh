# Sourced by _venv.sh and _venv_vllm.sh: goes to the repository's root; how they speak, and which Python they start from.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

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
