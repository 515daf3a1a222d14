"""`weightcast serve`: a model directory as an engine, for laptops, tests and small models.

Reads safetensors only, never a pickle, runs no code of the model directory, and asks no hub.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weightcast.cli import exits, output, values
from weightcast.cli.failures import safetensor_errors

EPILOG = """
examples:
  weightcast serve ./Qwen3-0.6B --port 8000
  weightcast serve ./Qwen3-0.6B --random-weights --dtype bfloat16
  weightcast serve ./Qwen3-0.6B --host 0.0.0.0 --token-file ./token

The first line on stdout says that it serves, and where: `weightcast: serving NAME at URL`.
Ctrl-C or SIGTERM ends it, with status 0.
"""

_STDIN = 0
DTYPES = ("auto", "bfloat16", "float16", "float32")
_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL_DIR", help="config.json, safetensors, and a tokenizer if there is one")
    add("--host", default="127.0.0.1", help="another than loopback needs --token-file (default: %(default)s)")
    add("--port", type=values.integer(0, 65535), default=8000, help="0 lets the system choose (default: %(default)s)")
    add("--token-file", type=Path, metavar="FILE", help="a file with the bearer token that weight routes ask for")
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of the weights (default: %(default)s, the checkpoint's); a publisher must send this dtype, "
        "see `weightcast publish --dtype`",
    )
    add("--threads", type=values.integer(1), metavar="N", help="of torch (default: torch's own)")
    add(
        "--random-weights",
        type=int,
        nargs="?",
        const=0,
        metavar="SEED",
        help="start with random weights, from config.json alone, and wait for a publisher",
    )
    add("--exit-with-parent", action="store_true", help="end when stdin ends, so that no engine outlives its starter")


def run(args: argparse.Namespace) -> int:
    token = output.read_token(args.token_file)
    _check_directory(args.model, needs_weights=args.random_weights is None)
    _check_host(args.host)
    if args.exit_with_parent:
        threading.Thread(target=_end_with_stdin, name="weightcast-stdin", daemon=True).start()
    with _sigterm_as_ctrl_c(), contextlib.suppress(KeyboardInterrupt):
        with output.stage(f"loading {args.model}"):
            model, tokenizer = _load(args)
        _serve(model, tokenizer, args, token)
    return exits.OK


def _check_directory(directory: Path, *, needs_weights: bool) -> None:
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} has no config.json: give the directory that save_pretrained wrote")
    if needs_weights and not any(directory.glob("*.safetensors")):
        raise FileNotFoundError(f"{directory} has no safetensors: add them, or start with --random-weights")


def _check_host(host: str) -> None:
    """Raises ValueError before the model is loaded, which takes time."""
    try:
        socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise ValueError(f"--host {host} is not an address of this machine: {exc}") from exc


def _serve(model: Any, tokenizer: Any, args: argparse.Namespace, token: str | None) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from weightcast.control.server.app import EngineServer
    from weightcast.engines.gate import Gate
    from weightcast.engines.module import ModuleEngine
    from weightcast.engines.transformers import TextGenerator

    gate, name = Gate(), args.model.resolve().name
    with contextlib.closing(TextGenerator(model, tokenizer, gate=gate)) as generator:
        server = EngineServer(
            ModuleEngine(model),
            host=args.host,
            port=args.port,
            token=token,
            gate=gate,
            generator=generator,
            model_name=name,
        )
        with server:
            print(f"weightcast: serving {name} at {server.url}", flush=True)
            if args.host in _ALL_ADDRESSES:
                print(f"weightcast: it listens on all addresses of this machine, port {server.port}", flush=True)
            server.run()


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer, None where the directory has none."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = None
    if any((args.model / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    return _load_model(args.model, args.dtype, args.random_weights), tokenizer


def _load_model(directory: Path, dtype: str, seed: int | None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if seed is None:
        try:
            return AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, local_files_only=True, use_safetensors=True
            )
        except safetensor_errors() as exc:
            raise ValueError(f"a safetensors file of {directory} is damaged: {exc}") from exc
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    torch.manual_seed(seed)
    wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
    return AutoModelForCausalLM.from_config(config, dtype=wanted)  # type: ignore[no-untyped-call]


def _end_with_stdin() -> None:
    """End this process as SIGTERM does, as soon as whoever holds the other end of stdin has gone."""
    # Not sys.stdin.read: it would hold a lock that the interpreter wants when it ends for another reason.
    while os.read(_STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that what was begun is closed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
