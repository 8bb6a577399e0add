"""The experts that routers send a subject to, in a terminal and as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Column
from rich.text import Text

from ffedit.display.terminal.tables import plain_table
from ffedit.facts.fact import Fact, show
from ffedit.inference.routing import Routes


def routing_table(facts: Sequence[Fact], found: Sequence[Mapping[int, Routes]], layer: int) -> Group | None:
    """Render each subject's experts in `layer`, or in the last mixture layer below it; None where there is none."""
    below = [at for at in (found[0] if found else {}) if at <= layer]
    if not below:
        return None
    at = max(below)
    table = plain_table(*(Column(heading, overflow="fold") for heading in ("subject", f"experts of layer {at}")))
    for fact, routes in zip(facts, found, strict=True):
        table.add_row(Text(show(fact.subject)), Text(_line(at, routes[at])))
    count = len(found[0][at].weights)
    note = f"router's mean weight; in how many of {count} contexts the subject's last token goes there"
    return Group(table, Text(note, style="dim"))


def _line(layer: int, routes: Routes) -> str:
    shares, weights, count = routes.shares, routes.mean_weights, len(routes.weights)
    order = (shares * weights.abs()).argsort(descending=True)
    used = [e for e in order.tolist() if shares[e] > 0]
    return " · ".join(f"{layer}.{e} {float(weights[e]):.2f} in {round(float(shares[e]) * count)}" for e in used)


def plain(found: Mapping[int, Routes]) -> dict[str, Any]:
    """Return, by layer and expert, the `share` of contexts routed to it and the router's mean `weight` there."""
    return {
        str(layer): {
            str(e): {"share": float(routes.shares[e]), "weight": float(routes.mean_weights[e])}
            for e in routes.shares.nonzero()[:, 0].tolist()
        }
        for layer, routes in found.items()
    }
