"""`scripts/demo`: RL training that publishes to live engines, on this machine."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_demo import report, supervisor, table, task
from rl_demo.messages import QUICK, TRANSPORTS, DemoSettings
from weightcast.cli import exits, values

EPILOG = """
examples:
  scripts/demo
  scripts/demo --quick
  scripts/demo --trainer-ranks 2 --transport gloo
"""

DEFAULT_STEPS, QUICK_STEPS = 40, 20
MAX_TRAINER_RANKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, positive, default = parser.add_argument, values.integer(1), "(default: %(default)s)"
    steps = f"(default: {DEFAULT_STEPS}, with --quick {QUICK_STEPS}; with fewer the reward is not judged)"
    ranks, seeds = values.integer(1, MAX_TRAINER_RANKS), values.integer(0, (1 << 31) - 1)
    add("--steps", type=positive, metavar="N", help=f"training steps, each with a publish {steps}")
    add("--engines", type=positive, default=2, metavar="N", help=f"inference servers {default}")
    ranks_help = f"processes that the trainer's model is sharded over with FSDP2, at most {MAX_TRAINER_RANKS} {default}"
    add("--trainer-ranks", type=ranks, default=1, metavar="N", help=ranks_help)
    add("--transport", choices=TRANSPORTS, default="ipc", help=f"of the weights {default}")
    add("--seed", type=seeds, default=0, help=f"of weights, puzzles and samples {default}")
    add("--output", type=Path, default=Path("weightcast-demo"), metavar="DIR", help=f"of the report {default}")
    add("--quick", action="store_true", help="a tiny model and an easy task: some ten seconds")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print the result, write the report. The status is 128 + n after signal n."""
    if args.output.exists() and not args.output.is_dir():
        raise NotADirectoryError(f"--output {args.output} is no directory: name one for the report, or a new one")
    default_steps = QUICK_STEPS if args.quick else DEFAULT_STEPS
    num_steps = args.steps or default_steps
    too_few: dict[str, Any] = {"min_reward_gain": None} if num_steps < default_steps else {}
    settings = DemoSettings(
        seed=args.seed,
        num_steps=num_steps,
        num_trainer_ranks=args.trainer_ranks,
        transport=args.transport,
        **(QUICK if args.quick else {}),
        **too_few,
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=120, force_terminal=False)
    console.print(task.describe(settings.num_digits), soft_wrap=True, markup=False, highlight=False)
    result = report.Result(settings=settings, machine=report.this_machine(), num_engines=args.engines)
    started = time.perf_counter()
    try:
        with contextlib.closing(supervisor.run(settings, args.engines)) as events, table.view(console) as show:
            for event in events:
                result.add(event)
                show(event)
    except supervisor.Interrupted as exc:
        [number] = exc.args
        print(f"scripts/demo: ended by {number.name}; nothing of the demo is left", file=sys.stderr)
        return 128 + int(number)
    result.wall_seconds = time.perf_counter() - started
    lines = [(sentence, "bold") for sentence in result.summary()]
    lines += [(f"report: {path}", "") for path in report.write(result, args.output)]
    lines += [(f"FAILED: {failure}", "bold red") for failure in result.failures()]
    if not result.failures():
        lines.append((result.success(), "bold" if settings.min_reward_gain is None else "bold green"))
    for text, style in lines:
        console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)
    return exits.NEGATIVE if result.failures() else exits.OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status, as the commands of weightcast have it. A usage error is a SystemExit."""
    parser = argparse.ArgumentParser(
        "scripts/demo",
        description="Train a small model with RL and publish every step to two live engines.",
        epilog=f"{EPILOG.strip()}\n\nexit status:\n{exits.TABLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (Exception, KeyboardInterrupt) as exc:
        status = exits.status_of(exc)
        if status is None:
            raise
        print(f"scripts/demo: {exits.describe(exc)}", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
