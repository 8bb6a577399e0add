"""An edit in terms of key-value memories, as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ffedit.display.terminal.prompt_view import compared, ends, named, placed, prefixed, share, title
from ffedit.display.terminal.tables import plain_table
from ffedit.facts.text import counted, number
from ffedit.inspector.edit_view import AddedMemory, EditView, LayerChange, Passage


def edited_view(view: EditView) -> Group:
    """Render an edit: the memories that Δ amounts to, changed predictions, prompts before and after."""
    more = f", and {counted(len(view.facts) - 1, 'more fact')}" if len(view.facts) > 1 else ""
    parts: list[RenderableType] = [Text(f"{fact}{more}", style="bold") for fact in view.facts[:1]]
    parts.append(Text(f"Edit {view.edit} of {view.model}", style="dim" if parts else "bold"))
    for layer in view.layers:
        for part, memory in enumerate(layer.added, 1):
            parts += [Text(""), added_memory(layer, memory, part)]
    parts += [Text(""), reread_passages(view)]
    for before, after in view.prompts:
        parts += [Text(""), compared(before, after)]
    return Group(*parts)


def added_memory(layer: LayerChange, memory: AddedMemory, part: int) -> Group:
    """Render one memory that the change amounts to: its value's distribution and its key's triggers."""
    size = f"  ‖Δ‖ {number(layer.norm)}, {layer.relative:.2%} of ‖W‖"
    which = f"The memory that {placed(layer.address)} gets"
    if len(layer.added) > 1:
        which, size = f"{which}, part {part}", f"{size}; {share(memory.share)} of ‖Δ‖²"
    heading = title(which).append(size, style="not bold")
    unit = "1 is the fact's own" if memory.written else "its key has norm 1"
    return Group(
        heading,
        ends(memory.value),
        Text(""),
        Text(f"What fires it (coefficient; {unit}), and what the model says there", style="dim"),
        passages(memory.triggers),
    )


def passages(some: Sequence[Passage]) -> Table | Text:
    """Render prefixes of a text and the model's prediction after each, before and after the edit."""
    if not some:
        return Text("nothing in this text")
    table = plain_table()
    if with_coefficient := some[0].coefficient is not None:
        table.add_column("w·m", justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, ratio=1)
    for heading in ("before", "after"):
        table.add_column(heading, no_wrap=True)
    for one in some:
        cells = [Text(number(one.coefficient or 0.0))] if with_coefficient else []
        cells.append(prefixed(one.prefix, 36))
        cells.append(_said(named(one.before), one.before.probability))
        cells.append(_said(named(one.after), one.after.probability, one.after.id != one.before.id))
        table.add_row(*cells)
    return table


def reread_passages(view: EditView) -> Group:
    """Render how many predictions of a text changed, and the positions that lost most."""
    heading = title("What reads differently").append(f"  {view.tokens:,} tokens of {view.corpus}", style="not bold")
    first = Text(f"The model predicts another token after {share(view.changed)} of them. Where it took back most:")
    return Group(heading, first, passages(view.passages))


def _said(name: str, probability: float, new: bool = False) -> Text:
    return Text(name, style="bold" if new else "").append(f" {share(probability)}", style="dim not bold")
