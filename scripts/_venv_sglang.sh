# Sourced by test-sglang. Leaves $PYTHON, an interpreter with SGLang, as it is on a CPU, and weightcast.
#
# Makes .venv-sglang when it is missing or broken (a download of some 0.7 GB, 2.4 GB on disk), and installs again only
# when pyproject.toml, the core's sources, constraints-sglang.txt, this file or this folder's place has changed. WEIGHTCAST_SGLANG_PYTHON
# names an interpreter to use instead; into that one nothing but weightcast itself is installed (editable, so that
# SGLang finds its plugin).

source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

# What SGLang imports on a CPU, with what that needs.
_PACKAGES=(
    transformers tokenizers aiohttp requests msgspec fastapi uvicorn orjson psutil pyzmq packaging setproctitle pybase64
    partial_json_parser uvloop prometheus-client python-multipart pillow einops interegular llguidance openai
    openai-harmony anthropic sentencepiece tiktoken scipy IPython watchfiles zstandard distro easydict py-spy ninja
    blobfile python-dateutil build numba gguf loguru
)
# What it imports too, whose own needs (CUDA builds, mostly) are left out.
_ALONE=(
    triton torchvision xgrammar outlines compressed-tensors dill datasets modelscope soundfile mistral_common pycountry
    multiprocess pyarrow pandas pydantic_extra_types jsonschema jsonschema_specifications referencing rpds-py cffi
    airportsdata diskcache nest_asyncio pytz apache-tvm-ffi sglang
)

_install() {
    local base
    if ! _pip --version >/dev/null 2>&1; then
        base=$(_find_python WEIGHTCAST_SGLANG_PYTHON)
        _say "making .venv-sglang with $("$base" --version)"
        "$base" -m venv --clear .venv-sglang
    fi
    _say "installing torch, and what SGLang needs on a CPU, into .venv-sglang (a download of some 0.7 GB)"
    _pip install --no-compile -c constraints-sglang.txt "$(grep '^torch==' constraints-sglang.txt)"
    _pip install --no-compile -c constraints-sglang.txt "${_PACKAGES[@]}" pytest-timeout -e '.[testing]'
    _say "installing SGLang"
    _pip install --no-compile --no-deps -c constraints-sglang.txt "${_ALONE[@]}"
}

if [[ -n "${WEIGHTCAST_SGLANG_PYTHON:-}" ]]; then
    PYTHON=$WEIGHTCAST_SGLANG_PYTHON
    _knows_our_plugins || _pip install --quiet --no-deps -e .
    _build_core
else
    PYTHON=$PWD/.venv-sglang/bin/python
    _install_once .venv-sglang "$(_stamp constraints-sglang.txt scripts/_venv_sglang.sh)"
fi
