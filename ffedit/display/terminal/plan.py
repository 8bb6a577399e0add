"""Show the plan of an edit that was not made: its stages, with the time and memory that they would take."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from ffedit.benchmark.estimate import Estimate
from ffedit.display.terminal.tables import duration, folded, plain_table, spaced


def plan(estimate: Estimate, written: str) -> RenderableType:
    """Render the stages of an edit with their seconds; `written` lists the files and folders that it would write."""
    table = plain_table("stage", *folded("step"), Column("about", justify="right"))
    for stage in estimate.stages:
        table.add_row(stage.name, stage.words, duration(stage.seconds))
    table.add_row("", "in all", duration(estimate.seconds), style="bold")
    most, now = estimate.memory_most / 1e9, estimate.memory_now / 1e9
    lines = [
        f"At most {duration(estimate.longest)}, if a value is not found before the last step.",
        f"Memory: {most:.1f} GB at most, of which {now:.1f} GB are in use now.",
        f"Written: {written}." if written else "Nothing is written: there is neither --out nor --export.",
        f"Estimated from passes that were timed here: {estimate.tokens_per_second:,.0f} tokens a second.",
    ]
    return spaced(table, Text("\n".join(lines)))
