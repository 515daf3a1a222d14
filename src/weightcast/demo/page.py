"""The report as one HTML page: no script, no font, no image and no address outside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from weightcast.demo import svg
from weightcast.demo.events import Stepped
from weightcast.demo.result import Result
from weightcast.demo.stages import REST, STAGES, by_stage

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5d6675; --line: #e3e6ec; --paper: #fff; --tile: #f5f6f9;
  --good: #1a7f4b; --bad: #c4314b; --c-reward: #2f6fde; --c-gather: #86b6f0; --c-offer: #2f6fde; --c-pack: #f0a93b;
  --c-send: #35a276; --c-seal: #9a6fd0; --c-pause: #d9485f; --c-rest: #b4bac6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #2c3340; --paper: #12161d;
  --tile: #1b212b; --good: #4cc38a; --bad: #ff7088; --c-reward: #6ea0f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 940px; padding: 40px 24px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; } h2 { font-size: 17px; margin: 36px 0 4px; }
p { margin: 4px 0 10px; color: var(--soft); }
.verdict { display: inline-block; margin: 14px 0 4px; padding: 4px 12px; border-radius: 99px; color: var(--paper);
  font-weight: 600; background: var(--good); } .verdict.bad { background: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 22px 0 0; }
.tile { background: var(--tile); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 23px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg line.level { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 5 4; }
svg text.level { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px; margin: 2px 0 6px 56px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; } .good { color: var(--good); } .bad { color: var(--bad); }
details { margin-top: 30px; } summary { cursor: pointer; font-weight: 600; }
"""


def render(result: Result) -> str:
    """The whole page. A run that failed early shows what there is."""
    body = [_head(result), _tiles(result)]
    if result.updates:
        body += [_reward(result), _sync(result), _pause(result)]
    body += [_checks(result), _about(result), _steps(result)]
    title = f"weightcast demo, {len(result.updates)} steps"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _head(result: Result) -> str:
    failures = result.failures()
    verdict = "".join(f'<div class="verdict bad">failed: {escape(failure)}</div> ' for failure in failures)
    return (
        "<h1>weightcast demo</h1>"
        f"<p>A trainer taught a small Qwen3 to sort digits with GRPO and published every step to {result.num_engines} "
        f"inference servers over <code>{result.settings.transport}://</code>, while these generated its rollouts.</p>"
        + (verdict or '<div class="verdict">passed: every engine serves exactly the last version</div>')
    )


def _tiles(result: Result) -> str:
    tiles = [
        ("-", "reward, start to end"),
        (f"{len(result.steps)}", f"versions, each on {result.num_engines} engines"),
        (_ms(result.typical(lambda s: s.seconds.total)), "to publish a version (median)"),
        (_ms(result.typical(lambda s: s.seconds.pause)), "pause of an engine (median)"),
    ]
    if result.start and result.end:
        tiles[0] = (f"{result.start.reward:.2f} → {result.end.reward:.2f}", tiles[0][1])
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles)
        + "</div>"
    )


def _reward(result: Result) -> str:
    levels = {f"evaluation at the {e.when}: {e.reward:.2f}": e.reward for e in (result.start, result.end) if e}
    plot = svg.line(_numbers(result), [step.reward for step in result.updates], colour="reward", top=1.0, levels=levels)
    return (
        "<h2>Reward</h2><p>Mean of each step's rollouts, sampled at temperature 1. 1 is a right answer, 0 one of the "
        "wrong length.</p>" + plot
    )


def _sync(result: Result) -> str:
    stages = [by_stage(step.seconds) for step in result.updates]
    parts = {name: [1e3 * seconds[name] for seconds in stages] for name in (*STAGES, REST)}
    legend = "".join(f'<span><i style="background:var(--c-{name})"></i>{name}</span>' for name in parts)
    first = result.steps[0].seconds.total
    return (
        "<h2>Time to publish, by stage</h2>"
        f"<p>From the call to the new version on every engine. The first publish, which also connects the engines and "
        f"makes the arena, took {_ms(first)} and is left out. This model has {result.steps[0].num_bytes / 1e6:.1f} MB: "
        "what is seen here is latency; <code>weightcast bench</code> measures bandwidth.</p>"
        f'<div class="legend">{legend}</div>' + svg.stacked(_numbers(result), parts, unit=" ms")
    )


def _pause(result: Result) -> str:
    pauses = {"pause": [1e3 * step.seconds.pause for step in result.updates]}
    return (
        "<h2>Pause</h2><p>How long an engine stood still for an install, the longest of them. During the rest of the "
        "publish it generated.</p>" + svg.stacked(_numbers(result), pauses, unit=" ms")
    )


def _checks(result: Result) -> str:
    rows = [
        [
            escape(check.engine),
            f'<span class="{"bad" if check.problems else "good"}">{"differs" if check.problems else "equal"}</span>',
            str(check.version),
            f"{check.num_tokens} of {check.num_prompts} prompts",
            f"{check.max_difference:.4f}",
            f"{check.tolerance:.4f}",
            f"{check.control_difference:.2f}",
        ]
        for check in result.checks
    ]
    titles = ["engine", "verdict", "version", "greedy tokens", "largest Δ log-prob", "allowed", "Δ to first version"]
    return (
        "<h2>Is it the same model?</h2><p>After the last publish every engine continued prompts greedily; the "
        "trainer's own model did the same with <code>transformers</code>' <code>generate</code>. The last column is "
        "the control: the same comparison with the weights that the run began with must fail.</p>"
        + _table(titles, rows)
    )


def _about(result: Result) -> str:
    settings, machine = result.settings, result.machine
    facts = [
        (
            "model",
            f"Qwen3, {settings.num_layers} layers, hidden size {settings.hidden_size}, "
            f"{result.num_parameters:,} parameters, bf16; AdamW on fp32 masters",
        ),
        (
            "rollouts",
            f"{result.num_rollouts}, of which {result.num_spanning} went on across an update; "
            f"{settings.answers_per_prompt} answers for each of {settings.prompts_per_step} prompts a step",
        ),
        (
            "a step",
            f"{result.typical(lambda s: s.step_seconds):.2f} s (median), of which "
            f"{result.typical(lambda s: s.rollout_seconds):.2f} s waiting for rollouts and "
            f"{result.typical(lambda s: s.train_seconds):.2f} s training",
        ),
        (
            "run",
            f"{result.wall_seconds:.0f} s, seed {settings.seed}, weightcast {machine.weightcast}, "
            f"Python {machine.python}, {machine.num_cores} cores, {machine.processor}",
        ),
    ]
    rows = "".join(f'<tr><td>{name}</td><td class="text">{escape(text)}</td></tr>' for name, text in facts)
    return f"<h2>The run</h2><table>{rows}</table>"


def _steps(result: Result) -> str:
    stages = (f"{stage} ms" for stage in (*STAGES, "total"))
    titles = ["step", "reward", "solved", "versions", "MB", *stages, "GB/s", "spanning"]
    table = _table(titles, map(_step, result.steps))
    return f"<details><summary>All {len(result.steps)} publishes</summary>{table}</details>"


def _step(step: Stepped) -> list[str]:
    versions = ", ".join("-" if v is None else str(v) for _, v in sorted(step.versions.items()))
    return [
        str(step.step),
        *([f"{step.reward:.3f}", f"{step.solved:.0%}"] if step.num_rollouts else ["", ""]),
        versions,
        f"{step.num_bytes / 1e6:.1f}",
        *(f"{1e3 * getattr(step.seconds, stage):.1f}" for stage in (*STAGES, "total")),
        f"{step.gb_per_second:.2f}",
        f"{step.num_spanning}",
    ]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    lines = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{_cells(titles, "th")}</tr>{lines}</table></div>'


def _cells(cells: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)


def _numbers(result: Result) -> list[int]:
    return [step.step for step in result.updates]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
