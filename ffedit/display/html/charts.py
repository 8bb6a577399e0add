"""Small line charts of shares, as coordinates that a template draws: paths, dots, ticks, a legend.

A series has a CSS class `s0`, `s1`, …, to which the style sheet gives a colour in light and in dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from ffedit.display.picture import layer_step
from ffedit.inspector.prompt_view import PromptView

# Coordinates of the whole chart, and of the area inside its axes.
WIDTH, HEIGHT = 360.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 350.0, 10.0, 176.0
SERIES = 6  # colours in the style sheet


@dataclass(frozen=True)
class Line:
    """One series: its name in the legend, and a share for each position on the x axis, None where there is none.

    `low` and `high` are the ends of intervals, empty for none.
    """

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass
class Chart:
    """A chart as a template draws it."""

    title: str  # text alternative for screen readers
    x_name: str = "layer"  # quantity on the x axis
    x_ticks: list[tuple[float, str]] = field(default_factory=list)  # coordinate and label
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    curves: list[tuple[str, str]] = field(default_factory=list)  # SVG path and class
    bands: list[tuple[str, str]] = field(default_factory=list)  # the same of the intervals
    dots: list[tuple[float, float, str, str]] = field(default_factory=list)  # x, y, class and tooltip
    legend: list[tuple[str, str]] = field(default_factory=list)  # name and class


def lines(title: str, series: Sequence[Line], labels: Sequence[str], x_name: str = "layer") -> Chart:
    """Draw shares as lines with intervals."""
    chart = Chart(title, x_name)
    seen = [v for line in series for column in (line.values, line.low, line.high) for v in column if _known(v)]
    ticks = _ticks(seen)
    height = _height(ticks[-1])
    across = _across(len(labels))
    chart.y_ticks = [(height(tick), f"{round(100 * tick, 7):g}%") for tick in ticks]
    chart.x_ticks = _x_ticks(labels, across)
    for number, line in enumerate(series):
        style = f"s{number % SERIES}"
        chart.legend.append((line.name, style))
        points = [(i, across(i), value) for i, value in enumerate(line.values) if _known(value)]
        chart.curves.append((_path([(x, height(value)) for _, x, value in points]), style))
        if line.low:
            there, back = ((line.low, points), (line.high, points[::-1]))
            ends = [(x, height(column[i] or 0.0)) for column, order in (there, back) for i, x, _ in order]
            chart.bands.append((_path(ends) + "Z", style))
        for i, x, value in points:
            chart.dots.append((x, height(value), style, f"{x_name} {labels[i]}, {line.name}: {value:.1%}"))
    return chart


def of_prompt(view: PromptView) -> Chart:
    """Draw the probability of the final prediction, layer by layer."""
    parts = {"without the layer": "before", "the layer alone": "output", "with the layer": "after"}
    series = [Line(name, [getattr(layer, part).final for layer in view.layers]) for name, part in parts.items()]
    return lines("probability of the prediction", series, [str(layer.address) for layer in view.layers])


def of_pair(before: PromptView, after: PromptView) -> Chart:
    """Draw, layer by layer, the probability of the prediction before and of that after an edit, each in its own run."""
    series = [
        Line(f"P({view.prediction.top[0].token.strip()}) {when}", [layer.after.final for layer in view.layers])
        for when, view in (("before", before), ("after", after))
    ]
    return lines("what the stream says", series, [str(layer.address) for layer in after.layers])


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _across(columns: int) -> Callable[[int], float]:
    """Return the x coordinate as a function of the column."""
    if columns == 1:
        return lambda i: (LEFT + RIGHT) / 2
    return lambda i: LEFT + 6 + (RIGHT - LEFT - 12) * i / (columns - 1)


def _height(high: float) -> Callable[[float], float]:
    """Return the y coordinate as a function of a value from 0 to `high`."""
    return lambda v: BOTTOM - (BOTTOM - TOP) * v / high


def _ticks(values: Sequence[float]) -> list[float]:
    """Choose round tick values from zero to the largest of the shares, or beyond."""
    high = max([*values, 0.0]) or 1.0
    raw = high / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def _x_ticks(labels: Sequence[str], across: Callable[[int], float]) -> list[tuple[float, str]]:
    step = layer_step(len(labels) * (1 if max(map(len, labels)) < 4 else 2))
    return [(across(i), label) for i, label in enumerate(labels) if i % step == 0]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
