"""Traces as heat maps in a terminal: the effects of one fact by token, and averages over facts by the role of a token.

Each cell is a shade character, drawn in its own background colour where the terminal has colours: piped, copied or
without colour, the map shows the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from ffedit.algebra.bootstrap import Interval
from ffedit.display.picture import NEGATIVE, Picture, Row, colour, pictures, restored, runs
from ffedit.facts.text import counted, number, quoted
from ffedit.locator import Trace, TraceSet
from ffedit.locator.result import Aggregate

SHADES, SHADES_ASCII = " ░▒▓█", " .+x#"
LABEL_CELLS = 14
MOST_CELLS = 4
MOST_UNKNOWN = 3
MOST_PROMPT = 48


def heat_map(trace: Trace | TraceSet, layer: int | None = None) -> HeatMap:
    """Render a trace, or the average of several by role, as a heat map; `layer` is marked, by default its choice."""
    (shown,) = pictures([trace], layer)
    return with_most(shown)


def with_most(shown: Picture) -> HeatMap:
    """Render a heat map with the largest number of each row beside it."""
    most = ("–" if np.isnan(row.most) else number(row.most) for row in shown.rows)
    return HeatMap(shown, tuple(f"{text:>5}" for text in ("most", *most)))


def averages_table(aggregate: Aggregate) -> RenderableType:
    """Render roles × layers as a heat map; beside each role its strongest layer with the effect and its interval."""
    columns = [("most [95%]", "layer", "n")]
    for i, layer in enumerate(aggregate.effects.argmax(1)):
        most = Interval(*(float(values[i, layer]) for values in (aggregate.effects, aggregate.low, aggregate.high)))
        columns.append((f"{number(most.mean)} {most.ends(number)}".rstrip(), str(layer), str(aggregate.counts[i])))
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    total = aggregate.total.ends(number)
    rows = zip(aggregate.roles, aggregate.effects, strict=True)
    shown = Picture(
        tuple(Row(role, effects, role.endswith("subject")) for role, effects in rows),
        title=(
            f"Causal trace of {restored(aggregate)}, average of {counted(aggregate.facts, 'fact')}",
            f"{runs(aggregate.metric, 'answer', aggregate.clean, aggregate.corrupted)} {total}".rstrip(),
            f"Corruption: {aggregate.corruption}",
            "In brackets: 95% bootstrap intervals, where facts differ",
        ),
        layer=aggregate.layer,
        depth=aggregate.effects.shape[1],
        metric=aggregate.metric,
    )
    table = HeatMap(shown, tuple(f"{a:<{widths[0]}} {b:>{widths[1]}} {c:>{widths[2]}}" for a, b, c in columns))
    return Group(table, Text(_set_apart(aggregate.unknown), style="yellow")) if aggregate.unknown else table


def _set_apart(unknown: Sequence[str]) -> str:
    are, their = ("is", "its answer") if len(unknown) == 1 else ("are", "their answers")
    named = ", ".join(quoted(prompt, MOST_PROMPT) for prompt in unknown[:MOST_UNKNOWN])
    more = f" and {len(unknown) - MOST_UNKNOWN} more" if len(unknown) > MOST_UNKNOWN else ""
    why = f"{are} set apart because the model does not give {their} by itself"
    return f"{counted(len(unknown), 'fact')} {why}: {named}{more}"


@dataclass(frozen=True)
class HeatMap:
    """A heat map of token rows and layer columns, as wide as the console allows."""

    picture: Picture  # the rows and titles to draw
    beside: tuple[str, ...]  # the column to the right: a heading, then a text for each row, all equally wide

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, heading = self.picture, self.beside[0]
        labels = min(LABEL_CELLS, max(cell_len(row.label) for row in shown.rows))
        width = max(8, options.max_width - labels - 3 - cell_len(heading))
        group = -(-shown.depth // width)
        columns = -(-shown.depth // group)
        cell = max(1, min(MOST_CELLS, width // columns))
        # Sixteen colours cannot show a ramp: the shade characters do.
        coloured = not console.no_color and console.color_system not in (None, "standard")
        shade = partial(_shade, SHADES_ASCII if options.ascii_only else SHADES, coloured)
        yield Text(shown.title[0], style="bold")
        yield Text("\n".join((*shown.title[1:], "")))
        for row, text in zip(shown.rows, self.beside[1:], strict=True):
            label = Text(row.label, "bold" if row.subject else "dim" if row.run else "", overflow="ellipsis")
            label.align("right", labels)
            cells = [shade(self._largest(row, i, group), cell) for i in range(columns)]
            yield _line(label, ("* " if row.subject else "  ", "bold"), *cells, (f" {text}", "dim"))
        axis = f"{_axis(shown.depth, columns, group, cell):<{columns * cell}} {heading}"
        yield _line(("layer".rjust(labels) + "  " + axis, "dim"))
        mark, name = "^" if options.ascii_only else "▲", f"layer {shown.layer}"
        before = (shown.layer // group) * cell + (cell - 1) // 2
        fits = before + 2 + len(name) <= columns * cell + 1 + cell_len(heading)
        marked = " " * before + f"{mark} {name}" if fits else f"{name} {mark}".rjust(before + 1)
        yield _line((" " * (labels + 2) + marked, "bold"))
        yield Text("")
        yield self._legend(shade)
        if remarks := self._remarks(group):
            yield Text("\n".join(remarks), style="dim")

    def _largest(self, row: Row, column: int, group: int) -> float | None:
        """Return the largest effect in a column as a share of the scale; None where nothing was restored."""
        effects = row.effects[column * group : (column + 1) * group]
        return None if np.isnan(effects).all() else self.picture.share(float(np.nanmax(effects)))

    def _legend(self, shade: Callable[[float, int], tuple[str, Style]]) -> Text:
        shown = self.picture
        if shown.scale == 0:
            return Text("No restoration brings anything back.")
        subject = "   * subject" if any(row.subject for row in shown.rows) else ""
        ramp = (shade(i / 9, 1) for i in range(10))
        return Text.assemble("0 ", *ramp, f" {number(shown.scale)} {shown.legend}{subject}")

    def _remarks(self, group: int) -> list[str]:
        shown, remarks = self.picture, []
        if shown.share(shown.lowest) < -NEGATIVE:
            remarks.append(f"- {shown.negative} {number(-shown.lowest)}")
        if group > 1:
            remarks.append(f"a column is {group} layers and shows their largest effect")
        if any(row.run and not np.isnan(row.most) for row in shown.rows):
            remarks.append("… shows the largest effect of its tokens")
        return remarks


def _shade(characters: str, coloured: bool, share: float | None, width: int) -> tuple[str, Style]:
    """Return the text and the style of an effect that is a `share` of the scale; None is left empty."""
    if share is None:
        return " " * width, Style()
    if share < -NEGATIVE:
        return "-" * width, Style(color="#a8a8a8", bgcolor=colour(0)) if coloured else Style()
    top = len(characters) - 1
    style = Style(color=colour(share), bgcolor=colour(share)) if coloured else Style()
    return characters[max(0, min(top, round(share * top)))] * width, style


def _line(*parts: Text | tuple[str, str | Style]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def _axis(depth: int, columns: int, group: int, cell: int) -> str:
    """Return the layers' numbers, each under its column, as many as fit."""
    widest = len(str(depth - 1)) + 1
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * cell >= widest)
    axis = ""
    for column in range(0, columns, step):
        text = str(column * group)
        axis = axis.ljust(column * cell + (cell - len(text)) // 2 if cell > 2 else column * cell) + text
    return axis
