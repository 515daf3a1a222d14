# Sourced by the other scripts. Leaves $PYTHON, an interpreter with weightcast and all its extras installed.
#
# Makes .venv when it is missing or broken, and installs again only when pyproject.toml, the native core's sources,
# constraints.txt or this folder's place has changed. WEIGHTCAST_PYTHON names an interpreter to use as it is, with nothing installed.
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) decide where packages come from and which build of torch.

source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

_install() {
    local base
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        base=$(_find_python WEIGHTCAST_PYTHON)
        _say "making .venv with $("$base" --version)"
        "$base" -m venv --clear .venv
    fi
    _say "installing torch into .venv (the longest step: a download of 200 MB where the index has its CPU build, of several GB elsewhere)"
    .venv/bin/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt "$(grep '^torch==' constraints.txt)"
    _say "installing weightcast with all its extras (about 60 small packages)"
    .venv/bin/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
}

if [[ -n "${WEIGHTCAST_PYTHON:-}" ]]; then
    PYTHON=$WEIGHTCAST_PYTHON
    export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
    _build_core
else
    _install_once .venv "$(_stamp constraints.txt)"
    PYTHON=$PWD/.venv/bin/python
fi
