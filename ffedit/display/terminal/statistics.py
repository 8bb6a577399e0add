"""Key statistics in a terminal: the amount of text per layer, and the signs that it was too little."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group
from rich.text import Text

from ffedit.algebra.key_moments import CONVERGED, KeyMoments
from ffedit.display.terminal.tables import folded, left, notes, plain_table, right, spaced
from ffedit.editor.statistics_files import file_name
from ffedit.files import cache
from ffedit.inference.corpus import Corpus
from ffedit.model.memory import Address

REACHED = (
    "reached it: tokens that the router sent to the expert; fewer than d_ff show too little of the keys to protect"
)


def moments_table(stats: Mapping[Address, KeyMoments], note: str, folder: Path | None) -> Group:
    """Render one row per layer, with notes and the reason for these layers; without a `folder` the cache keeps them."""
    sparse = any(moments.keys + moments.left_out < moments.count for moments in stats.values())
    headings = ("tokens", *(["reached it"] if sparse else []), "convergence")
    table = plain_table(*left("layer"), *right(*headings), *folded("kept in"))
    for address, moments in stats.items():
        few, unsettled = moments.keys < len(moments.sum), (moments.convergence or 0.0) > CONVERGED
        table.add_row(
            str(address),
            f"{moments.count:,}",
            *([Text(f"{moments.keys:,}", style="yellow" if few else "")] if sparse else []),
            Text("–" if moments.convergence is None else f"{moments.convergence:.1%}", "yellow" if unsettled else ""),
            Text(str(folder / file_name(address) if folder else cache.folder() / "moments")),
        )
    lines = [
        *([REACHED] if sparse else []),
        "convergence: with unlimited text for C, an edit would disturb other text less by this share; above "
        f"{CONVERGED:.0%} more text pays",
        "Text: " + "; ".join(dict.fromkeys(moments.source for moments in stats.values())),
        note,
    ]
    return spaced(table, notes(lines))


def shortage(stats: Mapping[Address, KeyMoments], corpus: Corpus) -> Text | None:
    """Return a warning if the text had fewer tokens than asked for."""
    moments = min(stats.values(), key=lambda moments: moments.count)
    if (count := moments.count) >= corpus.tokens:
        return None
    text = moments.source.partition(", computed in ")[0]
    return Text(f"! {text} holds {count:,} tokens only; {corpus.tokens:,} were asked for", style="yellow")
