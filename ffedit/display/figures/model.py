"""The report of a whole model as a figure: one panel for each group of measures, layers on the x axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ffedit.display.figures.saving import save_figure
from ffedit.display.panels import Panel, of_group, of_sureness
from ffedit.display.picture import layer_step
from ffedit.inspector.model_view import ModelReport, Unit

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
CHANCE = "#888888"
MARKERS = "osD^v"
COLUMNS, WIDTH, HEIGHT = 3, 3.6, 2.6
UNITS: dict[Unit, str] = {"share": "share", "number": "memories", "rank": "rank", "change": "relative change"}


def save_model(report: ModelReport, path: str | Path) -> Path:
    """Draw all measures by layer, with intervals, and agreement by the values' maximum probability.

    Raises:
        FFEditError: matplotlib is not installed.
        EditError: the suffix is not .png, .svg or .pdf, or the file cannot be written.
    """
    return save_figure(path, lambda: _draw(report))


def _draw(report: ModelReport) -> Any:
    from matplotlib.figure import Figure

    drawn = [of_group(group, measures, report.layers) for group, measures in report.groups().items()]
    drawn = [panel for panel in (*drawn, of_sureness(report)) if panel.is_measured]
    rows = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * WIDTH, rows * HEIGHT), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for each, panel in zip(axes, drawn, strict=False):
        _panel(each, panel)
    for each in axes[len(drawn) :]:
        each.set_visible(False)
    figure.suptitle(f"{report.model}, {report.tokens:,} tokens", fontsize=10)
    return figure


def _panel(axes: Any, panel: Panel) -> None:
    for number, line in enumerate(panel.series):
        colour = CHANCE if line.chance else COLOURS[number % len(COLOURS)]
        known = [i for i, value in enumerate(line.values) if value is not None]
        style = {"color": colour, "marker": MARKERS[number % len(MARKERS)], "markersize": 3.5, "linewidth": 1.4}
        values = [line.values[i] for i in known]
        axes.plot(known, values, label=line.name, linestyle=":" if line.chance else "-", **style)
        ends = ([column[i] for i in known] for column in (line.low, line.high))
        axes.fill_between(known, *ends, color=colour, alpha=0.15, linewidth=0)
    if panel.unit == "rank":
        axes.set_yscale("log")
        axes.invert_yaxis()
    elif panel.unit != "change":
        axes.set_ylim(bottom=0)
    step = layer_step(len(panel.labels))
    axes.set_xticks(range(0, len(panel.labels), step), panel.labels[::step])
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.set_ylabel(UNITS[panel.unit], fontsize=8)
    axes.set_xlabel(panel.x_name, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
