"""Two kinds of plot as inline SVG: points joined by a line, and stacked bars. No scripts; values show on hovering.

Colours are the page's CSS variables `--c-NAME`, so that one drawing serves a light and a dark page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 860, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 14, 40
_NUM_Y_TICKS, _NUM_X_TICKS = 5, 10
_MAX_GAP, _MAX_BAR_WIDTH = 4.0, 44.0


@dataclasses.dataclass(frozen=True, slots=True)
class Axes:
    """Maps steps and values to the drawing. `steps` has at least one, `top` is the largest value shown."""

    steps: Sequence[int]
    top: float
    unit: str

    @property
    def slot(self) -> float:
        """Width of one step."""
        return (WIDTH - LEFT - RIGHT) / len(self.steps)

    def x(self, index: int) -> float:
        """The middle of step number `index`."""
        return LEFT + (index + 0.5) * self.slot

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(value, self.top) / self.top

    def render(self) -> str:
        """Grid lines, tick labels and the names of both axes."""
        parts = [self._y_tick(self.top * i / _NUM_Y_TICKS) for i in range(_NUM_Y_TICKS + 1)]
        every = max(1, math.ceil(len(self.steps) / _NUM_X_TICKS))
        bottom = HEIGHT - BOTTOM
        parts += [
            f'<text x="{self.x(i):.1f}" y="{bottom + 16}" text-anchor="middle">{self.steps[i]}</text>'
            for i in range(0, len(self.steps), every)
        ]
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">step (= weight version)</text>')
        return "".join(parts)

    def _y_tick(self, value: float) -> str:
        y, label = self.y(value), f"{value:.4g}{self.unit}"
        return (
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )


def line(steps: Sequence[int], values: Sequence[float], *, colour: str, top: float, levels: Mapping[str, float]) -> str:
    """A value for each step, with dashed horizontal lines at `levels` (label -> value)."""
    axes = Axes(steps, top, "")
    points = " ".join(f"{axes.x(i):.1f},{axes.y(value):.1f}" for i, value in enumerate(values))
    dots = "".join(
        f'<circle cx="{axes.x(i):.1f}" cy="{axes.y(value):.1f}" r="3.5" style="fill:var(--c-{colour})">'
        f"<title>step {steps[i]}: {value:.3f}</title></circle>"
        for i, value in enumerate(values)
    )
    path = f'<polyline points="{points}" style="fill:none;stroke:var(--c-{colour});stroke-width:2"/>'
    return _svg(axes.render() + "".join(_level(axes, name, at) for name, at in levels.items()) + path + dots)


def stacked(steps: Sequence[int], parts: Mapping[str, Sequence[float]], *, unit: str) -> str:
    """A bar for each step, made of `parts` (name -> a value for each step), the first at the bottom."""
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    axes = Axes(steps, nice_top(max(totals)), unit)
    width = min(_MAX_BAR_WIDTH, axes.slot - min(_MAX_GAP, axes.slot / 4))
    bars, below = [], [0.0] * len(steps)
    for name, values in parts.items():
        for i, value in enumerate(values):
            bars.append(_bar(axes, i, width, below[i], value, f"step {steps[i]}: {name} {value:.2f}{unit}", name))
            below[i] += value
    return _svg(axes.render() + "".join(bars))


def nice_top(largest: float) -> float:
    """The smallest round number that is at least `largest` and gives round ticks; 1 if that is 0."""
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(power * step for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * step >= largest * 0.999)


def _bar(axes: Axes, index: int, width: float, below: float, value: float, title: str, colour: str) -> str:
    y, height = axes.y(below + value), axes.y(below) - axes.y(below + value)
    if height < 0.05:
        return ""
    return (
        f'<rect x="{axes.x(index) - width / 2:.1f}" y="{y:.2f}" width="{width:.1f}" height="{height:.2f}" '
        f'style="fill:var(--c-{colour})"><title>{escape(title)}</title></rect>'
    )


def _level(axes: Axes, name: str, value: float) -> str:
    # A low level is named at the right, a high one at the left: where a rising line is not.
    y, is_low = axes.y(value), value < axes.top / 2
    x, baseline, anchor = (WIDTH - RIGHT, y - 6, "end") if is_low else (LEFT + 4, y + 16, "start")
    return (
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="level" x="{x}" y="{baseline:.1f}" text-anchor="{anchor}">{escape(name)}</text>'
    )


def _svg(content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{content}</svg>'
