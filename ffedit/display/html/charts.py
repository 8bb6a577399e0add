"""Small charts with layers on the x axis, as coordinates that a template draws: paths, boxes, ticks, a legend.

A series has a CSS class `s0`, `s1`, …, to which the style sheet gives a colour in light and in dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeGuard

from ffedit.display import panels
from ffedit.display.panels import Line
from ffedit.display.picture import layer_step
from ffedit.display.terminal.model_view import cell
from ffedit.inspector.model_view import Measure, ModelReport, Unit
from ffedit.inspector.prompt_view import PromptView

# Coordinates of the whole chart, and of the area inside its axes.
WIDTH, HEIGHT = 360.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 350.0, 10.0, 176.0


@dataclass(frozen=True)
class Box:
    """A rectangle of a stacked bar."""

    x: float
    y: float
    width: float
    height: float
    style: str
    says: str


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
    boxes: list[Box] = field(default_factory=list)  # of stacked bars
    legend: list[tuple[str, str]] = field(default_factory=list)  # name and class


def lines(title: str, series: Sequence[Line], labels: Sequence[str], unit: Unit, x_name: str = "layer") -> Chart:
    """Draw lines with intervals; ranks on a logarithmic axis with the best on top."""
    chart = Chart(title, x_name)
    seen = [v for line in series for column in (line.values, line.low, line.high) for v in column if _known(v)]
    ticks = _ticks(seen, unit)
    height = _height(ticks[0], ticks[-1], logarithmic=unit == "rank")
    across = _across(len(labels))
    chart.y_ticks = [(height(tick), _tick_label(tick, unit)) for tick in ticks]
    chart.x_ticks = _x_ticks(labels, across)
    colours = count()
    for line in series:
        style = "chance" if line.chance else f"s{next(colours)}"
        chart.legend.append((line.name, style))
        points = [(i, across(i), value) for i, value in enumerate(line.values) if _known(value)]
        chart.curves.append((_path([(x, height(value)) for _, x, value in points]), style))
        if line.low:
            there, back = ((line.low, points), (line.high, points[::-1]))
            ends = [(x, height(column[i] or 0.0)) for column, order in (there, back) for i, x, _ in order]
            chart.bands.append((_path(ends) + "Z", style))
        for i, x, value in points:
            chart.dots.append((x, height(value), style, f"{x_name} {labels[i]}, {line.name}: {cell(value, unit)}"))
    return chart


def stacked(title: str, series: Sequence[Line], labels: Sequence[str]) -> Chart:
    """Draw shares that add up to 1 as stacked bars."""
    chart = Chart(title)
    height = _height(0.0, 1.0)
    across = _across(len(labels), inside=True)
    chart.y_ticks = [(height(tick), f"{tick:.0%}") for tick in (0.0, 0.25, 0.5, 0.75, 1.0)]
    chart.x_ticks = _x_ticks(labels, across)
    chart.legend = [(line.name, f"s{i}") for i, line in enumerate(series)]
    width = 0.76 * (RIGHT - LEFT) / len(labels)
    for column, label in enumerate(labels):
        below = 0.0
        for number, line in enumerate(series):
            value = line.values[column] or 0.0
            top, bottom = height(below + value), height(below)
            says = f"layer {label}, {line.name}: {value:.1%}"
            chart.boxes.append(Box(across(column) - width / 2, top, width, bottom - top, f"s{number}", says))
            below += value
    return chart


def of_group(group: str, measures: Sequence[Measure], layers: int) -> Chart:
    """Draw one group of a report's measures by layer."""
    panel = panels.of_group(group, measures, layers)
    if all(measure.name.startswith("case_") for measure in measures):
        return stacked(group, panel.series, panel.labels)
    return lines(group, panel.series, panel.labels, panel.unit)


def of_sureness(report: ModelReport) -> Chart:
    """Draw the agreement rate by the value's maximum probability."""
    panel = panels.of_sureness(report)
    return lines(panel.title, panel.series, panel.labels, panel.unit, panel.x_name)


def of_prompt(view: PromptView) -> Chart:
    """Draw the probability of the final prediction, layer by layer."""
    parts = {"without the layer": "before", "the layer alone": "output", "with the layer": "after"}
    series = [Line(name, [getattr(layer, part).final for layer in view.layers]) for name, part in parts.items()]
    return lines("probability of the prediction", series, [str(layer.address) for layer in view.layers], "share")


def of_pair(before: PromptView, after: PromptView) -> Chart:
    """Draw, layer by layer, the probability of the prediction before and of that after an edit, each in its own run."""
    series = [
        Line(f"P({view.prediction.top[0].token.strip()}) {when}", [layer.after.final for layer in view.layers])
        for when, view in (("before", before), ("after", after))
    ]
    return lines("what the stream says", series, [str(layer.address) for layer in after.layers], "share")


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _across(columns: int, inside: bool = False) -> Callable[[int], float]:
    """Return the x coordinate as a function of the column; `inside` leaves half a bar at both ends."""
    if inside or columns == 1:
        return lambda i: LEFT + (RIGHT - LEFT) * (i + 0.5) / columns
    return lambda i: LEFT + 6 + (RIGHT - LEFT - 12) * i / (columns - 1)


def _height(low: float, high: float, logarithmic: bool = False) -> Callable[[float], float]:
    """Return the y coordinate as a function of the value; if logarithmic, with the smallest value on top."""
    if logarithmic:
        return lambda v: TOP + (BOTTOM - TOP) * math.log(max(v, low) / low) / math.log(high / low)
    return lambda v: BOTTOM - (BOTTOM - TOP) * (v - low) / (high - low)


def _ticks(values: Sequence[float], unit: Unit) -> list[float]:
    """Choose round tick values that span all values: zero among them, or powers of ten for ranks."""
    if unit == "rank":
        return [10.0**i for i in range(max(1, math.ceil(math.log10(max([*values, 1.0])))) + 1)]
    low, high = min([*values, 0.0]), max([*values, 0.0])
    high = high if high > low else 1.0
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    return [step * i for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def _tick_label(tick: float, unit: Unit) -> str:
    shown = f"{round(tick, 9):,g}" if unit in ("rank", "number") else f"{round(100 * tick, 7):g}%"
    return shown.replace("-", "−")


def _x_ticks(labels: Sequence[str], across: Callable[[int], float]) -> list[tuple[float, str]]:
    step = layer_step(len(labels) * (1 if max(map(len, labels)) < 4 else 2))
    return [(across(i), label) for i, label in enumerate(labels) if i % step == 0]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
