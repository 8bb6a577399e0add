"""Tables in ffedit's style, and numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

MOST_NAMES = 8
MOST_WIDE = 10_000  # characters: the width of a table that nothing limits


def plain_table(*columns: Column | str) -> Table:
    """Create a table without rows in ffedit's style: a rule under the headings and no other lines."""
    return Table(
        *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False
    )


def left(*headings: str) -> list[Column]:
    """Return columns of text that does not wrap."""
    return [Column(heading, no_wrap=True) for heading in headings]


def right(*headings: str) -> list[Column]:
    """Return columns of numbers, or of numbered layers."""
    return [Column(heading, justify="right", no_wrap=True) for heading in headings]


def folded(*headings: str) -> list[Column]:
    """Return columns of text that may break anywhere."""
    return [Column(heading, overflow="fold") for heading in headings]


def spaced(*sections: RenderableType) -> Group:
    """Render sections with an empty line between two."""
    return Group(*[line for section in sections for line in (section, Text(""))][:-1])


@dataclass(frozen=True)
class Fitting:
    """Renders the first of several tables that fits the terminal's width, or else the last."""

    tables: Sequence[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = (Measurement.get(console, options.update(max_width=MOST_WIDE), table).maximum for table in self.tables)
        fits = (table for table, width in zip(self.tables, widths, strict=True) if width <= options.max_width)
        yield next(fits, self.tables[-1])


def with_more(table: RenderableType, more: int) -> RenderableType:
    """Render a table, and below it the number of rows that it leaves out."""
    return Group(table, Text(f" … and {more} more", style="dim")) if more > 0 else table


def notes(lines: Iterable[str]) -> Text:
    """Render the explanations of a table."""
    return Text("\n".join(lines), style="dim")


def share(value: float) -> str:
    """Format a share in percent; "0%" and "100%" are shown only for exactly 0 and 1."""
    if value == 0 or value == 1 or 0.0995 <= value < 0.995:
        return f"{value:.0%}"
    if value >= 0.0005:
        return f"{value:.1%}" if value < 0.9995 else "> 99.9%"
    return f"{100 * value:.1g}%" if value >= 1e-6 else f"{value:.0e}"


def named_values(*lines: tuple[str, str]) -> Table:
    """Render pairs of name and value in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(Text(name), Text(value))
    return table


def ranges(numbers: Iterable[int]) -> str:
    """Format integers as ranges: `0-2, 5` for 0, 1, 2, 5."""
    members = set(numbers)
    starts = sorted(n for n in members if n - 1 not in members)
    ends = sorted(n for n in members if n + 1 not in members)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def first_names(names: Sequence[str]) -> str:
    """Join the first names, and say how many more there are."""
    more = f", … and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def duration(seconds: float) -> str:
    """Format seconds in a suitable unit."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
