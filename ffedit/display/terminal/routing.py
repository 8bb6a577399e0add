"""Show the experts that routers send a subject to, in a terminal and as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from ffedit.display.terminal.tables import folded, plain_table
from ffedit.facts.fact import Fact, show
from ffedit.inference.routing import Routes


def routing_table(facts: Sequence[Fact], found: Sequence[Mapping[int, Routes]], layer: int) -> Group | None:
    """Render each subject's experts in `layer`, or in the last mixture layer below it; None where there is none."""
    at = max((mixture for mixture in (found[0] if found else {}) if mixture <= layer), default=None)
    if at is None:
        return None
    table = plain_table(*folded("subject", f"experts of layer {at}"))
    count = len(found[0][at].weights)
    for fact, routes in zip(facts, found, strict=True):
        shares, weights = routes[at].shares, routes[at].mean_weights
        order = (shares * weights.abs()).argsort(descending=True)
        used = [e for e in order.tolist() if shares[e] > 0]
        experts = (f"{at}.{e} {float(weights[e]):.2f} in {round(float(shares[e]) * count)}" for e in used)
        table.add_row(Text(show(fact.subject)), Text(" · ".join(experts)))
    note = f"router's mean weight; in how many of {count} contexts the subject's last token goes there"
    return Group(table, Text(note, style="dim"))
