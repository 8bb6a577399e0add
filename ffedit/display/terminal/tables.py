"""Tables in ffedit's style, and numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Column, Table
from rich.text import Text

MOST_NAMES = 8


def plain_table(*columns: Column | str) -> Table:
    """Create a table without rows in ffedit's style: a rule under the headings and no other lines."""
    return Table(
        *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_edge=False
    )


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
    """Say seconds in the unit that suits them."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
