"""`weightcast demo`: its options, and the run from start to report."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import get_args

from rich.console import Console

from weightcast.demo import report, supervisor
from weightcast.demo.events import Event
from weightcast.demo.result import Machine, Result
from weightcast.demo.settings import DemoSettings, Transport
from weightcast.demo.table import PLAIN_WIDTH, view

DEFAULT_STEPS = 40
QUICK_STEPS = 3
MAX_TRAINER_RANKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, metavar="N", help=f"training steps, each with a publish (default: {DEFAULT_STEPS})")
    add("--engines", type=int, default=2, metavar="N", help="inference servers (default: %(default)s)")
    add(
        "--trainer-ranks",
        type=int,
        default=1,
        metavar="N",
        help=f"processes that the trainer's model is sharded over with FSDP2, at most {MAX_TRAINER_RANKS} "
        "(default: %(default)s)",
    )
    add("--transport", choices=get_args(Transport), default="ipc", help="of the weights (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, puzzles and samples (default: %(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("weightcast-demo"),
        metavar="DIR",
        help="of the report (default: ./%(default)s)",
    )
    add("--quick", action="store_true", help="a tiny model and hardly any training: shows that everything runs")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print what came of it, write the report. 0 if all is well, 1 if not, 128 + n after signal n."""
    settings, console = _settings(args), _console()
    result = Result(settings=settings, machine=Machine.this(os.cpu_count() or 1), num_engines=args.engines)
    started = time.perf_counter()
    try:
        with view(console) as shown:

            def watch(event: Event) -> None:
                result.add(event)
                shown.show(event)

            supervisor.run(settings, args.engines, watch)
    except supervisor.Interrupted as exc:
        print(f"weightcast: ended by {exc}; nothing of the demo is left", file=sys.stderr)
        return exc.status
    result.wall_seconds = time.perf_counter() - started
    _print_summary(console, result)
    for path in report.write(result, args.output):
        _say(console, f"report: {path}")
    return _verdict(console, result)


def _settings(args: argparse.Namespace) -> DemoSettings:
    """Raises ValueError for numbers that make no run."""
    num_steps = args.steps if args.steps is not None else (QUICK_STEPS if args.quick else DEFAULT_STEPS)
    if num_steps < 1 or args.engines < 1:
        raise ValueError(f"--steps is {num_steps} and --engines {args.engines}; both must be at least 1")
    if not 1 <= args.trainer_ranks <= MAX_TRAINER_RANKS:
        raise ValueError(f"--trainer-ranks is {args.trainer_ranks}; it must be 1 to {MAX_TRAINER_RANKS}")
    if not 0 <= args.seed < 1 << 31:
        raise ValueError(f"--seed is {args.seed}; it must be 0 to {(1 << 31) - 1}")
    return (DemoSettings.quick if args.quick else DemoSettings)(
        seed=args.seed, num_steps=num_steps, num_trainer_ranks=args.trainer_ranks, transport=args.transport
    )


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH, force_terminal=False)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)


def _print_summary(console: Console, result: Result) -> None:
    if result.start and result.end:
        _say(console, f"reward: {result.start.reward:.3f} at the start, {result.end.reward:.3f} at the end", "bold")
    if result.updates:
        _say(
            console,
            f"{len(result.steps)} versions published to {result.num_engines} engines while they generated; "
            f"{result.num_spanning} of {result.num_rollouts} rollouts went on across an update; median publish "
            f"{result.typical(lambda s: s.seconds.total) * 1e3:.0f} ms, "
            f"pause {result.typical(lambda s: s.seconds.pause) * 1e3:.0f} ms; {result.wall_seconds:.0f} s in all",
        )


def _verdict(console: Console, result: Result) -> int:
    failures = result.failures()
    for failure in failures:
        _say(console, f"FAILED: {failure}", "bold red")
    if not failures:
        learned = "the reward rose, and " if result.settings.min_reward_gain > 0 else ""
        _say(console, f"passed: {learned}every engine serves exactly the trainer's last version", "bold green")
    return 1 if failures else 0
