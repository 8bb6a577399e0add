"""Show the plan of an edit that was not made: the facts as they were read, and what would be done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from rich.console import RenderableType
from rich.text import Text

from ffedit.display.terminal.tables import folded, named_values, plain_table, spaced, with_more
from ffedit.facts.fact import Fact

MOST_FACTS = 8


def plan(facts: Sequence[Fact], steps: Mapping[str, str]) -> RenderableType:
    """Render the first facts, each with the number of entries in its other fields, and the `steps` by name."""
    table = plain_table(*folded("prompt", "old object", "new object", "with"))
    for fact in islice(facts, MOST_FACTS):
        lists = {name: value for name, value in fact.to_dict().items() if isinstance(value, list)}
        counts = ", ".join(f"{name}: {len(value)}" for name, value in lists.items())
        table.add_row(*(Text(cell or "") for cell in (fact.text, fact.previous, fact.target, counts)))
    return spaced(with_more(table, len(facts) - MOST_FACTS), named_values(*steps.items()))
