"""Traces as figures of matplotlib, which is imported when a figure is drawn.

One fact, or the average of several, is a heat map of tokens and layers as in figure 1 of ROME (arXiv 2202.05262).
Averages by the role of a token are lines over the layers, as in its figures 2 and 3, with a panel for each kind of
module.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from ffedit.display.picture import (
    HURTS,
    NEGATIVE,
    PARTS,
    RAMP,
    UNITS,
    Picture,
    Row,
    layer_step,
    pictures,
    restored,
    site_pictures,
)
from ffedit.facts.text import counted, number
from ffedit.layer_choice.site_map import SiteMap
from ffedit.locator.result import ROLES, SETTINGS, Aggregate, Part, Trace, TraceSet

# Heat maps -----------------------------------------------------------------------------------------

MOST_ROWS = 40
MOST_CHARACTERS = 24
# Inches: row labels, the gap between panels that share them, and the colour bar with its labels.
LABELS, BETWEEN, BAR = 1.6, 0.3, 1.0


def heat_maps(traces: Sequence[Trace | TraceSet], layer: int | None = None) -> Any:
    """Draw traces, or averages of several facts, as heat maps side by side; `layer`, or each one's own, is marked."""
    return _side_by_side(pictures(traces, layer, MOST_ROWS))


def site_maps(trace: Trace, mapped: SiteMap, layer: int) -> Any:
    """Draw effect, reach and leak of a fact's sites side by side, with the same rows and columns; `layer` is marked."""
    return _side_by_side([*pictures([trace], layer, MOST_ROWS), *site_pictures(mapped, trace, layer, MOST_ROWS)])


def _side_by_side(panels: Sequence[Picture]) -> Any:
    from matplotlib.figure import Figure

    labels = [[_label(row) for row in shown.rows] for shown in panels]
    shared = [i > 0 and labels[i] == labels[i - 1] for i in range(len(panels))]
    widths = [max(3.2, min(9.0, 0.3 * shown.depth)) for shown in panels]
    heights = [max(1.0, 0.24 * len(shown.rows)) for shown in panels]
    gaps = [BETWEEN if same else LABELS for same in shared]
    wide, high = sum(widths) + sum(gaps) + BAR * len(panels), max(heights) + 1.4
    figure, left = Figure(figsize=(wide, high)), 0.0
    for shown, names, same, gap, width, height in zip(panels, labels, shared, gaps, widths, heights, strict=True):
        bottom = 0.7 + max(heights) - height
        axes = figure.add_axes(((left + gap) / wide, bottom / high, width / wide, height / high))
        _heat_map(axes, shown, [""] * len(names) if same else names, width, height)
        left += gap + width + BAR
    return figure


def _heat_map(axes: Any, shown: Picture, names: Sequence[str], width: float, height: float) -> None:
    """Draw one heat map of `width` × `height` inches."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    values = np.stack([row.effects for row in shown.rows])
    ramp = LinearSegmentedColormap.from_list("ffedit", RAMP).with_extremes(under=HURTS)
    # Negative effects near zero may be noise: only clearly negative ones get a colour of their own.
    hurts = values < -NEGATIVE * (shown.scale or 1)
    drawn = np.where(hurts, values, values.clip(0))
    image = axes.pcolormesh(drawn, cmap=ramp, vmin=0, vmax=shown.scale or 1, edgecolors=(1, 1, 1, 0.12), linewidth=0.4)
    axes.invert_yaxis()
    axes.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=8, parse_math=False)
    for tick, row in zip(axes.get_yticklabels(), shown.rows, strict=True):
        tick.set(fontweight="bold" if row.subject else "normal", color="#888888" if row.run else "black")
    axes.set_xticks(*layer_ticks(shown.depth, 0.5), fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("layer", fontsize=9, labelpad=15)
    mark = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center", "va": "center"}
    axes.annotate("▲", (shown.layer + 0.5, 0), (0, -19.5), fontsize=8, **mark)
    headline(axes, shown.title[0], shown.title[1:], width + BAR)
    beside = axes.inset_axes((1 + 0.15 / width, 0, 0.12 / width, 1))
    bar = axes.figure.colorbar(image, cax=beside, extend="min" if hurts.any() else "neither")
    bar.locator = MaxNLocator(max(2, min(6, round(2 * height))))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0)
    bar.set_label(_axis(shown, height), fontsize=8)


def _axis(shown: Picture, height: float) -> str:
    """Return the label of a colour bar, `height` inches long."""
    unit = UNITS.get(shown.metric)
    if unit is None:
        return f"{shown.metric} (share of the change)" if height >= 2 else shown.metric
    return f"indirect effect ({'P' if height < 2 and unit == 'probability' else unit})"


def _label(row: Row) -> str:
    shown = row.label if len(row.label) <= MOST_CHARACTERS else row.label[: MOST_CHARACTERS - 1] + "…"
    return f"{shown}*" if row.subject else shown


def headline(axes: Any, title: str, under: Sequence[str], width: float) -> None:
    """Write a title and the lines under it above `axes`, wrapped to `width` inches."""
    above = 6.5  # points
    for text, size, colour in [(line, 8, "#444444") for line in reversed(under)] + [(title, 10, "black")]:
        # A character of the sans-serif font is about 0.58 of its size wide.
        lines = textwrap.wrap(text, int(width * 72 / (0.58 * size))) or [""]
        style = {"textcoords": "offset points", "va": "bottom", "linespacing": 1.2, "parse_math": False}
        axes.annotate("\n".join(lines), (0, 1), (0, above), "axes fraction", fontsize=size, color=colour, **style)
        above += len(lines) * 1.25 * size + 2


def layer_ticks(depth: int, middle: float) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Return positions and labels for up to twelve layers; `middle` is the offset of a column's centre."""
    step = layer_step(depth)
    return np.arange(0, depth, step) + middle, [str(i) for i in range(0, depth, step)]


# Averages ------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind people can tell apart; the markers serve for print without colour.
COLOURS = ("#56b4e9", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000")
MARKERS = "osD^vx"
SEVERED_ROLE = "last subject"
SEVERED: dict[Part, tuple[Any, str]] = {"feed_forward": ((0, (4, 1.5)), "D"), "attention": ((0, (6, 1.5, 1, 1.5)), "s")}
MOST_COLUMNS = 3
WIDTH, HEIGHT = 3.4, 2.4  # inches


def average_lines(aggregates: Sequence[Aggregate]) -> Any:
    """Draw average indirect effects by layer, with their intervals, one line per role of a token.

    A measurement that differs from another only in the severed modules is a dashed line in the other's panel, that of
    the last subject token: the distance between the two lines is the effect of severing.
    """
    from matplotlib.figure import Figure

    panels = _panels(aggregates)
    units = [UNITS[panel[0].metric] for panel in panels]
    alike = len(set(units)) == 1
    columns = min(MOST_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=((WIDTH + 0.7) * columns, (HEIGHT + 1.7) * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=alike).ravel()
    for i, (axes, panel, unit) in enumerate(zip(grid, panels, units, strict=False)):
        _panel(axes, panel)
        if i % columns == 0 or not alike:
            axes.set_ylabel(f"average indirect effect ({unit})", fontsize=9)
    for axes in grid[len(panels) :]:
        axes.remove()
    columns = min(3, columns + 1)
    style = {"ncols": columns, "fontsize": 8, "frameon": False, "handlelength": 4}
    figure.legend(handles=_legend(panels), loc="outside lower left", **style)
    return figure


def _panels(aggregates: Sequence[Aggregate]) -> list[list[Aggregate]]:
    """Group the aggregates into panels: a measurement, then the same with modules severed."""
    panels = [[whole] for whole in aggregates if whole.sever is None]
    for severed in (aggregate for aggregate in aggregates if aggregate.sever is not None):
        whole = next((panel for panel in panels if panel[0].sever is None and _same(panel[0], severed)), None)
        if whole is not None and SEVERED_ROLE in severed.roles:
            whole.append(severed)
        else:
            panels.append([severed])
    return panels


def _same(first: Aggregate, second: Aggregate) -> bool:
    """Return whether two measurements differ in nothing but the severed modules."""
    names = {*SETTINGS, "facts", "unknown"} - {"sever"}
    alike = all(getattr(first, name) == getattr(second, name) for name in names)
    return alike and first.effects.shape[1] == second.effects.shape[1]


def _panel(axes: Any, panel: list[Aggregate]) -> None:
    whole, *severed = panel
    depth = whole.effects.shape[1]
    axes.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    for drawn, role in [*((whole, role) for role in whole.roles), *((cut, SEVERED_ROLE) for cut in severed)]:
        row, style = drawn.roles.index(role), _style(role, None if drawn is whole else drawn.sever)
        axes.plot(range(depth), drawn.effects[row], markevery=max(1, depth // 12), **style)
        axes.fill_between(range(depth), drawn.low[row], drawn.high[row], color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xlim(-0.5, depth - 0.5)
    axes.set_xticks(*layer_ticks(depth, 0))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("layer", fontsize=9)
    unit = "" if whole.metric == "probability" else f" {UNITS[whole.metric]}"
    total = f"{number(whole.total.mean)} {whole.total.ends(number)}".rstrip() + unit
    under = (f"n = {counted(whole.facts, 'fact')}, {whole.corruption}", f"average total effect {total}")
    title = restored(whole)
    headline(axes, title[:1].upper() + title[1:], under, WIDTH)


def _style(role: str, sever: Part | None) -> dict[str, Any]:
    """Return the style of a role's line: thickest for the subject's last token, hollow markers if severed."""
    colour, marker = COLOURS[ROLES.index(role)], MARKERS[ROLES.index(role)]
    style = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 2.0 if role == SEVERED_ROLE else 1.2}
    if sever is None:
        return style
    line, marker = SEVERED[sever]
    return style | {"linestyle": line, "marker": marker, "markerfacecolor": "white", "linewidth": 1.5}


def _legend(panels: list[list[Aggregate]]) -> list[Any]:
    """Make an entry for each role that is drawn, with its number of facts if that is the same in all panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = []
    wholes = [panel[0] for panel in panels]
    for role in ROLES:
        counts = {whole.counts[whole.roles.index(role)] for whole in wholes if role in whole.roles}
        if counts:
            name = f"{role} (n = {counts.pop()})" if len(counts) == 1 else role
            entries.append(Line2D([], [], label=name, **_style(role, None)))
    for kind in SEVERED:
        if any(severed.sever == kind for panel in panels for severed in panel[1:]):
            name = f"{SEVERED_ROLE}, {PARTS[kind]} severed"
            entries.append(Line2D([], [], label=name, **_style(SEVERED_ROLE, kind)))
    return [*entries, Patch(color="#000000", alpha=0.15, linewidth=0, label="95% bootstrap interval")]
