"""`weightcast serve`: a model directory as an engine, for laptops, tests and small models.

It reads only safetensors, never pickles, runs no code of the model directory, and downloads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from weightcast.cli import exits, output, values

EPILOG = """
examples:
  weightcast serve ./Qwen3-0.6B --port 8000
  weightcast serve ./Qwen3-0.6B --random-weights --dtype bfloat16
  weightcast serve ./Qwen3-0.6B --host 0.0.0.0 --token-file ./token

The first line on stdout is `weightcast: serving NAME at URL`. For each installed version the log on stderr has a line
with its seconds. Ctrl-C or SIGTERM ends the server, with status 0.
"""

_STDIN = 0
DTYPES = ("auto", "bfloat16", "float16", "float32")
_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        type=Path,
        metavar="MODEL_DIR",
        help="a directory with config.json, safetensors and optionally a tokenizer",
    )
    add("--host", default="127.0.0.1", help="address to listen on; except loopback, needs --token-file (%(default)s)")
    add("--port", type=values.integer(0, 65535), default=8000, help="port; 0: any free one (default: %(default)s)")
    add("--token-file", type=Path, metavar="FILE", help="a file with the bearer token that weight routes require")
    publisher_dtype = "a publisher must send this dtype, see `weightcast publish --dtype`"
    dtype_help = f"dtype of the weights (default: %(default)s, the checkpoint's); {publisher_dtype}"
    add("--dtype", choices=DTYPES, default="auto", help=dtype_help)
    add("--threads", type=values.integer(1), metavar="N", help="number of torch's threads (default: torch's)")
    random_help = "start with random weights, from config.json alone, until a version is published"
    add("--random-weights", type=int, nargs="?", const=0, metavar="SEED", help=random_help)
    health_help = "GET /health is 503 until the engine serves a version at most N behind; default: it always answers"
    add("--health-max-behind", type=values.integer(0), metavar="N", help=health_help)
    add("--enable-lora", action="store_true", help="take LoRA adapters, which requests name as their model")
    add(
        "--exit-with-parent",
        action="store_true",
        help="end when stdin is closed, so that the server does not outlive its parent",
    )


def run(args: argparse.Namespace) -> int:
    token = output.read_token(args.token_file)
    if not args.model.is_dir():
        raise FileNotFoundError(
            f"{args.model} is not a directory: download the model first (this command downloads nothing)"
        )
    if not (args.model / "config.json").is_file():
        raise FileNotFoundError(f"{args.model} has no config.json: pass the directory that save_pretrained wrote")
    if args.random_weights is None and not any(args.model.glob("*.safetensors")):
        raise FileNotFoundError(f"{args.model} has no safetensors: add them, or start with --random-weights")
    try:  # before the model is loaded, which takes time
        socket.getaddrinfo(args.host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise ValueError(f"--host {args.host} is not an address of this machine: {exc}") from exc
    if args.exit_with_parent:
        threading.Thread(target=_end_with_stdin, name="weightcast-stdin", daemon=True).start()
    with output.until_interrupted():
        with output.stage(f"loading {args.model}"):
            model, tokenizer = _load(args.model, args.dtype, args.random_weights, args.threads)
        _serve(model, tokenizer, args, token)
    return exits.OK


def _load(directory: Path, dtype: str, seed: int | None, num_threads: int | None) -> tuple[Any, Any]:
    """Load the model and its tokenizer; None if the directory has none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = None
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if seed is not None:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        torch.manual_seed(seed)
        wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
        return AutoModelForCausalLM.from_config(config, dtype=wanted), tokenizer  # type: ignore[no-untyped-call]
    options = {"dtype": dtype, "local_files_only": True, "use_safetensors": True}
    try:
        return AutoModelForCausalLM.from_pretrained(directory, **options), tokenizer
    except exits.safetensor_errors() as exc:
        raise ValueError(f"a safetensors file of {directory} is damaged: {exc}; download it again") from exc


def _serve(model: Any, tokenizer: Any, args: argparse.Namespace, token: str | None) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from weightcast.control.server.app import EngineServer
    from weightcast.engines.gate import Gate
    from weightcast.engines.lora import LoraLayers
    from weightcast.engines.module import ModuleEngine
    from weightcast.engines.transformers import TextGenerator

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("weightcast").setLevel(logging.INFO)
    name = args.model.resolve().name
    adapters = LoraLayers(model) if args.enable_lora else None
    with contextlib.closing(TextGenerator(model, tokenizer, gate=Gate(), adapters=adapters)) as generator:
        server = EngineServer(
            ModuleEngine(model, adapters=adapters),
            host=args.host,
            port=args.port,
            token=token,
            generator=generator,
            model_name=name,
            health_max_behind=args.health_max_behind,
        )

        def announce() -> None:
            print(f"weightcast: serving {name} at {server.url}", flush=True)
            if args.host in _ALL_ADDRESSES:
                print(f"weightcast: listening on all addresses of this machine, port {server.port}", flush=True)

        server.run(announce=announce)


def _end_with_stdin() -> None:
    """End this process as SIGTERM does, once the process at the other end of stdin has ended."""
    # Not sys.stdin.read: it holds a lock that the interpreter needs at exit.
    while os.read(_STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
