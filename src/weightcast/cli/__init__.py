"""The `weightcast` command: one module for each subcommand, imported only when that subcommand is called.

Each has the text `EPILOG`, `add_arguments(parser)`, and `run(args)`, which returns the exit status. `args.usage_error`
ends the command with a message about its options.

All subcommands write results to stdout, progress and errors to stderr. With `--json` stdout is one JSON object. The
exit status is one of those in `exits.py`. An error is one line, with `--debug` a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from weightcast import __version__
from weightcast.cli import exits, output

COMMANDS = {
    "serve": "serve a model directory as an engine whose weights can be updated while it generates",
    "publish": "publish a safetensors checkpoint to running engines, or into a store",
    "follow": "publish each new version of a store, or of a directory of checkpoints, to running engines",
    "pull": "copy the newest version of a store on another machine into a store here",
    "push": "copy the newest version of a store here into a store on another machine",
    "serve-store": "serve a store over HTTP, for readers and copies on other machines",
    "rollback": "publish an earlier version of a store again, under a new number",
    "export": "write a store's newest version as a checkpoint directory",
    "status": "show which version each engine of a fleet serves, and which are behind",
    "dashboard": "show the engines of a fleet on a web page, live, with the last publishes of a publisher",
    "inspect": "show the tensors and versions of an engine, a checkpoint or a store",
    "verify": "check that an engine has exactly the weights of a checkpoint, or that a store is intact",
    "bench": "measure a publish over a transport on this machine, against one memcpy",
    "delta": "compute how much differs between two checkpoints, and how large a delta would be",
    "plan": "compute the network traffic and the memory of a publish before there is a fleet",
}

_DESCRIPTION = "Move a trainer's weights into running inference engines: fast, verified, and as a transaction."
_EPILOG = f"""\
Run `weightcast COMMAND --help` for the options and examples of one command.

exit status:
{exits.TABLE}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. Usage errors and --help end with SystemExit, as argparse does."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        return _run(argv)
    except (Exception, KeyboardInterrupt) as exc:
        status = exits.status_of(exc)
        if isinstance(exc, BrokenPipeError):
            # The reader of stdout has ended, as in `weightcast ... | head -1`; Python would write the rest as it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if "--debug" in argv:
            traceback.print_exc()
        elif status is None:
            raise
        if "--json" in argv and not isinstance(exc, KeyboardInterrupt):
            with contextlib.suppress(OSError):  # stderr may itself be closed
                print(exits.describe(exc, as_json=True), flush=True)
        print(f"weightcast: {exits.describe(exc)}", file=sys.stderr)
        return exits.NEGATIVE if status is None else status


def _run(argv: Sequence[str]) -> int:
    """Parse the arguments and run the command. Only the chosen command's module is imported."""
    chosen = next((word for word in argv if not word.startswith("-")), "")
    parser = argparse.ArgumentParser(
        "weightcast", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"weightcast {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == chosen:
            with output.stage(output.IMPORTING):
                command = importlib.import_module(f"weightcast.cli.{name.replace('-', '_')}")
            subparser.epilog = f"{command.EPILOG.strip()}\n\nexit status:\n{exits.TABLE}"
            command.add_arguments(subparser)
            subparser.set_defaults(usage_error=subparser.error)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.usage_error(f"unrecognized arguments: {' '.join(unknown)}")
    status: int = command.run(args)  # for an unknown name argparse has ended the process
    return status
