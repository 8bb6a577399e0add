"""One memory as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ffedit.display.terminal.prompt_view import ROUTED, Bar, ends, named, notes, placed, prefixed, share, title
from ffedit.display.terminal.tables import named_values, plain_table
from ffedit.facts.text import number, quoted
from ffedit.inspector.memory_view import MemoryView


def memory_view(view: MemoryView) -> Group:
    """Render a memory: its value's distribution, its key's triggers, and the findings on both."""
    where = f"  memory {view.slot.index} of 0–{view.memories - 1} in {placed(view.slot.address)} of 0–{view.layers - 1}"
    where += f" of the {view.stack}" if view.note else ""
    heading = title(f"Memory {view.slot}").append(where, style="not bold")
    path = f"the final norm ({view.norm})" if view.norm else "no final norm, which this model does not have,"
    path = f"{path} and the unembedding" if view.norm or not view.note else "what the model has behind its last layer"
    value: list[RenderableType] = [
        title("Its value: what it says"),
        ends(view.value),
        notes([f"‖v‖ {number(view.value_norm)}, entropy {number(view.value.entropy)} nats; read through {path}"]),
    ]
    return Group(heading, Text(""), *value, Text(""), *_key(view), Text(""), named_values(*_told(view)))


def _key(view: MemoryView) -> Iterator[RenderableType]:
    """Yield the table of triggers, with the tokens that follow them."""
    yield title("Its key: what fires it").append(f"  {view.tokens:,} tokens of {view.corpus}", style="not bold")
    if not view.triggers:
        yield Text("Nothing: the coefficient is positive at no token of this text.")
        return
    table = plain_table()
    table.add_column("m", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("text", no_wrap=True)
    if follows := view.triggers[0].next is not None:
        table.add_column("next", no_wrap=True)
        table.add_column("place", justify="right", no_wrap=True)
    for one in view.triggers:
        bar = Bar(one.coefficient / view.triggers[0].coefficient)
        cells: tuple[Text, ...] = ()
        if one.next is not None:
            cells = Text(named(one.next), style="bold" if one.rank == 1 else ""), Text(f"{one.rank:,}")
        table.add_row(Text(number(one.coefficient)), bar, prefixed(one.prefix, 40), *cells)
    yield table
    if follows:
        place = "place: where the value's distribution has it, 1 the first"
        yield notes([f"next: the token that follows in the text; {place}"])


def _told(view: MemoryView) -> Iterator[tuple[str, str]]:
    """Yield pairs of name and finding."""
    yield "active", f"at {share(view.active)} of the tokens (m > 0)"
    if view.sent is not None:
        yield "router", f"sends {share(view.sent)} of the tokens to the expert; {ROUTED}, 0 at all other tokens"
    if view.shallow is not None and view.endings is not None:
        found, (last, pair) = view.shallow, view.endings
        end = "are at" if view.note else "end in"
        lines = [
            f"{share(found.last_share)} of the triggers {end} {quoted(last)}, {share(found.last_chance)} of the text"
        ]
        if pair is not None:
            lines.append(f"{share(found.pair_share)} in {quoted(pair)}, {share(found.pair_chance)} of the text")
        verdict = "shallow" if found.is_shallow else "not shallow"
        yield "pattern", f"{verdict}: {'; '.join(lines)}. Patterns beyond chance cover {share(found.covered)}"
    if view.agrees is not None and view.agreeing is not None and view.chance is not None:
        does = "the value's top token follows" if view.agrees else "another token than the value's top one follows"
        often = f"it follows {share(view.agreeing)} of the triggers, {share(view.chance)} of all tokens"
        yield "agreement", f"{does} the top trigger; {often}"
    if view.removal is not None:
        parts = {"the first": view.removal.first, "the last": view.removal.last, "a random": view.removal.random}
        shown = ", ".join(f"{_percent(change)} without {which}" for which, change in parts.items())
        yield "removal", f"the coefficient changes by {shown} token (mean of {view.removal.triggers})"
    if view.note is not None:
        yield "note", view.note


def _percent(change: float) -> str:
    return f"{change:+.0%}".replace("-", "−")
