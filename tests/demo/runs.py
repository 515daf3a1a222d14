"""Made-up runs, for what shows and judges them."""

from __future__ import annotations

from rl_demo.messages import Checked, DemoSettings, Evaluated, Event, RunEnded, Saved, Stepped, Warming
from rl_demo.report import Result, this_machine

from weightcast.errors import EngineResult, PublishReport, StageSeconds

ENGINES = ("http://127.0.0.1:1111", "http://127.0.0.1:2222")


def step(number: int, *, num_rollouts: int = 8) -> Stepped:
    report = PublishReport(
        run="0" * 32,
        version=number,
        num_bytes=2_500_000,
        num_tensors=36,
        num_buckets=1,
        install="staged",
        seconds=StageSeconds(gather=0.001, offer=0.002, pack=0.003, send=0.004, seal=0.005, pause=0.006, total=0.03),
        engines={name: EngineResult(ok=True) for name in ENGINES},
    )
    return Stepped(
        report=report,
        rollout_seconds=0.1,
        train_seconds=0.2,
        step_seconds=0.4,
        reward=0.1 * number,
        solved=0.05 * number,
        num_rollouts=num_rollouts,
        num_spanning=3 if num_rollouts else 0,
        num_tokens=0,
        num_stale_tokens=0,
    )


def check(engine: str, *problems: str) -> Checked:
    return Checked(
        engine=engine,
        version=4,
        num_prompts=2,
        num_tokens=12,
        max_difference=0.0,
        control_difference=1.5,
        tolerance=0.01,
        problems=problems,
    )


def evaluated(when: str, reward: float) -> Evaluated:
    return Evaluated(when=when, version=0, reward=reward, solved=reward / 2)


def events() -> list[Event]:
    """A whole run that went well."""
    return [
        Saved(num_parameters=1000),
        *(Warming(step=n, num_steps=4, loss=2.0 / n) for n in range(1, 5)),
        step(0, num_rollouts=0),
        evaluated("start", 0.3),
        *(step(number) for number in range(1, 5)),
        evaluated("end", 0.9),
        *(check(engine) for engine in ENGINES),
        RunEnded(),
    ]


def result(*happened: Event) -> Result:
    found = Result(settings=DemoSettings(seed=0, num_steps=4), machine=this_machine(), num_engines=2)
    for event in happened:
        found.add(event)
    return found
