"""Key statistics in a terminal: the amount of text per layer, and the signs that it was too little."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group
from rich.text import Text

from ffedit.algebra.key_moments import CONVERGED, LONGEST, KeyMoments
from ffedit.display.terminal.model_table import plain_table
from ffedit.editor import Corpus
from ffedit.editor.statistics_folder import file_name
from ffedit.facts.text import number
from ffedit.files import cache
from ffedit.model.memory import Address

REACHED = "reached it: tokens that the router sent to the expert; fewer than d_ff say little of what to protect"


def moments_table(stats: Mapping[Address, KeyMoments], note: str, folder: Path | None) -> Group:
    """Render one row per layer, with notes on the columns.

    Args:
        stats: key statistics by address.
        note: the reason why these layers were chosen.
        folder: the folder that they were written to; None where they are in the cache only.
    """
    table = plain_table()
    table.add_column("layer", no_wrap=True)
    sparse = any(moments.keys + moments.left_out < moments.count for moments in stats.values())
    headings = "convergence", "ridge", "sinks", "condition", "seconds"
    for heading in ("tokens", *(["reached it"] if sparse else []), *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("kept in", overflow="fold")
    for address, moments in stats.items():
        table.add_row(
            Text(str(address)),
            Text(f"{moments.count:,}"),
            *([_reached(moments)] if sparse else []),
            _convergence(moments),
            Text(f"{moments.ridge:g}"),
            Text(f"{moments.sinks:,}"),
            Text("–" if moments.condition is None else f"{moments.condition:.1e}"),
            Text(f"{moments.seconds:.1f}"),
            Text(str(folder / file_name(address)) if folder else f"{cache.folder() / 'moments'}"),
        )
    lines = [
        *([REACHED] if sparse else []),
        "convergence: how far two halves of the text are from solving the same update; – needs 2 · d_ff tokens; "
        f"above {CONVERGED:g} more text pays",
        "ridge: what makes each half's solutions disturb the other least, of the median of C's diagonal",
        f"sinks: keys longer than {LONGEST:g} times the median, counted as of that length; row beginnings are left out",
        "seconds: of the pass that collected the layer, with others or alone",
        "Text: " + "; ".join(dict.fromkeys(moments.source for moments in stats.values())),
    ]
    return Group(table, Text(""), Text("\n".join([*lines, *([note] if note else [])]), style="dim"))


def _convergence(moments: KeyMoments) -> Text:
    """Render the distance between the two halves' solutions; yellow above `CONVERGED`."""
    found = moments.convergence
    return Text("–") if found is None else Text(number(found), style="yellow" if found > CONVERGED else "")


def _reached(moments: KeyMoments) -> Text:
    """Render the number of tokens that reached a memory; yellow if fewer than d_ff."""
    return Text(f"{moments.keys:,}", style="yellow" if moments.keys < len(moments.sum) else "")


def shortage(stats: Mapping[Address, KeyMoments], corpus: Corpus, tolerance: float | None) -> Text | None:
    """Return a warning if the text had fewer tokens than asked for, unless it converged within `tolerance`."""
    count = min(moments.count for moments in stats.values())
    found = [moments.convergence for moments in stats.values()]
    enough = tolerance is not None and all(each is not None and each <= tolerance for each in found)
    if count >= corpus.tokens or enough:
        return None
    return Text(f"! {corpus} holds {count:,} tokens only; {corpus.tokens:,} were asked for", style="yellow")
