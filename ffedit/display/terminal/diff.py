"""Show the differences between two checkpoints, as tables in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from ffedit.display.terminal.tables import first_names, named_values, notes, plain_table, right, share, spaced
from ffedit.exporter.diff import Change, Diff
from ffedit.facts.text import counted

MOST_CHANGES = 40


def diff_view(diff: Diff) -> Group:
    """Render the differences between two checkpoints, or say that there are none."""
    recast = f", {len(diff.retyped)} the same but for the dtype" if diff.retyped else ""
    summary = f"{counted(len(diff.changes), 'tensor')} changed{recast}, {diff.same} the same."
    if diff.identical:
        summary = f"No difference: all {counted(diff.same, 'tensor')} are the same."
    heading = Text(f"{diff.base} → {diff.edited}", style="bold")
    sections: list[RenderableType] = [heading, Text(summary)]
    if diff.changes:
        sections.append(_changes(diff.changes))
    kinds = Counter(name.rpartition(": ")[2] for name in diff.retyped)
    lists = {
        "missing": diff.missing,
        "added": diff.added,
        "other shape": diff.reshaped,
        "other dtype": [f"{counted(count, 'tensor')} {kind}" for kind, count in kinds.items()],
    }
    if differences := [(name, first_names(names)) for name, names in lists.items() if names]:
        sections.append(named_values(*differences))
    return spaced(*sections)


def _changes(changes: Sequence[Change]) -> RenderableType:
    numbers = right("shape", "dtype", "‖Δ‖", "‖Δ‖ / ‖W‖", "changed")
    table = plain_table(Column("tensor", overflow="fold", min_width=16), *numbers)
    shown = sorted(changes, key=lambda change: -change.norm_ratio)[:MOST_CHANGES]
    for change in shown:
        cells = [change.name, " × ".join(map(str, change.shape)), change.dtype]
        table.add_row(*map(Text, [*cells, f"{change.norm:.3g}", f"{change.norm_ratio:.2%}", share(change.share)]))
    if len(changes) == len(shown):
        return table
    return Group(table, notes([f"… and {len(changes) - len(shown)} more, which changed less"]))
