"""The report of a whole model as a figure: one panel for each group of measures, layers on the x axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ffedit.display.figures.saving import save_figure
from ffedit.display.figures.trace import layer_ticks
from ffedit.inspector.views.report import Measure, ModelReport, Unit

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
CHANCE = "#888888"
MARKERS = "osD^v"
COLUMNS, WIDTH, HEIGHT = 3, 3.6, 2.6
UNITS: dict[Unit, str] = {"share": "share", "number": "memories", "rank": "rank", "change": "relative change"}
BY_CHANCE = ("shallow_chance", "agreement_dealt", "rank_dealt")


def save_model(report: ModelReport, path: str | Path) -> Path:
    """Draw all measures by layer, with intervals, and agreement by the values' maximum probability.

    Raises:
        FFEditError: matplotlib is not installed.
        EditError: the suffix is not .png, .svg or .pdf, or the file cannot be written.
    """
    return save_figure(path, lambda: _draw(report))


def _draw(report: ModelReport) -> Any:
    from matplotlib.figure import Figure

    measured = {m.name for m in report.measures if any(value is not None for value in m.values)}
    groups = {group: some for group, some in report.groups().items() if measured & {m.name for m in some}}
    count = len(groups) + bool(report.sureness)
    rows = -(-count // COLUMNS)
    figure = Figure(figsize=(COLUMNS * WIDTH, rows * HEIGHT), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, (group, measures) in zip(panels, groups.items(), strict=False):
        _panel(axes, group, measures, report.layers)
    if report.sureness:
        _sureness(panels[len(groups)], report)
    for axes in panels[count:]:
        axes.set_visible(False)
    figure.suptitle(f"{report.model}, {report.tokens:,} tokens", fontsize=10)
    return figure


def _panel(axes: Any, group: str, measures: Sequence[Measure], layers: int) -> None:
    unit = measures[0].definition.unit
    for number, measure in enumerate(measures):
        chance = measure.name in BY_CHANCE
        colour = CHANCE if chance else COLOURS[number % len(COLOURS)]
        known = [layer for layer in range(layers) if measure.values[layer] is not None]
        style = {"color": colour, "marker": MARKERS[number % len(MARKERS)], "markersize": 3.5, "linewidth": 1.4}
        axes.plot(
            known,
            [measure.values[layer] for layer in known],
            label=measure.definition.title,
            linestyle=":" if chance else "-",
            **style,
        )
        ends = ([column[layer] for layer in known] for column in (measure.low, measure.high))
        axes.fill_between(known, *ends, color=colour, alpha=0.15, linewidth=0)
    if unit == "rank":
        axes.set_yscale("log")
        axes.invert_yaxis()
    elif unit != "change":
        axes.set_ylim(bottom=0)
    _finish(axes, group, UNITS[unit])
    axes.set_xticks(*layer_ticks(layers, 0))
    axes.set_xlabel("layer", fontsize=8)
    axes.legend(frameon=False, fontsize=7)


def _sureness(axes: Any, report: ModelReport) -> None:
    bins = report.sureness
    where = [(one.least + one.most) / 2 for one in bins]
    axes.plot(where, [one.agreement for one in bins], "o-", color=COLOURS[0], markersize=3.5, linewidth=1.4)
    axes.fill_between(where, [b.low for b in bins], [b.high for b in bins], color=COLOURS[0], alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    _finish(axes, "agreement by how sure a value is", "share that agree")
    axes.set_xlabel("max probability", fontsize=8)


def _finish(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_ylabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
