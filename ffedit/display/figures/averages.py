"""Average effects by layer as a figure file, one line per role of a token: figures 2 and 3 of ROME (arXiv 2202.05262).

There is a panel for each kind of module, all with one vertical scale so that heights compare. A measurement that
differs from another only in the severed modules has no panel of its own: its last subject token is a dashed line in
the other's panel, because the distance between the two lines is the effect of severing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ffedit.display.figures.trace import headline, layer_ticks, save_figure
from ffedit.display.picture import PARTS, UNITS, restored
from ffedit.facts.text import counted, number
from ffedit.locator.aggregate import ROLES, Aggregate
from ffedit.locator.result import Part

# Okabe and Ito's colours, which colour-blind people can tell apart; the markers serve for print without colour.
LINES = dict(
    zip(
        ROLES,
        (
            ("#56b4e9", "o"),
            ("#0072b2", "s"),
            ("#d55e00", "D"),
            ("#009e73", "^"),
            ("#cc79a7", "v"),
            ("#000000", "x"),
        ),
        strict=True,
    )
)
SEVERED_ROLE = "last subject"
SEVERED: dict[Part, tuple[Any, str]] = {"feed_forward": ((0, (4, 1.5)), "D"), "attention": ((0, (6, 1.5, 1, 1.5)), "s")}
MOST_COLUMNS = 3
# Inches: a panel, and the space for its title.
WIDTH, HEIGHT, ABOVE = 3.4, 2.4, 0.9


def save_aggregate(aggregates: Sequence[Aggregate], path: str | Path) -> Path:
    """Draw average indirect effects by layer, with their intervals.

    Args:
        aggregates: at least one; those for panels, and severed ones to be compared in the panel of the same
            measurement.
        path: the file to write.

    Raises:
        FFEditError: matplotlib is not installed.
        EditError: the suffix is not .png, .svg or .pdf, or the file cannot be written.
    """
    return save_figure(path, lambda: _draw(_panels(aggregates)))


def _panels(aggregates: Sequence[Aggregate]) -> list[list[Aggregate]]:
    """Group the aggregates into panels: a measurement, then the same with modules severed."""
    panels = [[one] for one in aggregates if one.sever is None]
    for severed in (one for one in aggregates if one.sever is not None):
        whole = next((panel for panel in panels if panel[0].sever is None and _same(panel[0], severed)), None)
        if whole is not None and SEVERED_ROLE in severed.roles:
            whole.append(severed)
        else:
            panels.append([severed])
    return panels


def _same(one: Aggregate, other: Aggregate) -> bool:
    names = ("kind", "window", "metric", "corruption", "exact", "facts", "unknown")
    alike = all(getattr(one, name) == getattr(other, name) for name in names)
    return alike and one.effects.shape[1] == other.effects.shape[1]


def _draw(panels: list[list[Aggregate]]) -> Any:
    from matplotlib.figure import Figure

    units = [UNITS[panel[0].metric] for panel in panels]
    alike = len(set(units)) == 1
    columns = min(MOST_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    across, down = WIDTH + (0.3 if alike else 0.75), HEIGHT + ABOVE + 0.6
    wide, high = 0.7 + columns * across, rows * down
    figure = Figure(figsize=(wide, high))
    drawn: list[Any] = []
    for i, (panel, unit) in enumerate(zip(panels, units, strict=True)):
        row, column = divmod(i, columns)
        place = ((0.7 + column * across) / wide, 1 - (row * down + ABOVE + HEIGHT) / high, WIDTH / wide, HEIGHT / high)
        axes = figure.add_axes(place, sharey=drawn[0] if drawn and alike else None)
        _panel(axes, panel)
        if column == 0 or not alike:
            axes.set_ylabel(f"average indirect effect ({unit})", fontsize=9)
        else:
            axes.tick_params(labelleft=False)
        drawn.append(axes)
    figure.legend(
        handles=_legend(panels),
        loc="upper left",
        bbox_to_anchor=(0.7 / wide, 0),
        borderaxespad=0,
        ncols=min(3, columns + 1),
        fontsize=8,
        frameon=False,
        handlelength=4,
    )
    return figure


def _panel(axes: Any, panel: list[Aggregate]) -> None:
    whole, *severed = panel
    depth = whole.effects.shape[1]
    axes.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    for role in whole.roles:
        _line(axes, whole, role, None)
    for one in severed:
        _line(axes, one, SEVERED_ROLE, one.sever)
    axes.set_xlim(-0.5, depth - 0.5)
    axes.set_xticks(*layer_ticks(depth, 0))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("layer", fontsize=9)
    unit = "" if whole.metric == "probability" else f" {UNITS[whole.metric]}"
    total = " ".join((number(whole.total.mean), f"[{number(whole.total.low)}, {number(whole.total.high)}]{unit}"))
    under = (f"n = {counted(whole.facts, 'fact')}, {whole.corruption}", f"average total effect {total}")
    title = restored(whole)
    headline(axes, title[:1].upper() + title[1:], under, WIDTH, HEIGHT)


def _line(axes: Any, drawn: Aggregate, role: str, sever: Part | None) -> None:
    row = drawn.roles.index(role)
    layers = range(drawn.effects.shape[1])
    style = _style(role, sever)
    axes.plot(layers, drawn.effects[row], markevery=max(1, len(layers) // 12), **style)
    axes.fill_between(layers, drawn.low[row], drawn.high[row], color=style["color"], alpha=0.15, linewidth=0)


def _style(role: str, sever: Part | None) -> dict[str, Any]:
    """Return the style of a role's line: thickest for the subject's last token, hollow markers if severed."""
    colour, marker = LINES[role]
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
        counts = {one.counts[one.roles.index(role)] for one in wholes if role in one.roles}
        if counts:
            name = f"{role} (n = {counts.pop()})" if len(counts) == 1 else role
            entries.append(Line2D([], [], label=name, **_style(role, None)))
    for part in SEVERED:
        if any(one.sever == part for panel in panels for one in panel[1:]):
            name = f"{SEVERED_ROLE}, {PARTS[part]} severed"
            entries.append(Line2D([], [], label=name, **_style(SEVERED_ROLE, part)))
    levels = {one.level for one in wholes}
    interval = f"{levels.pop():.0%} " if len(levels) == 1 else ""
    entries.append(Patch(color="#000000", alpha=0.15, linewidth=0, label=f"{interval}bootstrap interval"))
    return entries
