"""The charts of a model's report as data: a page draws them as SVG, a figure file by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ffedit.display.terminal.memories import share
from ffedit.inspector.model_view import Measure, ModelReport, Unit

# Measures of what chance alone would give.
CHANCE = ("shallow_chance", "agreement_dealt", "rank_dealt")


@dataclass(frozen=True)
class Line:
    """One series: its name in the legend, and a value for each position on the x axis, None where there is none.

    `low` and `high` are the ends of intervals, empty for none; `chance` is a chance level, drawn in grey and dotted.
    """

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    chance: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart: its heading, its lines, the labels of the positions on the x axis, and the unit of the values."""

    title: str
    series: Sequence[Line]
    labels: Sequence[str]
    unit: Unit
    x_name: str = "layer"

    @property
    def is_measured(self) -> bool:
        """True if there is a value to draw."""
        return any(value is not None for line in self.series for value in line.values)


def of_group(group: str, measures: Sequence[Measure], layers: int) -> Panel:
    """Return one group of a report's measures by layer."""
    series = [Line(m.definition.title, m.values, m.low, m.high, m.name in CHANCE) for m in measures]
    return Panel(group, series, [str(layer) for layer in range(layers)], measures[0].definition.unit)


def of_sureness(report: ModelReport) -> Panel:
    """Return the agreement rate by the value's maximum probability."""
    bins = report.sureness
    agreement, low, high = ([getattr(each, name) for each in bins] for name in ("agreement", "low", "high"))
    labels = [share((each.least + each.most) / 2) for each in bins]
    line = Line("agreement", agreement, low, high)
    return Panel("agreement by how sure a value is", [line], labels, "share", "max probability")
