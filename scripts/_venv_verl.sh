# Sourced by test-verl. Leaves $PYTHON, an interpreter with verl, Ray and weightcast.
#
# Makes .venv-verl when it is missing or broken (1.6 GB on disk, torch included), and installs again only when
# pyproject.toml, the core's sources, constraints-verl.txt or this folder's place has changed. WEIGHTCAST_VERL_PYTHON names an interpreter to
# use as it is, with nothing installed.

source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

_install() {
    local base
    if ! _pip --version >/dev/null 2>&1; then
        base=$(_find_python WEIGHTCAST_VERL_PYTHON)
        _say "making .venv-verl with $("$base" --version)"
        "$base" -m venv --clear .venv-verl
    fi
    _say "installing torch into .venv-verl (the longest step: a download of 200 MB where the index has its CPU build, of several GB elsewhere)"
    _pip install --no-compile -c constraints-verl.txt "$(grep '^torch==' constraints-verl.txt)"
    _say "installing verl, Ray and weightcast"
    # verl alone: its own list has experiment trackers and trainers, which nothing here imports.
    _pip install --no-compile -c constraints-verl.txt --no-deps "$(grep '^verl==' constraints-verl.txt)"
    _pip install --no-compile -c constraints-verl.txt ray tensordict transformers codetiming hydra-core datasets pillow fastapi accelerate \
        pytest-timeout pyzmq -e '.[serve,testing]'
}

if [[ -n "${WEIGHTCAST_VERL_PYTHON:-}" ]]; then
    PYTHON=$WEIGHTCAST_VERL_PYTHON
    export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
    _build_core
else
    PYTHON=$PWD/.venv-verl/bin/python
    _install_once .venv-verl "$(_stamp constraints-verl.txt)"
fi
