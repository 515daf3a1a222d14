# Sourced by test-megatron. Leaves $PYTHON, an interpreter with Megatron-core, mbridge and weightcast.
#
# Makes .venv-megatron when it is missing or broken (1.3 GB on disk, torch included), and installs again only when
# pyproject.toml, the core's sources, constraints-megatron.txt or this folder's place has changed. WEIGHTCAST_MEGATRON_PYTHON names an
# interpreter to use as it is, with nothing installed.

source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

_install() {
    local base
    if ! _pip --version >/dev/null 2>&1; then
        base=$(_find_python WEIGHTCAST_MEGATRON_PYTHON)
        _say "making .venv-megatron with $("$base" --version)"
        "$base" -m venv --clear .venv-megatron
    fi
    _say "installing torch into .venv-megatron (the longest step: a download of 200 MB where the index has its CPU build, of several GB elsewhere)"
    _pip install --no-compile -c constraints-megatron.txt "$(grep '^torch==' constraints-megatron.txt)"
    _say "installing Megatron-core, mbridge and weightcast"
    _pip install --no-compile -c constraints-megatron.txt megatron-core mbridge einops httpx pytest-timeout -e '.[serve,testing]'
}

if [[ -n "${WEIGHTCAST_MEGATRON_PYTHON:-}" ]]; then
    PYTHON=$WEIGHTCAST_MEGATRON_PYTHON
    export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
    _build_core
else
    PYTHON=$PWD/.venv-megatron/bin/python
    _install_once .venv-megatron "$(_stamp constraints-megatron.txt)"
fi
